"""What could not be loaded is not saved, and replaces nothing; what an older server saved so is found and listed."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tinker_local.backend.adapters import adapter_files
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.storage import Store, store
from tinker_local.types import InvalidRequestError

from tests.storage.store_states import RUN, make_record, make_state, same_tensors

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def broken(seed: int, moment: str | None = None, value: float = np.nan) -> AdapterState:
    """A state with one value that is not finite: of the weights, or of `moment`."""
    state = make_state(seed)
    tensors, optimizer = dict(state.tensors), dict(state.optimizer or {})
    (tensors if moment is None else optimizer)[A if moment is None else f"{moment}.{A}"][2, 3] = value
    return replace(state, tensors=tensors, optimizer=optimizer)


CASES: dict[str, Callable[[], AdapterState]] = {
    "a weight": lambda: broken(1),
    "an infinite weight": lambda: broken(1, value=-np.inf),
    "a moment": lambda: broken(1, "exp_avg", np.inf),
    "a second moment": lambda: broken(1, "exp_avg_sq", np.inf),
}


@pytest.mark.parametrize("case", CASES)
def test_a_save_of_what_could_not_be_loaded_is_refused_and_replaces_nothing(case: str, tmp_path: Path) -> None:
    opened = Store(tmp_path)
    good = opened.write_checkpoint(make_record("latest"), make_state(1), overwrite=False)
    folders = sorted(tmp_path.glob("checkpoints/*/*/*"))
    with pytest.raises(InvalidRequestError, match=r"could not be loaded: .*safetensors: .*lora_A.weight: 1 of 256"):
        opened.write_checkpoint(make_record("latest"), CASES[case](), overwrite=True)
    assert sorted(tmp_path.glob("checkpoints/*/*/*")) == folders
    assert opened.list_checkpoints(RUN) == [good]
    assert same_tensors(opened.read_checkpoint(good, optimizer=True), make_state(1))
    opened.close()


def test_a_sampler_version_that_is_not_finite_is_refused_in_any_dtype(tmp_path: Path) -> None:
    state = broken(1)
    as_bits = {name: np.full(array.shape, 0x3F80, np.uint16) for name, array in state.tensors.items()}
    as_bits[A][1, 1] = 0x7F80  # infinite
    for each in (state, replace(state, tensors=as_bits, optimizer=None)):
        with pytest.raises(InvalidRequestError, match=r"lora_A\.weight: 1 of 256 values are not finite"):
            adapter_files.write_adapter(tmp_path, each)


def of_an_older_server(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that it did not examine: `fine`, and one for each of `CASES`."""
    with monkeypatch.context() as old:
        old.setattr(adapter_files, "_fault", lambda files: "")
        opened = Store(data_dir)
        opened.write_checkpoint(make_record("fine"), make_state(1), overwrite=False)
        for name, make in CASES.items():
            opened.write_checkpoint(make_record(name.replace(" ", "-")), make(), overwrite=False)
        opened.close()
    with sqlite3.connect(data_dir / "metadata.sqlite3") as connection:
        connection.execute("ALTER TABLE checkpoints DROP COLUMN unusable")
        connection.execute("UPDATE schema SET version = 3")
    connection.close()


def test_saves_of_an_older_server_that_cannot_be_loaded_are_listed_as_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_an_older_server(tmp_path, monkeypatch)
    opened = Store(tmp_path)
    found = {record.name: record for record in opened.list_checkpoints(RUN)}
    assert found["fine"].unusable == ""
    for name in CASES:
        record = found[name.replace(" ", "-")]
        file = "adapter_model" if "weight" in name else "optimizer"
        assert (record.unusable or "").startswith(f"{file}.safetensors: ")
        assert (record.unusable or "").endswith(f"{A}: 1 of 256 values are not finite")
        assert f"checkpoint {record.tinker_path} cannot be loaded" in caplog.text
        with pytest.raises(InvalidRequestError, match=f"checkpoint {record.tinker_path} cannot be loaded: {file}"):
            opened.read_checkpoint(record, optimizer=True)
        with pytest.raises(InvalidRequestError, match=f"model_path: {record.tinker_path} cannot be used: {file}"):
            opened.check_checkpoint(record, "model_path")
    with pytest.raises(InvalidRequestError, match="load its weights alone"):
        opened.read_checkpoint(found["a-moment"], optimizer=True)
    assert opened.read_checkpoint(found["a-moment"], optimizer=False).optimizer is None
    assert {record.name for record in opened.last_checkpoints([RUN])[RUN].values()} == {"fine"}
    assert same_tensors(opened.read_checkpoint(found["fine"], optimizer=True), make_state(1))
    opened.close()


def test_what_a_start_has_no_time_to_examine_is_examined_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_an_older_server(tmp_path, monkeypatch)
    monkeypatch.setattr(store, "EXAMINE_SECONDS", 0.0)
    opened = Store(tmp_path)
    assert {record.unusable for record in opened.list_checkpoints(RUN)} == {None}
    with pytest.raises(InvalidRequestError, match="cannot be used"):  # examined when it is needed
        opened.refuse_unusable(make_record("a-weight"), "path")
    left = 0
    while opened.examine_next():
        left += 1
    assert left == len(CASES)
    assert [record.name for record in opened.list_checkpoints(RUN) if record.unusable == ""] == ["fine"]
    opened.close()
    opened = Store(tmp_path)
    assert not opened.examine_next()
    opened.close()


def test_a_checkpoint_without_its_folder_is_not_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_an_older_server(tmp_path, monkeypatch)
    (folder,) = tmp_path.glob("checkpoints/*/*/a-weight@*")
    folder.rename(aside := tmp_path / "aside")
    opened = Store(tmp_path)
    (record,) = [record for record in opened.list_checkpoints(RUN) if record.unusable is None]
    assert record.name == "a-weight"
    assert record.missing
    opened.close()
    aside.rename(folder)
    opened = Store(tmp_path)
    assert all(bool(record.unusable) == (record.name != "fine") for record in opened.list_checkpoints(RUN))
    opened.close()
