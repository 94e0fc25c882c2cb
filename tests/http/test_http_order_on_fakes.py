"""Execution in `seq_id` order whatever arrives when, one execution per id, and what a failure does to what follows."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.scheduling import run_queue
from tinker_local.backend.scheduling.train_scheduler import TrainScheduler
from tinker_local.types import Datum, EncodedTextChunk, ForwardBackwardRequest, ModelInput
from tinker_local.types.codec import encode_forward_backward_request

from tests.http.conftest import PROTOBUF, Api, StartApi

LOSS = "loss:sum"


async def test_chunks_that_arrive_as_2_3_1_run_as_1_2_3_on_fakes(api: Api, make_datum: Any) -> None:
    model = await api.model()
    data = {1: [make_datum([1, 2])], 2: [make_datum([3, 4])] * 2, 3: [make_datum([5, 6])] * 3}
    requests = {}
    for seq_id in (2, 3):
        requests[seq_id] = await api.gradient(model, seq_id, data[seq_id])
    polls = [asyncio.create_task(api.result(requests[seq_id])) for seq_id in (2, 3)]  # as the SDK: before 1 is sent
    await asyncio.sleep(0.1)
    assert not any(call[0] == "forward_backward" for call in api.trainer.calls)
    requests[1] = await api.gradient(model, 1, data[1])
    outputs = [await api.result(requests[1]), *await asyncio.gather(*polls)]
    assert [len(output.loss_fn_outputs) for output in outputs] == [1, 2, 3]
    ran = [count for call in api.trainer.calls if call[0] == "forward_backward" for _, count, _ in call[1]]
    assert ran == [1, 2, 3]
    assert "grad_norm" in (await api.result(await api.step(model, 4)))["metrics"]


@pytest.mark.mutation(
    "duplicates-run-twice",
    "Training._place",
    "is not None:\n            return known\n        model =",
    "is False:\n            return known\n        model =",
)
async def test_same_seq_id_again_is_the_same_request_and_runs_once_on_fakes(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
    assert len({await api.submit("create_model", body) for _ in range(3)}) == 1
    model = (await api.result(f"{session}:train:0:create"))["model_id"]
    api.trainer.hold.clear()
    gradients = {await api.gradient(model, 1) for _ in range(3)}
    steps = {await api.step(model, 2) for _ in range(3)}
    assert (len(gradients), len(steps)) == (1, 1)
    api.trainer.hold.set()
    await api.result(steps.pop())
    after = {await api.gradient(model, 1), *gradients}  # also when it is long done
    assert after == gradients
    assert [call[0] for call in api.trainer.calls] == ["forward_backward", "optim_step"]
    for path, fields in [
        ("save_weights", {"path": "a"}),
        ("save_weights_for_sampler", {"path": "a"}),
    ]:
        seq_id = 3 if path == "save_weights" else 4
        requests = [await api.submit(path, {"model_id": model, "seq_id": seq_id, **fields}) for _ in range(2)]
        results = [await api.result(request) for request in requests]
        assert results[0] == results[1]  # a name that exists would have failed the second


async def test_id_of_another_operation_is_refused_by_name_on_fakes(api: Api) -> None:
    """It is not a retry: the client would read the result of the first as the second's."""
    session = await api.session()
    model = await api.model(session)
    await api.gradient(model, 1)
    path = await api.save(model, 2, "a")
    answers = [
        await api.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}),
        await api.gradient_answer(model, 1, forward_only=True),
        await api.gradient_answer(model, 2),
        await api.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "a"}),
        await api.post("load_weights", {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}),
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert "already" in answer.json()["detail"]
        assert model in answer.json()["detail"]
    await api.result(await api.step(model, 3))


