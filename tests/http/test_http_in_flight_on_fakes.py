"""In-flight clients: what a save, a client, a session and a version that fails mean for the others."""

import asyncio
import gc
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.types import InternalError, InvalidRequestError

from tests.http.conftest import Api, datum

MANY = {"sampling_params": {"max_tokens": 30, "temperature": 1.0, "stop": [], "seed": 3}}
TARGET = "{model}/in-flight"


@dataclass
class Pause:
    """Holds samples before their next token, from the `after`th on; a probe passes."""

    api: Api
    after: int = 10
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        sampler: Any = self.api.sampler
        model, here = sampler._model, threading.local()
        logits, sample, count = model.logits, sampler._sample, 0

        def paused(*args: Any) -> Any:
            nonlocal count
            if getattr(here, "pauses", False) and not self.go_on.is_set():
                count += 1
                if count > self.after:
                    self.reached.set()
                    assert self.go_on.wait(30)
            return logits(*args)

        def watched(work: Any, *args: Any) -> Any:
            steps = sample(work, *args)
            while True:
                here.pauses = work.params.max_tokens > 1
                try:
                    step = next(steps)
                except StopIteration:
                    return
                finally:
                    here.pauses = False
                yield step

        model.logits, sampler._sample = paused, watched


async def train(api: Api, model: str, seq_id: int, token: int) -> int:
    """Let `token` follow every token; the next `seq_id`."""
    data = [datum([other, token]) for other in range(1, 30)]
    for _ in range(3):
        await api.result(await api.gradient(model, seq_id, data))
        await api.result(await api.step(model, seq_id + 1, learning_rate=0.5))
        seq_id += 2
    return seq_id


async def spans(api: Api, sampler: str, request: str, index: int = 0) -> list[tuple[int, int, int]]:
    """Version, optimizer steps and tokens."""
    told = await api.get(f"samplers/{sampler}/weights_of_tokens", sequence_id=f"{request}:{index}")
    assert told.status_code == 200, told.text
    return [(each["version"], each["optimizer_steps"], each["tokens"]) for each in told.json()["drawn_under"]]


async def current(api: Api, model: str, number: int) -> None:
    """Wait until the sampler is at save `number`."""
    target = api.backend.sampling.targets._targets[model]
    await api.until(lambda: target.current is not None and target.current.number >= number)


async def test_running_samples_of_all_in_flight_clients_go_on_under_the_newest_save_on_fakes(api: Api) -> None:
    model = await api.model()
    first = await api.nameless(model, 1, 0, "inflight")
    kept = await api.nameless(model, 2, 1)
    before = await api.result(await api.sample(kept, 0, **MANY))
    await api.result(await api.sample(first, 0, **MANY))
    pause = Pause(api)
    running = await api.sample(first, 1, **MANY)
    assert await asyncio.to_thread(pause.reached.wait, 30)
    seq_id = await train(api, model, 3, 7)
    second = await api.nameless(model, seq_id, 2, "inflight")
    assert not pause.go_on.is_set()
    await current(api, model, 2)
    pause.go_on.set()
    tokens = (await api.result(running)).sequences[0].tokens
    drawn = await spans(api, first, running)
    assert [(version, steps) for version, steps, _ in drawn] == [(1, 0), (2, 3)]
    assert 10 <= drawn[0][2] < 30
    assert set(tokens[drawn[0][2] + 1 :]) == {7}
    for sampler in first, second:  # the older client runs on the newer weights, too
        request = await api.sample(sampler, 2, **MANY)
        assert set((await api.result(request)).sequences[0].tokens) == {7}
        assert await spans(api, sampler, request) == [(2, 3, 30)]
    again = await api.result(await api.sample(kept, 1, **MANY))
    assert np.array_equal(again.sequences[0].tokens, before.sequences[0].tokens)  # a snapshot keeps its weights
    metrics = api.backend.metrics()["fake/bigram"]
    assert (metrics.in_flight_published, metrics.in_flight_tokens, metrics.tokens_on_older_keys) == (2, 120, 0)


