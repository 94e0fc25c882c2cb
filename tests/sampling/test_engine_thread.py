"""The engine thread: cancelled requests, several engines, exceptions in a step, the end."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.vllm_engine.engine_thread import EngineRequest, EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import InternalError, SamplingParams

TEXT = list(range(20, 60))


def unfinished(engine: Any) -> int:
    return int(engine.get_num_unfinished_requests())


async def wait_until(condition: Callable[[], Any], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_cancelling_a_sample_frees_its_slots_and_hurts_nobody(text: Any) -> None:
    async def count() -> int:
        return await asyncio.wrap_future(text.sampler._thread.call(text.sampler._engine, unfinished))

    async def equals(n: int) -> bool:
        return await count() == n

    long = SampleWork(text.prompt(TEXT), None, SamplingParams(max_tokens=900, stop=()), num_samples=5)
    task, other = (asyncio.create_task(text.sampler.sample(work)) for work in (long, long))
    await wait_until(lambda: equals(10))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: equals(5))
    assert len((await other).sequences) == 5
    assert await count() == 0


async def test_a_request_cancelled_before_it_was_admitted_never_runs(text: Any) -> None:
    gate = threading.Event()
    blocked = text.sampler._thread.call(text.sampler._engine, lambda _: gate.wait(10))
    task = asyncio.create_task(text.sampler.sample(SampleWork(text.prompt(TEXT), None, SamplingParams(stop=()))))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gate.set()
    await asyncio.wrap_future(blocked)
    assert await asyncio.wrap_future(text.sampler._thread.call(text.sampler._engine, unfinished)) == 0


async def test_engines_of_one_process_sample_side_by_side(text: Any, untied: Any, vl: Any, vl25: Any) -> None:
    async def check(served: Any, seed: int) -> None:
        prompt = served.prompt(TEXT[seed:])
        work = SampleWork(prompt, None, SamplingParams(max_tokens=10, seed=seed, stop=()))
        (sequence,) = (await served.sampler.sample(work)).sequences
        served.same(sequence.logprobs, served.hf.logprobs(prompt, sequence.tokens))

    await asyncio.gather(*(check(served, seed) for seed in range(5) for served in (text, untied, vl, vl25)))


@pytest.mark.more
async def test_an_exception_in_a_step_fails_what_was_in_flight_and_the_engine_comes_back(
    text: Any, untied: Any, tmp_path: Path
) -> None:
    thread = text.sampler._thread
    sampler = VLLMSampler(text.options, thread)
    adapter = text.adapter(tmp_path / "v1", r"self_attn\.q_proj$", 4)
    prompt = text.prompt(TEXT)
    scoring = SampleWork(prompt, adapter.version, SamplingParams(max_tokens=1), prompt_logprobs=True)
    before = (await sampler.sample(scoring)).prompt_logprobs
    assert before is not None

    def break_step(engine: Any) -> None:
        def step() -> None:
            raise RuntimeError("broken on purpose")

        engine.step = step

    bystander = asyncio.create_task(
        untied.sampler.sample(SampleWork(untied.prompt(TEXT), None, SamplingParams(max_tokens=200, stop=())))
    )
    await asyncio.wrap_future(thread.call(sampler._engine, break_step))
    long = SampleWork(prompt, adapter.version, SamplingParams(max_tokens=300, stop=()))
    for result in await asyncio.gather(*(sampler.sample(long) for _ in range(3)), return_exceptions=True):
        assert isinstance(result, InternalError)
        assert "broken on purpose" in str(result)
    assert sampler._engine.restarts == 1
    # The adapter is read again.
    after = (await sampler.sample(scoring)).prompt_logprobs
    assert after is not None
    text.same(after[1:], before[1:])
    assert (await bystander).sequences[0].tokens.size == 200
    await sampler.close()
    with pytest.raises(InternalError):
        await sampler.sample(long)


async def test_building_an_engine_leaves_the_process_as_it_was(text: Any) -> None:
    import os
    import random

    import torch

    def state() -> Any:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        threads = torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()
        generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
        return environment, threads, generators, torch.get_default_dtype(), torch.is_grad_enabled()

    before = state()
    sampler = VLLMSampler(text.options, text.sampler._thread)
    assert state() == before
    await sampler.close()
    assert state() == before


async def test_closing_one_engine_leaves_the_others_and_the_process_alone(text: Any) -> None:
    """vLLM's own shutdown would destroy the distributed groups that all engines of a process share."""
    import torch.distributed

    sampler = VLLMSampler(text.options, text.sampler._thread)
    running = asyncio.create_task(
        sampler.sample(SampleWork(text.prompt(TEXT), None, SamplingParams(max_tokens=900, stop=())))
    )
    await asyncio.sleep(0.05)
    await sampler.close()
    with pytest.raises(InternalError, match="stopped"):
        await running
    assert torch.distributed.is_initialized()
    prompt = text.prompt(TEXT)
    text.same(await text.score(prompt), text.hf.prompt_logprobs(prompt))


