"""Many episodes at once: what is asked of the sampler, limits, cancelling, progress. The sampler reads a script."""

import asyncio
import gc
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_local.client import rl
from tinker_local.types import InvalidRequestError

from tests.rl.scripted_sampler import END, Countdown, Maker, Request, ScriptedSampler, make_chat

PARAMS = tinker.SamplingParams(max_tokens=16)
PIXELS = np.zeros((8, 8, 3), np.uint8)


def environment_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("environment")]


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread of an environment, and nothing that asyncio complains about."""
    gc.freeze()  # so that the search below is for this test's garbage alone
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    deadline = time.monotonic() + 10
    while environment_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert environment_threads() == []


async def test_512_sync_environments_run_at_once_while_a_slow_one_keeps_nobody_waiting(
    sampler: ScriptedSampler,
) -> None:
    release, others, finished = threading.Event(), threading.Barrier(511), []

    def make(index: int) -> Countdown:
        def step(turn: int) -> None:
            if index == 0:
                release.wait(200)
            else:
                others.wait(200)  # for each other, while the slow one is in its first step
            finished.append(index)

        return Countdown(on_step=step)

    maker = Maker(make)

    def progress(stats: rl.RolloutStats) -> None:
        if stats.done == 511:
            release.set()  # only the slow one is left

    rollouts = await rl.rollout([rl.Group(maker, 64)] * 8, sampler, make_chat(), PARAMS, progress=progress)
    assert release.is_set()
    assert finished[-2:] == [0, 0]
    assert [len(group) for group in rollouts.groups] == [64] * 8
    assert all(trajectory.end == "terminated" and trajectory.reward == 2 for trajectory in rollouts.trajectories)
    assert [len(environment.threads) for environment in maker.made] == [1] * 512
    assert [environment.closed for environment in maker.made] == [1] * 512


class AsyncCountdown(Countdown):
    """The same without threads."""

    delay: Any = None

    async def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        if self.delay is not None:
            await self.delay()
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


async def test_512_async_environments_run_at_once_on_the_event_loop(sampler: ScriptedSampler) -> None:
    release, others = asyncio.Event(), asyncio.Barrier(511)
    maker = Maker(lambda index: AsyncCountdown())

    async def make() -> AsyncCountdown:
        environment = maker()
        environment.delay = release.wait if len(maker.made) == 1 else others.wait
        return environment

    def progress(stats: rl.RolloutStats) -> None:
        if stats.done == 511:
            release.set()

    async with asyncio.timeout(200):
        rollouts = await rl.rollout([rl.Group(make, 512)], sampler, make_chat(), PARAMS, progress=progress)
    assert rollouts.mean_reward == 2
    assert {thread for environment in maker.made for thread in environment.threads} == {threading.get_ident()}
    assert [environment.closed for environment in maker.made] == [1] * 512


async def test_no_more_than_max_concurrency_environments_are_open(sampler: ScriptedSampler) -> None:
    open_now, most = set(), 0

    def make(index: int) -> Countdown:
        nonlocal most
        open_now.add(index)
        most = max(most, len(open_now))

        class Counted(Countdown):
            def close(self) -> None:
                open_now.discard(index)
                super().close()

        return Counted(on_step=lambda turn: time.sleep(0.01))

    maker = Maker(make)
    await rl.rollout([rl.Group(maker, 8)] * 4, sampler, make_chat(), PARAMS, max_concurrency=5)
    assert most == 5
    assert len(maker.made) == 32


async def test_equal_first_prompts_go_as_one_request_although_rendering_takes_its_time(
    sampler: ScriptedSampler,
) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    maker = Maker(lambda index: Countdown(first=["look", picture.copy()]))
    rollouts = await rl.rollout([rl.Group(maker, 16), rl.Group(maker, 4)], sampler, make_chat(), PARAMS)
    first = [request.count for request in sampler.requests if "assistant\nok" not in request.text]
    assert sorted(first) == [4, 16]
    assert sorted(request.count for request in sampler.requests if "assistant\nok" in request.text) == [1] * 20
    names = [turn.sequence_id for trajectory in rollouts.trajectories for turn in trajectory.turns]
    assert len(set(names)) == 40  # each has a separate sample


async def test_different_first_prompts_go_apart(sampler: ScriptedSampler) -> None:
    maker = Maker(lambda index: Countdown(1, first=["ab"[index % 2], np.full((8, 8, 3), index // 2 % 2, np.uint8)]))
    rollouts = await rl.rollout([rl.Group(maker, 8)], sampler, make_chat(), PARAMS)
    assert sorted(request.count for request in sampler.requests) == [2, 2, 2, 2]
    for trajectory in rollouts.trajectories:
        prompts = [request.prompt for request in sampler.requests]
        assert trajectory.turns[0].prompt in prompts


async def test_a_slow_reset_goes_on_its_own(sampler: ScriptedSampler) -> None:
    answered = threading.Event()

    def answer(request: Any) -> str:
        answered.set()
        return "ok"

    sampler.script = answer
    maker = Maker(lambda index: Countdown(1, on_reset=(lambda: answered.wait(60)) if index == 3 else lambda: None))
    await rl.rollout([rl.Group(maker, 4)], sampler, make_chat(), PARAMS)
    assert [request.count for request in sampler.requests] == [3, 1]


async def test_a_refused_shared_request_fails_those_who_shared_it_and_no_other(sampler: ScriptedSampler) -> None:
    sampler.script = lambda request: tinker.TinkerError("no 7 today") if "bad" in request.text else "ok"
    maker = Maker(lambda index: Countdown(1, first="bad" if index < 3 else "good"))
    rollouts = await rl.rollout([rl.Group(maker, 8)], sampler, make_chat(), PARAMS)
    failed = [trajectory for trajectory in rollouts.trajectories if trajectory.failure]
    assert [str(trajectory.failure) for trajectory in failed] == ["sampling: TinkerError: no 7 today"] * 3
    assert rollouts.mean_reward == 1
    assert (rollouts.stats.done, rollouts.stats.failed, rollouts.stats.turns) == (8, 3, 5)


@pytest.mark.mutation(
    "one-seed-for-all",
    "GroupSampler._params_for",
    "% 2**64, self._index, member, turn])",
    "% 2**64, self._index, turn])",
)
async def test_with_a_seed_every_reply_has_its_own_and_again_the_same(sampler: ScriptedSampler) -> None:
    async def seeds(seed: int) -> list[int]:
        sampler.requests.clear()
        params = tinker.SamplingParams(max_tokens=16, seed=seed)
        await rl.rollout([rl.Group(Countdown, 8), rl.Group(Countdown, 8)], sampler, make_chat(), params)
        assert all(request.count == 1 for request in sampler.requests)
        seeds = [request.params.seed for request in sampler.requests]
        assert None not in seeds
        return sorted(seed for seed in seeds if seed is not None)

    first = await seeds(5)
    assert len(set(first)) == 2 * 8 * 2
    assert await seeds(5) == first
    assert not set(await seeds(6)) & set(first)
    assert len(set(await seeds(-1))) == 32


async def test_the_groups_seed_resets_every_member(sampler: ScriptedSampler) -> None:
    maker = Maker()
    await rl.rollout([rl.Group(maker, 3, seed=11), rl.Group(maker, 2)], sampler, make_chat(), PARAMS)
    assert sorted(map(str, (environment.seeds[0] for environment in maker.made))) == ["11", "11", "11", "None", "None"]


async def test_replies_stop_where_the_template_ends_them_unless_told_otherwise(sampler: ScriptedSampler) -> None:
    await rl.rollout([rl.Group(Countdown, 1)], sampler, make_chat(), PARAMS)
    assert sampler.requests[0].params.stop == [END]
    await rl.rollout([rl.Group(Countdown, 1)], sampler, make_chat(), tinker.SamplingParams(max_tokens=16, stop=["."]))
    assert sampler.requests[-1].params.stop == ["."]
    assert PARAMS.stop is None


async def test_max_turns_ends_an_episode_with_what_it_has(sampler: ScriptedSampler) -> None:
    maker = Maker(lambda index: Countdown(index + 1, shown=["more", PIXELS]))
    rollouts = await rl.rollout([rl.Group(maker, 4)], sampler, make_chat(), PARAMS, max_turns=2)
    ends = sorted((len(trajectory.turns), trajectory.end, trajectory.reason) for trajectory in rollouts.trajectories)
    assert ends == [(1, "terminated", ""), *[(2, "max_turns", "not over after 2 turns")] * 2, (2, "terminated", "")]
    assert rollouts.stats.images == 3  # the last observation of those that were cut is not rendered
    assert len(rollouts.data(loss_fn="ppo")) == 4


async def test_replies_get_what_is_left_of_the_context_and_an_episode_that_fills_it_ends(
    sampler: ScriptedSampler,
) -> None:
    rollouts = await rl.rollout(
        [rl.Group(lambda: Countdown(99, first="x", shown="yy"), 2)], sampler, make_chat(), PARAMS, context_length=100
    )
    for request in sampler.requests:
        assert request.params.max_tokens == min(16, 100 - request.prompt.length)
    for trajectory in rollouts.trajectories:
        assert trajectory.end == "context"
        assert trajectory.failure is None
        assert trajectory.trainable
        turns = len(trajectory.turns)
        assert trajectory.reason.startswith(f"the prompt of turn {turns + 1} has 1")
        assert trajectory.reason.endswith("the context 100")


async def test_the_services_refusal_of_a_full_context_ends_the_episode(sampler: ScriptedSampler) -> None:
    refusal = "Prompt length plus max_tokens exceeds the model's context window: 90 prompt tokens + 16 max_tokens > 100"
    sampler.script = lambda request: tinker.TinkerError(refusal) if request.prompt.length > 84 else "ok"
    rollouts = await rl.rollout([rl.Group(lambda: Countdown(99), 3)], sampler, make_chat(), PARAMS)
    assert {trajectory.end for trajectory in rollouts.trajectories} == {"context"}
    assert {trajectory.reason for trajectory in rollouts.trajectories} == {refusal}
    assert all(len(trajectory.turns) >= 1 and trajectory.trainable for trajectory in rollouts.trajectories)


@pytest.mark.parametrize("limit", [10, 41])
async def test_a_context_that_the_first_prompt_fills_leaves_nothing_to_train(
    sampler: ScriptedSampler, limit: int
) -> None:
    groups = [rl.Group(lambda: Countdown(first="x" * 30), 2)]
    with pytest.raises(rl.AllTrajectoriesFailedError, match=rf"2 x the prompt of turn 1 has \d+ .* context {limit}"):
        await rl.rollout(groups, sampler, make_chat(), PARAMS, context_length=limit)
    assert sampler.requests == []


async def test_if_all_fail_the_error_counts_the_reasons(sampler: ScriptedSampler) -> None:
    def reset(index: int) -> None:
        raise ValueError("cannot" if index else "will not")

    maker = Maker(lambda index: Countdown(on_reset=lambda: reset(index)))
    with pytest.raises(rl.AllTrajectoriesFailedError) as caught:
        await rl.rollout([rl.Group(maker, 3)], sampler, make_chat(), PARAMS)
    assert str(caught.value) == (
        "none of 3 trajectories can be trained on: 2 x environment: reset: ValueError: cannot; "
        "1 x environment: reset: ValueError: will not"
    )
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "max_turns: must be at least 1, not 0"),
        ({"context_length": -1}, "context_length: must be at least 1, not -1"),
        ({"max_concurrency": 0}, "max_concurrency: must be at least 1, not 0"),
        ({"step_timeout": 0.0}, "step_timeout: must be above 0 seconds, not 0.0"),
    ],
)
async def test_an_argument_out_of_range_is_named(
    sampler: ScriptedSampler, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await rl.rollout([rl.Group(Countdown)], sampler, make_chat(), PARAMS, **settings)
    assert str(caught.value) == message
    with pytest.raises(InvalidRequestError, match="groups: at least one"):
        await rl.rollout([], sampler, make_chat(), PARAMS)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("the connection is gone"), "RuntimeError: the connection is gone"),
        (asyncio.CancelledError(), "the request was cancelled by the client"),
    ],
)
async def test_whatever_a_request_raises_ends_its_own_trajectory(
    sampler: ScriptedSampler, answer: Any, message: str
) -> None:
    sampler.script = lambda request: answer if "bad" in request.text else "ok"
    maker = Maker(lambda index: Countdown(shown="bad" if index == 1 else "good"))
    rollouts = await rl.rollout([rl.Group(maker, 4)], sampler, make_chat(), PARAMS)
    (failure,) = rollouts.failures
    assert (failure.kind, failure.message) == ("sampling", message)
    assert rollouts.mean_reward == 2
    assert [environment.closed for environment in maker.made] == [1] * 4


async def test_samples_without_logprobs_or_too_few_are_failures(sampler: ScriptedSampler) -> None:
    sampler.logprobs = False
    with pytest.raises(rl.AllTrajectoriesFailedError, match="2 x sampling: the service returned no logprobs"):
        await rl.rollout([rl.Group(Countdown, 2)], sampler, make_chat(), PARAMS)
    sampler.logprobs = True
    scripted: Any = sampler
    sample = scripted.sample
    scripted.sample = lambda prompt, count, params: sample(prompt, count - 1, params)
    with pytest.raises(
        rl.AllTrajectoriesFailedError, match="2 x sampling: the service returned 1 samples instead of 2"
    ):
        await rl.rollout([rl.Group(Countdown, 2)], sampler, make_chat(), PARAMS)


async def test_stats_count_what_happened(sampler: ScriptedSampler) -> None:
    sampler.script = lambda request: "abc"
    seen: list[tuple[int, ...]] = []

    def progress(stats: rl.RolloutStats) -> None:
        seen.append((stats.total, stats.done, stats.failed, stats.turns, stats.tokens, stats.images))

    def fail(turn: int) -> None:
        raise ValueError

    maker = Maker(lambda index: Countdown(3, ["hi", PIXELS], PIXELS, on_step=fail if index == 0 else lambda turn: None))
    rollouts = await rl.rollout([rl.Group(maker, 3)], sampler, make_chat(), PARAMS, progress=progress)
    stats = rollouts.stats
    # 1 reply of the one that failed, 3 of each other; 4 tokens each (abc and the end); 1 image, and 3 of each other
    assert (stats.total, stats.done, stats.failed, stats.turns, stats.tokens, stats.images) == (3, 3, 1, 7, 28, 7)
    assert seen[-1] == (3, 3, 1, 7, 28, 7)
    assert seen == sorted(seen)
    assert len(seen) == 7  # after every reply that was answered, and after every end
    assert (stats.reward_sum, stats.mean_reward, rollouts.mean_reward) == (6, 3, 3)
    assert sum(trajectory.num_tokens for trajectory in rollouts.trajectories) == 28


async def test_what_progress_raises_comes_out_as_it_is_and_everything_is_closed(sampler: ScriptedSampler) -> None:
    def progress(stats: rl.RolloutStats) -> None:
        raise KeyError("mine")

    maker = Maker()
    with pytest.raises(KeyError, match="mine"):
        await rl.rollout([rl.Group(maker, 4)], sampler, make_chat(), PARAMS, progress=progress)
    await until(lambda: not environment_threads())  # a close that was cancelled goes on in its thread
    assert [environment.closed for environment in maker.made] == [1] * 4


async def hang(request: Request) -> str:
    await asyncio.sleep(3600)
    return "never"


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_cancelling_ends_requests_and_closes_environments(sampler: ScriptedSampler, how: str) -> None:
    sampler.script = lambda request: hang(request) if "[image]" in request.text or "go on" in request.text else "ok"
    maker = Maker(lambda index: Countdown(first=["a", PIXELS] if index % 2 else "b"))
    limit = asyncio.timeout(None)

    async def running() -> None:
        async with limit:
            await rl.rollout([rl.Group(maker, 16)], sampler, make_chat(), PARAMS)

    task = asyncio.create_task(running())
    await until(lambda: sum(request.count for request in sampler.requests) == 8 + 8 + 8)
    if how == "cancel":
        task.cancel()
    else:
        limit.reschedule(0)
    with pytest.raises(asyncio.CancelledError if how == "cancel" else TimeoutError):
        await task
    assert [environment.closed for environment in maker.made] == [1] * 16
    await until(lambda: sampler.cancelled == 1 + 8)  # the eight's shared one, and the second ones of the other eight


async def test_cancelling_leaves_stuck_calls_behind_and_closes_their_environments_when_they_return(
    sampler: ScriptedSampler,
) -> None:
    release = threading.Event()
    maker = Maker(lambda index: Countdown(on_step=lambda turn: release.wait(100) if index < 4 else None, turns=99))
    task = asyncio.create_task(rl.rollout([rl.Group(maker, 8)], sampler, make_chat(), PARAMS))
    await until(lambda: len([environment for environment in maker.made if environment.actions]) == 8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(environment.closed for environment in maker.made) == [0] * 4 + [1] * 4
    release.set()
    await until(lambda: not environment_threads())
    assert [environment.closed for environment in maker.made] == [1] * 8


async def test_an_environment_that_is_made_after_the_cancelling_is_closed(sampler: ScriptedSampler) -> None:
    release, making = threading.Event(), threading.Event()

    def make(index: int) -> Countdown:
        making.set()
        release.wait(60)
        return Countdown()

    maker = Maker(make)
    task = asyncio.create_task(rl.rollout([rl.Group(maker, 1)], sampler, make_chat(), PARAMS))
    await until(making.is_set)
    task.cancel()
    await asyncio.sleep(0.1)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [environment.closed for environment in maker.made] == [1]


async def test_an_async_environment_that_catches_the_cancelling_does_not_stop_it(sampler: ScriptedSampler) -> None:
    started = asyncio.Event()

    class Stubborn(AsyncCountdown):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            started.set()
            self.actions.append(action)
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60 if len(self.actions) == 1 else 0)
            return "go on", 0.0, len(self.actions) == 3, False, {}

    maker = Maker(lambda index: Stubborn())
    task = asyncio.create_task(rl.rollout([rl.Group(maker, 1)], sampler, make_chat(), PARAMS))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (maker.made[0].actions, maker.made[0].closed) == (["ok"], 1)


async def test_rollouts_run_side_by_side(sampler: ScriptedSampler) -> None:
    async def one(text: str) -> rl.Rollouts:
        return await rl.rollout([rl.Group(lambda: Countdown(first=text), 8)], sampler, make_chat(), PARAMS)

    for rollouts in await asyncio.gather(one("a"), one("b"), one("a")):
        assert rollouts.mean_reward == 2
        assert rollouts.stats.turns == 16


def test_rollouts_run_in_one_event_loop_after_the_other(sampler: ScriptedSampler) -> None:
    chat, group = make_chat(), rl.Group(Countdown, 8)
    for _ in range(2):
        rollouts = asyncio.run(rl.rollout([group], sampler, chat, PARAMS))
        assert rollouts.mean_reward == 2


@pytest.mark.more
async def test_rendering_large_images_leaves_the_event_loop_free(sampler: ScriptedSampler) -> None:
    """What others compute while the loop waits for its turn, in CPU time: wall time says how busy the machine is."""
    picture = np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), dtype=np.uint8)
    worst, total = 0.0, time.process_time()

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.process_time()
            await asyncio.sleep(0.002)
            worst = max(worst, time.process_time() - before)

    watching = asyncio.create_task(watch())
    await rl.rollout([rl.Group(lambda: Countdown(first=picture, shown=picture), 4)], sampler, make_chat(), PARAMS)
    total = time.process_time() - total
    watching.cancel()
    print(f"rendered for {total:.2f} s; the loop waited for at most {1000 * worst:.0f} ms of that")
    assert total > 0.5  # or the images are too small to show anything
    assert worst < 0.25


SCRIPT = r"""
import asyncio, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
import tinker
from scripted_sampler import Countdown, Maker, ScriptedSampler, make_chat
from tinker_local.client import rl

