"""`retrieve_future`: woken by events, re-readable, and never a status that makes the SDK try for ever."""

import asyncio
import dataclasses
import gc
import time
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tinker_local.backend.scheduling import operations
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.types import ForwardBackwardRequest, ModelInput, NotFoundError, SampleRequest

from tests.http.conftest import Api, Clock, StartApi, datum

FUTURES = "tinker_local.backend.http.future_routes"


@pytest.mark.mutation("results-polled-for", "Operation.wait", "await self._wake.wait()", "await asyncio.sleep(0.05)")
async def test_result_wakes_the_poll_within_milliseconds_on_fakes(api: Api) -> None:
    """Nothing polls: a control-plane step has no floor."""
    model = await api.model()
    for warm in range(1, 6):
        await api.result(await api.step(model, warm))
    took = []
    for seq_id in range(6, 46):
        began = time.perf_counter()
        await api.result(await api.step(model, seq_id))
        took.append(time.perf_counter() - began)
    # Submit, step and poll together take 3 ms. A server that polls every 50 ms takes them in each step, also in the
    # fastest of 40, which a busy machine does not slow down.
    assert min(took) < 0.02

    operation = api.backend.operations.get(await api.gradient(model, 47))  # 46 is missing: it waits
    assert operation is not None
    waiting = [asyncio.create_task(operation.wait(30)) for _ in range(5)]
    await asyncio.sleep(0.05)
    operation.fail(NotFoundError("enough"))
    for _ in range(10):  # turns of the event loop, in which no time needs to pass
        await asyncio.sleep(0)
    assert all(task.done() for task in waiting)
    assert await asyncio.gather(*waiting) == [True] * 5


async def test_idle_polls_are_held_and_end_with_408_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{FUTURES}.LONG_POLL_SECONDS", 0.3)
    model = await api.model()
    request = await api.gradient(model, 2)
    began = time.monotonic()
    answers = await asyncio.gather(*(api.poll(request) for _ in range(20)))
    assert 0.25 < time.monotonic() - began < 25  # without the patch they are held for longer
    assert {answer.status_code for answer in answers} == {408}
    await api.gradient(model, 1)
    assert (await api.poll(request)).status_code == 200


def test_long_polls_end_before_the_sdk_gives_up() -> None:
    from tinker_local.backend.http.future_routes import LONG_POLL_SECONDS

    assert 15 <= LONG_POLL_SECONDS <= 40


async def test_results_can_be_read_again_until_their_retention_ends_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api(session_timeout=0.4)
    session = await api.backend.sessions.create()  # without heartbeats: it stays
    model = await api.model(session)
    sampler = await api.base_sampler(session)
    requests = [await api.gradient(model, 1), await api.gradient(model, 2, loss_fn="no"), await api.sample(sampler, 0)]
    first = [await api.poll(request) for request in requests]
    again = [await api.poll(request) for request in requests]
    assert [answer.content for answer in first] == [answer.content for answer in again]
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + api.backend.options.result_retention)
    monkeypatch.setattr(operations, "time", later)
    await api.until(lambda: api.backend.operations.get(requests[2]) is None)
    assert (await api.poll(requests[2])).status_code == 410  # the SDK samples again
    lost = await api.poll(requests[0])
    assert (lost.status_code, lost.json()["category"]) == (200, "server")
    # A command of long ago is not run again, and a model is not made again over the one that lives.
    assert "seq_id: 1" in await api.failure(await api.gradient(model, 1))
    body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
    answer = await api.post("create_model", body)
    assert answer.status_code == 400
    assert "model_seq_id" in answer.json()["detail"]
    await api.result(await api.gradient(model, 3))


@pytest.mark.parametrize("request_id", ["", "x", "a:b", "s:train:0:1", "s:sample:0:1", "s:sample:0", "::::", "é\u0000"])
async def test_unknown_request_is_404_on_fakes(api: Api, request_id: str) -> None:
    answer = await api.poll(request_id)
    assert answer.status_code == 404
    assert "request_id" in answer.json()["detail"]


async def test_unknown_request_of_a_live_session_is_404_on_fakes(api: Api) -> None:
    session = await api.session()
    for owner in (f"{session}:train:5", f"{session}:sample:5"):
        assert (await api.poll(f"{owner}:1")).status_code == 404
    model = await api.model(session)
    assert (await api.failure(f"{model}:99")).startswith("server: ")


