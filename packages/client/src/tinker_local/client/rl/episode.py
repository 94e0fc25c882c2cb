"""One environment, driven: reset, prompt, reply, step, until it ends. What fails is told apart here.

`Episode` knows no sampler: rollouts of this package and of the cookbook both drive it.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.conversation import Conversation
from tinker_local.client.rl.environment import Environment, Observation, as_messages
from tinker_local.client.rl.trajectory import Failure, FailureKind
from tinker_local.client.rl.workers import Worker
from tinker_local.types import InvalidRequestError

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0


class EpisodeError(Exception):
    """An episode that cannot go on; `failure` says why."""

    def __init__(self, kind: FailureKind, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message, error)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an environment answered, checked. `done`: it terminated or truncated the episode."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Episode:
    """Drives the environment that `make` makes and keeps its conversation. Every failure is an EpisodeError of a kind:

    "environment": it raised, or returned what no environment returns; "observation": what it shows cannot be rendered;
    "timeout": a call of it took longer than `step_timeout` seconds.
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
        self._stuck = False
        self._conversation: Conversation | None = None

    @property
    def conversation(self) -> Conversation:
        if self._conversation is None:
            raise ValueError("conversation: reset comes first")
        return self._conversation

    @property
    def num_images(self) -> int:
        """Images of the conversation so far; 0 before there is one."""
        return 0 if self._conversation is None else self._conversation.num_images

    async def reset(self, seed: int | None) -> None:
        """Make the environment, reset it and render the first prompt."""
        self._environment = await self._call("make", self._make)
        result = await self._call("reset", self._environment.reset, seed=seed)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise EpisodeError("environment", f"reset: must return (observation, info), not {_shape(result)}")
        self._conversation = await self._rendering(lambda: Conversation(self._chat, as_messages(result[0])))

    async def step(self, action: str) -> StepOutcome:
        """Hand the reply's text to the environment; what it answers is rendered by `observe` if it goes on."""
        if self._environment is None:
            raise ValueError("step: reset comes first")
        return _checked(await self._call("step", self._environment.step, action))

    async def observe(self, observation: Observation) -> None:
        """Render an observation behind the reply: the next prompt."""
        conversation = self.conversation
        await self._rendering(lambda: conversation.observe(as_messages(observation)))

    async def close(self) -> None:
        """Close the environment if it can be closed, and let its thread end; a stuck call is not waited for."""
        close = getattr(self._environment, "close", None)
        if close is not None and (inspect.iscoroutinefunction(close) or not self._stuck):
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._worker.call(close)
            except Exception:  # an episode is not lost because its environment cannot be closed
                logger.warning("closing %s failed", type(self._environment).__name__, exc_info=True)
        elif close is not None:
            self._worker.post(close)
        self._worker.stop()

    async def _call(self, name: str, function: Any, *arguments: Any, **named: Any) -> Any:
        self._stuck = True  # until it returns: whoever is cancelled meanwhile leaves it behind
        try:
            async with asyncio.timeout(self._step_timeout) as limit:
                result = await self._worker.call(function, *arguments, **named)
        except Exception as error:
            if limit.expired():
                raise EpisodeError("timeout", f"{name}: took longer than {self._step_timeout} s") from error
            self._stuck = False
            raise EpisodeError("environment", f"{name}: {type(error).__name__}: {error}", error) from error
        self._stuck = False
        return result

    async def _rendering(self, render: Any) -> Any:
        try:
            return await asyncio.to_thread(render)
        except (InvalidRequestError, OSError) as error:
            raise EpisodeError("observation", str(error), error) from error


def _checked(result: Any) -> StepOutcome:
    if not isinstance(result, tuple) or len(result) != 5:
        raise EpisodeError(
            "environment", f"step: must return (observation, reward, terminated, truncated, info), not {_shape(result)}"
        )
    observation, reward, terminated, truncated, info = result
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise EpisodeError("environment", f"step: the reward must be a number, not {reward!r:.80}", error) from error
    if not math.isfinite(number):
        raise EpisodeError("environment", f"step: the reward must be finite, not {number}")
    if not isinstance(info, Mapping):
        raise EpisodeError("environment", f"step: info must be a mapping, not {type(info).__name__}")
    return StepOutcome(observation, number, bool(terminated), bool(truncated), info)


def _shape(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
