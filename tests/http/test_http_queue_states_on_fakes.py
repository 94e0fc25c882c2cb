"""What a client learns of an operation that is not done: that it is its turn, or who is before it."""

import threading

import pytest
from tinker_local.backend.scheduling.operations import ACTIVE, training_state
from tinker_local.backend.scheduling.sample_turns import sample_states

from tests.http.conftest import Api


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_local.backend.http.future_routes.LONG_POLL_SECONDS", 0.05)
    monkeypatch.setattr("tinker_local.backend.scheduling.sample_turns.COUNT_SECONDS", 0.0)


async def state(api: Api, request: str) -> tuple[str, str | None]:
    answer = await api.poll(request)
    assert answer.status_code == 408
    found = answer.json()
    assert found["type"] == "try_again"
    assert found["request_id"] == request
    return found["queue_state"], found.get("queue_state_reason")


async def test_training_that_waits_for_others_is_told_for_whom_on_fakes(api: Api) -> None:
    mine, first, second = [await api.model() for _ in range(3)]
    api.trainer.hold.clear()
    running = await api.gradient(first, 1)
    await api.until(lambda: api.trainer.entered)
    queued = await api.gradient(second, 1)
    later = await api.step(first, 2)
    waiting = [await api.gradient(mine, 1), await api.step(mine, 2)]
    assert await state(api, running) == ("active", None)
    assert await state(api, later) == ("active", None)  # its own session's turn
    for request in waiting:  # one runs, a step of its session and one of another session are queued
        expected = "the trainer is busy with 3 requests of 2 other sessions"
        assert await state(api, request) == ("paused_capacity", expected)
    assert (await state(api, queued))[1] == "the trainer is busy with 4 requests of 2 other sessions"
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram", "lora_config": {"rank": 2}}
    creation = await api.submit("create_model", body)
    assert (await state(api, creation))[0] == "paused_capacity"
    api.trainer.hold.set()
    for request in (running, queued, later, *waiting, creation):
        await api.result(request)


async def test_save_that_is_being_written_waits_for_nobody_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = await api.model(), await api.model()
    disk, write = threading.Event(), api.backend.store.write_checkpoint
    monkeypatch.setattr(api.backend.store, "write_checkpoint", lambda *a, **k: disk.wait(30) and write(*a, **k))
    save = await api.submit("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    run = api.backend.runs.live(model)
    assert run is not None
    await api.until(lambda: bool(run.captures))
    api.trainer.hold.clear()
    gradient = await api.gradient(other, 1)
    await api.until(lambda: api.trainer.entered)
    assert await state(api, save) == ("active", None)
    disk.set()
    assert (await api.result(save))["path"]
    api.trainer.hold.set()
    await api.result(gradient)


async def test_chunk_that_waits_for_its_own_group_is_active_on_fakes(api: Api) -> None:
    assert await state(api, await api.gradient(await api.model(), 2)) == ("active", None)


async def test_sample_that_finds_no_place_is_told_whose_are_before_it_on_fakes(api: Api) -> None:
    first, second, mine = [await api.base_sampler() for _ in range(3)]
    api.sampler.hold.clear()
    running = [await api.sample(first, 0), await api.sample(second, 0)]  # the fake has two threads
    await api.until(lambda: api.sampler.running == 2 and api.sampler.sequences_waiting == 0)
    waiting = [await api.sample(mine, 0, num_samples=3)]
    await api.until(lambda: api.sampler.sequences_waiting == 3)
    waiting.append(await api.sample(first, 1))
    await api.until(lambda: api.sampler.sequences_waiting == 4)
    for request in running:
        assert await state(api, request) == ("active", None)
    two = "the sampler is full with 2 requests of 2 other sessions"
    assert await state(api, waiting[0]) == ("paused_capacity", two)
    assert await state(api, waiting[1]) == ("paused_capacity", two)  # `second` and `mine`; its own does not count
    await api.post("cancel_future", {"request_id": running[1]})
    await api.until(lambda: api.sampler.sequences_waiting == 1)
    assert await state(api, waiting[0]) == ("active", None)
    api.sampler.hold.set()
    for request in waiting:
        await api.result(request)
    assert api.sampler.sequences_waiting == 0


async def test_sample_behind_those_of_its_own_session_alone_is_active_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    requests = [await api.sample(sampler, seq_id) for seq_id in range(4)]
    await api.until(lambda: api.sampler.sequences_waiting == 2)
    assert [await state(api, request) for request in requests] == [("active", None)] * 4


def test_counting_is_exact_with_thousands_of_samples() -> None:
    samples = [(f"s{place % 7}", 1 + place % 3) for place in range(20_000)]
    waiting = 9_000
    states = sample_states(samples, waiting)
    left = sum(count for _, count in samples)
    for place, (session, count) in enumerate(samples):
        if place % 997 == 0:
            others = [other for other, _ in samples[:place] if other != session]
            if left > waiting or not others:
                assert states[place] is ACTIVE
            else:
                reason = states[place].reason
                assert reason is not None
                assert f"{len(others)} requests of {len(set(others))} other" in reason
        left -= count
    assert states[-1] is not ACTIVE


def test_training_waits_for_nobody_while_nothing_runs_or_its_own_does() -> None:
    assert training_state("a", [], [("b", 5)]) is ACTIVE  # a chunk is missing, say
    assert training_state("a", ["b", "a"], [("b", 5)]) is ACTIVE
    assert (
        training_state("a", ["b"], [("a", 5), ("b", 0)]).reason
        == "the trainer is busy with 1 request of 1 other session"
    )
