"""Opens the metadata database and upgrades one that an older server wrote."""

import logging
import sqlite3
from typing import Any

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.types import InternalError

log = logging.getLogger(__name__)

BUSY_SECONDS = 10
"""How long a transaction waits for another program that holds the database."""


def open_database(url: str | sa.URL) -> sa.Engine:
    """The engine. Upgrades an older database; RuntimeError if a newer server wrote it, or if it is damaged."""
    # No limit: every thread gets a connection at once.
    engine = sa.create_engine(url, pool_size=8, max_overflow=-1)
    try:
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "connect", _set_pragmas)
            _check(engine)
        _bring_up_to_date(engine)
    except BaseException:
        engine.dispose()
        raise
    sa.event.listen(engine, "handle_error", _explain_lock)
    return engine


def _check(engine: sa.Engine) -> None:
    """RuntimeError, in one sentence, if SQLite finds the database damaged."""
    try:
        with engine.connect() as connection:
            found = " ".join(str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()).split())
    except sa.exc.OperationalError:  # it is busy, or cannot be opened
        raise
    except sa.exc.DatabaseError as error:
        found = str(error.orig)
    if found != "ok":
        raise RuntimeError(
            f"the database {engine.url.database} is damaged ({found}): put it back from a backup, or move it away "
            "with its -wal and -shm files to start without its records; checkpoints are found by their folders"
        )


def _bring_up_to_date(engine: sa.Engine) -> None:
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
        _migrate(engine, version)


def _explain_lock(context: sa.ExceptionContext) -> None:
    """InternalError if another program holds the database."""
    if getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        raise InternalError(
            f"another program has held the database {context.engine and context.engine.url.database} for more than "
            f"{BUSY_SECONDS} s, so nothing was changed: end that program, and send the request again"
        ) from context.original_exception


def _set_pragmas(connection: Any, _record: Any) -> None:
    """FULL: a commit waits for the disk, so that what was acknowledged survives a power cut."""
    for pragma in ("journal_mode = WAL", "synchronous = FULL", f"busy_timeout = {BUSY_SECONDS * 1000}"):
        connection.execute(f"PRAGMA {pragma}")


def _migrate(engine: sa.Engine, version: int) -> None:
    """Upgrade from `version` to `tables.SCHEMA_VERSION`; RuntimeError if that is impossible.

    Each step adds columns, if they are missing, before it raises the version: if the server is killed in between, the
    next start completes the step.
    """
    if version < 1:
        raise RuntimeError(f"the database {engine.url} has schema version {version}, which no server ever wrote")
    log.info("the database %s goes from schema version %d to %d", engine.url, version, tables.SCHEMA_VERSION)
    if version == 1:
        _from_1_to_2(engine)
    if version <= 2:
        _from_2_to_3(engine)
    if version <= 3:
        _from_3_to_4(engine)
    if version <= 4:
        _from_4_to_5(engine)


def _from_1_to_2(engine: sa.Engine) -> None:
    """Adds public checkpoints and copies; splits the reason of a session's end from its detail."""
    _add_column(engine, "sessions", "end_detail VARCHAR")
    _add_column(engine, "training_runs", "copied_from VARCHAR")
    _add_column(engine, "checkpoints", "public BOOLEAN DEFAULT false NOT NULL")
    sessions = tables.sessions
    with engine.begin() as connection:
        ended = sa.select(sessions.c.number, sessions.c.end_reason).where(sessions.c.end_reason.is_not(None))
        for number, text in connection.execute(ended).all():
            reason, _, detail = text.partition(": ")
            connection.execute(
                sa.update(sessions)
                .where(sessions.c.number == number)
                .values(end_reason=reason, end_detail=detail or None)
            )
        connection.execute(sa.update(tables.schema).values(version=2))


def _from_2_to_3(engine: sa.Engine) -> None:
    """Adds the mark of checkpoints whose folder is missing; the owners and projects of sessions."""
    _add_column(engine, "checkpoints", "missing BOOLEAN DEFAULT false NOT NULL")
    _add_column(engine, "sessions", "owner VARCHAR DEFAULT 'local' NOT NULL")
    _add_column(engine, "sessions", "project_id VARCHAR")
    with engine.begin() as connection:
        connection.execute(sa.update(tables.schema).values(version=3))


def _from_3_to_4(engine: sa.Engine) -> None:
    """Numbers checkpoints in the order in which they were recorded; adds why one cannot be loaded, which of older ones
    is not known yet, and why a sampling session may read its checkpoint."""
    _add_column(engine, "checkpoints", "unusable VARCHAR")
    _add_column(engine, "sampling_sessions", "read_as_public BOOLEAN")
    _add_column(engine, "checkpoints", "save_number BIGINT DEFAULT 0 NOT NULL")
    with engine.begin() as connection:
        connection.execute(
            sa.text("CREATE INDEX IF NOT EXISTS ix_checkpoints_save_number ON checkpoints (save_number)")
        )
        table = tables.checkpoints
        connection.execute(sa.update(table).where(table.c.save_number == 0).values(save_number=table.c.number))
        connection.execute(sa.update(tables.schema).values(version=4))


def _from_4_to_5(engine: sa.Engine) -> None:
    """Adds the precision of the base model, which of older runs and checkpoints was not recorded."""
    _add_column(engine, "training_runs", "base_precision VARCHAR")
    _add_column(engine, "checkpoints", "base_precision VARCHAR")
    with engine.begin() as connection:
        connection.execute(sa.update(tables.schema).values(version=5))


def _add_column(engine: sa.Engine, table: str, definition: str) -> None:
    name = definition.split()[0]
    if name not in {column["name"] for column in sa.inspect(engine).get_columns(table)}:
        with engine.begin() as connection:
            connection.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN {definition}"))
