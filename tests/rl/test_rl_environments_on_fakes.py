"""What an environment does wrong ends its own trajectory, with a reason; its siblings train. A script samples."""

import asyncio
import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tinker
from tinker_local.client import rl
from tinker_local.client.rl.episode import EpisodeError

from tests.rl.scripted_sampler import IMAGE_TOKENS, Countdown, Maker, Request, ScriptedSampler, make_chat

PARAMS = tinker.SamplingParams(max_tokens=16)


@pytest.fixture(autouse=True)
def _asyncio_has_no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    gc.freeze()  # so that the search below is for this test's garbage alone
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*arguments: Any, **named: Any) -> Any:
        raise error

    return function


class AsyncCountdown(Countdown):
    async def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


async def one_fails(
    sampler: ScriptedSampler, bad: Callable[[], Any], chat: rl.Chat | None = None, **settings: Any
) -> tuple[rl.Trajectory, list[Any]]:
    """The trajectory of `bad` in a group of four, the other three of which train as if it were not there."""
    maker = Maker(lambda index: bad() if index == 0 else Countdown())
    rollouts = await rl.rollout([rl.Group(maker, 4)], sampler, chat or make_chat(), PARAMS, **settings)
    (failed,) = [trajectory for trajectory in rollouts.trajectories if trajectory.failure]
    others = [trajectory for trajectory in rollouts.trajectories if trajectory is not failed]
    assert [(trajectory.end, trajectory.reward) for trajectory in others] == [("terminated", 2.0)] * 3
    assert not failed.trainable
    assert failed.end == "failed"
    assert failed.reason == str(failed.failure)
    assert len(rollouts.data(lambda members: [1.0] * len(members))) == 3
    assert (rollouts.stats.done, rollouts.stats.failed, rollouts.stats.reward_sum) == (4, 1, 6.0)
    assert [environment.closed for environment in maker.made if isinstance(environment, Countdown)] == [1] * len(
        [environment for environment in maker.made if isinstance(environment, Countdown)]
    )
    return failed, maker.made


ERRORS = [
    (ValueError("bad"), "ValueError: bad"),
    (KeyError("door"), "KeyError: 'door'"),
    (TimeoutError("theirs"), "TimeoutError: theirs"),
    (SystemExit(3), "SystemExit: 3"),
]


@pytest.mark.parametrize(("error", "message"), ERRORS)
@pytest.mark.parametrize("kind", [Countdown, AsyncCountdown])
async def test_an_environment_that_raises_fails_alone(
    sampler: ScriptedSampler, error: Any, message: Any, kind: Any
) -> None:
    failed, _ = await one_fails(sampler, lambda: kind(on_reset=raises(error)))
    assert failed.failure is not None
    assert failed.failure.kind == "environment"
    assert (failed.failure.message, failed.failure.error) == (f"reset: {message}", error)
    assert failed.turns == ()
    failed, _ = await one_fails(sampler, lambda: kind(on_step=lambda turn: raises(error)() if turn == 2 else None))
    assert str(failed.failure) == f"environment: step: {message}"
    assert [turn.reward for turn in failed.turns] == [1.0, 0.0]


@pytest.mark.parametrize("error", [StopIteration(5), KeyboardInterrupt(), asyncio.CancelledError("theirs")])
async def test_exceptions_that_steer_python_itself_fail_their_environment_alone(
    sampler: ScriptedSampler, error: Any
) -> None:
    failed, _ = await one_fails(sampler, lambda: Countdown(on_step=raises(error)))
    assert failed.failure is not None
    assert failed.failure.message == f"step: {type(error).__name__}: {error}"
    assert failed.failure.error is error


async def test_an_async_environment_whose_own_task_was_cancelled_fails_alone(sampler: ScriptedSampler) -> None:
    class Cancelled(AsyncCountdown):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            other = asyncio.ensure_future(asyncio.sleep(10))
            other.cancel()
            await other

    failed, _ = await one_fails(sampler, Cancelled)
    assert str(failed.failure) == "environment: step: CancelledError: "


@pytest.mark.parametrize(("error", "message"), ERRORS)
async def test_an_environment_that_cannot_be_made_fails_alone(
    sampler: ScriptedSampler, error: Any, message: Any
) -> None:
    failed, made = await one_fails(sampler, raises(error))
    assert str(failed.failure) == f"environment: make: {message}"
    assert len(made) == 3


async def test_what_is_no_environment_is_named(sampler: ScriptedSampler) -> None:
    failed, _ = await one_fails(sampler, lambda: None)
    assert failed.failure is not None
    assert failed.failure.message == "make: returned NoneType, which has no reset"


class Odd:
    """A value that neither float nor bool nor len can read."""

    def __float__(self) -> float:
        raise RuntimeError("no scalar")

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    def __repr__(self) -> str:
        return "Odd()"