async def test_duplicates_sent_at_the_same_time_are_one_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    path = await api.named(model, 1, "a")
    saved = await api.save(model, 2, "a")
    calls = {
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "fake/bigram"},
        "load_weights": {"session_id": session, "model_seq_id": 2, "path": saved, "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
        "optim_step": {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.1}},
    }
    for name, body in calls.items():
        answers = await asyncio.gather(*(api.post(name, body) for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5, answers[-1].text
        assert len({answer.text for answer in answers}) == 1
    samples = await asyncio.gather(*(api.post("asample", api.sample_body(f"{session}:sample:0", 0)) for _ in range(5)))
    assert len({answer.text for answer in samples}) == 1
    for request in (f"{session}:train:1:create", f"{session}:train:2:create", f"{session}:sample:0:0"):
        await api.result(request)
    assert api.trainer.adapters == {f"{session}:train:{number}" for number in range(3)}


async def test_pipelined_steps_equal_awaited_ones_on_fakes(api: Api, make_datum: Any) -> None:
    session = await api.session()
    losses = {}
    for number, pipelined in enumerate((True, False)):
        model = await api.model(session, number)
        requests, found = [], []
        for step in range(4):
            request = await api.gradient(model, 2 * step + 1, [make_datum([5, 9, 20, 31])])
            requests.append(request)
            if not pipelined:
                found.append((await api.result(request)).metrics[LOSS])
            optim = await api.step(model, 2 * step + 2)
            if not pipelined:
                await api.result(optim)
        losses[pipelined] = found or [(await api.result(request)).metrics[LOSS] for request in requests]
    assert losses[True] == losses[False]
    assert losses[True] == sorted(losses[True], reverse=True)


async def loss(api: Api, model: str, seq_id: int) -> float:
    """Of the default datum, without a gradient."""
    return float((await api.result(await api.gradient(model, seq_id, forward_only=True))).metrics[LOSS])


async def test_gap_is_skipped_at_once_by_a_step_which_fails_and_discards_on_fakes(api: Api) -> None:
    model = await api.model()
    start = await loss(api, model, 1)
    late = await api.gradient(model, 3)  # 2 never came
    step = await api.step(model, 4)
    message = await api.failure(step)  # and not after the 360 s of its patience
    assert message.startswith("user: ")
    assert "seq_id 2 never arrived" in message
    assert (await api.result(late)).metrics[LOSS] == start
    assert api.trainer.calls[-1] == ("discard_gradients", model)
    # Neither the weights nor the gradient have anything left of it.
    assert await loss(api, model, 5) == start
    empty = await api.result(await api.step(model, 6))
    assert empty["metrics"]["grad_norm"] == 0
    await api.result(await api.gradient(model, 7))
    assert (await api.result(await api.step(model, 8)))["metrics"]["grad_norm"] > 0
    assert await loss(api, model, 9) < start


async def test_skipped_id_is_closed_and_refused_through_its_future_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.failure(await api.step(model, 3))
    answer = await api.gradient_answer(model, 2)
    assert answer.status_code == 200  # a refused submit would hang the SDK's training client
    message = await api.failure(answer.json()["request_id"])
    assert message.startswith("user: ")
    assert "seq_id: 2" in message
    await api.result(await api.gradient(model, 4))
    await api.result(await api.step(model, 5))


@pytest.mark.parametrize("path", ["save_weights", "save_weights_for_sampler", "load_weights"])
async def test_gap_is_skipped_at_once_by_anything_that_is_no_gradient_on_fakes(api: Api, path: str) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": 7, "path": "a"}
    request = await api.submit(path, {**body, "optimizer": True} if path == "load_weights" else body)
    assert (await api.outcome(request)).status_code == 200  # and not after the 360 s of its patience


async def test_missing_chunk_is_waited_for_and_then_given_up_on_fakes(start_api: StartApi) -> None:
    api = await start_api(gap_patience=0.4)
    model = await api.model()
    began = time.monotonic()
    request = await api.gradient(model, 2)
    await api.result(request)
    assert time.monotonic() - began > 0.35
    assert "seq_id 1 never arrived" in await api.failure(await api.step(model, 3))
    run = api.backend.runs.live(model)
    assert run is not None
    run.queue.commands._patience = 600.0
    late = await api.gradient(model, 4)
    request = await api.gradient(model, 6)  # 5 comes while it is waited for
    await asyncio.sleep(0.1)
    await api.gradient(model, 5)
    await api.result(late)
    await api.result(request)
    await api.result(await api.step(model, 7))


async def test_waiting_for_a_missing_chunk_is_no_polling_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api(gap_patience=30)
    model = await api.model()
    await api.gradient(model, 2)
    run = api.backend.runs.live(model)
    assert run is not None
    await api.until(lambda: run.queue.ready == 1)
    for _ in range(10):  # turns of the event loop: the round that preparing it wakes is over
        await asyncio.sleep(0)
    rounds = 0
    original = TrainScheduler._round

    async def count(self: TrainScheduler) -> bool:
        nonlocal rounds
        rounds += 1
        return await original(self)

    monkeypatch.setattr(TrainScheduler, "_round", count)
    await asyncio.sleep(1)
    assert rounds == 0


@pytest.mark.mutation(
    "step-after-a-failed-gradient",
    "RunQueue.fail",
    '            self.commands.poison(f"{command.operation.request_id} failed: {error}", command.era)\n',
    "            pass\n",
)
@pytest.mark.mutation(
    "partial-gradient-kept",
    "Training.optim_step.run",
    "                await scheduler.call(trainer.discard_gradients, model.model_id)\n",
    "",
)
@pytest.mark.parametrize("last", ["the failure", "a good one"])
async def test_failed_gradient_fails_the_next_step_alone_on_fakes(api: Api, make_datum: Any, last: str) -> None:
    model = await api.model()
    start = await loss(api, model, 1)
    good = [await api.gradient(model, 2)]
    bad = await api.gradient(model, 3, [make_datum([5, 9]), make_datum([5, 9999])])
    if last == "a good one":
        good.append(await api.gradient(model, 4))
    step = await api.step(model, 3 + len(good))
    following = await api.gradient(model, 4 + len(good))
    next_step = await api.step(model, 5 + len(good))
    assert "data[1]" in await api.failure(bad)
    assert [(await api.result(each)).metrics[LOSS] for each in good] == [start] * len(good)
    message = await api.failure(step)
    assert message.startswith("user: ")
    assert "gradient was discarded" in message
    assert bad in message
    assert (await api.result(following)).metrics[LOSS] == start
    one = (await api.result(next_step))["metrics"]["grad_norm"]
    # The step after took one gradient alone.
    twin = await api.model(number=0)
    await api.result(await api.gradient(twin, 1))
    assert one == (await api.result(await api.step(twin, 2)))["metrics"]["grad_norm"]


async def trained_like(api: Api, model: str, twin: str) -> None:
    """Both have the same weights, moments and steps."""
    ours, theirs = (api.trainer.capture(each, optimizer=True) for each in (model, twin))
    assert ours.step == theirs.step
    for tensors, expected in ((ours.tensors, theirs.tensors), (ours.optimizer or {}, theirs.optimizer or {})):
        assert tensors.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(tensors[name], array)


async def test_a_gradient_that_was_sent_after_a_failure_was_read_starts_anew_on_fakes(
    api: Api, make_datum: Any
) -> None:
    model, twin = await api.model(), await api.model()
    message = await api.failure(await api.gradient(model, 1, [make_datum([5, 9]), make_datum([5, 9999])]))
    assert message.endswith("; no gradient is left since the last optimizer step")
    for each, seq_id in ((model, 2), (twin, 1)):
        await api.result(await api.gradient(each, seq_id))
        await api.result(await api.step(each, seq_id + 1))
    await trained_like(api, model, twin)


@pytest.mark.mutation(
    "part-of-a-failed-call-kept",
    "TrainScheduler._run_gradients",
    "                    await self._memory_sharing.discard_gradients(queue.model_id)\n",
    "                    pass\n",
)
@pytest.mark.parametrize("where", ["decoding", "training"])
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_nothing_of_a_failed_call_of_three_requests_stays_on_fakes(
    api: Api, make_datum: Any, failing: int, where: str
) -> None:
    """Caught and sent again, the weights are those of one clean call. The SDK sends the first request last."""
    model, twin = await api.model(), await api.model()
    inputs: dict[str, Any] = {"logprobs": [-1.0, -2.0], "advantages": [1.0, -0.5]}
    good = [make_datum(tokens, **inputs) for tokens in ([5, 9, 20], [31, 7, 8], [40, 41, 42])]
    bad = good.copy()
    if where == "decoding":
        bad[failing] = make_datum([5, 9, 9999], **inputs)
    else:
        bad[failing] = make_datum([5, 9, 20], **{**inputs, "logprobs": [-1.0, -2000.0]})  # its ratio overflows
    api.trainer.hold.clear()
    blocker = await api.gradient(await api.model(), 1)  # so that all three run in one pass
    asked = {at: await api.gradient(model, at + 1, [bad[at]], "importance_sampling") for at in (1, 2, 0)}
    await api.all_prepared()
    api.trainer.hold.set()
    await api.result(blocker)
    message = await api.failure(asked[failing])
    assert "; no gradient is left since the last optimizer step" in message
    for at in {0, 1, 2} - {failing}:
        await api.result(asked[at])
    again = {at: await api.gradient(model, at + 4, [good[at]], "importance_sampling") for at in (1, 2, 0)}
    clean = {at: await api.gradient(twin, at + 1, [good[at]], "importance_sampling") for at in (1, 2, 0)}
    for request in (*again.values(), *clean.values()):
        await api.result(request)
    run = api.backend.runs.live(model)
    assert run is not None
    assert run.queue.gradients == 3
    norms = [
        (await api.result(await api.step(each, at)))["metrics"]["grad_norm"] for each, at in ((model, 7), (twin, 4))
    ]
    assert norms[0] == norms[1]
    await trained_like(api, model, twin)
    twins = api.backend.runs.live(twin)
    assert twins is not None
    assert run.progress.last is not None
    assert twins.progress.last is not None
    assert run.progress.last.loss == twins.progress.last.loss


async def test_the_rest_of_a_failed_call_that_runs_after_the_next_was_sent_is_not_in_it_on_fakes(
    api: Api, make_datum: Any
) -> None:
    """The SDK raises the first failure, and does not wait for the requests behind it."""
    model, twin = await api.model(), await api.model()
    api.trainer.hold.clear()
    rest = await api.gradient(model, 2)
    bad = await api.gradient(model, 1, [make_datum([5, 9999])])
    assert "9999" in await api.failure(bad)
    await api.all_prepared()  # `rest` is in the trainer
    again = await api.gradient(model, 3, [make_datum([5, 9])])
    step = await api.step(model, 4)
    api.trainer.hold.set()
    for request in (rest, again, step):
        await api.result(request)
    await api.result(await api.gradient(twin, 1, [make_datum([5, 9])]))
    await api.result(await api.step(twin, 2))
    await trained_like(api, model, twin)


async def test_a_failure_discards_the_gradient_of_earlier_calls_and_says_so_on_fakes(api: Api, make_datum: Any) -> None:
    """A program that accumulates sends them again, or goes on with the later ones alone."""
    model, twin = await api.model(), await api.model()
    for seq_id in (1, 2):
        await api.result(await api.gradient(model, seq_id))
    message = await api.failure(await api.gradient(model, 3, [make_datum([5, 9999])]))
    assert message.endswith(
        "; no gradient is left since the last optimizer step: that of 2 earlier forward_backward requests was "
        "discarded too, send all of it again"
    )
    run = api.backend.runs.live(model)
    assert run is not None
    assert run.would_lose() is None
    await api.result(await api.gradient(model, 4, [make_datum([5, 9])]))
    await api.result(await api.gradient(twin, 1, [make_datum([5, 9])]))
    await api.result(await api.step(model, 5))
    await api.result(await api.step(twin, 2))
    await trained_like(api, model, twin)


async def test_a_step_behind_a_failure_alone_fails_even_if_that_was_read_on_fakes(api: Api, make_datum: Any) -> None:
    """Its gradient would be empty, or a part of what the client means."""
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    bad = await api.gradient(model, 2, [make_datum([5, 9999])])
    await api.failure(bad)
    message = await api.failure(await api.step(model, 3))
    assert f"the optimizer step was not taken and the gradient was discarded, because {bad} failed" in message
    assert (await api.result(await api.step(model, 4)))["metrics"]["grad_norm"] == 0


async def test_what_was_on_its_way_when_a_failure_was_read_is_no_answer_to_it_on_fakes(
    api: Api, make_datum: Any
) -> None:
    """A large request, whose bytes are still arriving."""
    model = await api.model()
    bad = await api.gradient(model, 1, [make_datum([5, 9999])])
    body = encode_forward_backward_request(
        ForwardBackwardRequest(model_id=model, seq_id=2, data=(make_datum([5, 9]),), loss_fn="cross_entropy")
    )
    began, read = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:10]
        began.set()
        await read.wait()
        yield body[10:]

    sending = asyncio.create_task(api.post("forward_backward", content=slowly(), headers={"Content-Type": PROTOBUF}))
    await began.wait()
    await asyncio.sleep(0.05)
    await api.failure(bad)
    read.set()
    await api.result((await sending).json()["request_id"])
    assert bad in await api.failure(await api.step(model, 3))


async def test_a_failure_waits_for_what_was_sent_with_it_on_fakes(
    start_api: StartApi, make_datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a step is there, or nothing comes any more."""
    monkeypatch.setattr(run_queue, "LONGEST_PAUSE", 600.0)
    api = await start_api(failure_pause=600.0)
    model = await api.model()
    bad = await api.gradient(model, 1, [make_datum([5, 9999])])
    told = asyncio.create_task(api.failure(bad))
    good = await api.gradient(model, 2)
    await api.result(good)
    await asyncio.sleep(0.05)
    assert not told.done()
    step = await api.step(model, 3)
    assert bad in await api.failure(step)
    assert "9999" in await told
    # Of a forward, nothing depends on when it is read.
    await api.failure(await api.gradient(model, 4, [make_datum([5, 9999])], forward_only=True))
    run = api.backend.runs.live(model)
    assert run is not None
    run.queue.failure_pause = 0.2
    began = time.monotonic()
    await api.failure(await api.gradient(model, 5, [make_datum([5, 9999])]))
    assert time.monotonic() - began > 0.15


async def test_failed_forward_pass_poisons_no_step_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.gradient(model, 1)
    await api.failure(await api.gradient(model, 2, loss_fn="nonsense", forward_only=True))
    assert (await api.result(await api.step(model, 3)))["metrics"]["grad_norm"] > 0


async def test_malformed_step_fails_in_its_place_and_keeps_the_order_on_fakes(api: Api) -> None:
    model = await api.model()
    api.trainer.hold.clear()
    gradient = await api.gradient(model, 1)
    bodies: list[dict[str, Any]] = [
        {"adam_params": {"learning_rate": "fast"}},
        {"adam_params": {"learning_rate": 0.1, "beta1": 1.5}},
        {"adam_params": {"learning_rate": -0.1}},
        {"adam_params": None, "surprise": 1},
    ]
    requests = [
        await api.submit("optim_step", {"model_id": model, "seq_id": seq_id, **body})
        for seq_id, body in enumerate(bodies, 2)
    ]
    good = await api.step(model, 6)
    api.trainer.hold.set()
    await api.result(gradient)
    for request, field in zip(requests, ["learning_rate", "beta1", "learning_rate", "surprise"], strict=True):
        message = await api.failure(request)
        assert message.startswith("user: ")
        assert field in message
    # Nothing was taken, so the gradient is still there for the step that is right.
    assert (await api.result(good))["metrics"]["grad_norm"] > 0
    assert [call[0] for call in api.trainer.calls] == ["forward_backward", "optim_step"]


async def test_bad_datum_fails_its_own_request_and_nobody_elses_on_fakes(api: Api, make_datum: Any) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(3)]
    alone = (await api.result(await api.gradient(await api.model(), 1))).metrics[LOSS]
    api.trainer.hold.clear()
    first = await api.gradient(models[0], 1)  # keeps the trainer busy, so that what follows runs together
    nan = make_datum([5, 9, 20, 31], weights=[1.0, float("nan"), 1.0])
    requests = [
        await api.gradient(models[1], 1),
        await api.gradient(models[2], 1, [nan]),
        await api.gradient(models[0], 2),
        await api.gradient(models[2], 2),
    ]
    await api.all_prepared()
    api.trainer.hold.set()
    assert "nan" in (await api.failure(requests[1])).lower()
    for request in (first, requests[0], requests[2], requests[3]):
        assert (await api.result(request)).metrics[LOSS] == alone
    for model, seq_id in ((models[0], 3), (models[1], 2)):
        await api.result(await api.step(model, seq_id))
    assert "data[0]" in await api.failure(await api.step(models[2], 3))


async def test_models_share_a_call_of_the_trainer_and_stay_apart_on_fakes(api: Api, make_datum: Any) -> None:
    """Co-batched under one lock: the weights of each model are what they are when it trains alone."""
    session = await api.session()
    data = {0: [make_datum([5, 9, 20, 31])], 1: [make_datum([40, 41, 42])] * 3}

    async def train(models: dict[int, str]) -> dict[int, list[float]]:
        for step in range(3):
            for at, model in models.items():
                await api.gradient(model, 2 * step + 1, data[at])
            for model in models.values():
                await api.step(model, 2 * step + 2)
        return {
            at: [(await api.result(f"{model}:{2 * step + 1}")).metrics[LOSS] for step in range(3)]
            for at, model in models.items()
        }

    blocker, models = await api.model(), {at: await api.model(session, at) for at in (0, 1)}
    api.trainer.hold.clear()
    await api.gradient(blocker, 1)
    await api.until(lambda: api.trainer.entered)
    pair = asyncio.create_task(train(models))
    runs = [api.backend.runs.live(model) for model in models.values()]
    queues = [run.queue for run in runs if run is not None]
    assert len(queues) == len(models)
    await api.until(lambda: all(len(queue.commands.pending()) == 6 for queue in queues))
    await api.all_prepared()
    api.trainer.hold.set()
    together = await pair
    batches = [call[1] for call in api.trainer.calls if call[0] == "forward_backward"]
    assert any(len({adapter for adapter, _, _ in batch}) == 2 for batch in batches)
    alone: dict[int, Any] = {}
    for at in (0, 1):
        alone |= await train({at: await api.model(session, 10 + at)})
    assert together == alone


async def test_each_request_of_a_queue_has_its_own_loss_and_settings_on_fakes(api: Api, make_datum: Any) -> None:
    model, other = await api.model(), await api.model()
    tokens = [5, 9, 20, 31]
    q = [-1.0, -2.0, -0.5]
    advantages = [1.0, -2.0, 0.5]
    policy = [make_datum(tokens, logprobs=q, advantages=advantages)]
    api.trainer.hold.clear()
    blocker = await api.gradient(other, 1)
    await api.until(lambda: api.trainer.entered)  # alone
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    requests = {
        "cross_entropy": await api.gradient(model, 1, [make_datum(tokens)]),
        "importance_sampling": await api.gradient(model, 2, policy, "importance_sampling"),
        "ppo": await api.gradient(model, 3, policy, "ppo"),
        "ppo tight": await api.gradient(model, 4, policy, "ppo", loss_fn_config=config),
        "cispo": await api.gradient(model, 5, policy, "cispo"),
    }
    await api.all_prepared()
    api.trainer.hold.set()
    await api.result(blocker)
    results = {name: await api.result(request) for name, request in requests.items()}
    batches = [call[1] for call in api.trainer.calls if call[0] == "forward_backward"]
    assert max(len(batch) for batch in batches) == 5  # one call for all of them
    p = results["cross_entropy"].loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    ratio, a = np.exp(p - np.array(q)), np.array(advantages)
    expected = {
        "cross_entropy": -p.sum(),
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a).sum(),
        "ppo tight": -np.minimum(ratio * a, np.clip(ratio, 0.9, 1.1) * a).sum(),
        "cispo": -(np.clip(ratio, 0.0, 4.0) * p * a).sum(),
    }
    assert len({round(value, 6) for value in expected.values()}) == 5
    for name, value in expected.items():
        assert results[name].metrics[LOSS] == pytest.approx(value, rel=1e-5), name


async def test_metrics_and_outputs_are_of_each_request_and_in_its_order_on_fakes(api: Api, make_datum: Any) -> None:
    """Not totals of the batch, which the SDK would add up again, and not in the order of packing."""
    model, other = await api.model(), await api.model()
    lengths = [7, 2, 5, 3, 9, 4]
    data = [make_datum(list(range(10, 10 + length))) for length in lengths]
    api.trainer.hold.clear()
    blocker = await api.gradient(other, 1)
    requests = [await api.gradient(model, seq_id, data[: seq_id * 2]) for seq_id in (1, 2, 3)]
    api.trainer.hold.set()
    await api.result(blocker)
    for seq_id, request in enumerate(requests, 1):
        output = await api.result(request)
        logprobs = [o["logprobs"].to_numpy() for o in output.loss_fn_outputs]
        assert [len(values) for values in logprobs] == [length - 1 for length in lengths[: seq_id * 2]]
        assert output.metrics[LOSS] == pytest.approx(-sum(float(v.sum()) for v in logprobs), rel=1e-5)


async def test_loss_is_a_sum_so_chunks_add_up_on_fakes(api: Api, make_datum: Any) -> None:
    session = await api.session()
    data = [make_datum([5, 9, 20, 31]), make_datum([40, 41, 42]), make_datum([7, 7], weights=[-0.5])]
    whole, parts = await api.model(session, 0), await api.model(session, 1)
    total = (await api.result(await api.gradient(whole, 1, data))).metrics[LOSS]
    split = [(await api.result(await api.gradient(parts, i + 1, [d]))).metrics[LOSS] for i, d in enumerate(data)]
    assert total == pytest.approx(sum(split), rel=1e-6)
    norms = [(await api.result(await api.step(m, s)))["metrics"]["grad_norm"] for m, s in ((whole, 2), (parts, 4))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


async def test_one_model_with_much_queued_does_not_keep_others_waiting_on_fakes(api: Api) -> None:
    session = await api.session()
    busy, other = await api.model(session, 0), await api.model(session, 1)
    api.trainer.hold.clear()
    for step in range(30):
        await api.gradient(busy, 2 * step + 1)
        await api.step(busy, 2 * step + 2)
    late = await api.gradient(other, 1)
    await api.all_prepared()
    api.trainer.hold.set()
    await api.result(late)
    ran = [item for call in api.trainer.calls if call[0] == "forward_backward" for item in call[1]]
    assert [adapter for adapter, _, _ in ran].index(other) <= 3


async def test_model_in_creation_takes_commands_in_order_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs before the adapter is there, however long that takes."""
    model, session = await api.model(), await api.session()
    path = await api.save(model, 1, "a")
    go_on = threading.Event()
    original = api.backend.store.read_checkpoint

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(api.backend.store, "read_checkpoint", slow)
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    creation = await api.submit("load_weights", body)
    gradient = await api.gradient(f"{session}:train:0", 1)
    step = await api.step(f"{session}:train:0", 2)
    await api.result(await api.gradient(model, 2))  # others go on
    early = await api.post("get_info", {"model_id": f"{session}:train:0"})
    assert early.status_code == 404
    assert "being created" in early.json()["detail"]
    go_on.set()
    for request in (creation, gradient, step):
        await api.result(request)
    await api.ok("get_info", {"model_id": f"{session}:train:0"})


async def test_trainer_that_breaks_its_contract_fails_the_batch_and_hangs_nobody_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(2)]
    original = api.trainer.forward_backward

    def broken(how: str) -> Any:
        def run(work: Any) -> Any:
            results = original(work)
            if how == "raises":
                raise ZeroDivisionError("no such luck")
            if how == "too few":
                return results[:-1]
            for result in results:
                result.metrics["loss:sum"] = "much"
            return results

        return run

    for seq_id, how in enumerate(("raises", "too few", "wrong type"), 1):
        monkeypatch.setattr(api.trainer, "forward_backward", broken(how))
        requests = [await api.gradient(model, 2 * seq_id - 1) for model in models]
        for request in requests:
            assert (await api.failure(request)).startswith("server: ")
        monkeypatch.setattr(api.trainer, "forward_backward", original)
        for model in models:
            assert "discarded" in await api.failure(await api.step(model, 2 * seq_id))
    assert await api.healthy()


async def test_unknown_base_name_of_one_copy_is_no_hindrance_on_fakes(start_api: StartApi) -> None:
    """Two names of one copy of the weights: what was saved under one loads under the other."""
    api = await start_api(models=("fake/bigram=same", "fake/alias=same"))
    session = await api.session()
    model = await api.model(session, 0, base_model="fake/alias")
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2))
    path = await api.save(model, 3, "a")
    want = await loss(api, model, 4)
    for number, name in enumerate(("fake/alias", "fake/bigram", None), 1):
        body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True}
        await api.result(await api.submit("load_weights", {**body, "base_model": name} if name else body))
        assert await loss(api, f"{session}:train:{number}", 1) == pytest.approx(want, rel=1e-12)
    info = await api.ok("get_info", {"model_id": f"{session}:train:2"})
    assert info["model_data"]["model_name"] == "fake/bigram"
    sampler = await api.named(model, 5, "a")
    for number, name in enumerate(("fake/alias", "fake/bigram")):
        body = {"session_id": session, "sampling_session_seq_id": number, "model_path": sampler, "base_model": name}
        await api.ok("create_sampling_session", body)


