"""Opens the database of the metadata."""

from typing import Any

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.migrations import migrate


def open_database(url: str | sa.URL) -> tuple[sa.Engine, bool]:
    """The engine, and whether the database was new.

    An older database is brought to this version; RuntimeError if it is of a newer one.
    """
    # Every thread that asks gets a connection at once, however many there are.
    engine = sa.create_engine(url, pool_size=8, max_overflow=-1)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _set_pragmas)
    is_new = not sa.inspect(engine).has_table(tables.schema.name)
    tables.metadata.create_all(engine)
    with engine.begin() as connection:
        version = connection.execute(sa.select(tables.schema.c.version)).scalar()
        if version is None:
            connection.execute(sa.insert(tables.schema).values(version=tables.SCHEMA_VERSION))
        elif version > tables.SCHEMA_VERSION:
            raise RuntimeError(
                f"the database {engine.url} has schema version {version}, this server knows {tables.SCHEMA_VERSION}; "
                "start the newer server that wrote it"
            )
    if version is not None and version < tables.SCHEMA_VERSION:
        migrate(engine, version)
    return engine, is_new


def _set_pragmas(connection: Any, _record: Any) -> None:
    """FULL: a commit waits for the disk, so that what was acknowledged survives a power cut too."""
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 10000"):
        connection.execute(f"PRAGMA {pragma}")
