"""A start deletes no checkpoint, whatever was lost or put back: database, write-ahead log, folders."""

import json
import logging
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.storage import Store
from tinker_local.backend.storage.records import CheckpointRecord, SessionRecord, TrainingRunRecord
from tinker_local.types import LoraConfig, NotFoundError

from tests.storage.store_states import RUN, START, make_record, make_state, same_tensors

COUNT = 7
DATABASE = "metadata.sqlite3"


def write(store: Store, number: int) -> CheckpointRecord:
    record = make_record(f"c{number}", created_at=START + timedelta(minutes=number))
    return store.write_checkpoint(record, make_state(number), overwrite=False)


def copy_database(folder: Path, to: Path) -> None:
    for file in folder.glob(f"{DATABASE}*"):
        shutil.copy(file, to)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The data folder of a server that was killed after seven acknowledged checkpoints. `yesterday` beside it has the
    database when there were three, without the others in a write-ahead log."""
    folder, yesterday, now = tmp_path / "data", tmp_path / "yesterday", tmp_path / "now"
    for made in (yesterday, now):
        made.mkdir()
    store = Store(folder)
    for number in range(3):
        write(store, number)
    store.close()
    copy_database(folder, yesterday)
    store = Store(folder)
    for number in range(3, COUNT):
        write(store, number)
    copy_database(folder, now)  # a kill leaves the write-ahead log; `close` empties it
    store.close()
    copy_database(now, folder)
    assert (folder / f"{DATABASE}-wal").stat().st_size > 0
    return folder


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the store logged. Threads that other tests left may log, too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("tinker_local.backend.storage")]


def weights(folder: Path) -> set[Path]:
    return set(folder.glob("checkpoints/*/*/*/adapter_model.safetensors"))


def check_all(store: Store) -> None:
    """All seven are found, whole."""
    assert [record.name for record in store.list_checkpoints(RUN)] == [f"c{n}" for n in reversed(range(COUNT))]
    for number in range(COUNT):
        state = store.read_checkpoint(make_record(f"c{number}"), optimizer=True)
        assert same_tensors(state, make_state(number))


def lose_the_log(folder: Path) -> None:
    for end in ("-wal", "-shm"):
        (folder / f"{DATABASE}{end}").unlink()


def restore_yesterday(folder: Path) -> None:
    lose_the_log(folder)
    copy_database(folder.parent / "yesterday", folder)


def corrupt_the_log(folder: Path) -> None:
    log = folder / f"{DATABASE}-wal"
    content = bytearray(log.read_bytes())
    content[40:400] = bytes(360)  # of the first frame: SQLite ignores it and those that follow
    log.write_bytes(content)


def lose_the_database(folder: Path) -> None:
    for file in folder.glob(f"{DATABASE}*"):
        file.unlink()


@pytest.mark.mutation(
    "start-deletes-what-has-no-record",
    "CheckpointFolders.unrecorded",
    "            elif any((path / mark).exists() for mark in (UNFINISHED, REMOVING)):\n",
    "            elif True:\n",
)
@pytest.mark.parametrize("fault", [lose_the_log, restore_yesterday, corrupt_the_log, lose_the_database])
def test_an_older_database_than_the_folders_loses_no_checkpoint(
    killed: Path, fault: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(killed)
    assert len(before) == COUNT
    fault(killed)
    with caplog.at_level(logging.WARNING):
        store = Store(killed)
    assert weights(killed) == before
    check_all(store)
    known = 0 if fault is lose_the_database else 3
    adopted = [f"tinker://{RUN}/weights/c{number}" for number in range(known, COUNT)]
    (warning,) = told(caplog)
    assert f"{COUNT - known} without a record: adopted" in warning
    assert all(path in warning for path in adopted)
    # Their run and its session are found again as well.
    run = store.get_training_run(RUN)
    assert run is not None
    assert (run.session_id, run.base_model) == ("5f1c9d5e-0000", "org/base")
    assert store.get_session("5f1c9d5e-0000") == SessionRecord("5f1c9d5e-0000", run.created_at)
    store.close()
    caplog.clear()
    store = Store(killed)
    check_all(store)
    assert told(caplog) == []
    store.close()


def test_folders_mounted_too_late_are_missing_until_they_are_there(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(killed)
    (killed / "checkpoints").rename(killed.parent / "elsewhere")
    with pytest.raises(RuntimeError, match=rf"knows {COUNT} checkpoints, but .*checkpoints does not exist"):
        Store(killed)
    (killed / "checkpoints").mkdir()
    with caplog.at_level(logging.WARNING):
        store = Store(killed)
    (warning,) = told(caplog)
    assert f"{COUNT} recorded without a folder: kept and marked as missing" in warning
    assert all(f"tinker://{RUN}/weights/c{number}" in warning for number in range(COUNT))
    assert [record.missing for record in store.list_checkpoints(RUN)] == [True] * COUNT
    with pytest.raises(NotFoundError, match=r"c0 is missing: put its folder .* back"):
        store.read_checkpoint(make_record("c0"), optimizer=False)
    store.close()
    (killed / "checkpoints").rmdir()
    (killed.parent / "elsewhere").rename(killed / "checkpoints")
    store = Store(killed)
    assert weights(killed) == before
    assert [record.missing for record in store.list_checkpoints(RUN)] == [False] * COUNT
    check_all(store)
    store.close()


def test_a_missing_checkpoint_can_be_deleted_and_saved_again(killed: Path) -> None:
    shutil.rmtree(killed / "checkpoints")
    (killed / "checkpoints").mkdir()
    store = Store(killed)
    store.delete_checkpoint(make_record("c0"))
    assert write(store, 0) in store.list_checkpoints(RUN)
    store.write_checkpoint(make_record("c1"), make_state(1), overwrite=True)
    store.close()
    store = Store(killed)
    assert [r.name for r in store.list_checkpoints(RUN) if not r.missing] == ["c1", "c0"]
    store.close()


def test_record_and_folder_lost_at_random_lose_nothing_else(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(killed)
    lost = store.checkpoint_folder(store.list_checkpoints(RUN)[0])
    store.close()
    shutil.rmtree(lost)
    with sqlite3.connect(killed / DATABASE) as connection:
        connection.execute("DELETE FROM checkpoints WHERE name = 'c2'")
    connection.close()
    with caplog.at_level(logging.WARNING):
        store = Store(killed)
    (warning,) = told(caplog)
    assert f"1 without a record: adopted, private and without expiry (tinker://{RUN}/weights/c2)" in warning
    assert (
        f"1 recorded without a folder: kept and marked as missing until the folder is put back (tinker://{RUN}/w"
        in (warning)
    )
    assert len(weights(killed)) == COUNT - 1
    assert len(store.list_checkpoints(RUN)) == COUNT
    store.close()


def test_an_adopted_checkpoint_is_what_was_written_but_private_and_without_expiry(tmp_path: Path) -> None:
    """What became of its expiry and publication is not known: only the record is changed then."""
    store = Store(tmp_path, clock=lambda: START)
    given = make_record("a", user_metadata={"k": "é"}, expires_at=START + timedelta(hours=1))
    written = store.set_public(store.write_checkpoint(given, make_state(1), overwrite=False), True)
    store.close()
    lose_the_database(tmp_path)
    store = Store(tmp_path, clock=lambda: START + timedelta(days=1))
    assert store.forget_expired() == []
    assert store.list_checkpoints(RUN) == [replace(written, public=False, expires_at=None)]
    store.close()


def test_a_checkpoint_of_an_older_server_is_adopted_too(tmp_path: Path) -> None:
    """Its description has no checksums, and may not know what is newer than it."""
    store = Store(tmp_path)
    folder = store.checkpoint_folder(store.write_checkpoint(make_record("a"), make_state(1), overwrite=False))
    store.close()
    described = json.loads((folder / "checkpoint.json").read_text())
    for newer in ("files", "public", "missing"):
        described.pop(newer, None)
    (folder / "checkpoint.json").write_text(json.dumps(described))
    lose_the_database(tmp_path)
    store = Store(tmp_path)
    assert same_tensors(store.read_checkpoint(make_record("a"), optimizer=True), make_state(1))
    store.close()


def damage(described: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """What a `checkpoint.json` may be instead of `described`."""

    def other(**fields: Any) -> Callable[[], str]:
        return lambda: json.dumps(described | fields)

    return {
        "nested": lambda: "[" * 200_000,
        "list": other(tinker_path=[]),
        "infinity": other(size_bytes=float("inf")),
        "half a character": other(base_model="\ud800"),
    }


@pytest.mark.parametrize("how", ["nested", "list", "infinity", "half a character"])
def test_a_description_that_may_hold_anything_stops_no_start(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    folders = [
        store.checkpoint_folder(store.write_checkpoint(make_record(name), make_state(1), overwrite=False))
        for name in ("a", "b")
    ]
    store.close()
    description = folders[0] / "checkpoint.json"
    description.write_text(damage(json.loads(description.read_text()))[how]())
    lose_the_database(tmp_path)
    store = Store(tmp_path)
    assert [record.name for record in store.list_checkpoints(RUN)] == ["b"]
    assert f"1 not a checkpoint of this server: left alone ({folders[0]} (" in caplog.text
    assert folders[0].is_dir()
    store.close()


def test_a_folder_with_links_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An export of it would be downloaded, and may lead to any file that the server can read."""
    store = Store(tmp_path)
    folder = store.checkpoint_folder(store.write_checkpoint(make_record("a"), make_state(1), overwrite=False))
    store.close()
    config = folder / "adapter_config.json"
    (tmp_path / "secret").write_bytes(config.read_bytes())
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    lose_the_database(tmp_path)
    store = Store(tmp_path)
    assert store.list_checkpoints(RUN) == []
    assert "adapter_config.json is a link" in caplog.text
    store.close()


