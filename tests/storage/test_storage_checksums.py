"""What was written is what is loaded: a flipped bit or a cut-off file is one sentence, for training and sampling."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinker_local.backend.adapters import checksums
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.adapters.host_adapters import host_adapter
from tinker_local.backend.adapters.version_content import version_content
from tinker_local.backend.storage import Store
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.types import InvalidRequestError, NotFoundError

from tests.storage.store_states import RUN, make_record, make_state, same_tensors

WEIGHTS, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path)
    yield opened
    opened.close()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(byte ^ 255 for byte in content[-64:])
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def forget_checksums(folder: Path) -> None:
    """As an older server wrote it."""
    described = json.loads((folder / "checkpoint.json").read_text())
    del described["files"]
    (folder / "checkpoint.json").write_text(json.dumps(described))


def saved(store: Store) -> tuple[CheckpointRecord, Path]:
    written = store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
    return written, store.checkpoint_folder(written)


@pytest.mark.mutation(
    "flipped-bytes-are-loaded",
    "checksums.check_files",
    '        if _sha256(folder / name) != each.get("sha256"):\n',
    "        if False:\n",
)
@pytest.mark.parametrize(
    ("damage", "words"), [(flip, "does not have the SHA-256"), (cut, "bytes and was written with")]
)
def test_64_damaged_bytes_are_an_error_that_names_file_and_folder(
    store: Store, damage: Callable[[Path], None], words: str
) -> None:
    written, folder = saved(store)
    damage(folder / WEIGHTS)
    for load in (
        lambda: store.read_checkpoint(written, optimizer=False),
        lambda: store.check_checkpoint(written, "path"),
        lambda: host_adapter(AdapterVersion("v", folder), 64),
    ):
        with pytest.raises(InvalidRequestError, match=rf"is damaged: {WEIGHTS} .*{words}.* put {folder} back"):
            load()


@pytest.mark.parametrize("begun", [True, False])
def test_a_version_that_is_removed_while_it_is_read_is_gone_and_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Newer weights of an in-flight client replace it, and its samples go on with those."""
    hashed = checksums._sha256
    for number, load in enumerate((lambda version: host_adapter(version, 64), version_content)):
        written = store.write_checkpoint(make_record(f"{number}"), make_state(1), overwrite=False)
        folder = store.checkpoint_folder(written)

        def remove(file: Path, folder: Path = folder) -> str:
            if not begun:
                shutil.rmtree(folder)
                return hashed(file)
            found = hashed(file)
            shutil.rmtree(folder)
            return found[::-1]

        monkeypatch.setattr(checksums, "_sha256", remove)
        with pytest.raises(NotFoundError, match=r"sampler version v: its folder .* (was removed while|is gone)"):
            load(AdapterVersion("v", folder))
        monkeypatch.setattr(checksums, "_sha256", hashed)


def test_a_damaged_optimizer_costs_the_optimizer_and_not_the_weights(store: Store) -> None:
    written, folder = saved(store)
    flip(folder / OPTIMIZER)
    with pytest.raises(InvalidRequestError, match=rf"is damaged: {OPTIMIZER} .* or load its weights alone"):
        store.read_checkpoint(written, optimizer=True)
    assert store.read_checkpoint(written, optimizer=False).optimizer is None


def test_a_checkpoint_of_an_older_server_loads_without_checksums(store: Store) -> None:
    written, folder = saved(store)
    forget_checksums(folder)
    assert same_tensors(store.read_checkpoint(written, optimizer=True), make_state(1))
    store.check_checkpoint(written, "path")
    (folder / "checkpoint.json").unlink()
    assert same_tensors(store.read_checkpoint(written, optimizer=True), make_state(1))


@pytest.mark.parametrize("content", [b"", b"torn"])
def test_truncated_weights_without_checksums_are_one_sentence(store: Store, content: bytes) -> None:
    written, folder = saved(store)
    forget_checksums(folder)
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=rf"^checkpoint {written.tinker_path} cannot be read \(.*it is in"):
        store.read_checkpoint(written, optimizer=True)


def test_a_damaged_description_is_an_error_too(store: Store) -> None:
    written, folder = saved(store)
    (folder / "checkpoint.json").write_text('{"files": 3}')
    with pytest.raises(InvalidRequestError, match=r"is damaged: checkpoint.json in"):
        store.read_checkpoint(written, optimizer=False)


def test_a_copy_has_the_checksums_of_its_source_and_not_of_what_became_of_it(store: Store) -> None:
    from tests.storage.test_storage_copies import copy

    written, folder = saved(store)
    flip(folder / WEIGHTS)
    with pytest.raises(InvalidRequestError, match="SHA-256"):
        store.read_checkpoint(copy(store, written), optimizer=False)
    assert store.list_checkpoints(RUN) == [written]
