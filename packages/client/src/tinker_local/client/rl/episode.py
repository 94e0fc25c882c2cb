"""Drives one environment (reset, prompt, reply, step, until it ends) and classifies its failures.

`Episode` knows no sampler. Both the rollouts of this package and those of the cookbook use it.
"""

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.conversation import Conversation
from tinker_local.client.rl.environment import Environment, Observation, as_messages
from tinker_local.client.rl.trajectory import Failure, FailureKind
from tinker_local.client.rl.workers import CallError, Worker, is_cancelled
from tinker_local.types import InvalidRequestError

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_STUCK_SECONDS = 2.0
"""How long `close` waits for a running call of the environment."""

_renderings = threading.BoundedSemaphore(2)
"""Maximum number of threads that render at once. Each holds the GIL for long, and the event loop needs its turn."""


class EpisodeError(Exception):
    """An episode that cannot continue; `failure` says why."""

    def __init__(self, kind: FailureKind, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the original exception (the cookbook's executors send errors between processes)."""
        return type(self), (self.failure.kind, self.failure.message)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The validated answer of an environment. `done`: it terminated or truncated the episode."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Episode:
    """Drives the environment that `make` creates and keeps its conversation. A failure is an EpisodeError of a kind:

    "environment": it raised or returned an invalid value; "observation": its observation cannot be rendered;
    "timeout": one of its calls took longer than `step_timeout` seconds.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        chat: Chat,
        *,
        step_timeout: float | None = None,
        name: str = "environment",
    ) -> None:
        self._make = make
        self._environment: Environment | None = None
        self._chat = chat
        self._step_timeout = step_timeout
        self._worker = Worker(name)
        self._closed = False
        self._first: Observation = None
        self._conversation: Conversation | None = None

    @property
    def conversation(self) -> Conversation:
        if self._conversation is None:
            raise ValueError("conversation: begin comes first")
        return self._conversation

    @property
    def num_images(self) -> int:
        """Images in the conversation so far; 0 before `begin`."""
        return 0 if self._conversation is None else self._conversation.num_images

    async def reset(self, seed: int | None) -> None:
        """Create and reset the environment; `begin` renders its observation."""
        make = self._make if inspect.iscoroutinefunction(self._make) else self._make_in_thread
        self._environment = await self._call("make", make)
        for method in ("reset", "step"):
            if not callable(getattr(self._environment, method, None)):
                raise EpisodeError("environment", f"make: returned {_shape(self._environment)}, which has no {method}")
        result = await self._call("reset", self._environment.reset, seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EpisodeError("environment", f"reset: must return (observation, info), not {_shape(result)}")
        self._first, info = result
        if not isinstance(info, Mapping):
            raise EpisodeError("environment", f"reset: info must be a mapping, not {_shape(info)}")

    async def begin(self) -> None:
        """Render the first prompt."""
        first = self._first
        self._conversation = await self._render(lambda: Conversation(self._chat, as_messages(first)))

    async def step(self, action: str) -> StepOutcome:
        """Pass the reply's text to the environment; if the episode continues, `observe` renders the answer."""
        if self._environment is None:
            raise ValueError("step: reset comes first")
        return _checked(await self._call("step", self._environment.step, action))

    async def observe(self, observation: Observation) -> None:
        """Render an observation after the reply, which gives the next prompt."""
        conversation = self.conversation
        await self._render(lambda: conversation.observe(as_messages(observation)))

    async def close(self) -> None:
        """Close the environment once, if it can be closed, and let its thread end.

        Waits up to 2 s for a call that still runs in the thread. The environment is closed after that call, even if it
        takes longer.
        """
        if self._closed:
            return
        self._closed = True
        close = getattr(self._environment, "close", None)
        try:
            if inspect.iscoroutinefunction(close) or (close is not None and not self._worker.busy):
                await self._close(close, _CLOSE_SECONDS)
            elif self._worker.busy:
                await self._close(self._close_in_thread, _STUCK_SECONDS)
        finally:
            self._worker.stop()

    async def _close(self, close: Callable[[], Any], seconds: float) -> None:
        """Errors of `close` are only logged, so that they do not cost an episode."""
        try:
            async with asyncio.timeout(seconds):
                await self._worker.call(close)
        except TimeoutError:
            logger.warning("%s: not closed within %g s", self._worker.name, seconds)
        except CallError as failed:
            logger.warning("%s: close failed: %s", self._worker.name, failed, exc_info=failed.error)

    def _make_in_thread(self) -> Any:
        made = self._make()
        if not inspect.isawaitable(made):
            self._environment = made  # at once: it must be closed even after a cancellation
        return made

    def _close_in_thread(self) -> Any:
        """Runs after any earlier call in the thread, which may be the one that creates the environment."""
        close = getattr(self._environment, "close", None)
        return None if close is None else close()

    async def _call(self, name: str, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            async with asyncio.timeout(self._step_timeout) as limit:
                result = await self._worker.call(function, *arguments, **named)
        except (CallError, TimeoutError) as error:
            if limit.expired():
                raise EpisodeError("timeout", f"{name}: took longer than {self._step_timeout} s") from error
            cause = error.error if isinstance(error, CallError) else error
            raise EpisodeError("environment", f"{name}: {error}", cause) from cause
        if is_cancelled():  # an environment that catches everything also catches the cancellation
            raise asyncio.CancelledError
        return result

    async def _render(self, render: Callable[[], Any]) -> Any:
        """Render in the environment's thread, which is idle meanwhile."""

        def rendered() -> Any:
            with _renderings:
                return None if self._closed else render()  # closed meanwhile: the result is not needed, and others wait

        try:
            return await self._worker.call(rendered)
        except CallError as failed:
            error = failed.error
            message = str(error) if isinstance(error, (InvalidRequestError, OSError)) else str(failed)
            raise EpisodeError("observation", message, error) from error


def _checked(result: Any) -> StepOutcome:
    if not isinstance(result, tuple) or len(result) != 5:
        raise EpisodeError(
            "environment", f"step: must return (observation, reward, terminated, truncated, info), not {_shape(result)}"
        )
    observation, reward, terminated, truncated, info = result
    try:
        number = float(reward)
    except Exception as error:  # a reward may have any class, and its conversion may raise anything
        raise EpisodeError("environment", f"step: the reward must be a number, not {_short(reward)}", error) from error
    if not math.isfinite(number):
        raise EpisodeError("environment", f"step: the reward must be finite, not {number}")
    if not isinstance(info, Mapping):
        raise EpisodeError("environment", f"step: info must be a mapping, not {_shape(info)}")
    return StepOutcome(observation, number, _flag("terminated", terminated), _flag("truncated", truncated), info)


def _flag(name: str, value: Any) -> bool:
    try:
        return bool(value)
    except Exception as error:
        raise EpisodeError("environment", f"step: {name} must be a bool, not {_short(value)}", error) from error


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"


def _shape(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