@pytest.mark.parametrize("time", ["yesterday", "2026-01-01T00:00:00"])
def test_times_of_a_description_that_are_none_are_those_of_the_checkpoint(tmp_path: Path, time: str) -> None:
    store = Store(tmp_path)
    store.add_session(SessionRecord("5f1c9d5e-0000", START))
    store.add_training_run(TrainingRunRecord(RUN, "5f1c9d5e-0000", "org/base", LoraConfig(rank=4), START, START))
    written = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    description = store.checkpoint_folder(written) / "checkpoint.json"
    store.close()
    described = json.loads(description.read_text())
    described["session"]["created_at"] = described["training_run"]["last_request_at"] = time
    description.write_text(json.dumps(described))
    lose_the_database(tmp_path)
    store = Store(tmp_path)
    session, run = store.get_session("5f1c9d5e-0000"), store.get_training_run(RUN)
    assert session is not None
    assert run is not None
    assert (session.created_at, run.last_request_at) == (written.created_at, written.created_at)
    store.close()


def test_run_and_session_of_an_adopted_checkpoint_are_recorded_as_they_were(tmp_path: Path) -> None:
    store = Store(tmp_path)
    session = SessionRecord("5f1c9d5e-0000", START, {"k": "v"}, ("t",), "my run")
    run = TrainingRunRecord(
        RUN, session.session_id, "org/base", LoraConfig(rank=4, train_mlp=False), START, START, {"a": "b"}
    )
    store.add_session(session)
    store.add_training_run(run)
    source = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    copy_session = SessionRecord("copy", START, display_name="copy of a")
    copy_run = replace(run, training_run_id="copy:train:0", session_id="copy", copied_from=source.tinker_path)
    store.copy_checkpoint(source, copy_run, session=copy_session, expires_at=None, copies=[])
    store.close()
    lose_the_database(tmp_path)
    store = Store(tmp_path)
    assert [store.get_session(each.session_id) for each in (session, copy_session)] == [session, copy_session]
    assert [store.get_training_run(each.training_run_id) for each in (run, copy_run)] == [run, copy_run]
    store.close()


