"""Trainer and sampler on one device: the sampler sleeps when the trainer needs its memory, and wakes when somebody
samples."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.fakes import FakeMemory
from tinker_local.backend.scheduling.memory_sharing import MemorySharing
from tinker_local.types import Datum, EncodedTextChunk, InternalError, ModelInput

from tests.http.conftest import Api, StartApi

SIZE, SAMPLERS = 100, 60
FITS, NEEDS_ALL, TOO_LONG = 30, 50, 120
"""Positions of a datum: the trainer has 40 beside the sampler, and with 50 in its cache the sampler cannot wake."""

Start = Callable[..., Awaitable[Any]]


@pytest.fixture
async def api(start_api: Start) -> Any:
    return await start_api(memory=FakeMemory(SIZE, SAMPLERS))


def datum(positions: int) -> Datum:
    tokens = [5 + 7 * at % 50 for at in range(positions + 1)]
    return Datum(
        model_input=ModelInput(chunks=(EncodedTextChunk(tokens=tokens[:-1]),)),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


async def train(api: Api, model: str, seq_id: int, *positions: int) -> Any:
    return await api.result(await api.gradient(model, seq_id, [datum(n) for n in positions]))


async def grad_norm(api: Api, model: str, seq_id: int) -> float:
    return float((await api.result(await api.step(model, seq_id)))["metrics"]["grad_norm"])


def sleeps(api: Api) -> tuple[int, bool]:
    """How often the sampler was put to sleep, and whether it sleeps, as /metrics has it."""
    (metrics,) = api.backend.metrics().values()
    assert metrics.sampler_asleep == api.sampler.asleep
    return metrics.sampler_sleeps, metrics.sampler_asleep


def gradients(api: Api) -> list[list[str]]:
    """Adapters of each call of the trainer."""
    return [[item[0] for item in seen] for name, seen in api.trainer.calls if name == "forward_backward"]


async def samples(api: Api, sampler: str, seq_ids: Sequence[int]) -> list[str]:
    return [await api.sample(sampler, seq_id) for seq_id in seq_ids]


async def test_training_that_fits_never_puts_the_sampler_to_sleep_and_never_wakes_it_on_fakes(api: Api) -> None:
    model = await api.model()
    for seq_id in range(1, 9, 2):
        await train(api, model, seq_id, FITS, FITS)
        await grad_norm(api, model, seq_id + 1)
    assert sleeps(api) == (0, False)
    await train(api, model, 9, NEEDS_ALL)
    for seq_id in range(10, 20, 2):
        await grad_norm(api, model, seq_id)
        await train(api, model, seq_id + 1, FITS)
    await api.save(model, 20, "state")
    assert sleeps(api) == (1, True)
    assert api.sampler.wakes == 0


async def test_a_request_that_does_not_fit_gets_the_samplers_memory_on_fakes(
    api: Api, start_api: StartApi, tmp_path: Path
) -> None:
    roomy = await start_api(data_dir=tmp_path / "roomy")
    seen = []
    for each in (api, roomy):
        model = await each.model()
        first = await train(each, model, 1, NEEDS_ALL, FITS)
        second = await train(each, model, 2, FITS, NEEDS_ALL)
        losses = [output.metrics["loss:sum"] for output in (first, second)]
        seen.append([*losses, await grad_norm(each, model, 3)])
    assert seen[0] == pytest.approx(seen[1])
    assert sleeps(api) == (1, True)
    assert sleeps(roomy) == (0, False)


async def test_neighbours_of_a_request_that_does_not_fit_run_once_on_fakes(
    api: Api, start_api: StartApi, tmp_path: Path
) -> None:
    roomy = await start_api(data_dir=tmp_path / "roomy")
    norms = []
    for each in (api, roomy):
        session = await each.session()
        models = [await each.model(session, number) for number in range(3)]
        each.trainer.hold.clear()
        waiting = [await each.gradient(models[0], 1, [datum(FITS)])]

        def entered(trainer: Any = each.trainer) -> bool:
            return bool(trainer.entered)

        await each.until(entered)
        waiting += [await each.gradient(model, 1 + (model == models[0]), [datum(FITS)]) for model in models[:2]]
        waiting += [await each.gradient(models[2], 1, [datum(NEEDS_ALL)])]
        await each.all_prepared()
        each.trainer.hold.set()
        for request_id in waiting:
            await each.result(request_id)
        norms.append([await grad_norm(each, model, 2 + (model == models[0])) for model in models])
        if each is api:
            assert sorted(gradients(api)[1]) == sorted(models), "they did not share a call"
            assert gradients(api)[2:] == [[models[2]]]
    assert norms[0] == pytest.approx(norms[1])


async def test_the_next_sample_wakes_the_sampler_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    before = (await api.result(await api.sample(sampler, 0))).sequences[0]
    await train(api, model, 1, NEEDS_ALL)
    assert sleeps(api) == (1, True)
    after = (await api.result(await api.sample(sampler, 1))).sequences[0]
    np.testing.assert_array_equal(after.tokens, before.tokens)
    np.testing.assert_array_equal(after.logprobs, before.logprobs)
    assert sleeps(api) == (1, False)
    await train(api, model, 2, NEEDS_ALL)
    assert sleeps(api) == (2, True)


async def test_many_samples_at_once_wake_the_sampler_once_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    await train(api, model, 1, NEEDS_ALL)
    for request_id in await samples(api, sampler, range(20)):
        await api.result(request_id)
    assert api.sampler.wakes == 1


async def test_a_save_for_sampling_wakes_the_sampler_and_is_sampled_from_on_fakes(api: Api) -> None:
    model = await api.model()
    await train(api, model, 1, NEEDS_ALL)
    await grad_norm(api, model, 2)
    sampler = await api.nameless(model, 3, 0)
    assert sleeps(api) == (1, False)
    before = await api.score(sampler, 0)
    await train(api, model, 4, NEEDS_ALL)
    assert sleeps(api) == (2, True)
    assert await api.score(sampler, 1) == before


async def test_the_trainer_waits_for_samples_in_flight_and_later_ones_for_it_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    first = await api.sample(sampler, 0)
    await api.until(lambda: bool(api.sampler.running))
    gradient = await api.gradient(model, 1, [datum(NEEDS_ALL)])
    await api.until(lambda: len(gradients(api)) == 1)
    later = await samples(api, sampler, (1, 2))
    await asyncio.sleep(0.1)
    assert (api.sampler.begun, len(gradients(api)), sleeps(api)) == (1, 1, (0, False))
    api.trainer.hold.clear()
    api.sampler.hold.set()
    await api.result(first)
    await api.until(lambda: api.trainer.entered)
    await asyncio.sleep(0.05)
    assert (api.sampler.begun, sleeps(api)) == (1, (1, True)), "awake before the trainer is through"
    api.trainer.hold.set()
    await api.result(gradient)
    for request_id in later:
        await api.result(request_id)
    assert (sleeps(api), api.sampler.wakes) == ((1, False), 1)


async def test_an_endless_stream_of_samples_does_not_keep_the_trainer_from_its_memory_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    trained = asyncio.Event()

    async def stream(first: int) -> int:
        seq_id = first
        while not trained.is_set():
            await api.result(await api.sample(sampler, seq_id))
            seq_id += 1
        return seq_id - first

    streams = [asyncio.create_task(stream(1000 * number)) for number in range(4)]
    await api.until(lambda: api.sampler.begun > 8)
    for seq_id in range(1, 6):
        await train(api, model, seq_id, NEEDS_ALL)
    trained.set()
    assert min(await asyncio.gather(*streams)) > 0
    assert 1 <= sleeps(api)[0] <= 5


async def test_a_sampler_that_cannot_sleep_leaves_the_error_as_it_is_on_fakes(start_api: StartApi) -> None:
    api = await start_api(memory=FakeMemory(SIZE, SAMPLERS), sampler_sleeps=False)
    model = await api.model()
    failure = await api.failure(await api.gradient(model, 1, [datum(NEEDS_ALL)]))
    left = "no gradient is left since the last optimizer step"
    assert failure == f"server: data[0]: {NEEDS_ALL} positions do not fit in the trainer's memory; {left}"
    assert len(gradients(api)) == 1
    assert sleeps(api) == (0, False)


async def test_with_several_base_models_no_sampler_sleeps_on_fakes(start_api: StartApi) -> None:
    memory = FakeMemory(SIZE, SAMPLERS)
    api = await start_api(memory=memory, models=("fake/bigram", "fake/other"))
    model = await api.model()
    assert "do not fit" in await api.failure(await api.gradient(model, 1, [datum(NEEDS_ALL)]))
    assert not memory.asleep


async def test_what_fits_nowhere_fails_after_one_more_try_on_fakes(api: Api) -> None:
    model = await api.model()
    left = "no gradient is left since the last optimizer step"
    expected = f"server: data[1]: {TOO_LONG} positions do not fit in the trainer's memory; {left}"
    assert await api.failure(await api.gradient(model, 1, [datum(FITS), datum(TOO_LONG)])) == expected
    assert len(gradients(api)) == 2
    assert await api.failure(await api.gradient(model, 2, [datum(FITS), datum(TOO_LONG)])) == expected
    assert len(gradients(api)) == 3, "there was nothing more to be had"
    assert sleeps(api) == (1, True)
    assert await api.healthy()


async def test_a_sleep_that_fails_fails_the_requests_that_needed_it_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(2)]

    async def no_host_memory() -> None:
        raise InternalError("no host memory")

    monkeypatch.setattr(api.sampler, "sleep", no_host_memory)
    api.trainer.hold.clear()
    waiting = [await api.gradient(models[0], 1, [datum(FITS)])]
    await api.until(lambda: api.trainer.entered)
    short = [await api.gradient(models[1], 1, [datum(NEEDS_ALL)])]
    waiting.append(await api.gradient(models[0], 2, [datum(FITS)]))
    await api.all_prepared()
    api.trainer.hold.set()
    failure = await api.failure(short[0])
    assert "do not fit in the trainer's memory, and the sampler could not make room: no host memory" in failure
    for request_id in waiting:
        await api.result(request_id)
    assert await api.healthy()
    assert sleeps(api) == (0, False)
    monkeypatch.undo()
    await train(api, models[0], 3, NEEDS_ALL)


async def test_a_waking_that_fails_fails_the_samples_that_waited_and_the_next_tries_again_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    await train(api, model, 1, NEEDS_ALL)
    tries: list[Any] = []

    async def no_memory() -> None:
        tries.append(None)
        raise InternalError("no memory")

    woken, waiters = MemorySharing._woken, []

    async def counted(self: MemorySharing) -> None:
        waiters.append(self)
        await woken(self)

    monkeypatch.setattr(api.sampler, "wake", no_memory)
    monkeypatch.setattr(MemorySharing, "_woken", counted)
    api.trainer.hold.clear()
    gradient = await api.gradient(model, 2, [datum(FITS)])
    await api.until(lambda: api.trainer.entered)
    waiting = await samples(api, sampler, range(3))
    await api.until(lambda: len(waiters) == 3)
    api.trainer.hold.set()
    await api.result(gradient)
    for request_id in waiting:
        assert await api.failure(request_id) == "server: the sampler could not be woken: no memory"
    assert len(tries) == 1
    assert sleeps(api) == (1, True)
    monkeypatch.undo()
    await api.result(await api.sample(sampler, 3))
    assert sleeps(api) == (1, False)


async def test_the_sampler_wakes_beside_a_trainer_that_has_died_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    await train(api, model, 1, NEEDS_ALL)

    def gone() -> None:
        assert api.trainer._memory is not None
        api.trainer._memory.cached = 0
        raise InternalError("the trainer's process was ended")

    monkeypatch.setattr(api.trainer, "release_memory", gone)
    await api.result(await api.sample(sampler, 0))


async def test_a_cancelled_sample_lets_the_trainer_have_its_memory_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    flying = await api.sample(sampler, 0)
    await api.until(lambda: bool(api.sampler.running))
    gradient = await api.gradient(model, 1, [datum(NEEDS_ALL)])
    await api.until(lambda: len(gradients(api)) == 1)
    held_back = await api.sample(sampler, 1)
    for request_id in (held_back, flying):
        api.backend.operations.cancel(request_id)
    await api.result(gradient)
    assert (sleeps(api), api.sampler.begun) == ((1, True), 1)


async def test_a_sample_cancelled_while_the_sampler_wakes_holds_up_nobody_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    await train(api, model, 1, NEEDS_ALL)
    api.trainer.hold.clear()
    gradient = await api.gradient(model, 2, [datum(FITS)])
    await api.until(lambda: api.trainer.entered)
    first, second = await samples(api, sampler, (0, 1))
    await asyncio.sleep(0.05)
    api.backend.operations.cancel(first)
    api.trainer.hold.set()
    await api.result(gradient)
    await api.result(second)
    assert "cancelled" in await api.failure(first)
    assert api.sampler.wakes == 1


async def test_the_end_of_a_session_wakes_nobody_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.nameless(model, 1, 0)
    await train(api, model, 2, NEEDS_ALL)
    assert (await api.post(f"sessions/{session}/finish", {})).status_code == 204
    assert not api.sampler.versions
    assert (sleeps(api), api.sampler.wakes) == ((1, True), 0)


@pytest.mark.parametrize("moment", ["samples end", "sleep", "train again", "wake", "asleep"])
async def test_closing_at_any_moment_ends_everything_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch, moment: Any
) -> None:
    model = await api.model()
    sampler = await api.base_sampler()
    began, go_on = asyncio.Event(), asyncio.Event()

    def slow(method: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            began.set()
            await go_on.wait()
            await method()

        return run

    if moment in ("sleep", "wake"):
        monkeypatch.setattr(api.sampler, moment, slow(getattr(api.sampler, moment)))
    if moment == "samples end":
        api.sampler.hold.clear()
        await api.sample(sampler, 0)
        await api.until(lambda: bool(api.sampler.running))
    gradient = await api.gradient(model, 1, [datum(NEEDS_ALL)])
    if moment in ("wake", "asleep"):
        await api.result(gradient)
    if moment == "wake":
        await samples(api, sampler, (1, 2))
    if moment == "train again":
        await api.until(lambda: bool(gradients(api)))
        api.trainer.hold.clear()
    if moment in ("sleep", "wake"):
        await began.wait()
    elif moment == "samples end":
        await api.until(lambda: bool(gradients(api)))
    asyncio.get_running_loop().call_later(0.2, go_on.set)
    asyncio.get_running_loop().call_later(0.2, api.trainer.hold.set)
    async with asyncio.timeout(60):
        await api.backend.close()