async def test_sample_is_deduplicated_by_sampling_session_and_seq_id_on_fakes(api: Api) -> None:
    session = await api.session()
    one, other = await api.base_sampler(session, 0), await api.base_sampler(session, 1)
    body = api.sample_body(one, 5, num_samples=2)
    del body["sampling_params"]["seed"]
    first = await api.ok("asample", body)
    assert await api.ok("asample", body) == first
    result = (await api.poll(first["request_id"])).content
    assert await api.ok("asample", body) == first  # also when it is done: not sampled again
    assert (await api.poll(first["request_id"])).content == result
    assert api.sampler.begun == 1
    second = await api.ok("asample", api.sample_body(other, 5, num_samples=2))
    third = await api.ok("asample", api.sample_body(one, 6, num_samples=2))
    ids = [i for promise in (first, second, third) for i in promise["sample_sequence_ids"]]
    assert len(set(ids)) == 6


async def test_nameless_save_retried_with_a_new_number_gives_the_first_sampler_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "snapshot"}
    first = await api.submit("save_weights_for_sampler", body)
    again = await api.submit("save_weights_for_sampler", {**body, "sampling_session_seq_id": 1})
    assert first == again
    assert (await api.result(again))["sampling_session_id"] == f"{session}:sample:0"
    assert (await api.get(f"samplers/{session}:sample:1")).status_code == 404
    # The number that was skipped is free.
    assert await api.nameless(model, 2, 1) == f"{session}:sample:1"


async def test_number_of_a_sampler_is_not_given_twice_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    path = await api.named(model, 1, "a")
    base = {"session_id": session, "sampling_session_seq_id": 0}
    await api.ok("create_sampling_session", {**base, "base_model": "fake/bigram"})
    again = await api.ok("create_sampling_session", {**base, "base_model": "fake/bigram"})
    assert again["sampling_session_id"] == f"{session}:sample:0"
    answer = await api.post("create_sampling_session", {**base, "model_path": path})
    assert answer.status_code == 400
    assert "sampling_session_seq_id" in answer.json()["detail"]
    save = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0, "kind": "snapshot"}
    assert "sampling_session_seq_id" in await api.failure(await api.submit("save_weights_for_sampler", save))
    assert len(api.sampler.versions) == 1  # the named one: nothing of the refused save is left


async def test_cancelling_frees_the_slot_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    requests = [await api.sample(sampler, seq_id) for seq_id in range(4)]
    await api.until(lambda: api.sampler.running == 4)
    polls = [asyncio.create_task(api.poll(request)) for request in requests]
    await asyncio.sleep(0.05)
    for request in requests[:3]:
        assert (await api.post("cancel_future", {"request_id": request})).status_code == 204
    for poll in polls[:3]:
        assert (await poll).json()["category"] == "user"
    await api.until(lambda: api.sampler.running == 1)
    await api.until(lambda: len(api.backend.sampling.in_flight) == 1)
    api.sampler.hold.set()
    assert (await polls[3]).headers["content-type"] == "application/x-protobuf"
    await api.until(lambda: not api.backend.sampling.in_flight)


async def test_cancelling_before_the_work_began_frees_the_slot_too_on_fakes(api: Api) -> None:
    from tinker_local.types import ModelInput, SampleRequest

    sampler = await api.base_sampler()
    request = SampleRequest(sampling_session_id=sampler, seq_id=0, prompt=ModelInput.from_ints([5]))
    operation = await api.backend.sampling.sample(request)
    api.backend.operations.cancel(operation.request_id)  # its task has not had a turn yet
    await asyncio.sleep(0.05)
    await api.until(lambda: not api.backend.sampling.in_flight)
    assert not api.backend.sampling._open[sampler].running


async def test_cancelling_touches_nothing_but_samples_that_run_on_fakes(api: Api) -> None:
    model = await api.model()
    gradient = await api.gradient(model, 1)
    for request in ("unknown", gradient, f"{model}:create"):
        assert (await api.post("cancel_future", {"request_id": request})).status_code == 204
    await api.result(gradient)
    done = await api.sample(await api.base_sampler(), 0)
    output = await api.result(done)
    await api.post("cancel_future", {"request_id": done})
    assert await api.result(done) == output


