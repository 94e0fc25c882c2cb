"""A data folder of an older server opens: its records read the same, and what is new has its default."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from tinker_local.backend.storage import Store, tables
from tinker_local.backend.storage.records import SamplingSessionRecord, SessionRecord, TrainingRunRecord
from tinker_local.types import LoraConfig

from tests.storage.store_states import RUN, START, make_record, make_state, same_tensors

# As servers of version 1 made them, word for word.
VERSION_1 = """
CREATE TABLE schema (version INTEGER NOT NULL);
CREATE TABLE sessions (
    number INTEGER NOT NULL, session_id VARCHAR NOT NULL, created_at BIGINT NOT NULL, user_metadata JSON NOT NULL,
    tags JSON NOT NULL, display_name VARCHAR, ended_at BIGINT, end_reason VARCHAR,
    PRIMARY KEY (number), UNIQUE (session_id)
);
CREATE TABLE training_runs (
    number INTEGER NOT NULL, training_run_id VARCHAR NOT NULL, session_id VARCHAR NOT NULL,
    base_model VARCHAR NOT NULL, lora_config JSON NOT NULL, created_at BIGINT NOT NULL,
    last_request_at BIGINT NOT NULL, user_metadata JSON NOT NULL, PRIMARY KEY (number), UNIQUE (training_run_id)
);
CREATE INDEX ix_training_runs_created_at ON training_runs (created_at);
CREATE TABLE sampling_sessions (
    number INTEGER NOT NULL, sampling_session_id VARCHAR NOT NULL, session_id VARCHAR NOT NULL,
    base_model VARCHAR NOT NULL, model_path VARCHAR, nameless BOOLEAN NOT NULL, created_at BIGINT NOT NULL,
    PRIMARY KEY (number), UNIQUE (sampling_session_id)
);
CREATE TABLE checkpoints (
    number INTEGER NOT NULL, training_run_id VARCHAR NOT NULL, kind VARCHAR NOT NULL, name VARCHAR NOT NULL,
    base_model VARCHAR NOT NULL, lora_config JSON NOT NULL, created_at BIGINT NOT NULL, size_bytes BIGINT NOT NULL,
    has_optimizer BOOLEAN NOT NULL, expires_at BIGINT, user_metadata JSON NOT NULL,
    PRIMARY KEY (number), UNIQUE (training_run_id, kind, name)
);
CREATE INDEX ix_checkpoints_created_at ON checkpoints (created_at);
CREATE INDEX ix_checkpoints_expires_at ON checkpoints (expires_at);
INSERT INTO schema VALUES (1);
"""
MICROSECONDS = (START - tables.EPOCH) // timedelta(microseconds=1)
CONFIG = LoraConfig(rank=4, train_mlp=False)


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    """A data folder of version 1 with sessions, a run, a sampling session and a checkpoint."""
    new, old = tmp_path / "new", tmp_path / "old"
    store = Store(new)
    written = store.write_checkpoint(make_record("kept"), make_state(1), overwrite=False)
    store.close()
    old.mkdir()
    shutil.copytree(new / "checkpoints", old / "checkpoints")
    connection = sqlite3.connect(old / "metadata.sqlite3")
    connection.executescript(VERSION_1)
    sessions = [("live", None), ("done", "success"), ("broken", "errored: ValueError: bad: luck")]
    for name, reason in sessions:
        ended = None if reason is None else MICROSECONDS + 5
        row = (name, MICROSECONDS, '{"a": "b"}', '["t"]', name, ended, reason)
        connection.execute(f"INSERT INTO sessions VALUES (NULL, {', '.join('?' * 7)})", row)
    config = json.dumps(CONFIG.model_dump())
    run = (RUN, "live", "org/base", config, MICROSECONDS, MICROSECONDS, "{}")
    connection.execute(f"INSERT INTO training_runs VALUES (NULL, {', '.join('?' * 7)})", run)
    sampler = ("live:sample:0", "live", "org/base", None, 0, MICROSECONDS)
    connection.execute(f"INSERT INTO sampling_sessions VALUES (NULL, {', '.join('?' * 6)})", sampler)
    checkpoint = (RUN, "weights", "kept", "org/base", config, MICROSECONDS, written.size_bytes, 1, None, "{}")
    connection.execute(f"INSERT INTO checkpoints VALUES (NULL, {', '.join('?' * 10)})", checkpoint)
    connection.commit()
    connection.close()
    return old


def check(folder: Path) -> None:
    store = Store(folder)
    base = SessionRecord("live", START, {"a": "b"}, ("t",), "live")
    ended = START + timedelta(microseconds=5)
    assert store.get_session("live") == base
    done = store.get_session("done")
    assert done == replace(base, session_id="done", display_name="done", ended_at=ended, end_reason="success")
    broken = store.get_session("broken")
    assert broken is not None
    assert (broken.end_reason, broken.end_detail) == ("errored", "ValueError: bad: luck")
    assert store.get_training_run(RUN) == TrainingRunRecord(RUN, "live", "org/base", CONFIG, START, START)
    sampler = SamplingSessionRecord("live:sample:0", "live", "org/base", None, False, START, read_as_public=None)
    assert store.get_sampling_session("live:sample:0") == sampler
    (kept,) = store.list_checkpoints(RUN)
    assert (kept.checkpoint_id, kept.public, kept.expires_at) == ("weights/kept", False, None)
    assert same_tensors(store.read_checkpoint(kept, optimizer=True), make_state(1))
    assert store.set_public(kept, True).public
    assert store.find_copy("none") is None
    store.close()
    with sqlite3.connect(folder / "metadata.sqlite3") as connection:
        assert connection.execute("SELECT version FROM schema").fetchall() == [(tables.SCHEMA_VERSION,)]


def test_a_folder_of_version_1_opens_with_everything_in_it(old_folder: Path) -> None:
    check(old_folder)
    store = Store(old_folder)  # and again
    assert store.list_checkpoints(RUN)[0].public
    store.close()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10, 11])
def test_a_migration_that_was_killed_is_brought_to_its_end(old_folder: Path, step: int) -> None:
    code = f"""