@dataclass
class FakeVLLM:
    """Finishes every request in its third step; `fail` is raised by the next step. A request whose parameters are
    "streamed" has an output in each."""

    fail: Exception | None = None
    requests: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    streamed: set[str] = field(default_factory=set)

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any) -> None:
        if params == "refused":
            raise ValueError("refused")
        self.requests[request_id] = 0
        self.streamed |= {request_id} if params == "streamed" else set()

    def abort_request(self, ids: list[str]) -> None:
        for request_id in ids:
            del self.requests[request_id]

    def step(self) -> list[Any]:
        self.steps += 1
        if self.fail:
            raise self.fail
        done = []
        for request_id in list(self.requests):
            self.requests[request_id] += 1
            finished = self.requests[request_id] == 3
            if finished or request_id in self.streamed:
                done.append(SimpleNamespace(request_id=request_id, finished=finished))
            if finished:
                del self.requests[request_id]
        return done


@pytest.fixture
def fakes() -> Any:
    """A thread with one engine on fakes: (thread, engine, every FakeVLLM that was built)."""
    built: list[FakeVLLM] = []

    def build() -> FakeVLLM:
        built.append(FakeVLLM())
        return built[-1]

    thread = EngineThread()
    engine = thread.add_engine("fake", build, lambda _: None).result(10)
    yield thread, engine, built
    thread.stop()


def submit(thread: EngineThread, engine: Any, *params: Any, lora: str | None = None) -> Future[list[Any]]:
    request = EngineRequest("prompt", params or ("params",), None if lora is None else SimpleNamespace(lora_name=lora))
    return thread.submit(engine, lambda _: request)


def pause(thread: EngineThread, engine: Any) -> Callable[[], None]:
    gate = threading.Event()
    thread.call(engine, lambda _: gate.wait(10))
    return gate.set


def test_with_a_fake_engine_the_thread_sleeps_when_there_is_nothing_to_do(fakes: Any) -> None:
    thread, engine, built = fakes
    assert len(submit(thread, engine, "a", "b").result(10)) == 2
    steps = built[0].steps
    time.sleep(0.05)
    assert built[0].steps == steps


def test_with_a_fake_engine_it_rests_whenever_nothing_is_in_flight() -> None:
    thread, vllm, rests = EngineThread(), FakeVLLM(), queue.SimpleQueue[int]()
    engine = thread.add_engine("fake", lambda: vllm, lambda _: None, rest=lambda: rests.put(vllm.steps)).result(10)
    assert rests.get(timeout=10) == 0
    for steps in (3, 6):
        submit(thread, engine).result(10)
        while (found := rests.get(timeout=10)) != steps:
            assert found < steps
    thread.stop()


def test_with_a_fake_engine_a_refused_request_fails_alone_and_leaves_nothing_behind(fakes: Any) -> None:
    thread, engine, built = fakes
    go = pause(thread, engine)
    bad, good = submit(thread, engine, "a", "refused"), submit(thread, engine)
    go()
    with pytest.raises(ValueError, match="refused"):
        bad.result(10)
    assert len(good.result(10)) == 1
    assert built[0].requests == {}


