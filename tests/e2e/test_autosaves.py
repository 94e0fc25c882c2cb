"""What the server saves by itself, on a real model: an official client goes on from it to the same bits."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker_local.types import Datum, ModelInput
from tinker_local.types.sdk import to_sdk

TEXT = "tiny/text"
DATA = [
    to_sdk(
        Datum(model_input=ModelInput.from_ints([5, 9, 20, 31, 7]), loss_fn_inputs={"target_tokens": [9, 20, 31, 7, 8]})
    )
]
CONFIG = {"base_model": TEXT, "rank": 4, "seed": 7}
EVERY = 8.0
"""Seconds from one autosave to the next."""


def train(client: Any, steps: int) -> list[float]:
    """The losses of so many steps."""
    losses = []
    for _ in range(steps):
        losses.append(client.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    return losses


def autosaved(url: str, run: str) -> int:
    """The optimizer steps in the autosave of `run`; 0 if there is none."""
    listed = tinker.RestClient(base_url=url).list_checkpoints(run).result().checkpoints
    found = [dict(each.user_metadata or {}) for each in listed if each.checkpoint_id == "weights/autosave"]
    return int(found[0]["optimizer_steps"]) if found else 0


def saved_tensors(data_dir: Path, client: Any) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint that is saved now, those of the optimizer too."""
    run = client.save_state("end").result().path.split("/")[2]
    (folder,) = data_dir.glob(f"checkpoints/{run.replace(':', '*')}/weights/end@*")
    return {
        f"{file.name} {name}": tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.rotated(2)
@pytest.mark.more
def test_a_real_run_goes_on_to_the_same_bits_from_what_the_server_saved_by_itself(
    serve: Any, tiny_models: dict[str, Path]
) -> None:
    model = ["--model", f"{TEXT}={tiny_models[TEXT]}", "--kv-cache", "0.25", "--max-rank", "8"]
    model += ["--max-context-length", "256", "--trainer", "process"]
    server = serve(*model, "--autosave", str(EVERY / 60))
    service = tinker.ServiceClient(base_url=server.url)
    client = service.create_lora_training_client(**CONFIG)
    run = client.get_info().model_id
    path = f"tinker://{run}/weights/autosave"

    losses = list[float]()
    while not autosaved(server.url, run):  # training goes on meanwhile
        losses += train(client, 1)
        time.sleep(0.1)
    first, resumed = 0, None
    while first != autosaved(server.url, run):
        first = autosaved(server.url, run)
        resumed = service.create_training_client_from_state_with_optimizer(path)
    middle = train(resumed, 3)
    while autosaved(server.url, run) == first:  # the next comes `EVERY` seconds after this one
        losses += train(client, 1)
        time.sleep(0.1)
    losses += train(client, 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(280) == 0
    steps = len(losses)
    assert f"saved {path} after {steps} optimizer steps" in server.lines

    again = serve(*model, "--port", server.url.rpartition(":")[2])
    with pytest.raises(tinker.RequestFailedError) as lost:
        client.forward_backward(DATA, "cross_entropy").result()
    named = re.search(r"tinker://\S+/weights/\w+", str(lost.value))
    assert named is not None
    assert named[0] == path
    service = tinker.ServiceClient(base_url=again.url)
    uninterrupted = service.create_lora_training_client(**CONFIG)
    wanted = train(uninterrupted, steps + 3)
    assert losses == wanted[:steps]
    assert middle == wanted[first : first + 3]
    continued = service.create_training_client_from_state_with_optimizer(path)
    assert train(continued, 3) == wanted[steps:]
    found, expected = saved_tensors(again.data_dir, continued), saved_tensors(again.data_dir, uninterrupted)
    assert found.keys() == expected.keys()
    assert {name.partition(" ")[0] for name in found} >= {"adapter_model.safetensors", "optimizer.safetensors"}
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