import os, sys
from pathlib import Path
from tinker_local.backend.storage import Store, database
add, steps = database._add_column, []
def killed(*arguments):
    add(*arguments)
    steps.append(1)
    if len(steps) == {step}:
        os._exit(9)
database._add_column = killed
Store(Path({str(old_folder)!r}))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 9
    check(old_folder)


def test_the_tables_of_an_old_folder_are_those_of_a_new_one(old_folder: Path, tmp_path: Path) -> None:
    Store(old_folder).close()
    columns = []
    for folder in (old_folder, tmp_path / "new"):
        inspector = sa.inspect(sa.create_engine(f"sqlite:///{folder / 'metadata.sqlite3'}"))
        columns.append(
            {
                (table, column["name"], str(column["type"]), column["nullable"])
                for table in inspector.get_table_names()
                for column in inspector.get_columns(table)
            }
        )
    assert columns[0] == columns[1]


def test_checkpoints_of_an_old_folder_are_in_the_order_in_which_they_were_recorded(old_folder: Path) -> None:
    """In which the clock was set back: the times of the second and the third are before that of the first."""
    later = [("second", -2_000_000), ("third", -3_000_000), ("fourth", 5)]
    with sqlite3.connect(old_folder / "metadata.sqlite3") as connection:
        (first,) = connection.execute("SELECT * FROM checkpoints").fetchall()
        for name, passed in later:
            row = (*first[1:3], name, *first[4:6], MICROSECONDS + passed, *first[7:])
            connection.execute(f"INSERT INTO checkpoints VALUES (NULL, {', '.join('?' * 10)})", row)
    names = ["fourth", "third", "second", "kept"]
    for _ in range(2):
        store = Store(old_folder)
        assert [record.name for record in store.list_checkpoints(RUN)] == names
        assert [record.name for record in store.list_all_checkpoints(9, 0)[0]] == names
        assert store.last_checkpoints([RUN])[RUN]["weights"].name == "fourth"
        store.close()
    store = Store(old_folder)
    store.write_checkpoint(make_record("fifth", created_at=START - timedelta(days=1)), make_state(1), overwrite=False)
    assert [record.name for record in store.list_checkpoints(RUN)] == ["fifth", *names]
    store.close()
