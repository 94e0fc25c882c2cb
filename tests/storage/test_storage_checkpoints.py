"""Checkpoints of `Store`: content, names, overwriting, deletion, expiry, threads, restart."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tinker_local.backend.storage import FolderInUseError, Store, parse_tinker_path
from tinker_local.backend.storage.checkpoint_folders import CheckpointFolders
from tinker_local.types import InvalidRequestError, LoraConfig, NotFoundError, StorageFullError

from tests.storage.store_states import RUN, START, make_record, make_state, same_tensors


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "data", clock=lambda: START)
    yield opened
    opened.close()


def folders_of(store: Store, run: str = RUN) -> set[Path]:
    root = store.checkpoint_folder(make_record("x", run=run)).parents[2]
    return set(root.glob("*/*/*"))


def test_checkpoint_is_read_back_bit_for_bit(store: Store) -> None:
    state = make_state(5)
    expires = START + timedelta(hours=1)
    given = make_record("final", user_metadata={"note": "é", "n": [1, None]}, expires_at=expires)
    written = store.write_checkpoint(given, state, overwrite=False)
    read = store.read_checkpoint(written, optimizer=True)
    assert same_tensors(read, state)
    assert (read.base_model, read.lora_config, read.target_modules) == ("org/base", given.lora_config, ("q_proj",))
    assert store.get_checkpoint(RUN, "weights", "final") == written
    folder = store.checkpoint_folder(written)
    assert written == replace(
        given, has_optimizer=True, size_bytes=sum((folder / name).stat().st_size for name in FILES)
    )
    weights_only = store.read_checkpoint(written, optimizer=False)
    assert (weights_only.optimizer, weights_only.step) == (None, 0)


FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")


@pytest.mark.mutation(
    "pickle",
    "write_adapter",
    "        _save(folder / OPTIMIZER, state.optimizer, metadata)\n",
    "        __import__('pickle').dump(dict(state.optimizer), (folder / 'optimizer.pt').open('wb'))\n",
)
def test_checkpoint_folder_holds_safetensors_and_json_alone(store: Store) -> None:
    state = make_state(5)
    folder = store.checkpoint_folder(store.write_checkpoint(make_record("final"), state, overwrite=False))
    assert {file.name for file in folder.iterdir()} == {*FILES, "checkpoint.json"}
    on_disk = load_file(folder / "adapter_model.safetensors")
    assert all(on_disk[name].tobytes() == tensor.tobytes() for name, tensor in state.tensors.items())
    assert json.loads((folder / "adapter_config.json").read_text()) == state.peft_config()
    assert json.loads((folder / "checkpoint.json").read_text())["tinker_path"] == f"tinker://{RUN}/weights/final"


def test_tensors_in_any_memory_layout_are_written_right(store: Store) -> None:
    """safetensors writes the memory of a transposed or strided array as it lies, without an error."""
    state = make_state(1, optimizer=False)
    wide = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    odd = replace(state, tensors={"transposed": wide.T, "strided": wide[:, ::2], "reversed": wide[::-1]})
    read = store.read_checkpoint(store.write_checkpoint(make_record("a"), odd, overwrite=False), optimizer=False)
    assert all(np.array_equal(read.tensors[name], tensor) for name, tensor in odd.tensors.items())


def test_checkpoint_without_optimizer_says_so(store: Store) -> None:
    written = store.write_checkpoint(
        make_record("s", kind="sampler_weights"), make_state(1, optimizer=False), overwrite=False
    )
    assert not written.has_optimizer
    assert not (store.checkpoint_folder(written) / "optimizer.safetensors").exists()
    with pytest.raises(InvalidRequestError, match="without optimizer state"):
        store.read_checkpoint(written, optimizer=True)


def test_an_existing_name_is_refused_and_kept_unless_overwrite(store: Store) -> None:
    store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    with pytest.raises(InvalidRequestError, match=r"'a' exists already in weights"):
        store.write_checkpoint(make_record("a"), make_state(2), overwrite=False)
    store.write_checkpoint(make_record("a", kind="sampler_weights"), make_state(3), overwrite=False)
    store.write_checkpoint(make_record("a", run="other:train:0"), make_state(4), overwrite=False)
    assert same_tensors(store.read_checkpoint(make_record("a"), optimizer=True), make_state(1))
    assert len(folders_of(store)) == 3


def test_overwrite_replaces_weights_and_the_whole_record(store: Store) -> None:
    expires = START + timedelta(hours=1)
    old = store.write_checkpoint(
        make_record("a", user_metadata={"k": 1}, expires_at=expires), make_state(1), overwrite=True
    )
    new = store.write_checkpoint(make_record("a", user_metadata={"j": 2}), make_state(2), overwrite=True)
    assert store.list_checkpoints(RUN) == [new]
    assert (new.user_metadata, new.expires_at) == ({"j": 2}, None)
    # Equal times, yet another folder: nothing that remembers a path can serve the old weights.
    assert store.checkpoint_folder(old) != store.checkpoint_folder(new)
    assert folders_of(store) == {store.checkpoint_folder(new)}
    assert same_tensors(store.read_checkpoint(old, optimizer=True), make_state(2))


def test_overwrite_keeps_the_old_one_whole_until_the_new_one_is_recorded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    seen = []
    commit = store._commit

    def look_then_commit(record: Any, overwrite: Any) -> Any:
        seen.append(same_tensors(store.read_checkpoint(make_record("a"), optimizer=True), make_state(1)))
        return commit(record, overwrite)

    monkeypatch.setattr(store, "_commit", look_then_commit)
    store.write_checkpoint(make_record("a"), make_state(2), overwrite=True)
    assert seen == [True]


def test_a_write_that_fails_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Any) -> None:
        raise OSError(28, "No space left on device")

    store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    monkeypatch.setattr("tinker_local.backend.storage.checkpoint_folders.fsync_path", full)
    with pytest.raises(StorageFullError, match=r"is full.*delete checkpoints"):
        store.write_checkpoint(make_record("a"), make_state(2), overwrite=True)
    assert len(folders_of(store)) == 1
    assert same_tensors(store.read_checkpoint(make_record("a"), optimizer=True), make_state(1))


@pytest.mark.mutation("folder-not-synced", "CheckpointFolders._make", "            fsync_path(unfinished)\n", "")
def test_everything_is_on_the_disk_before_the_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, commit = os.fsync, store._commit

    def note_fsync(descriptor: Any) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def note_commit(record: Any, overwrite: Any) -> Any:
        events.append("commit")
        return commit(record, overwrite)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(store, "_commit", note_commit)
    folder = store.checkpoint_folder(store.write_checkpoint(make_record("a"), make_state(1), overwrite=False))
    unfinished = next(event for event in events if ".unfinished-" in event).split("/.unfinished-")[0]
    assert unfinished == str(folder.parent)
    synced = events[: events.index("commit")]
    assert {Path(path).name for path in synced if ".unfinished-" in path} >= {*FILES, "checkpoint.json"}
    # The folder after its files, then its parent after the rename; and the new parents in theirs.
    assert [Path(path).parent for path in synced[-2:]] == [folder.parent, folder.parents[1]]
    assert ".unfinished-" in synced[-2]
    assert {str(folder.parents[1]), str(folder.parents[2])} <= set(synced)


@pytest.mark.mutation("database-does-not-wait", "_set_pragmas", "synchronous = FULL", "synchronous = OFF")
def test_sqlite_waits_for_the_disk(store: Store) -> None:
    with store._engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    assert pragmas == ["wal", 2]


@pytest.mark.mutation(
    "paths-leave-their-folder",
    "check_checkpoint_name",
    "if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:",
    "if len(name) > MAX_NAME_LENGTH:",
)
@pytest.mark.parametrize(
    "name",
    ["..", ".", "", ".hidden", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "a\0", "é", "a" * 129, "%2e%2e", "a:b"],
)
def test_a_name_that_is_no_plain_segment_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidRequestError, match=r"name: .*letters"):
        store.write_checkpoint(make_record(name), make_state(1), overwrite=True)
    with pytest.raises(InvalidRequestError, match=r"letters|form"):
        parse_tinker_path(f"tinker://{RUN}/weights/{name}", "path")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["000060", "final", "a.b-c_D", "-x", "a..b", "a" * 128])
def test_plain_names_work(store: Store, name: str) -> None:
    written = store.write_checkpoint(make_record(name), make_state(1), overwrite=False)
    assert parse_tinker_path(written.tinker_path) == (RUN, "weights", name)
    assert same_tensors(store.read_checkpoint(written, optimizer=True), make_state(1))


@pytest.mark.parametrize("run", ["..", ".", "a/b", "../../x", "a:b", "a%3Ab", "a\0b", "ü"])
def test_run_ids_stay_inside_and_apart(store: Store, tmp_path: Path, run: str) -> None:
    root = tmp_path / "data" / "checkpoints"
    folder = store.checkpoint_folder(store.write_checkpoint(make_record("a", run=run), make_state(1), overwrite=False))
    assert folder.resolve().relative_to(root.resolve()).parts[1:2] == ("weights",)
    others = {store.checkpoint_folder(make_record("a", run=other)) for other in ("a:b", "a%3Ab", "a/b", "..", "%2E.")}
    assert len(others) == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("weights/a", "form"),
        ("tinker://run/weights", "form"),
        ("tinker:///weights/a", "form"),
        ("tinker://run/weights/a/b", "form"),
        ("tinker://run/full_weights/a", "full_weights.*weights, sampler_weights, external_weights"),
        ("tinker://run/weights/..", "letters"),
    ],
)
def test_tinker_path_errors_name_the_field(path: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^model_path: .*{message}"):
        parse_tinker_path(path, "model_path")


def test_delete_removes_record_and_folder(store: Store) -> None:
    written = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    store.delete_checkpoint(written)
    assert store.get_checkpoint(RUN, "weights", "a") is None
    assert folders_of(store) == set()
    for call in (store.delete_checkpoint, lambda record: store.read_checkpoint(record, optimizer=False)):
        with pytest.raises(NotFoundError, match=f"{RUN}/weights/a"):
            call(written)
    store.write_checkpoint(make_record("a"), make_state(2), overwrite=False)


def test_delete_forgets_the_record_before_the_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    seen = []
    monkeypatch.setattr(store._folders, "remove", lambda record: seen.append(store.get_checkpoint(RUN, "weights", "a")))
    store.delete_checkpoint(written)
    assert seen == [None]


def test_expired_checkpoints_are_gone_at_once_and_their_folders_when_told(tmp_path: Path) -> None:
    clock = [START]
    store = Store(tmp_path / "data", clock=lambda: clock[0])
    hours = {"soon": 1, "later": 2, "never": None}
    records = {
        name: store.write_checkpoint(
            make_record(name, expires_at=None if number is None else START + timedelta(hours=number)),
            make_state(1),
            overwrite=False,
        )
        for name, number in hours.items()
    }
    clock[0] += timedelta(minutes=59)
    assert store.forget_expired() == []
    assert len(store.list_checkpoints(RUN)) == 3
    clock[0] += timedelta(minutes=1)
    # Before anybody sweeps.
    assert store.get_checkpoint(RUN, "weights", "soon") is None
    assert {record.name for record in store.list_checkpoints(RUN)} == {"later", "never"}
    assert ({record.name for record in store.list_all_checkpoints(9, 0)[0]}, store.list_all_checkpoints(9, 0)[1]) == (
        {"later", "never"},
        2,
    )
    changes: list[Callable[[], object]] = [
        lambda: store.set_expiry(records["soon"], None),
        lambda: store.set_public(records["soon"], True),
        lambda: store.forget_checkpoint(records["soon"]),
    ]
    for change in changes:
        with pytest.raises(NotFoundError):
            change()
    assert store.forget_expired() == [records["soon"]]
    assert store.forget_expired() == []
    # Those that hold it still read it.
    assert same_tensors(store.read_checkpoint(records["soon"], optimizer=True), make_state(1))
    store.remove_folder(records["soon"])
    with pytest.raises(NotFoundError):
        store.read_checkpoint(records["soon"], optimizer=True)
    assert len(folders_of(store)) == 2
    store.close()


def test_the_name_of_an_expired_checkpoint_is_free_and_its_folder_is_not_lost(tmp_path: Path) -> None:
    clock = [START]
    store = Store(tmp_path / "data", clock=lambda: clock[0])
    old = store.write_checkpoint(
        make_record("a", expires_at=START + timedelta(hours=1)), make_state(1), overwrite=False
    )
    clock[0] += timedelta(hours=1)
    new = store.write_checkpoint(make_record("a", created_at=clock[0]), make_state(2), overwrite=False)
    assert store.list_checkpoints(RUN) == [new]
    assert folders_of(store) == {store.checkpoint_folder(old), store.checkpoint_folder(new)}
    assert store.forget_expired() == [old]
    store.remove_folder(old)
    assert folders_of(store) == {store.checkpoint_folder(new)}
    assert same_tensors(store.read_checkpoint(new, optimizer=True), make_state(2))
    store.close()


def test_expiry_and_publication_are_changed_in_the_record_alone(store: Store) -> None:
    written = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    until = START + timedelta(days=1, microseconds=7)
    assert store.set_expiry(written, until) == replace(written, expires_at=until)
    public = store.set_public(written, True)
    assert public == replace(written, expires_at=until, public=True)
    assert store.get_checkpoint(RUN, "weights", "a") == public
    with pytest.raises(InvalidRequestError, match="public already"):
        store.set_public(written, True)
    assert store.set_expiry(written, None) == replace(written, public=True)
    assert store.set_public(written, False) == written
    with pytest.raises(InvalidRequestError, match="private already"):
        store.set_public(written, False)


def test_lists_are_newest_first_with_the_count_of_all(store: Store) -> None:
    # Written in another order than they began, in which the clock was set back.
    for index, number in enumerate([4, 1, 2, 3]):
        begun = START - timedelta(minutes=number)
        record = make_record(f"c{index}", run=f"run{index % 2}:train:0", created_at=begun, save_number=number)
        store.write_checkpoint(record, make_state(1), overwrite=False)
    page, total = store.list_all_checkpoints(3, 0)
    assert ([record.name for record in page], total) == (["c0", "c3", "c2"], 4)
    assert [record.name for record in store.list_all_checkpoints(3, 3)[0]] == ["c1"]
    assert [record.name for record in store.list_checkpoints("run1:train:0")] == ["c3", "c1"]


def test_checkpoints_are_there_after_a_restart(tmp_path: Path) -> None:
    first = Store(tmp_path)
    written = first.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    first.close()
    first.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.delete_checkpoint(written)
    second = Store(tmp_path)
    assert second.list_checkpoints(RUN) == [written]
    assert same_tensors(second.read_checkpoint(written, optimizer=True), make_state(1))
    second.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "metadata.sqlite3") as connection:
        connection.execute("UPDATE schema SET version = 99")
    with pytest.raises(RuntimeError, match="schema version 99"):
        Store(tmp_path)


def test_a_second_server_on_the_folder_is_refused_with_the_holder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(FolderInUseError, match=rf"{tmp_path} is in use .*process {os.getpid()}\)"):
        Store(tmp_path)
    code = "import sys; from pathlib import Path; from tinker_local.backend.storage import Store\n"
    code += "Store(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"process {os.getpid()}" in done.stderr
    store.close()
    Store(tmp_path).close()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_another_user_made_beforehand_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    precious, data = tmp_path / "precious", tmp_path / "data"
    precious.write_text("mine")
    data.mkdir()
    if kind == "link":
        (data / "lock").symlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(data / "lock")
    else:
        (data / "lock").mkdir()
    with pytest.raises(RuntimeError, match=r"^[^\n]*data/lock cannot be locked [^\n]*another user may have made it"):
        Store(data)
    assert precious.read_text() == "mine"


def test_programs_started_by_the_server_do_not_keep_its_lock(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with subprocess.Popen(["sleep", "30"], close_fds=False) as child:
        store.close()
        Store(tmp_path).close()
        child.kill()


def test_many_threads_write_read_overwrite_and_delete(store: Store) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(thread: int) -> None:
        try:
            barrier.wait()
            for step in range(8):
                store.write_checkpoint(make_record("shared"), make_state(thread * 100 + step), overwrite=True)
                state = store.read_checkpoint(make_record("shared"), optimizer=True)
                assert same_tensors(state, make_state(state.step))
                own = make_record(f"own{thread}", kind="sampler_weights")
                store.write_checkpoint(own, make_state(step), overwrite=False)
                store.list_all_checkpoints(10, 0)
                if step < 7:
                    store.delete_checkpoint(own)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert folders_of(store) == {store.checkpoint_folder(record) for record in store.list_checkpoints(RUN)}
    assert len(folders_of(store)) == 9


def test_of_two_threads_one_gets_the_name(store: Store) -> None:
    outcomes: list[object] = []
    barrier = threading.Barrier(6)

    def work(seed: int) -> None:
        barrier.wait()
        try:
            store.write_checkpoint(make_record("a"), make_state(seed, width=512), overwrite=False)
            outcomes.append(seed)
        except InvalidRequestError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert same_tensors(store.read_checkpoint(make_record("a"), optimizer=True), make_state(winner, width=512))
    assert len(folders_of(store)) == 1


def test_folders_of_one_name_and_time_never_meet(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    written = [folders.write(make_record("a", lora_config=LoraConfig()), make_state(seed)) for seed in range(3)]
    assert [record.created_at - START for record in written] == [timedelta(microseconds=n) for n in range(3)]
    assert len({folders.path(record) for record in written}) == 3
