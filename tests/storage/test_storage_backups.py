"""`tinker-local backup` and `restore`: whole and consistent while a server writes, and nothing is overwritten."""

import os
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tinker_local.backend.cli.main import main
from tinker_local.backend.hosting.backups import back_up
from tinker_local.backend.hosting.backups import restore as put_back
from tinker_local.backend.storage import FolderInUseError, Store
from tinker_local.backend.storage.records import SessionRecord

from tests.storage.store_states import RUN, START, make_record, make_state, same_tensors


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A server's, with three checkpoints; it stays open."""
    opened = Store(tmp_path / "data")
    opened.add_session(SessionRecord("s", START))
    for number in range(3):
        opened.write_checkpoint(make_record(f"c{number}"), make_state(number), overwrite=False)
    yield opened
    opened.close()


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def checkpoints(folder: Path) -> set[Path]:
    return set(folder.glob("checkpoints/*/*/*"))


def test_a_backup_of_a_live_server_is_restored_bit_for_bit(store: Store, tmp_path: Path) -> None:
    data, to, new = (tmp_path / name for name in ("data", "backup", "new"))
    done = command("backup", "--data-dir", data, "--to", to)
    assert (done.exit_code, done.output.split(":")[0]) == (0, "copied the database and 3 checkpoints (0.0 MiB)")
    store.delete_checkpoint(make_record("c0"))
    done = command("restore", "--from", to, "--data-dir", new)
    assert done.exit_code == 0, done.output
    restored = Store(new)
    assert restored.get_session("s") == SessionRecord("s", START)
    assert [record.name for record in restored.list_checkpoints(RUN)] == ["c2", "c1", "c0"]
    for number in range(3):
        assert same_tensors(restored.read_checkpoint(make_record(f"c{number}"), optimizer=True), make_state(number))
    restored.close()


def test_an_earlier_backup_is_brought_up_to_date_and_copies_nothing_twice(store: Store, tmp_path: Path) -> None:
    data, to = tmp_path / "data", tmp_path / "backup"
    assert back_up(data, to).checkpoints == 3
    store.delete_checkpoint(make_record("c0"))
    later = make_record("c1", created_at=START + timedelta(hours=1))
    store.write_checkpoint(later, make_state(9), overwrite=True)
    copied = back_up(data, to)
    assert (copied.checkpoints, copied.missing, copied.damaged) == (1, [], [])
    assert {path.name[:2] for path in checkpoints(to)} == {"c1", "c2"}
    assert len(checkpoints(to)) == 2
    opened = Store(to)  # a backup is a data folder
    assert same_tensors(opened.read_checkpoint(later, optimizer=True), make_state(9))
    opened.close()


def test_a_checkpoint_replaced_while_another_is_copied_is_in_the_backup(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copyfile, left = shutil.copyfile, [1, 2]

    def replace_meanwhile(source: Path, target: Path) -> Any:
        if left:
            hour = left.pop(0)
            for number in range(3):
                record = make_record(f"c{number}", created_at=START + timedelta(hours=hour))
                store.write_checkpoint(record, make_state(number + 10 * hour), overwrite=True)
        return copyfile(source, target)

    monkeypatch.setattr("tinker_local.backend.hosting.backups.shutil.copyfile", replace_meanwhile)
    copied = back_up(tmp_path / "data", tmp_path / "backup")
    assert copied.missing == []
    opened = Store(tmp_path / "backup")
    for number in range(3):
        state = opened.read_checkpoint(make_record(f"c{number}"), optimizer=True)
        assert same_tensors(state, make_state(number + 20))
    opened.close()


def test_backups_while_threads_save_overwrite_and_delete_are_consistent(store: Store, tmp_path: Path) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        step = 0
        try:
            while not stop.is_set():
                step += 1
                store.write_checkpoint(make_record(f"t{thread}"), make_state(step), overwrite=True)
                if step % 3 == 0:
                    store.delete_checkpoint(make_record(f"t{thread}"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        results = [back_up(tmp_path / "data", tmp_path / f"backup{number}") for number in range(3)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    for number, copied in enumerate(results):
        assert copied.damaged == []
        opened = Store(tmp_path / f"backup{number}")
        there = {record.name: record for record in opened.list_checkpoints(RUN) if not record.missing}
        assert {"c0", "c1", "c2"} <= set(there)
        for record in there.values():
            state = opened.read_checkpoint(record, optimizer=True)
            assert same_tensors(state, make_state(state.step))
        opened.close()


def test_a_damaged_checkpoint_is_named_and_everything_else_is_copied(store: Store, tmp_path: Path) -> None:
    file = store.checkpoint_folder(store.list_checkpoints(RUN)[0]) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(64)
    file.write_bytes(content)
    done = command("backup", "--data-dir", tmp_path / "data", "--to", tmp_path / "backup")
    assert done.exit_code == 1
    assert "1 checkpoints are damaged" in done.output
    assert "adapter_model.safetensors does not have the SHA-256" in done.output
    assert len(checkpoints(tmp_path / "backup")) == 3


def test_neither_backup_nor_restore_overwrites_anything_else(store: Store, tmp_path: Path) -> None:
    data, to, other = (tmp_path / name for name in ("data", "backup", "other"))
    other.mkdir()
    (other / "thesis.tex").touch()
    for source, target, reason in (
        (data, other, "neither empty nor an earlier backup"),
        (data, data, "is the data folder itself"),
        (other, to, "has no metadata.sqlite3"),
    ):
        with pytest.raises(ValueError, match=reason):
            back_up(source, target)
    back_up(data, to)
    with pytest.raises(FolderInUseError, match="in use"):
        put_back(to, data)
    store.close()
    with pytest.raises(ValueError, match="holds a database or checkpoints"):
        put_back(to, data)
    with pytest.raises(ValueError, match="is it a backup"):
        put_back(other, tmp_path / "new")
    assert (other / "thesis.tex").exists()


@pytest.mark.parametrize("where", ["file", "checkpoint", "run", "checkpoints", "log", "pipe"])
def test_a_backup_with_links_or_special_files_is_not_restored(store: Store, tmp_path: Path, where: str) -> None:
    data, to, new, secret = (tmp_path / name for name in ("data", "backup", "new", "secret"))
    back_up(data, to)
    folder = min(checkpoints(to))
    weights = folder / "adapter_model.safetensors"
    strange = {
        "file": weights,
        "checkpoint": folder,
        "run": folder.parents[1],
        "checkpoints": to / "checkpoints",
        "log": to / "metadata.sqlite3-wal",
        "pipe": weights,
    }[where]
    if strange.exists():
        strange.rename(secret)
    else:
        secret.write_bytes(b"")
    if where == "pipe":
        os.mkfifo(strange)
    else:
        strange.symlink_to(secret)
    done = command("restore", "--from", to, "--data-dir", new)
    assert done.exit_code == 1
    assert f"{strange} is {'not a plain file' if where == 'pipe' else 'a link'}" in done.output
    assert "nothing was restored" in done.output
    assert not new.exists()


def test_hard_links_in_a_backup_are_restored_as_files_of_their_own(store: Store, tmp_path: Path) -> None:
    data, to, snapshot, new = (tmp_path / name for name in ("data", "backup", "snapshot", "new"))
    back_up(data, to)
    shutil.copytree(to, snapshot, copy_function=os.link)  # as `cp -al` and `rsync --link-dest` do
    assert put_back(snapshot, new).checkpoints == 3
    assert {file.stat().st_nlink for file in new.glob("checkpoints/*/*/*/*")} == {1}
