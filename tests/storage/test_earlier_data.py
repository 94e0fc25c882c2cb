"""What earlier commits left behind goes on here: data folders, backups, exported adapters (`earlier_data.py`)."""

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker_local.backend.adapters.peft_adapters import read_peft_adapter
from tinker_local.backend.families import family_of

from tests.conftest import Server
from tests.storage.earlier_data import CLI, EARLIER, MODEL, greedy, step

COMMITS = sorted(path.name.partition(".")[0] for path in EARLIER.glob("*.tar.xz"))


def test_there_are_data_of_earlier_commits() -> None:
    assert COMMITS


def unpacked(commit: str, folder: Path) -> Any:
    """What is expected; the archive's folders are in `folder` then."""
    with tarfile.open(EARLIER / f"{commit}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return json.loads((folder / "expected.json").read_text())


@pytest.mark.more
@pytest.mark.parametrize("part", ["data", "backup"])
@pytest.mark.parametrize("commit", COMMITS)
def test_runs_and_samplers_of_an_earlier_data_folder_go_on_on_fakes(
    serve: Callable[..., Server], tmp_path: Path, commit: str, part: str
) -> None:
    expected = unpacked(commit, tmp_path)
    data = tmp_path / "data"
    if part == "backup":
        data = tmp_path / "restored"
        subprocess.run([*CLI, "restore", "--from", tmp_path / "backup", "--data-dir", data], check=True)
    server = serve("--fake", "--model", MODEL, data_dir=data)
    service = tinker.ServiceClient(base_url=server.url)
    found = greedy(service.create_sampling_client(model_path=expected["sampler"]))
    assert found["tokens"] == expected["sample"]["tokens"]
    assert found["logprobs"] == pytest.approx(expected["sample"]["logprobs"], abs=1e-6)
    client = service.create_training_client_from_state_with_optimizer(expected["state"])
    assert [step(client, first) for first in (40, 50)] == pytest.approx(expected["losses after"], abs=1e-5)
    earlier = expected["state"].removeprefix("tinker://").partition("/")[0]
    runs = service.create_rest_client().list_training_runs(limit=9).result().training_runs
    [run] = [each for each in runs if each.training_run_id == earlier]
    assert run.user_metadata == {"of": "a fixture"}


@pytest.mark.parametrize("commit", COMMITS)
def test_an_adapter_that_an_earlier_commit_exported_comes_back_bit_for_bit(tmp_path: Path, commit: str) -> None:
    import transformers
    from tinker_local.backend.tiny_models import make_tiny_text_model
    from tinker_local.backend.training.run.worker import HFTrainer
    from tinker_local.backend.training.trainer_config import TrainerConfig

    unpacked(commit, tmp_path)
    model = make_tiny_text_model(tmp_path / "model", family="qwen3")
    family = family_of(transformers.AutoConfig.from_pretrained(model).model_type, "")
    trainer = HFTrainer(TrainerConfig(str(model), name="tiny", dtype="float32", device="cpu"))
    adapter = read_peft_adapter(tmp_path / "export", family)
    trainer.create_adapter("a", adapter.config(family))
    state, notes = adapter.state(trainer.capture("a", optimizer=False), family)
    trainer.close()
    exported = load_file(tmp_path / "export" / "adapter_model.safetensors")
    assert notes == ()
    assert state.tensors.keys() == exported.keys()
    assert all(np.array_equal(state.tensors[name], tensor) for name, tensor in exported.items())
    assert any(np.any(tensor) for name, tensor in exported.items() if ".lora_B." in name)