@pytest.mark.mutation("culprit-takes-all-with-it", "at_fault", "    return named or groups\n", "    return groups\n")
def test_with_a_fake_engine_a_named_culprit_fails_alone_and_the_others_run_again(fakes: Any) -> None:
    thread, engine, built = fakes
    go = pause(thread, engine)
    guilty = submit(thread, engine, lora="run/7")
    innocent = [submit(thread, engine, lora="run/70"), submit(thread, engine)]
    thread.call(engine, lambda vllm: setattr(vllm, "fail", RuntimeError("Loading lora run/7 failed: no adapter")))
    go()
    with pytest.raises(InternalError, match="run/7 failed"):
        guilty.result(10)
    assert [len(future.result(10)) for future in innocent] == [1, 1]
    assert engine.restarts == 1
    assert len(built) == 2


def test_with_a_fake_engine_outputs_of_streams_come_in_each_step_and_none_begins_again(fakes: Any) -> None:
    thread, engine, _ = fakes
    outputs: list[tuple[int, bool]] = []

    def stream(on_output: Callable[[int, Any], None]) -> Future[list[Any]]:
        request = EngineRequest("prompt", ("streamed", "streamed"))
        return thread.submit(engine, lambda _: request, on_output=on_output)

    whole = stream(lambda index, output: outputs.append((index, output.finished)))
    assert len(whole.result(10)) == 2
    assert outputs == [(0, False), (1, False), (0, False), (1, False), (0, True), (1, True)]

    def fail(_: int, __: Any) -> None:
        engine.built.fail = RuntimeError("Loading lora run/7 failed: no adapter")

    go = pause(thread, engine)
    begun, guilty, other = stream(fail), submit(thread, engine, lora="run/7"), submit(thread, engine)
    go()
    for failed in (begun, guilty):
        with pytest.raises(InternalError, match="run/7 failed"):
            failed.result(10)
    assert len(other.result(10)) == 1


def test_with_a_fake_engine_an_unnamed_failure_fails_all_in_flight(fakes: Any) -> None:
    thread, engine, _ = fakes
    go = pause(thread, engine)
    futures = [submit(thread, engine) for _ in range(3)]
    thread.call(engine, lambda vllm: setattr(vllm, "fail", RuntimeError("out of luck")))
    go()
    for future in futures:
        with pytest.raises(InternalError, match="out of luck"):
            future.result(10)
    assert len(submit(thread, engine).result(10)) == 1


def test_with_a_fake_engine_that_cannot_be_built_again_the_next_request_tries() -> None:
    working = threading.Event()
    working.set()
    first = FakeVLLM()
    engines = iter([first])

    def build() -> FakeVLLM:
        if not working.is_set():
            raise RuntimeError("no memory")
        return next(engines, FakeVLLM())

    thread = EngineThread()
    engine = thread.add_engine("fake", build, lambda _: None).result(10)
    working.clear()
    thread.call(engine, lambda vllm: setattr(vllm, "fail", RuntimeError("boom")))
    for _ in range(2):
        with pytest.raises(Exception, match="no memory"):
            submit(thread, engine).result(10)
    working.set()
    assert len(submit(thread, engine).result(10)) == 1
    thread.stop()


def test_with_a_fake_engine_nobody_waits_for_ever_after_the_end(fakes: Any) -> None:
    thread, engine, _ = fakes
    go = pause(thread, engine)
    waiting = submit(thread, engine)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    go()
    with pytest.raises(InternalError, match="stopped"):
        waiting.result(10)
    stopper.join(10)
    with pytest.raises(InternalError, match="stopped"):
        submit(thread, engine).result(10)
    with pytest.raises(InternalError, match="stopped"):
        thread.call(engine, lambda _: None).result(10)


def test_an_exception_while_a_request_is_ended_starts_the_engine_again(fakes: Any) -> None:
    """The thread would end, and the server would never sample again. Others start over."""
    thread, engine, built = fakes

    def step() -> list[Any]:
        time.sleep(0.002)
        return []

    def abort(ids: list[str]) -> None:
        raise IndexError("broken on purpose")

    built[0].step, built[0].abort_request = step, abort
    cancelled, other = submit(thread, engine), submit(thread, engine)
    end = time.monotonic() + 10
    while len(engine.in_flight) < 2:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert cancelled.cancel()
    assert len(other.result(10)) == 1
    assert len(built) == 2
    assert engine.restarts == 1
    assert len(submit(thread, engine).result(10)) == 1