async def test_full_queue_is_429_and_drains_on_fakes(start_api: StartApi) -> None:
    api = await start_api(max_queued_samples=3)
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    requests = [await api.sample(sampler, seq_id) for seq_id in range(3)]
    assert (await api.post("asample", api.sample_body(sampler, 3))).status_code == 429
    assert await api.sample(sampler, 1) == requests[1]  # a retry of an accepted one is not a new one
    api.sampler.hold.set()
    for request in requests:
        await api.result(request)
    await api.result(await api.sample(sampler, 3))


async def test_five_hundred_samples_at_once_are_all_answered_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()

    async def one(seq_id: int) -> Any:
        return await api.result(await api.sample(sampler, seq_id))

    outputs = await asyncio.gather(*(one(seq_id) for seq_id in range(512)))
    assert len(outputs) == 512
    assert len(api.backend.operations) >= 512
    await api.until(lambda: not api.backend.sampling.in_flight)


@pytest.mark.mutation(
    "old-samplers-get-new-weights",
    "Sampling._version",
    "return self._versions.ephemeral(session.ephemeral.name)",
    "return self._versions.ephemeral(list(self._versions._folders._versions)[-1])",
)
async def test_samplers_keep_the_weights_of_their_save_on_fakes(api: Api) -> None:
    """Old versions are not changed by training, and sampling them changes no training weights."""
    session = await api.session()
    model = await api.model(session)
    base = await api.score(await api.base_sampler(session, 0), 0)
    samplers, scores = [], []
    seq_id = 1
    for number in range(1, 4):
        samplers.append(await api.nameless(model, seq_id, number))
        scores.append(await api.score(samplers[-1], 0))
        await api.gradient(model, seq_id + 1)
        await api.result(await api.step(model, seq_id + 2))
        seq_id += 3
    assert scores[0] == base
    assert len({tuple(score) for score in scores}) == 3
    forward = (await api.result(await api.gradient(model, seq_id, forward_only=True))).metrics
    for sampler, score in zip(samplers, scores, strict=True):
        assert await api.score(sampler, 1) == score
    assert (await api.result(await api.gradient(model, seq_id + 1, forward_only=True))).metrics == forward


