"""Environments of this package for `tinker_cookbook.rl.train`. This module requires tinker-cookbook.

    builder = CookbookDatasetBuilder(make_groups=lambda step: [Group(...), ...], steps=100, chat=chat)
    await tinker_cookbook.rl.train.main(train.Config(dataset_builder=builder, ...))

The cookbook samples and builds the data. Prompts and replies have the same tokens as in `rollout`.
"""

import asyncio
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chz
import numpy as np
import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopReason,
)
from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.environment import Group
from tinker_local.client.rl.episode import Episode


class CookbookEnv(Env):
    """One environment, driven by the cookbook. Failures raise EpisodeError, which its rollout strategy handles.

    `max_turns`, `context_length`: an episode that reaches one of them ends, with `stop/max_turns` or
    `stop/context_overflow` among its metrics. The cookbook always asks for the `max_tokens` of its config, so
    `context_length` is the model's context length minus `max_tokens`. Numbers in the environment's info become metrics.
    """

    def __init__(
        self,
        episode: Episode,
        chat: Chat,
        seed: int | None = None,
        *,
        max_turns: int | None = None,
        context_length: int | None = None,
    ) -> None:
        self._episode = episode
        self._stop: StopCondition = chat.stop
        self._seed = seed
        self._max_turns = max_turns
        self._context_length = context_length

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        await self._episode.reset(self._seed)
        await self._episode.begin()
        if self._is_full():
            return InitialObservationOverflow(reward=0.0, metrics=_stop_metric(StopReason.MAX_TOKENS))
        return self._episode.conversation.prompt, self._stop

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        conversation = self._episode.conversation
        answer = await self._episode.step(conversation.reply(action))
        stopped: StopReason | None = None
        if answer.done:
            stopped = StopReason.COMPLETED
        elif self._max_turns is not None and conversation.turns >= self._max_turns:
            stopped = StopReason.MAX_TURNS
        else:
            await self._episode.observe(answer.observation)
            if self._is_full():
                stopped = StopReason.CONTEXT_OVERFLOW
        return StepResult(
            reward=answer.reward,
            episode_done=stopped is not None,
            next_observation=tinker.ModelInput.empty() if stopped else conversation.prompt,
            next_stop_condition=self._stop,
            metrics=_numbers(answer.info) | (_stop_metric(stopped) if stopped else {}),
        )

    def _is_full(self) -> bool:
        return self._context_length is not None and self._episode.conversation.length >= self._context_length


class CookbookGroupBuilder(EnvGroupBuilder):
    """A `Group` for the cookbook. It can be pickled if the group's `make` can (a class or function of a module)."""

    def __init__(
        self,
        group: Group,
        chat: Chat,
        *,
        max_turns: int | None = None,
        context_length: int | None = None,
        step_timeout: float | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._group = group
        self._chat = chat
        self._limits = {"max_turns": max_turns, "context_length": context_length}
        self._step_timeout = step_timeout
        self._tags = list(tags)
        self._episodes: list[Episode] = []

    async def make_envs(self) -> Sequence[Env]:
        group = self._group
        episodes = [Episode(group.make, self._chat, step_timeout=self._step_timeout) for _ in range(group.size)]
        self._episodes += episodes
        return [CookbookEnv(episode, self._chat, group.seed, **self._limits) for episode in episodes]

    async def cleanup(self) -> None:
        episodes, self._episodes = self._episodes, []
        await asyncio.gather(*(episode.close() for episode in episodes))

    def logging_tags(self) -> list[str]:
        return self._tags


class CookbookDataset(RLDataset):
    """`make_groups(step)` returns the groups of a step, for `steps` steps; `settings` go to CookbookGroupBuilder."""

    def __init__(self, make_groups: Callable[[int], Sequence[Group]], steps: int, chat: Chat, **settings: Any) -> None:
        self._make_groups = make_groups
        self._steps = steps
        self._chat = chat
        self._settings = settings

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [CookbookGroupBuilder(group, self._chat, **self._settings) for group in self._make_groups(index)]

    def __len__(self) -> int:
        return self._steps


@chz.chz
class CookbookDatasetBuilder(RLDatasetBuilder):
    """For `rl.train.Config(dataset_builder=...)`; the fields are those of CookbookDataset and CookbookGroupBuilder."""

    make_groups: Callable[[int], Sequence[Group]]
    steps: int
    chat: Chat
    max_turns: int | None = None
    context_length: int | None = None
    step_timeout: float | None = None

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        limits = {"max_turns": self.max_turns, "context_length": self.context_length}
        return CookbookDataset(self.make_groups, self.steps, self.chat, step_timeout=self.step_timeout, **limits), None


def _stop_metric(reason: StopReason) -> dict[str, float | int]:
    return {f"stop/{reason}": 1.0}


def _numbers(info: Mapping[str, Any]) -> dict[str, float | int]:
    return {key: float(value) for key, value in info.items() if isinstance(value, (numbers.Real, np.bool_))}