STUCK = sys.argv[2] == "stuck"

def make(index):
    def step(turn):
        if STUCK and index % 2 == 0:
            sys.stdout.write("stuck\n")
            time.sleep(3600)
        if sys.argv[2] == "failing" and index % 2 == 0:
            raise SystemExit(7)
    environment = Countdown(1 if not STUCK else 10**9, on_step=step)
    environment.close = lambda: sys.stdout.write(f"closed {index}\n")
    return environment

async def main():
    sampler = ScriptedSampler()
    rollouts = await rl.rollout(
        [rl.Group(Maker(make), 8)], sampler, make_chat(), tinker.SamplingParams(max_tokens=16)
    )
    print("mean", rollouts.mean_reward, "failures", len(rollouts.failures), flush=True)
    sampler.close()

asyncio.run(main(), debug=True)
end = time.monotonic() + 10  # a thread that was told to end may need its turn
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.01)
print("threads", threading.active_count())
"""


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def start(kind: str, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(_start_script(kind, **settings))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def _start_script(kind: str, **settings: Any) -> subprocess.Popen[bytes]:
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    command = [sys.executable, "-u", *warnings, "-c", SCRIPT, str(Path(__file__).parent), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"}, **settings)


@pytest.mark.more
def test_ctrl_c_ends_a_rollout_with_stuck_environments_and_closes_the_others(script: Any) -> None:
    process = script("stuck", stderr=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(4):
        assert process.stdout.readline() == b"stuck\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=280)  # and not after the hour for which they are stuck
    assert process.returncode == -signal.SIGINT, err.decode()
    assert sorted(out.decode().split("\n")) == ["", "closed 1", "closed 3", "closed 5", "closed 7"]
    assert err.decode().rstrip().endswith("KeyboardInterrupt")
    for complaint in ("never retrieved", "never awaited", "was destroyed", "ResourceWarning"):
        assert complaint not in err.decode()


@pytest.mark.more
def test_a_rollout_leaves_nothing_on_stderr_and_no_thread(script: Any) -> None:
    out, err = script("failing", stderr=subprocess.PIPE).communicate(timeout=280)
    lines = out.decode().splitlines()
    assert lines[-2:] == ["mean 1.0 failures 4", "threads 1"]
    assert sorted(lines[:-2]) == [f"closed {index}" for index in range(8)]
    # asyncio's debug mode names what took long on a busy machine, which is not at issue here.
    assert [line for line in err.decode().splitlines() if not line.startswith("Executing <")] == []


@pytest.mark.more
def test_on_a_terminal_a_bar_shows_what_happens(script: Any) -> None:
    terminal, stderr = pty.openpty()
    process = script("failing", stderr=stderr)
    os.close(stderr)
    shown = b""
    while True:
        try:
            shown += (block := os.read(terminal, 4096))
        except OSError:  # how a terminal says that its writers are gone
            break
        if not block:
            break
    os.close(terminal)
    process.communicate(timeout=280)
    assert process.returncode == 0
    assert b"rollout" in shown
    assert b"8/8" in shown
    assert b"failed 4" in shown
