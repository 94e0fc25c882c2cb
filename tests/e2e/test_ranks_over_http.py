"""A server whose trainer is two ranks: through HTTP it computes what one rank does, and goes on after one is killed."""

import os
import signal
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

from tests.conftest import TEXT, Server, start_server
from tests.e2e.conftest import SdkDriver
from tests.http.supervised_apps import children

IDS = [[5, 9, 20, 31, 7, 44], [8, 30, 31], [60, 61, 7, 5]]
DATA = [Datum(model_input=ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]}) for ids in IDS]
ADAM = AdamParams(learning_rate=0.01)
LORA = LoraConfig(rank=4, seed=7)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, stop=())


@pytest.fixture(params=["--shard never", "--shard 2", "--context-parallel 2"])
def server(tiny_models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    options = [
        "--train-gpus",
        "0,1",
        *request.param.split(),
        "--max-rank",
        "8",
        "--kv-cache",
        "0.25",
        "--max-context-length",
        "256",
    ]
    server = start_server(tmp_path / "data", "--model", f"{TEXT}={tiny_models[TEXT]}", *options)
    yield server
    server.stop()


def ranks_of(server: Server) -> list[int]:
    """The processes of the trainer, in the order of their GPUs."""
    found = {}
    for pid in children(server.process.pid):
        for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if each.startswith(b"CUDA_VISIBLE_DEVICES="):
                found[each] = pid
    return [pid for _, pid in sorted(found.items())]


def healthy(server: Server) -> bool:
    try:
        return server.healthy()
    except urllib.error.HTTPError:
        return False


def of_one_rank(folder: Path, steps: int) -> list[float]:
    trainer = HFTrainer(TrainerConfig(str(folder), name="one", device="cpu", max_rank=8))
    trainer.create_adapter("a", LORA)
    data = [
        TrainDatum(
            RenderedInput(np.array(ids[:-1], np.int32)),
            np.array(ids[1:]),
            {"weights": np.ones(len(ids) - 1, np.float32)},
        )
        for ids in IDS
    ]
    losses = []
    for _ in range(steps):
        (result,) = trainer.forward_backward([TrainWork("a", data, "cross_entropy")])
        assert isinstance(result, TrainResult)
        losses.append(result.metrics["loss:sum"])
        trainer.optim_step("a", ADAM)
    return losses


def trained(driver: SdkDriver, model: object, steps: int) -> list[float]:
    """The losses of so many steps."""
    losses = []
    for _ in range(steps):
        losses.append(driver.gradient(model, DATA, "cross_entropy")[1])
        driver.step(model, ADAM)
    return losses


@pytest.mark.more  # starts a server with vLLM
@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU has no room for two ranks' collectives")
def test_two_ranks_train_over_http_as_one_and_go_on_after_one_is_killed(
    server: Server, tiny_models: dict[str, Path]
) -> None:
    driver = SdkDriver(server.url)
    model = driver.create(TEXT, LORA)

    first = trained(driver, model, 3)
    path = driver.save(model, "three-steps")
    before = ranks_of(server)
    assert len(before) == 2
    os.kill(before[1], signal.SIGKILL)
    while healthy(server):  # calls before that fail
        time.sleep(0.01)
    after = trained(driver, model, 2)
    assert len(ranks_of(server)) == 2
    assert not {*before} & {*ranks_of(server)}
    assert after == trained(driver, driver.resume(path, optimizer=True), 2)
    np.testing.assert_allclose([*first, *after], of_one_rank(tiny_models[TEXT], 5), rtol=1e-5)
    assert driver.sample(driver.sampler(model), ModelInput.from_ints([5, 9]), 1, GREEDY)[0][0]