@pytest.mark.parametrize("hours", [1, -1], ids=["clock-runs", "clock-set-back"])
def test_of_two_folders_of_one_name_the_newer_is_the_checkpoint_and_the_older_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hours: int
) -> None:
    store = Store(tmp_path)
    old = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    store.close()
    shutil.copytree(tmp_path, tmp_path / "before")
    store = Store(tmp_path)
    later = make_record("a", created_at=START + timedelta(hours=hours))
    new = store.write_checkpoint(later, make_state(2), overwrite=True)
    folder, old_folder = store.checkpoint_folder(new), store.checkpoint_folder(old)
    store.close()
    shutil.copytree(tmp_path / "before" / old_folder.relative_to(tmp_path), old_folder)
    aside = old_folder.with_name(f".aside-{old_folder.name}")
    # With today's database the older folder has no record; with yesterday's the newer one has none.
    for database in ("today", "yesterday"):
        caplog.clear()
        store = Store(tmp_path)
        assert store.list_checkpoints(RUN) == [new]
        assert same_tensors(store.read_checkpoint(new, optimizer=True), make_state(2))
        store.close()
        assert set(folder.parent.iterdir()) == {folder, aside}
        assert f"1 older than another one of the same name: put aside ({old_folder})" in caplog.text
        if database == "today":
            aside.rename(old_folder)
            lose_the_database(tmp_path)
            copy_database(tmp_path / "before", tmp_path)
    caplog.clear()
    Store(tmp_path).close()
    assert told(caplog) == []


