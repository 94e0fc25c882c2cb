"""The asynchronous loop: what it trains, how stale that is, what it throws away, and how it ends."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import tinker
from tinker_local.client import rl
from tinker_local.types import InvalidRequestError

from tests.rl.scripted_sampler import Countdown, Maker, Request, ScriptedSampler, make_chat

PARAMS = tinker.SamplingParams(max_tokens=8)
ADAM = tinker.AdamParams(learning_rate=0.1)


@dataclass
class FakeClient:
    """A training client whose samplers all read one script. `calls`: what it was asked, in order."""

    sampler: ScriptedSampler
    calls: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    failure: Exception | None = None

    async def _answer(self, call: str, value: Any) -> Any:
        await asyncio.sleep(0)
        if call == "optim_step" and self.failure is not None:
            raise self.failure
        return value

    def _asked(self, call: str, value: Any = None) -> Awaitable[Any]:
        self.calls.append(call)
        return self._answer(call, value)

    def forward_backward(self, data: list[tinker.Datum], loss_fn: str, config: Any = None) -> Awaitable[Any]:
        self.sizes.append(len(data))
        return self._asked(f"forward_backward {loss_fn} {config}")

    def optim_step(self, params: tinker.AdamParams) -> Awaitable[Any]:
        self.rates.append(params.learning_rate)
        return self._asked("optim_step")

    def save_weights_and_get_sampling_client(self, kind: str) -> Awaitable[Any]:
        return self._asked(f"save {kind}", self.sampler)


def rewarding(index: int) -> Countdown:
    """Every second environment of a group gives a reward of 2."""
    return Countdown(1, on_step=lambda turn: ("", 1.0 + index % 2, True, False, {}))


class Groups:
    """Groups of two without end, each with another `Maker`. `made`: all environments."""

    def __init__(self, make: Callable[[int], Any] = rewarding) -> None:
        self._make = make
        self._makers: list[Maker] = []

    def __iter__(self) -> Iterator[rl.Group]:
        while True:
            first = 2 * len(self._makers)
            self._makers.append(Maker(partial(self._made_at, first)))
            yield rl.Group(self._makers[-1], 2)

    def _made_at(self, first: int, index: int) -> Any:
        return self._make(first + index)

    @property
    def made(self) -> list[Any]:
        return [environment for each in self._makers for environment in each.made]


async def run(client: FakeClient, groups: Any, **options: Any) -> list[rl.AsyncStep]:
    steps: list[rl.AsyncStep] = []
    given: dict[str, Any] = {"steps": 4, "groups_per_step": 2, "on_step": steps.append, **options}
    taken = await rl.train_asynchronously(client, groups, make_chat(), PARAMS, ADAM, **given)  # type: ignore[arg-type]
    assert taken == client.calls.count("optim_step")
    return steps


async def test_each_step_is_a_gradient_an_update_and_an_in_flight_save_on_fakes(sampler: ScriptedSampler) -> None:
    client, groups = FakeClient(sampler), Groups()
    steps = await run(client, groups, loss_fn_config={"clip_low_threshold": 0.8})
    step = ["forward_backward ppo {'clip_low_threshold': 0.8}", "optim_step", "save inflight"]
    assert client.calls == ["save inflight", *step * 4]
    assert client.sizes == [4] * 4  # two groups of two, all with an advantage
    assert [each.step for each in steps] == [0, 1, 2, 3]
    assert all(len(each.groups) == 2 for each in steps)
    assert steps[0].metrics()["async/staleness_max"] == 0
    for each in steps:
        metrics = each.metrics()
        assert metrics["reward"] == 1.5
        assert 0 <= metrics["async/staleness_mean"] <= metrics["async/staleness_max"]
        assert metrics["async/fresh_share"] == sum(stale <= 1 for stale in each.staleness) / 2
        assert 0 <= metrics["async/waited_seconds"] <= metrics["async/step_seconds"]
        assert metrics["async/tokens_thrown_away"] == 0
    await until_closed(groups)


async def test_each_step_has_the_learning_rate_that_a_function_gives_for_it_on_fakes(sampler: ScriptedSampler) -> None:
    steps: list[rl.AsyncStep] = []
    client, groups = FakeClient(sampler), Groups()
    await rl.train_asynchronously(
        client,  # type: ignore[arg-type]
        groups,
        make_chat(),
        PARAMS,
        lambda step: tinker.AdamParams(learning_rate=1 - 0.25 * step),
        steps=3,
        groups_per_step=2,
        on_step=steps.append,
    )
    assert client.rates == [1.0, 0.75, 0.5]
    assert len(steps) == 3
    await until_closed(groups)


async def until_closed(groups: Groups) -> None:
    for _ in range(2000):
        if all(environment.closed for environment in groups.made):
            return
        await asyncio.sleep(0.01)
    raise AssertionError([environment.closed for environment in groups.made])


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_as_many_groups_run_ahead_as_are_asked_for_on_fakes(sampler: ScriptedSampler, ahead: int) -> None:
    """Those that wait are trained in the order of their weights, and none is trained twice."""
    client, groups = FakeClient(sampler), Groups()
    steps = await run(client, groups, steps=6, steps_ahead=ahead, in_flight=False)
    assert client.calls.count("save snapshot") == 7
    assert 2 * 2 * 6 <= len(groups.made) <= 2 * 2 * (6 + ahead + 1)
    staleness = [stale for each in steps for stale in each.staleness]
    assert max(staleness) >= ahead  # those of the first weights
    assert sum(staleness) <= ahead * len(staleness)  # since no more are begun
    ids = [turn.sequence_id for step in steps for group in step.groups for t in group.trajectories for turn in t.turns]
    assert len(ids) == len(set(ids)) == 24
    await until_closed(groups)


async def test_a_slow_group_holds_up_no_step_and_is_trained_or_thrown_away_on_fakes(sampler: ScriptedSampler) -> None:
    for most, thrown in (None, 0), (1, 1):
        release = asyncio.Event()
        count = itertools.count()

        async def slow(first: bool, release: asyncio.Event = release) -> str:
            if first:
                await release.wait()
            return "ok"

        def script(request: Request, count: Any = count, slow: Any = slow) -> Any:
            return slow(next(count) == 0)

        sampler.script = script
        client, groups = FakeClient(sampler), Groups()
        seen: list[rl.AsyncStep] = []

        def on_step(step: rl.AsyncStep, release: Any = release, seen: Any = seen) -> None:
            seen.append(step)
            if step.step == 3:
                sampler.loop.call_soon_threadsafe(release.set)

        await run(client, groups, steps=12, max_staleness=most, on_step=on_step)
        assert len(seen) == 12
        stalest = max(max(each.staleness) for each in seen)
        assert stalest <= 1 if thrown else stalest >= 4
        assert (sum(each.thrown_away for each in seen) > 0) is bool(thrown)
        await until_closed(groups)


async def test_groups_of_equal_returns_take_no_step_and_the_end_of_the_groups_is_the_end_on_fakes(
    sampler: ScriptedSampler,
) -> None:
    client, groups = FakeClient(sampler), Groups(lambda index: Countdown())  # each returns 2
    steps = await run(client, itertools.islice(groups, 5), steps=10)
    assert client.calls == ["save inflight"]
    assert [len(each.groups) for each in steps] == [2, 2, 1]
    assert all(each.gradient is None for each in steps)
    await until_closed(groups)


async def test_failures_are_replaced_and_counted_and_end_the_loop_if_nothing_else_comes_on_fakes(
    sampler: ScriptedSampler,
) -> None:
    def broken(index: int) -> Countdown:
        def step(turn: int) -> Any:
            if index % 8 in (2, 3, 4):  # a whole group, and half of another
                raise OSError("the browser is gone")
            return "", 1.0 + index % 2, True, False, {}

        return Countdown(1, on_step=step)

    client, groups = FakeClient(sampler), Groups(broken)
    steps = await run(client, groups, steps=4)
    assert len(steps) == 4
    assert sum(each.thrown_away for each in steps) > 0
    await until_closed(groups)

    def hopeless(index: int) -> Countdown:
        return Countdown(1, on_reset=lambda: (_ for _ in ()).throw(OSError("no display")))

    with pytest.raises(rl.AllTrajectoriesFailedError, match="no display"):
        await run(FakeClient(sampler), Groups(hopeless))


async def test_an_error_of_the_server_or_of_the_program_ends_all_that_runs_on_fakes(sampler: ScriptedSampler) -> None:
    client, groups = FakeClient(sampler, failure=RuntimeError("the server is gone")), Groups()
    with pytest.raises(RuntimeError, match="the server is gone"):
        await rl.train_asynchronously(
            client,  # type: ignore[arg-type]
            groups,
            make_chat(),
            PARAMS,
            ADAM,
            steps=3,
            groups_per_step=2,
        )
    await until_closed(groups)

    def stop(step: rl.AsyncStep) -> None:
        raise KeyError("my program")

    groups = Groups()
    with pytest.raises(KeyError, match="my program"):
        await run(FakeClient(sampler), groups, on_step=stop)
    await until_closed(groups)


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("groups_per_step", 0), ("steps_ahead", -1), ("max_staleness", -1)]
)
async def test_a_number_that_is_too_small_is_refused_by_name_on_fakes(
    sampler: ScriptedSampler, name: str, value: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}: must be at least .*, not {value}"):
        await run(FakeClient(sampler), [], **{name: value})
