"""Copies of checkpoints share their files and nothing else; and what a session holds is counted."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tinker_local.backend.storage import Store
from tinker_local.backend.storage.data_folder import fsync_path
from tinker_local.backend.storage.records import (
    CheckpointRecord,
    CopyRecord,
    SamplingSessionRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.types import LoraConfig, NotFoundError, StorageFullError

from tests.storage.store_states import RUN, START, make_record, make_state, same_tensors

LATER = START + timedelta(hours=3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path, clock=lambda: START)
    yield opened
    opened.close()


def run_of(run: str, session: str = "s", when: datetime = START, source: str | None = None) -> TrainingRunRecord:
    return TrainingRunRecord(run, session, "org/base", LoraConfig(rank=4, train_mlp=False), when, when, {}, source)


def copy(store: Store, source: CheckpointRecord, number: int = 0) -> CheckpointRecord:
    session = f"copy{number}"
    run = run_of(f"{session}:train:0", session, LATER, source.tinker_path)
    path = f"tinker://{run.training_run_id}/{source.kind}/{source.name}"
    note = CopyRecord(f"key{number}", {"source_path": source.tinker_path}, path)
    return store.copy_checkpoint(source, run, session=SessionRecord(session, LATER), expires_at=LATER, copies=[note])


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_a_copy_has_the_same_content_kind_and_name_and_its_own_end(store: Store, kind: str) -> None:
    given = make_record("a", kind=kind, expires_at=START + timedelta(hours=1), user_metadata={"k": "v"})
    state = make_state(1, optimizer=kind == "weights")
    source = store.set_public(store.write_checkpoint(given, state, overwrite=False), True)
    made = copy(store, source)
    assert made == replace(source, training_run_id="copy0:train:0", created_at=LATER, expires_at=LATER, public=False)
    assert store.list_checkpoints("copy0:train:0") == [made]
    assert same_tensors(store.read_checkpoint(made, optimizer=kind == "weights"), state)
    ours, theirs = store.checkpoint_folder(made), store.checkpoint_folder(source)
    tensors = "adapter_model.safetensors"
    assert (ours / tensors).stat().st_ino == (theirs / tensors).stat().st_ino  # a hard link
    assert "copy0:train:0" in (ours / "checkpoint.json").read_text()
    assert RUN in (theirs / "checkpoint.json").read_text()
    run, session, found = store.get_training_run("copy0:train:0"), store.get_session("copy0"), store.find_copy("key0")
    assert run is not None
    assert run.copied_from == source.tinker_path
    assert session is not None
    assert session.created_at == LATER
    assert found is not None
    assert found.tinker_path == made.tinker_path
    # Neither needs the other.
    store.delete_checkpoint(source)
    assert same_tensors(store.read_checkpoint(made, optimizer=kind == "weights"), state)


@pytest.mark.parametrize("code", ["EPERM", "EMLINK", "EXDEV", "EOPNOTSUPP", "ENOSYS"])
def test_a_copy_where_hard_links_are_refused_has_its_own_bytes_and_they_are_on_the_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(getattr(errno, code), "no links here")

    def noted(path: Path) -> None:
        on_disk.add(path.name)
        fsync_path(path)

    on_disk: set[str] = set()
    source = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr("tinker_local.backend.storage.checkpoint_folders.fsync_path", noted)
    made = copy(store, source)
    assert on_disk >= {file.name for file in store.checkpoint_folder(made).iterdir()} > {"optimizer.safetensors"}
    store.delete_checkpoint(source)
    assert same_tensors(store.read_checkpoint(made, optimizer=True), make_state(1))


def test_a_copy_that_the_disk_has_no_room_for_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    source = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    monkeypatch.setattr(Path, "hardlink_to", full)
    with pytest.raises(StorageFullError, match=f"the disk of {tmp_path} is full"):
        copy(store, source)
    assert [folder.name[:2] for folder in (tmp_path / "checkpoints").glob("*/*/*")] == ["a@"]
    assert store.get_training_run("copy0:train:0") is None


def test_a_copy_that_fails_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    copy(store, source)
    with pytest.raises(Exception, match="UNIQUE"):
        copy(store, source)
    assert len(list((tmp_path / "checkpoints").glob("*/*/*"))) == 2
    store.delete_checkpoint(source)
    with pytest.raises(NotFoundError):
        copy(store, source, 1)
    assert store.get_session("copy1") is None
    assert store.get_training_run("copy1:train:0") is None


def test_what_belongs_to_a_session_is_listed_and_counted(store: Store) -> None:
    for number in range(2):
        store.add_training_run(run_of(f"s:train:{number}"))
        store.add_sampling_session(SamplingSessionRecord(f"s:sample:{number}", "s", "org/base", None, True, START))
    store.add_training_run(run_of("other:train:0", "other"))
    assert store.session_members("s") == (["s:train:0", "s:train:1"], ["s:sample:0", "s:sample:1"])
    assert store.session_members("none") == ([], [])
    sizes = [
        store.write_checkpoint(make_record(name, run=run, expires_at=end), make_state(1), overwrite=False).size_bytes
        for name, run, end in (
            ("a", "s:train:0", None),
            ("b", "s:train:1", LATER),
            ("over", "s:train:1", START),
            ("a", "other:train:0", None),
        )
    ]
    assert store.session_storage(["s", "other", "none"]) == {"s": (2, sizes[0] + sizes[1]), "other": (1, sizes[3])}


def test_sessions_are_paged_by_time_and_id(store: Store) -> None:
    times = {"a": 1, "b": 2, "d": 2, "c": 2, "e": 3}
    for name, minutes in times.items():
        store.add_session(SessionRecord(name, START + timedelta(minutes=minutes)))
    found, before = [], None
    while page := store.sessions_before(before, 2):
        found += [record.session_id for record in page]
        before = (page[-1].created_at, page[-1].session_id)
    assert found == ["e", "d", "c", "b", "a"]
    listed, total = store.list_sessions(2, 1)
    assert ([record.session_id for record in listed], total) == (["c", "d"], 5)
