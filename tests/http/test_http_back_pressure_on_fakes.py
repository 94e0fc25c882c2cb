"""Training queues have an end: clients that reach it are slowed down, and lose neither a request nor their order."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.served_models import Engines
from tinker_local.types import TooManyRequestsError

from tests.http.conftest import Api, StartApi

LOSS = "loss:sum"
ADAM = tinker.AdamParams(learning_rate=0.05)


async def full(api: Api, model: str) -> int:
    """Hold the trainer and queue until a gradient is refused; its seq_id."""
    api.trainer.hold.clear()
    await api.gradient(model, 1)
    await api.until(lambda: api.trainer.entered)
    for seq_id in range(2, 20):
        if (await api.gradient_answer(model, seq_id)).status_code == 429:
            return seq_id
    raise AssertionError("nothing is refused")


async def test_refused_submit_is_told_when_to_come_again_on_fakes(start_api: StartApi) -> None:
    api = await start_api(max_queued_requests_per_session=3)
    model = await api.model()
    seq_id = await full(api, model)
    assert seq_id == 1 + 3 + 1
    for answer in (
        await api.gradient_answer(model, seq_id),
        await api.post("optim_step", {"model_id": model, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.1}}),
        await api.post("save_weights", {"model_id": model, "seq_id": seq_id + 2, "path": "a"}),
    ):
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert 0 < int(answer.headers["retry-after-ms"]) <= 1000
        assert "3 training requests of this session are queued" in answer.json()["detail"]
    assert api.backend.metrics()["fake/bigram"].submits_refused == 4


async def test_refused_submit_can_be_sent_again_and_leaves_no_gap_on_fakes(start_api: StartApi) -> None:
    api = await start_api(max_queued_requests_per_session=3)
    model = await api.model()
    refused = await full(api, model)
    api.trainer.hold.set()
    await api.result(f"{model}:{refused - 1}")
    step = await api.step(model, refused + 1)  # there is room for it now, and what is below is on its way
    await asyncio.sleep(0.2)
    assert step in [operation.request_id for operation in api.backend.operations.unfinished()]
    await api.result(await api.gradient(model, refused))
    assert (await api.result(step))["metrics"]["grad_norm"] > 0


async def test_bytes_are_bounded_too_on_fakes(start_api: StartApi, make_datum: Any) -> None:
    api = await start_api(max_queued_bytes_per_session=2000)
    model = await api.model()
    api.trainer.hold.clear()
    data = [make_datum([5] * 100)]
    await api.gradient(model, 1, data)
    await api.until(lambda: api.trainer.entered)
    await api.gradient(model, 2, data)
    answer = await api.gradient_answer(model, 3, data)
    assert answer.status_code == 429
    assert "2000 bytes" in answer.json()["detail"]
    await api.gradient(model, 3)  # a small one


async def test_one_session_that_fills_its_queue_refuses_nobody_else_on_fakes(start_api: StartApi) -> None:
    api = await start_api(max_queued_requests_per_session=3, max_queued_requests=100)
    busy, other = await api.model(), await api.model()
    await full(api, busy)
    gradient, step = await api.gradient(other, 1), await api.step(other, 2)
    api.trainer.hold.set()
    await api.result(gradient)
    await api.result(step)


async def test_full_server_takes_from_each_model_what_it_needs_to_go_on_on_fakes(start_api: StartApi) -> None:
    """Chunks of one request arrive as 2, 3, 1: a bound between them would lock the model for ever."""
    api = await start_api(max_queued_requests_per_session=3, max_queued_requests=3)
    busy, other = await api.model(), await api.model()
    await full(api, busy)
    requests = [await api.gradient(other, seq_id) for seq_id in (2, 3, 4, 1)]
    assert (await api.gradient_answer(other, 5)).status_code == 429
    api.trainer.hold.set()
    for request in requests:
        await api.result(request)


async def test_group_that_can_never_fit_fails_and_the_model_goes_on_on_fakes(
    start_api: StartApi, make_datum: Any
) -> None:
    api = await start_api(max_queued_bytes=3000)
    model = await api.model()
    large = [make_datum([5] * 100)]
    requests = [await api.gradient(model, seq_id, large) for seq_id in (2, 3, 4, 1)]
    assert "send fewer datums" in await api.failure(requests.pop(2))
    for request in requests:
        await api.result(request)
    assert "was discarded" in await api.failure(await api.step(model, 5))
    assert await api.healthy()


async def test_in_process_the_same_bounds_raise_on_fakes(start_api: StartApi) -> None:
    from tinker_local.types import AdamParams, OptimStepRequest

    api = await start_api(max_queued_requests_per_session=3)
    model = await api.model()
    refused = await full(api, model)
    with pytest.raises(TooManyRequestsError, match="3 training requests") as error:
        await api.backend.training.optim_step(
            OptimStepRequest(model_id=model, seq_id=refused, adam_params=AdamParams(learning_rate=0.1))
        )
    assert error.value.retry_after


# The official SDK -----------------------------------------------------------------------------------------------------


class SlowTrainer(FakeTrainer):
    """A batch waits for `go`, and is kept: which requests, of how many datums, of which model."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.ran: list[tuple[str, int]] = []
        self.go = threading.Event()
        self.go.set()

    def forward_backward(self, work: Any) -> Any:
        assert self.go.wait(60)
        self.ran += [(item.adapter_id, len(item.data)) for item in work]
        return super().forward_backward(work)