@pytest.mark.mutation(
    "effect-not-verified",
    "SaveWeightsForSampler._load_and_verify",
    "        if not agreement.difference <= tolerance:\n",
    "        if False:\n",
)
async def test_version_that_the_sampler_does_not_serve_is_an_error_and_leaves_nothing_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2, learning_rate=1.0))
    original = api.sampler._weights

    async def base_only(version: Any) -> Any:
        await original(version)
        return await original(None)

    monkeypatch.setattr(api.sampler, "_weights", base_only)
    saves: list[dict[str, Any]] = [{"path": "a"}, {"sampling_session_seq_id": 0}]
    for seq_id, fields in enumerate(saves, 3):
        body = {"model_id": model, "seq_id": seq_id, **fields}
        message = await api.failure(await api.submit("save_weights_for_sampler", body))
        assert message.startswith("server: the sampler does not serve the weights")
    assert api.sampler.versions == set()
    assert (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"] == []
    assert not list((api.backend.options.data_dir / "ephemeral").iterdir())


@pytest.mark.parametrize("rounds", [True, False])
async def test_a_difference_that_rounding_explains_is_no_error_on_fakes(
    rounds: bool, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training makes tokens so unlikely that 16 bits leave more of a logprob open than engines usually differ by. The
    sampler moves here by 3 per mille, and the trainer, if it rounds so, by one."""
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2, learning_rate=1.0))
    original, exact = api.sampler._weights, api.trainer.logprobs

    async def moved(version: Any) -> Any:
        found = await original(version)
        matrices = {name: dataclasses.replace(each, b=each.b * 1.003) for name, each in found.matrices.items()}
        return dataclasses.replace(found, matrices=matrices)

    def rounded(adapter_id: str | None, *inputs: Any, nudge: int = 0) -> Any:
        return exact(adapter_id, *inputs) * (1 + (nudge > 0) * rounds * 1e-3)

    monkeypatch.setattr(api.sampler, "_weights", moved)
    monkeypatch.setattr(api.trainer, "logprobs", rounded)
    saved = await api.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "a"})
    if rounds:
        assert (await api.result(saved))["path"].endswith("/a")
    else:
        assert "on average (at most 0.0001 is normal)" in await api.failure(saved)


async def test_deleted_checkpoint_ends_its_samplers_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    path = await api.named(model, 1, "a")
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await api.ok("create_sampling_session", body))["sampling_session_id"]
    await api.score(sampler, 0)
    assert (await api.delete(f"training_runs/{model}/checkpoints/sampler_weights/a")).status_code == 204
    for answer in (
        await api.post("asample", api.sample_body(sampler, 1)),
        await api.get(f"samplers/{sampler}"),
        await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 1}),
        await api.post("create_sampling_session", body),
    ):
        assert answer.status_code == 404
        assert path in answer.json()["detail"]
    await api.until(lambda: not api.sampler.versions)
    # The name is free again, and means other weights.
    await api.gradient(model, 2)
    await api.result(await api.step(model, 3))
    assert await api.named(model, 4, "a") == path
    again = (await api.ok("create_sampling_session", {**body, "sampling_session_seq_id": 2}))["sampling_session_id"]
    assert await api.score(again, 0) != await api.score(await api.base_sampler(session, 3), 0)


async def test_checkpoint_deleted_without_a_sampler_leaves_the_engine_too_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.named(model, 1, "a")  # loaded to be verified
    assert len(api.sampler.versions) == 1
    await api.delete(f"training_runs/{model}/checkpoints/sampler_weights/a")
    await api.until(lambda: not api.sampler.versions)


async def test_expired_checkpoint_is_gone_on_fakes(start_api: StartApi) -> None:
    clock = Clock()
    api = await start_api(clock=clock, session_timeout=0.4)
    session = await api.backend.sessions.create()
    model = await api.model(session)
    path = await api.named(model, 1, "short", ttl_seconds=3600)
    await api.save(model, 2, "kept")
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await api.ok("create_sampling_session", body))["sampling_session_id"]
    clock.ahead = timedelta(seconds=3601)
    await api.until(lambda: not api.sampler.versions)
    left = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in left] == ["weights/kept"]
    assert (await api.post("asample", api.sample_body(sampler, 0))).status_code == 404


async def test_name_that_exists_fails_the_save_and_no_409_on_fakes(api: Api) -> None:
    model = await api.model()
    path = await api.save(model, 1, "a")
    body = {"model_id": model, "seq_id": 2, "path": "a", "overwrite": False}
    message = await api.failure(await api.submit("save_weights", body))
    assert message.startswith("user: ")
    assert "'a' exists" in message
    assert await api.save(model, 3, "a", overwrite=True, user_metadata={"new": "yes"}) == path
    listed = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [(c["checkpoint_id"], c["user_metadata"]) for c in listed] == [("weights/a", {"new": "yes"})]
    await api.named(model, 4, "a")  # another kind: another name space
    body = {"model_id": model, "seq_id": 5, "path": "a"}
    assert "'a' exists" in await api.failure(await api.submit("save_weights_for_sampler", body))


async def test_result_that_cannot_be_sent_is_a_failure_and_no_5xx_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    from tinker_local.backend.training.trainer import TrainResult

    outputs = {
        "no wire format": [{"logprobs": np.zeros((3, 0), np.float32)}],
        "no tensor": [{"logprobs": np.array(["a"])}],
    }
    model = await api.model()
    for seq_id, output in enumerate(outputs.values(), 1):
        result = TrainResult(output, {"loss:sum": 0.0})
        monkeypatch.setattr(api.trainer, "forward_backward", lambda work, result=result: [result] * len(work))
        assert (await api.failure(await api.gradient(model, seq_id))).startswith("server: ")


async def test_saves_in_flight_are_finished_when_the_server_stops_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api()
    model = await api.model()
    original = api.backend.store.write_checkpoint

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return original(*args, **kwargs)

    monkeypatch.setattr(api.backend.store, "write_checkpoint", slow)
    request_id = await api.submit("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    operation = api.backend.operations.get(request_id)
    assert operation is not None
    run = api.backend.runs.live(model)
    assert run is not None
    await api.until(lambda: bool(run.captures))
    await api.backend.close()
    path = (await operation)["path"]
    again = await start_api()
    assert (await again.ok("weights_info", {"tinker_path": path}))["lora_rank"] == 4


async def test_results_beyond_their_memory_drop_those_that_were_read_first_on_fakes(start_api: StartApi) -> None:
    """64 unread answers once kept 750 MiB."""
    of_one = operations.OPERATION_BYTES + operations.OBJECT_BYTES + 2 * 100 * 4  # tokens and logprobs
    api = await start_api(max_result_bytes_per_session=3 * of_one, max_result_bytes=4 * of_one)
    sampler, other = await api.base_sampler(), await api.base_sampler()
    kept = api.backend.operations

    async def sample(sampler: str, seq_id: int) -> str:
        request = await api.sample(sampler, seq_id, sampling_params={"max_tokens": 100, "stop": []})
        known = kept.get(request)
        assert known is not None
        await known
        await asyncio.sleep(0)
        return request

    first, second, third = [await sample(sampler, seq_id) for seq_id in range(3)]
    assert kept.kept_bytes == 3 * of_one
    await api.poll(second)
    fourth = await sample(sampler, 3)
    assert [request for request in (first, second, third, fourth) if kept.get(request) is None] == [second]
    await sample(sampler, 4)  # nothing was read: the oldest goes
    assert kept.get(first) is None
    answer = await api.poll(first)
    assert answer.status_code == 410  # the SDK samples again
    assert "--max-results-per-session" in answer.text
    mine = [await sample(other, seq_id) for seq_id in range(2)]  # beyond what all may have: of whom has most
    assert kept.get(third) is None
    assert all(kept.get(request) is not None for request in mine)
    assert kept.kept_bytes == 4 * of_one
    for request in (*mine, fourth):
        kept.forget(request)
    assert kept.kept_bytes == of_one


async def test_requests_that_failed_keep_nothing_of_what_was_sent_on_fakes(api: Api) -> None:
    """The frames of an error once kept the data of each failed request, up to 512 MiB, for 15 minutes."""
    model, sampler = await api.model(), await api.base_sampler()

    async def gradient() -> tuple[Operation[Any], weakref.ref[Any]]:
        request = ForwardBackwardRequest(model_id=model, seq_id=1, data=(datum([5, 9, 20]),), loss_fn="unknown")
        tokens = weakref.ref(request.data[0].model_input.chunks[0].tokens)  # type: ignore[union-attr]
        return await api.backend.training.forward_backward(request), tokens

    async def sample() -> tuple[Operation[Any], weakref.ref[Any]]:
        prompt = ModelInput.from_ints([5, 2**30])
        request = SampleRequest(sampling_session_id=sampler, seq_id=0, prompt=prompt)
        tokens = weakref.ref(prompt.chunks[0].tokens)  # type: ignore[union-attr]
        return await api.backend.sampling.sample(request), tokens

    def gone(tokens: weakref.ref[Any]) -> bool:
        gc.collect()
        return tokens() is None

    for submit in (gradient, sample):
        operation, tokens = await submit()
        assert await operation.wait(30)
        assert operation.failed
        # A busy machine may not have ended the task yet that held them.
        await api.until(partial(gone, tokens))
        assert "user" in await api.failure(operation.request_id)


async def test_gradients_that_were_computed_keep_nothing_of_what_was_sent_on_fakes(api: Api) -> None:
    """Their results once held the command until a client read its failure: the data for 15 minutes."""

    async def gradient() -> tuple[Operation[Any], weakref.ref[Any]]:
        data = (datum([5, 9, 20]),)
        request = ForwardBackwardRequest(model_id=model, seq_id=1, data=data, loss_fn="cross_entropy")
        targets = weakref.ref(data[0].loss_fn_inputs["target_tokens"].data)
        return await api.backend.training.forward_backward(request), targets

    def gone() -> bool:
        gc.collect()
        return targets() is None

    model = await api.model()
    operation, targets = await gradient()
    assert await operation.wait(30)
    assert not operation.failed
    await api.until(gone)
    assert await api.result(operation.request_id)