async def test_a_save_ends_before_the_sampler_has_its_weights_and_a_sample_of_its_client_waits_for_them_on_fakes(
    api: Api,
) -> None:
    model = await api.model()
    first = await api.nameless(model, 1, 0, "inflight")
    await current(api, model, 1)
    go_on, publish, published = asyncio.Event(), api.sampler.publish, []

    async def slow(target: str, version: Any, number: int) -> None:
        await go_on.wait()
        published.append(number)
        await publish(target, version, number)

    api.sampler.publish = slow  # type: ignore[method-assign]
    seq_id = await train(api, model, 2, 7)
    clients = [await api.nameless(model, seq_id + at, at + 1, "inflight") for at in range(3)]  # none waits
    waiting = [await api.sample(client, 0, **MANY) for client in clients]
    await asyncio.sleep(0.05)
    assert all(api.backend.operations.get(request).done is False for request in waiting)  # type: ignore[union-attr]
    api.sampler.publish = publish  # type: ignore[method-assign]
    old = await api.sample(first, 0, **MANY)  # of the weights that are there
    await api.result(old)
    assert await spans(api, first, old) == [(1, 0, 30)]
    go_on.set()
    for client, request in zip(clients, waiting, strict=True):
        await api.result(request)
        versions = [version for version, _, _ in await spans(api, client, request)]
        assert versions == sorted(versions)
        assert set(versions) <= {2, 4}
        assert versions[0] >= clients.index(client) + 2
    assert published == [2]  # and then 4, at the usual speed: the third was superseded
    assert api.backend.metrics()["fake/bigram"].in_flight_published == 3


@pytest.mark.more
async def test_a_thousand_saves_of_each_kind_keep_one_in_flight_version_and_the_snapshots_of_the_limit_on_fakes(
    api: Api,
) -> None:
    """In memory and on disk, in a loop of which every tenth client samples."""
    model, beside = await api.model(), await api.model()
    found: list[tuple[Any, ...]] = []
    for number in range(1000):
        moving = await api.nameless(model, number + 1, number, "inflight")
        snapshot = await api.nameless(beside, number + 1, number)
        for sampler in (moving, snapshot) if number % 10 == 9 else ():
            await api.result(await api.sample(sampler, 0))
        if number == 0:
            ((first,), (other,)) = api.backend.sampling.ephemeral.of_runs().values()
            assert first.size == other.size
            api.backend.quotas.session = replace(api.backend.quotas.session, ephemeral_bytes=4 * first.size)
        if number in (99, 999):
            await current(api, model, number + 1)
            await api.until(lambda: len(api.backend.folders._versions) <= 5)
            kept = api.backend.sampling.ephemeral.of_runs()
            assert [each.pinned for each in kept[model]] == [True]
            assert set(api.sampler._targets) == {TARGET.format(model=model)}
            found.append(
                (
                    len(kept[beside]),
                    len(api.backend.folders._versions),
                    len(api.sampler.versions),
                    api.backend.metrics()["fake/bigram"].ephemeral_bytes // first.size,
                )
            )
    assert found == [(4, 5, 4, 5)] * 2


async def test_a_version_that_the_sampler_does_not_serve_fails_its_clients_and_not_those_before_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    first = await api.nameless(model, 1, 0, "inflight")
    await current(api, model, 1)
    with monkeypatch.context() as patched:

        async def refuse(*_: Any) -> None:
            raise InvalidRequestError("vLLM took 3 of its 4 tensors")

        patched.setattr(api.sampler, "load_version", refuse)
        second = await api.nameless(model, 2, 1, "inflight")
        message = await api.failure(await api.sample(second, 0, **MANY))
    assert message.startswith("server: ")
    assert f"does not serve in-flight save 2 of {model}" in message
    assert "this client needs save 2 or a later one: vLLM took 3 of its 4 tensors" in message
    request = await api.sample(first, 0, **MANY)
    await api.result(request)
    assert await spans(api, first, request) == [(1, 0, 30)]
    third = await api.nameless(model, 3, 2, "inflight")
    await current(api, model, 3)
    for seq_id, sampler in enumerate((first, second, third), 5):
        request = await api.sample(sampler, seq_id, **MANY)
        await api.result(request)
        assert await spans(api, sampler, request) == [(3, 0, 30)]


async def test_a_publication_that_fails_half_way_is_told_until_the_next_save_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    with monkeypatch.context() as patched:

        async def torn(*_: Any) -> None:
            raise InternalError("the weights could not be changed")

        patched.setattr(api.sampler, "publish", torn)
        first = await api.nameless(model, 1, 0, "inflight")
        assert "the weights could not be changed" in await api.failure(await api.sample(first, 0, **MANY))
    second = await api.nameless(model, 2, 1, "inflight")
    await api.result(await api.sample(second, 0, **MANY))
    await api.until(lambda: len(api.backend.folders._versions) == 1)


