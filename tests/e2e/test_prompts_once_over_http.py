"""`--share-prefixes`: a client gets the same numbers, and the same adapter, with and without it."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.numpy import load_file
from tinker_local.client import rl

from tests.conftest import Server
from tests.e2e.test_vision_rl import VISION, Album

pytestmark = pytest.mark.more

TOLERANCE = 0.1 if torch.cuda.is_available() else 1e-5  # bfloat16 there, float32 here


def trained(server: Server, data: Any, name: str) -> dict[str, np.ndarray]:
    """What a client sees of one step on `data`, and the adapter after it."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    client = service.create_lora_training_client(base_model=VISION, rank=4, seed=3)
    seen: dict[str, np.ndarray] = {}
    for _ in range(2):  # A has no gradient before B has changed
        for loss_fn in ("importance_sampling", "ppo"):
            output = client.forward_backward(data, loss_fn).result()
            seen[f"{loss_fn} loss"] = np.array(output.metrics["loss:sum"])
            logprobs = [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]
            assert [len(each) for each in logprobs] == [datum.model_input.length for datum in data]
            seen[f"{loss_fn} logprobs"] = np.concatenate(logprobs)
        # With this epsilon a step is as long as the gradient, and not all of its signs.
        metrics = client.optim_step(tinker.AdamParams(learning_rate=0.01, eps=1.0)).result().metrics
        assert metrics is not None
        assert metrics["grad_norm"] > 1
    client.save_state(name).result()
    (folder,) = (each.parent for each in Path(server.data_dir).rglob("adapter_model.safetensors") if name in str(each))
    return seen | load_file(folder / "adapter_model.safetensors")


def test_a_step_on_groups_of_samples_is_the_same_with_and_without_it(
    real_server: Server, tiny_models: dict[str, Path], serve: Any
) -> None:
    service = tinker.ServiceClient(base_url=real_server.url, api_key="tml-local")
    client = service.create_lora_training_client(base_model=VISION, rank=4, seed=3)
    sampler = client.save_weights_and_get_sampling_client().result()
    groups = [rl.Group(functools.partial(Album, turns), 4, seed=turns) for turns in (1, 2, 3)]
    rollouts = asyncio.run(rl.rollout(groups, sampler, rl.Chat.of(client), tinker.SamplingParams(max_tokens=6)))
    assert not rollouts.failures
    data = [datum for at, each in enumerate(rollouts.trajectories) for datum in each.data((-1.0) ** at)]
    assert len(data) == 12
    options = ("--kv-cache", "0.25", "--max-rank", "32", "--share-prefixes", "off")
    off = serve("--model", f"{VISION}={tiny_models[VISION]}", *options)
    with_it, without = trained(real_server, data, "prompts-once"), trained(off, data, "prompts-each")
    assert with_it.keys() == without.keys()
    for name, wanted in without.items():
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(with_it[name], wanted, rtol=0, atol=TOLERANCE * scale, err_msg=name)
