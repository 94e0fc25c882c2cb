"""An adapter that was trained on a base in 4 bits, on a server whose base is dense, over the official SDK."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker_local.types import LoraConfig

from tests.conftest import start_server
from tests.e2e.conftest import SdkDriver
from tests.e2e.test_agreement import TOLERANCE, difference, inputs_of, sampler_logprobs, train, trainer_logprobs

NAME = "tiny/text"


@pytest.mark.more
def test_an_adapter_of_a_packed_base_goes_on_where_its_base_is_and_says_so_elsewhere(
    tiny_models: dict[str, Path], tmp_path: Path, picture: Any
) -> None:
    inputs = inputs_of(NAME, picture)
    model = ("--model", f"{NAME}={tiny_models[NAME]}")
    server = start_server(tmp_path / "data", *model, "--base-precision", "int4")
    sdk = SdkDriver(server.url)
    client = sdk.create(NAME, LoraConfig(rank=8, seed=4))
    train(client, inputs, 2)
    trained = trainer_logprobs(client, inputs)
    path, sampler_path = sdk.save(client, "kept"), sdk.named_sampler(client, "served")[0]
    server.stop()

    server = start_server(tmp_path / "data", *model)
    sdk = SdkDriver(server.url)
    with pytest.raises(
        tinker.TinkerError, match=r"trained on a base in 4 bits \(int4-curved\).* dense base.* --base-precision int4"
    ):
        sdk.resume(path, optimizer=True).result()
    client = sdk.resume(path, optimizer=False).result()
    dense = trainer_logprobs(client, inputs)
    sampled = sampler_logprobs(sdk.service.create_sampling_client(model_path=sampler_path), inputs)
    assert difference(dense, sampled) <= TOLERANCE
    assert difference(dense, trained) > 10 * TOLERANCE  # another model than it was
    later = sdk.save(client, "later")
    listed = {
        each.tinker_path: each for each in sdk.service.create_rest_client().list_user_checkpoints().result().checkpoints
    }
    assert (listed[later].user_metadata or {})["tinker_local.began_on"] == "int4-curved"
    raw = httpx.get(f"{server.url}/api/v1/checkpoints").json()["checkpoints"]
    assert {each["tinker_path"] for each in raw if each.get("base_precision") == "int4-curved"} == {path, sampler_path}
    server.stop()
    notice = f"samples: {sampler_path} was trained on a base in 4 bits (int4-curved), and this server has a dense base"
    assert [line for line in server.lines if notice in line]

    server = start_server(tmp_path / "data", *model, "--base-precision", "int4")
    sdk = SdkDriver(server.url)
    again = sdk.resume(path, optimizer=True).result()
    assert difference(trainer_logprobs(again, inputs), trained) <= TOLERANCE
    server.stop()

    out = tmp_path / "merged"
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "export", path, str(out), "--to", "merged"]
    done = subprocess.run([*command, "--data-dir", tmp_path / "data"], capture_output=True, text=True, check=True)
    assert "warning: the adapter was trained on a base in 4 bits (int4-curved)" in done.stderr
    card = (out / "README.md").read_text()
    assert "- trained on a base in 4 bits (int4-curved, groups of 32)" in card
    assert "on a base in 4 bits (int4-curved), where it was trained, the trainer's are " in card