async def test_a_save_that_was_acknowledged_is_verified_by_the_next_trainer_if_this_one_ends_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    computed, ends = api.trainer.logprobs, [True]

    def ends_once(adapter: Any, *probes: Any) -> Any:
        if ends:
            ends.clear()
            raise ProcessEndedError("the trainer was killed")
        return computed(adapter, *probes)

    monkeypatch.setattr(api.trainer, "logprobs", ends_once)
    first = await api.nameless(model, 1, 0, "inflight")
    request = await api.sample(first, 0, **MANY)
    await api.result(request)
    assert not ends
    assert await spans(api, first, request) == [(1, 0, 30)]
    assert api.trainer.adapters == {model}


async def test_a_version_in_use_keeps_none_of_the_trainers_tensors_in_memory_on_fakes(api: Api) -> None:
    model = await api.model()
    captured, states = api.trainer.capture, set()

    def capture(*args: Any, **kwargs: Any) -> Any:
        state = captured(*args, **kwargs)
        states.add(id(state))
        return state

    api.trainer.capture = capture  # type: ignore[method-assign]
    await api.nameless(model, 1, 0, "inflight")
    await current(api, model, 1)
    await asyncio.to_thread(api.backend.folders.flush)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, AdapterState) and id(each) in states]
    assert states


async def test_a_save_that_begins_as_its_session_ends_leaves_nothing_on_fakes(api: Api) -> None:
    model = await api.model()
    captured, target = api.trainer.capture, threading.Event()

    def capture(*args: Any, **kwargs: Any) -> Any:
        assert target.wait(30)
        return captured(*args, **kwargs)

    api.trainer.capture = capture  # type: ignore[method-assign]
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
    await api.submit("save_weights_for_sampler", body)
    await asyncio.sleep(0.05)
    finished = asyncio.create_task(api.post(f"sessions/{model.partition(':')[0]}/finish", {}))
    await asyncio.sleep(0.05)
    target.set()
    assert (await finished).status_code == 204
    assert api.backend.sampling.targets._targets == {}
    assert api.backend.folders._versions == {}


async def test_the_end_of_a_session_ends_its_in_flight_clients_with_a_sentence_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler = await api.nameless(model, 1, 0, "inflight")
    await api.result(await api.sample(sampler, 0, **MANY))
    pause = Pause(api, 5)
    running = await api.sample(sampler, 1, **MANY)
    assert await asyncio.to_thread(pause.reached.wait, 30)
    finished = await api.post(f"sessions/{model.partition(':')[0]}/finish", {"reason": {"type": "success"}})
    assert finished.status_code == 204
    assert "its weights were of an ephemeral save and are gone" in (await api.outcome(running)).text
    pause.go_on.set()
    answer = await api.post("asample", api.sample_body(sampler, 2, **MANY))
    assert answer.status_code == 410
    assert "save_weights_for_sampler(name) saves survives the session" in answer.text
    assert api.backend.folders._versions == {}
    assert api.sampler._targets == {}
    assert api.backend.sampling.targets._targets == {}
    assert api.backend.metrics()["fake/bigram"].ephemeral_bytes == 0


async def test_a_sampler_without_a_second_slot_refuses_with_the_reason_on_fakes(api: Api) -> None:
    api.backend.models.get("fake/bigram").engines.sampler.why_not_in_flight = "it has one slot for adapters"
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
    message = await api.failure(await api.submit("save_weights_for_sampler", body))
    assert "kind: 'inflight' is not possible on this server: it has one slot for adapters; use 'snapshot'" in message


async def test_the_weights_of_tokens_are_told_of_in_flight_clients_alone_on_fakes(api: Api) -> None:
    model = await api.model()
    sampler, other = await api.nameless(model, 1, 0), await api.nameless(model, 2, 1, "inflight")
    request = await api.sample(sampler, 0, **MANY)
    output = await api.result(request)
    assert output.sequences[0].drawn_under is None
    answer = await api.get(f"samplers/{sampler}/weights_of_tokens", sequence_id=f"{request}:0")
    assert (answer.status_code, "kind='inflight'" in answer.text) == (404, True)
    answer = await api.get(f"samplers/{other}/weights_of_tokens", sequence_id=f"{request}:0")
    assert (answer.status_code, "is not of the sampling session" in answer.text) == (400, True)