class Served:
    """A server with tight bounds, and its trainer."""

    def __init__(self, folder: Path, **options: Any) -> None:
        def load(source: ModelSource, options: BackendOptions) -> Engines:
            model = FakeModel(source.name)
            self.trainer = SlowTrainer(model)
            return Engines(FakeRenderer(model), self.trainer, FakeSampler(model), arch="fake", tolerance=1e-4)

        options = {"batch_tokens": 8, "micro_batch_tokens": 8, **options}  # small calls: the queue drains slowly
        self.backend = InProcessBackend([ModelSource("m", "m")], BackendOptions(data_dir=folder, **options), load=load)
        self.server = LoopbackServer(self.backend)

    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url, api_key=self.server.api_key)

    @property
    def refused(self) -> int:
        return self.backend.metrics()["m"].submits_refused

    def go_once_it_refused(self) -> None:
        end = time.monotonic() + 60
        while not self.refused:
            assert time.monotonic() < end
            time.sleep(0.01)
        self.trainer.go.set()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    started: list[Served] = []

    def start(**options: Any) -> Served:
        started.append(Served(tmp_path / str(len(started)), **options))
        return started[-1]

    yield start
    for one in started:
        one.trainer.go.set()
        one.server.close()


def datum(tokens: list[int]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:])},  # type: ignore[dict-item]
    )


def train(service: tinker.ServiceClient, steps: int, submitted: Callable[[], None] = lambda: None) -> list[float]:
    """The losses of `steps` steps that are all submitted before the first result is waited for."""
    client = service.create_lora_training_client(base_model="m", rank=2, seed=1)
    futures = []
    for at in range(steps):
        gradient = client.forward_backward([datum([5, 9, 20 + at, 31])], "cross_entropy")
        futures.append((gradient, client.optim_step(ADAM)))
    submitted()
    for _, step in futures:
        metrics = step.result(timeout=120).metrics
        assert metrics is not None
        assert metrics["grad_norm"] > 0
    return [gradient.result(timeout=120).metrics[LOSS] for gradient, _ in futures]


def test_sdk_that_runs_into_the_bound_is_slowed_down_and_loses_nothing_on_fakes(served: Any) -> None:
    tight, wide = served(max_queued_requests_per_session=3), served()
    tight.trainer.go.clear()
    with tight.service() as client:
        found = train(client, 12, tight.go_once_it_refused)
    with wide.service() as client:
        wanted = train(client, 12)
    assert (tight.refused > 0, wide.refused) == (True, 0)
    assert found == wanted
    assert tight.trainer.ran == [(f"{tight.trainer.ran[0][0]}", 1)] * 12


def test_sdks_many_chunks_pass_a_bound_of_fewer_on_fakes(served: Any) -> None:
    """Three chunks behind a full queue: 2 and 3 are sent at once and refused, 1 is sent when all of them were taken."""
    tight = served(max_queued_requests_per_session=2)
    with tight.service() as service:
        client = service.create_lora_training_client(base_model="m", rank=2)
        tight.trainer.go.clear()
        first = [client.forward_backward([datum([5, 9])], "cross_entropy") for _ in range(2)]
        step = client.optim_step(ADAM)
        data = [datum([i % 500, (i * 7) % 500 + 1]) for i in range(2500)]
        many, last = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        tight.go_once_it_refused()
        assert len(many.result(timeout=120).loss_fn_outputs) == 2500
        for future in (*first, step, last):
            future.result(timeout=120)
    assert [count for _, count in tight.trainer.ran] == [1, 1, 1024, 1024, 452]


def test_sdk_of_another_session_gets_in_beside_one_that_fills_the_server_on_fakes(served: Any) -> None:
    tight = served(max_queued_requests=6, max_queued_requests_per_session=6)
    with tight.service() as greedy, tight.service() as modest:
        flood = greedy.create_lora_training_client(base_model="m", rank=2)
        tight.trainer.go.clear()
        queued = [flood.forward_backward([datum([5, 9, 20])], "cross_entropy") for _ in range(60)]
        tight.go_once_it_refused()
        client = modest.create_lora_training_client(base_model="m", rank=2)
        for _ in range(3):
            client.forward_backward([datum([5, 9])], "cross_entropy").result(timeout=60)
            client.optim_step(ADAM).result(timeout=60)
        assert sum(ran[0] == flood.model_id for ran in tight.trainer.ran) < 60
        for future in queued:
            future.result(timeout=120)