def test_start_removes_only_what_is_marked_as_unfinished_or_being_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    kept, other = (store.write_checkpoint(make_record(n), make_state(1), overwrite=False) for n in ("kept", "other"))
    folder, parent = store.checkpoint_folder(kept), store.checkpoint_folder(kept).parent
    store.close()
    (parent / (".unfinished-" + "0" * 32)).mkdir()
    (parent / (".removing-" + "0" * 32)).mkdir()
    for number, mark in enumerate((".unfinished", ".removing")):
        marked = parent / f"marked@20260101T000000.00000{number}"
        shutil.copytree(folder, marked)
        (marked / mark).touch()
    shutil.copytree(folder, parent / "my backup")
    shutil.copytree(folder, parent / "copied@20260101T000000.000007")  # its description says `kept`
    (parent / "torn@20260101T000000.000008").mkdir()
    for mark in (".unfinished", ".removing"):  # with a record, marks mean nothing
        (store.checkpoint_folder(other) / mark).touch()
    (parent.parent.parent / "empty-run" / "weights").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        store = Store(tmp_path)
    strange = [parent / name for name in ("my backup", "copied@20260101T000000.000007", "torn@20260101T000000.000008")]
    (warning,) = told(caplog)
    assert "3 not a checkpoint of this server: left alone" in warning
    assert all(str(path) in warning for path in strange)
    assert {record.name for record in store.list_checkpoints(RUN)} == {"kept", "other"}
    assert set(parent.iterdir()) == {folder, store.checkpoint_folder(other), *strange}
    assert not any(file.name.startswith(".") for file in store.checkpoint_folder(other).iterdir())
    assert not (parent.parent.parent / "empty-run").exists()
    store.close()


def test_what_was_deleted_does_not_come_back_when_the_server_was_killed_before_its_folder_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    written = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    store.forget_checkpoint(written)  # and a sample still reads the folder
    assert same_tensors(store.read_checkpoint(written, optimizer=True), make_state(1))
    store.close()
    store = Store(tmp_path)
    assert store.list_checkpoints(RUN) == []
    assert weights(tmp_path) == set()
    store.close()


@pytest.mark.parametrize("damage", ["header", "page"])
def test_a_damaged_database_is_one_sentence_and_the_checkpoints_survive_without_it(killed: Path, damage: str) -> None:
    Store(killed).close()  # everything is in the one file
    database = killed / DATABASE
    content = bytearray(database.read_bytes())
    begin, end = (0, 100) if damage == "header" else (4096, len(content))
    content[begin:end] = b"\xa5" * (end - begin)
    database.write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"^the database {database} is damaged \(.*\): put it back .* or move it"):
        Store(killed)
    assert len(weights(killed)) == COUNT
    database.rename(killed.parent / "damaged")
    store = Store(killed)
    check_all(store)
    store.close()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702, 0o700])
def test_a_data_folder_that_others_can_enter_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    Store(folder).close()
    warned = [record.getMessage() for record in caplog.records if str(folder) in record.getMessage()]
    assert ([f"{folder} (mode {mode:o})" in text for text in warned]) == [True] * (mode != 0o700)