STEPS = [
    (5, "step: must return (observation, reward, terminated, truncated, info), not int"),
    (("a", 1.0), "step: must return (observation, reward, terminated, truncated, info), not a tuple of 2"),
    (("a", 1.0, True, {}), "step: must return (observation, reward, terminated, truncated, info), not a tuple of 4"),
    (("a", float("nan"), True, False, {}), "step: the reward must be finite, not nan"),
    (("a", float("-inf"), True, False, {}), "step: the reward must be finite, not -inf"),
    (("a", "much", True, False, {}), "step: the reward must be a number, not str 'much'"),
    (("a", None, True, False, {}), "step: the reward must be a number, not NoneType None"),
    (("a", Odd(), True, False, {}), "step: the reward must be a number, not Odd Odd()"),
    (("a", 10**400, True, False, {}), "step: the reward must be a number, not int 1000000000"),
    (("a", 1.0, Odd(), False, {}), "step: terminated must be a bool, not Odd Odd()"),
    (
        ("a", 1.0, False, np.array([True, False]), {}),
        "step: truncated must be a bool, not ndarray array([",
    ),
    (("a", 1.0, True, False, None), "step: info must be a mapping, not NoneType"),
]


@pytest.mark.parametrize(("returned", "message"), STEPS)
async def test_a_step_of_the_wrong_shape_is_named(sampler: ScriptedSampler, returned: Any, message: Any) -> None:
    failed, _ = await one_fails(sampler, lambda: Countdown(on_step=lambda turn: returned))
    assert failed.failure is not None
    assert failed.failure.kind == "environment"
    assert failed.failure.message.startswith(message)
    assert len(failed.turns) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("hi", "reset: must return (observation, info), not str"),
        (("hi", {}, 1), "reset: must return (observation, info), not a tuple of 3"),
        (("hi", ["info"]), "reset: info must be a mapping, not list"),
    ],
)
async def test_a_reset_of_the_wrong_shape_is_named(sampler: ScriptedSampler, returned: Any, message: Any) -> None:
    class Wrong(Countdown):
        def reset(self, *, seed: int | None = None) -> Any:
            return returned

    failed, _ = await one_fails(sampler, Wrong)
    assert str(failed.failure) == f"environment: {message}"


async def test_an_environment_that_takes_no_seed_says_so(sampler: ScriptedSampler) -> None:
    class Seedless(Countdown):
        def reset(self) -> Any:  # type: ignore[override]
            return "hi", {}

    failed, _ = await one_fails(sampler, Seedless)
    assert failed.failure is not None
    assert "unexpected keyword argument 'seed'" in failed.failure.message


def closed_picture() -> PIL.Image.Image:
    picture = PIL.Image.new("RGB", (8, 8))
    picture.close()
    return picture


BROKEN = [
    (b"\x89PNG no picture", "no image that can be read (15 bytes, beginning with 89 50 4e 47"),
    (b"", "0 bytes"),
    (np.zeros((4, 4, 7), np.uint8), "not 4 x 4 x 7"),
    (np.zeros((4, 4, 3), np.float32), "must be uint8 from 0 to 255, not float32"),
    (Path("/no/such/picture.png"), "No such file"),
    (closed_picture, ""),
    (object(), "or a message with a role, not object"),
    ("half a pair: \ud800", "U+D800"),
    ({"role": "narrator", "content": "once"}, "this template knows no role narrator"),
]


@pytest.mark.parametrize(("observation", "message"), BROKEN)
@pytest.mark.parametrize("when", ["reset", "step"])
async def test_an_observation_that_cannot_be_rendered_fails_alone(
    sampler: ScriptedSampler, observation: Any, message: Any, when: Any
) -> None:
    shown = observation() if callable(observation) else observation
    failed, _ = await one_fails(sampler, lambda: Countdown(**{{"reset": "first", "step": "shown"}[when]: shown}))
    assert failed.failure is not None
    assert failed.failure.kind == "observation"
    assert message in failed.failure.message
    assert len(failed.turns) == (when == "step")


async def test_reasons_are_counted_where_their_messages_name_objects(sampler: ScriptedSampler) -> None:
    with pytest.raises(rl.AllTrajectoriesFailedError, match=r"3 x observation: .* no image that can be read"):
        await rl.rollout([rl.Group(lambda: Countdown(first=b"broken"), 3)], sampler, make_chat(), PARAMS)


async def test_the_last_observation_is_not_rendered(sampler: ScriptedSampler) -> None:
    rollouts = await rl.rollout([rl.Group(lambda: Countdown(1, shown=b"broken"))], sampler, make_chat(), PARAMS)
    assert rollouts.failures == []


async def test_an_image_in_a_chat_of_text_fails_alone(sampler: ScriptedSampler) -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    failed, _ = await one_fails(sampler, lambda: Countdown(shown=picture), chat=make_chat(images=False))
    assert failed.failure is not None
    assert failed.failure.kind == "observation"
    assert "has no image_processor to count its tokens" in failed.failure.message


