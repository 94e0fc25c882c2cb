"""After a training future of `tinker_local.client` was cancelled, calls go on, and the next result says what became."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tinker_local.client as local
from tinker import types
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.models.served_models import Engines
from tinker_local.client.shielded_training import CANCELLED

BASE = "fake/bigram"
ADAM = local.AdamParams(learning_rate=0.05)


class HeldTrainer(FakeTrainer):
    """Gradients wait for `go`."""

    go = threading.Event()

    def forward_backward(self, work: Any) -> Any:
        assert self.go.wait(60)
        return super().forward_backward(work)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local.ServiceClient]:
    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), HeldTrainer(model), FakeSampler(model), arch="fake", tolerance=1e-4)

    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"), failure_pause=0.0)
    with local.ServiceClient(backend=InProcessBackend([ModelSource(BASE, BASE)], options, load=load)) as client:
        yield client


@pytest.fixture(autouse=True)
def go() -> threading.Event:
    HeldTrainer.go.set()
    return HeldTrainer.go


def data(count: int, tokens: tuple[int, ...] = (10, 20)) -> list[types.Datum]:
    inputs = {"target_tokens": types.TensorData(data=[20, 30], dtype="int64", shape=[2])}
    return [types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)] * count


async def cancelled(awaitable: Any, pause: float = 0.0) -> None:
    """A task that awaits it, and is cancelled."""

    async def wait() -> Any:
        return await awaitable

    task = asyncio.create_task(wait())
    await asyncio.sleep(pause)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_calls_go_on_after_a_future_was_cancelled_on_fake_engines(service: local.ServiceClient) -> None:
    """In the SDK about half of these hang, a race: the turn that the cancelled call has not taken is never taken."""
    for _ in range(8):
        client = await service.create_lora_training_client(BASE, rank=4, seed=1)
        await cancelled(client.forward_backward(data(64), "cross_entropy"))
        await cancelled(client.forward_backward(data(64), "cross_entropy"))
        got = await asyncio.wait_for(client.forward_backward(data(64), "cross_entropy"), 60)
        assert got.metrics[f"{CANCELLED}:sum"] == 2.0
        assert (await client.optim_step(ADAM)).metrics[CANCELLED] == 2.0


async def test_the_next_result_says_what_became_of_a_cancelled_gradient_on_fake_engines(
    service: local.ServiceClient, caplog: pytest.LogCaptureFixture, go: threading.Event
) -> None:
    client, twin = [await service.create_lora_training_client(BASE, rank=4, seed=1) for _ in range(2)]
    go.clear()
    await cancelled(client.forward_backward(data(1), "cross_entropy"), 0.05)
    following = client.forward_backward(data(2), "cross_entropy")
    go.set()
    assert (await following).metrics[f"{CANCELLED}:sum"] == 1.0
    assert "a cancelled forward_backward had been sent: its gradient is in the accumulated one" in caplog.text
    assert (await client.forward(data(1), "cross_entropy")).metrics.keys() == {"loss:sum"}
    step = await client.optim_step(ADAM)
    assert step.metrics[CANCELLED] == 1.0
    assert "its gradient is in that of this step" in caplog.text
    await twin.forward_backward(data(3), "cross_entropy")
    assert step.metrics["grad_norm"] == pytest.approx((await twin.optim_step(ADAM)).metrics["grad_norm"])
    caplog.clear()
    assert CANCELLED not in (await client.forward_backward(data(1), "cross_entropy")).metrics
    assert CANCELLED not in (await client.optim_step(ADAM)).metrics
    assert not caplog.text


async def test_a_cancelled_call_that_fails_and_a_cancelled_step_are_told_on_fake_engines(
    service: local.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = await service.create_lora_training_client(BASE, rank=4, seed=1)
    await cancelled(client.forward_backward(data(1, (10, 20, 30)), "cross_entropy"))  # wrong shapes
    with pytest.raises(local.RequestFailedError) as failed:
        await client.optim_step(ADAM)
    assert any("a cancelled forward_backward had been sent: it failed" in note for note in failed.value.__notes__)
    await client.forward_backward(data(1), "cross_entropy")
    await cancelled(client.optim_step(ADAM))
    caplog.clear()
    assert CANCELLED not in (await client.forward_backward(data(1), "cross_entropy")).metrics
    assert "a cancelled optim_step had been sent: the step was taken" in caplog.text
    # A gradient that a cancelled step used is not in the next one.
    await cancelled(client.forward_backward(data(1), "cross_entropy"))
    await cancelled(client.optim_step(ADAM))
    caplog.clear()
    assert CANCELLED not in (await client.forward_backward(data(1), "cross_entropy")).metrics
    assert "a step used it" in caplog.text


async def test_a_future_that_was_given_up_can_be_awaited_again_on_fake_engines(
    service: local.ServiceClient, go: threading.Event
) -> None:
    client = await service.create_lora_training_client(BASE, rank=4, seed=1)
    go.clear()
    future = client.forward_backward(data(1), "cross_entropy")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future, 0.05)
    with pytest.raises(TimeoutError):
        await future.result_async(0.05)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(future.result, 0.05)
    go.set()
    assert (await future).metrics["loss:sum"] > 0
    assert CANCELLED not in (await client.optim_step(ADAM)).metrics


async def test_every_call_of_a_training_client_is_shielded_on_fake_engines(service: local.ServiceClient) -> None:
    client = await service.create_lora_training_client(BASE, rank=4, seed=1)
    assert isinstance(client, local.TrainingClient)
    state = (await client.save_state("a")).path

    def loss(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {}

    calls: list[Callable[[], Any]] = [
        lambda: client.forward(data(1), "cross_entropy"),
        lambda: client.forward_backward_custom(data(1), loss),
        lambda: client.optim_step(ADAM),
        lambda: client.save_state("b"),
        lambda: client.save_weights_for_sampler("c"),
        lambda: client.save_weights_external("d"),
        lambda: client.save_weights_and_get_sampling_client(),
    ]
    for call in calls:
        await cancelled(call())
        await asyncio.wait_for(client.forward_backward(data(1), "cross_entropy"), 60)
    for create in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        again = await create(state)
        with pytest.warns(FutureWarning, match="load_state"):
            future = again.load_state(state)
        await cancelled(future)
        await asyncio.wait_for(again.forward_backward(data(1), "cross_entropy"), 60)