@pytest.mark.mutation(
    "checkpoint-of-another-base-accepted",
    "check_base",
    "    if record.base_model not in base.names:\n",
    "    if False:\n",
)
async def test_checkpoint_of_another_base_is_refused_on_fakes(start_api: StartApi) -> None:
    api = await start_api(models=("fake/bigram", "fake/other"))
    session = await api.session()
    model = await api.model(session, 0, base_model="fake/other")
    path, sampler = await api.save(model, 1, "a"), await api.named(model, 2, "a")
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True, "base_model": "fake/bigram"}
    answer = await api.post("load_weights", body)
    assert answer.status_code == 400
    assert "fake/other" in answer.json()["detail"]
    target = await api.model(session, 2)
    message = await api.failure(
        await api.submit("load_weights", {"model_id": target, "seq_id": 1, "path": path, "optimizer": True})
    )
    assert "fake/other" in message
    body = {
        "session_id": session,
        "sampling_session_seq_id": 0,
        "model_path": sampler,
        "base_model": "fake/bigram",
    }
    assert "fake/other" in (await api.post("create_sampling_session", body)).json()["detail"]


async def test_load_is_a_models_first_request_or_refused_on_fakes(api: Api) -> None:
    session = await api.session()
    source = await api.model(session, 0)
    await api.result(await api.gradient(source, 1))
    await api.result(await api.step(source, 2))
    path, want = await api.save(source, 3, "a"), await loss(api, source, 4)
    target = await api.model(session, 1)
    body = {"model_id": target, "seq_id": 1, "path": path, "optimizer": True}
    await api.result(await api.submit("load_weights", body))
    assert await loss(api, target, 2) == pytest.approx(want, rel=1e-12)
    assert "first request" in await api.failure(await api.submit("load_weights", {**body, "seq_id": 3}))
    narrow = await api.model(session, 2, lora_config={"rank": 8})
    assert "rank 4" in await api.failure(await api.submit("load_weights", {**body, "model_id": narrow}))


async def test_text_chunks_equal_their_concatenation_on_fakes(api: Api) -> None:
    model = await api.model()
    split = ModelInput(chunks=(EncodedTextChunk(tokens=[5]), EncodedTextChunk(tokens=[9, 20])))
    inputs = {"target_tokens": [9, 20, 31]}
    data = [
        Datum(model_input=split, loss_fn_inputs=inputs),
        Datum(model_input=ModelInput.from_ints([5, 9, 20]), loss_fn_inputs=inputs),
    ]
    outputs = (await api.result(await api.gradient(model, 1, data))).loss_fn_outputs
    assert outputs[0]["logprobs"] == outputs[1]["logprobs"]