async def test_expected_tokens_that_the_service_refuses_fail_alone(sampler: ScriptedSampler) -> None:
    def script(request: Request) -> Any:
        for chunk in request.prompt.chunks:
            if isinstance(chunk, tinker.types.ImageChunk) and chunk.expected_tokens != IMAGE_TOKENS:
                return tinker.TinkerError(f"expected_tokens: {chunk.expected_tokens} instead of {IMAGE_TOKENS}")
        return "ok"

    sampler.script = script
    wrong = tinker.types.ImageChunk(data=b"...", format="png", expected_tokens=9)
    failed, _ = await one_fails(sampler, lambda: Countdown(first=wrong))
    assert str(failed.failure) == "sampling: TinkerError: expected_tokens: 9 instead of 4"
    failed, _ = await one_fails(sampler, lambda: Countdown(shown=wrong))
    assert failed.failure is not None
    assert (failed.failure.kind, len(failed.turns)) == ("sampling", 1)


@pytest.mark.more
async def test_a_sync_call_that_takes_too_long_fails_alone(sampler: ScriptedSampler) -> None:
    release = threading.Event()
    maker = Maker(lambda index: Countdown(on_step=(lambda turn: release.wait(60)) if index == 0 else lambda turn: None))
    rollouts = await rl.rollout([rl.Group(maker, 4)], sampler, make_chat(), PARAMS, step_timeout=3.0)
    (failure,) = rollouts.failures
    assert str(failure) == "timeout: step: took longer than 3.0 s"
    assert rollouts.mean_reward == 2
    assert maker.made[0].closed == 0  # it is in the middle of a call
    release.set()
    deadline = time.monotonic() + 30
    while maker.made[0].closed == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert [environment.closed for environment in maker.made] == [1] * 4


async def test_an_async_call_that_takes_too_long_fails_alone(sampler: ScriptedSampler) -> None:
    class Slow(AsyncCountdown):
        async def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
            await asyncio.sleep(3600)

    failed, _ = await one_fails(sampler, Slow, step_timeout=3.0)
    assert str(failed.failure) == "timeout: reset: took longer than 3.0 s"


async def test_making_may_take_too_long_and_what_comes_of_it_is_closed(sampler: ScriptedSampler) -> None:
    release = threading.Event()

    def make() -> Countdown:
        release.wait(60)
        return Countdown()

    maker = Maker(lambda index: make())
    with pytest.raises(rl.AllTrajectoriesFailedError, match=r"1 x timeout: make: took longer than 0\.2 s"):
        await rl.rollout([rl.Group(maker, 1)], sampler, make_chat(), PARAMS, step_timeout=0.2)
    release.set()
    deadline = time.monotonic() + 30
    while [environment.closed for environment in maker.made] != [1]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [Countdown, AsyncCountdown])
async def test_errors_of_close_are_logged_only(
    sampler: ScriptedSampler, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    class Unclosable(kind):  # type: ignore[misc, valid-type]
        if kind is Countdown:

            def close(self) -> None:
                raise SystemExit("not now")
        else:

            async def close(self) -> None:  # type: ignore[misc]
                raise SystemExit("not now")

    with caplog.at_level(logging.WARNING):
        rollouts = await rl.rollout([rl.Group(Unclosable, 1)], sampler, make_chat(), PARAMS)
    assert rollouts.mean_reward == 2
    assert [record.getMessage() for record in caplog.records] == ["environment 0.0: close failed: SystemExit: not now"]


async def test_methods_may_return_awaitables_and_close_may_be_missing(sampler: ScriptedSampler) -> None:
    class Mixed:
        def reset(self, *, seed: int | None = None) -> Any:
            return self._later(("hi", {}))

        def step(self, action: str) -> Any:
            return self._later((None, np.float32(1.0), np.bool_(True), False, {"word": action}))

        async def _later(self, value: Any) -> Any:
            await asyncio.sleep(0)
            return value

    async def make() -> Any:
        return Mixed()

    makers: list[Any] = [make, lambda: make()]
    rollouts = await rl.rollout([rl.Group(maker, 2) for maker in makers], sampler, make_chat(), PARAMS)
    assert [trajectory.reward for trajectory in rollouts.trajectories] == [1.0] * 4
    assert rollouts.trajectories[0].turns[0].info == {"word": "ok"}


async def test_rendering_does_not_wait_for_asyncios_own_threads(sampler: ScriptedSampler) -> None:
    """Async environments often call `asyncio.to_thread`, and may fill its pool."""
    loop, release = asyncio.get_running_loop(), threading.Event()
    filled = [loop.run_in_executor(None, release.wait, 60) for _ in range(64)]
    try:
        rollouts = await asyncio.wait_for(rl.rollout([rl.Group(Countdown, 4)], sampler, make_chat(), PARAMS), 30)
    finally:
        release.set()
        await asyncio.gather(*filled)
    assert rollouts.mean_reward == 2


def test_an_episodes_error_travels_between_processes() -> None:
    error = EpisodeError("timeout", "step: took longer than 1.0 s", threading.ThreadError())
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.failure.kind, copy.failure.message) == ("timeout", "step: took longer than 1.0 s")
