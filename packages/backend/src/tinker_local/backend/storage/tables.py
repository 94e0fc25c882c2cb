"""The database's tables. Times are integers: microseconds since 1970 in UTC, which sort and compare everywhere."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Column, Integer, MetaData, String, Table, TypeDecorator, false
from sqlalchemy import UniqueConstraint as Unique

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCHEMA_VERSION = 5
"""Raise it together with a new upgrade step in `database.py`, so that older data folders open."""


class UtcTime(TypeDecorator[datetime]):
    """A datetime with a time zone, exact to the microsecond; ValueError for one without."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> int | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return (value - EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: Any) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=value)


metadata = MetaData()

# `number` counts insertions, by which listings are ordered: the clock may have been set back.
schema = Table("schema", metadata, Column("version", Integer, nullable=False))

sessions = Table(
    "sessions",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("session_id", String, nullable=False, unique=True),
    Column("created_at", UtcTime, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("display_name", String),
    Column("ended_at", UtcTime),
    Column("end_reason", String),
    Column("end_detail", String),
    Column("owner", String, nullable=False, server_default="local"),
    Column("project_id", String),
)

training_runs = Table(
    "training_runs",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("training_run_id", String, nullable=False, unique=True),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora_config", JSON, nullable=False),
    Column("created_at", UtcTime, nullable=False, index=True),
    Column("last_request_at", UtcTime, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("copied_from", String),
    Column("base_precision", String),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("sampling_session_id", String, nullable=False, unique=True),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("model_path", String),
    Column("nameless", Boolean, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("read_as_public", Boolean),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("training_run_id", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("name", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora_config", JSON, nullable=False),
    Column("created_at", UtcTime, nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Column("expires_at", UtcTime, index=True),
    Column("user_metadata", JSON, nullable=False),
    Column("public", Boolean, nullable=False, server_default=false()),
    Column("missing", Boolean, nullable=False, server_default=false()),
    Column("unusable", String),
    Column("save_number", BigInteger, nullable=False, server_default="0", index=True),
    Column("base_precision", String),
    Unique("training_run_id", "kind", "name"),
)

copies = Table(
    "copies",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("key", String, nullable=False, unique=True),
    Column("request", JSON, nullable=False),
    Column("tinker_path", String, nullable=False),
)
