"""Brings the database of an older server to today's tables, one version after the other.

Columns are added before the version is raised, and only if they are missing: a server that is killed in between is
brought on by the next.
"""

import logging

import sqlalchemy as sa
from tinker_local.backend.storage import tables

log = logging.getLogger(__name__)


def migrate(engine: sa.Engine, version: int) -> None:
    """From `version` to `tables.SCHEMA_VERSION`; RuntimeError if there is no way."""
    if version < 1:
        raise RuntimeError(f"the database {engine.url} has schema version {version}, which no server ever wrote")
    log.info("the database %s goes from schema version %d to %d", engine.url, version, tables.SCHEMA_VERSION)
    if version == 1:
        _from_1_to_2(engine)


def _from_1_to_2(engine: sa.Engine) -> None:
    """Public checkpoints, copies, and the reason of a session's end apart from its detail."""
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


def _add_column(engine: sa.Engine, table: str, definition: str) -> None:
    name = definition.split()[0]
    if name not in {column["name"] for column in sa.inspect(engine).get_columns(table)}:
        with engine.begin() as connection:
            connection.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN {definition}"))
