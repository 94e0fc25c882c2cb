"""Runs many episodes at once with async sampling: groups of environments in, groups of trajectories out."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import tinker
from tinker_local.client.rl.advantages import Advantages, centered_returns
from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.environment import Group
from tinker_local.client.rl.episode import Episode, EpisodeError
from tinker_local.client.rl.progress import Report, RolloutStats, open_progress
from tinker_local.client.rl.sample_replies import ContextOverflowError, GroupSampler
from tinker_local.client.rl.trajectory import End, Failure, Trajectory, Turn
from tinker_local.types import InvalidRequestError


class AllTrajectoriesFailedError(RuntimeError):
    """No trajectory of a rollout can be trained on; the message counts the reasons."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The trajectories, in the order of the groups. `groups[g]`: those of group g, including failed ones."""

    groups: tuple[tuple[Trajectory, ...], ...]
    stats: RolloutStats = field(repr=False)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def failures(self) -> list[Failure]:
        return [trajectory.failure for trajectory in self.trajectories if trajectory.failure is not None]

    @property
    def mean_reward(self) -> float:
        """Mean return of the trajectories that can be trained on."""
        return float(np.mean([trajectory.reward for trajectory in self.trajectories if trajectory.trainable]))

    def data(
        self,
        advantages: Advantages = centered_returns,
        loss_fn: tinker.types.LossFnType = "importance_sampling",
    ) -> list[tinker.Datum]:
        """Training data of all groups, each with the `advantages` of its trajectories.

        Failed trajectories are left out, and so are those whose advantage is 0, because they would train nothing. If
        the returns of every group are equal, the list is empty.
        """
        data: list[tinker.Datum] = []
        for group in self.groups:
            members = [trajectory for trajectory in group if trajectory.trainable]
            for trajectory, advantage in zip(members, advantages(members) if members else [], strict=True):
                if np.any(advantage):
                    data += trajectory.data(advantage, loss_fn)
        return data


async def rollout(
    groups: Sequence[Group],
    sampler: tinker.SamplingClient,
    chat: Chat,
    params: tinker.SamplingParams,
    *,
    max_turns: int | None = None,
    context_length: int | None = None,
    max_concurrency: int = 512,
    step_timeout: float | None = None,
    progress: Literal["auto"] | Report | None = "auto",
) -> Rollouts:
    """Run every environment of every group to its end, at most `max_concurrency` at once.

    Args:
        params: Sampling parameters of each reply. A `seed` gives every reply a different seed derived from it. Without
            a `stop`, a reply stops where the chat template ends it (`chat.stop`).
        max_turns: An episode ends after this many replies.
        context_length: The model's positions (`service.get_server_capabilities()`). A reply may use what the prompt
            leaves of them; an episode whose prompt fills them ends. None: the service's refusal ends it.
        step_timeout: Seconds allowed for each creation, reset and step of an environment.
        progress: "auto": a bar if stderr is a terminal; a function: called with `RolloutStats` after every turn and
            every end; None: nothing.

    A failure of an environment, an observation or a request ends only its own trajectory, whose `failure` says why.
    Cancelling ends everything: requests are cancelled and environments closed.

    Raises AllTrajectoriesFailedError if no trajectory can be trained on, InvalidRequestError for an argument, and what
    `progress` raises.
    """
    limits = {"max_turns": max_turns, "context_length": context_length, "max_concurrency": max_concurrency}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise InvalidRequestError(f"{name}: must be at least 1, not {value}")
    if step_timeout is not None and step_timeout <= 0:
        raise InvalidRequestError(f"step_timeout: must be above 0 seconds, not {step_timeout}")
    if not groups:
        raise InvalidRequestError("groups: at least one is needed")
    if params.stop is None and chat.stop:
        params = params.model_copy(update={"stop": chat.stop})
    stats = RolloutStats(total=sum(group.size for group in groups))
    slots = asyncio.Semaphore(max_concurrency)

    async def run(group: Group, index: int, member: int, replies: GroupSampler) -> Trajectory:
        async with slots:
            name = f"environment {index}.{member}"
            episode = Episode(group.make, chat, step_timeout=step_timeout, name=name)
            return await _Run(episode, group.seed, member, replies, max_turns, stats, report).run()

    with open_progress(progress, stats) as report:
        try:
            async with asyncio.TaskGroup() as tasks:
                running: list[list[asyncio.Task[Trajectory]]] = []
                for index, group in enumerate(groups):
                    replies = GroupSampler(sampler, params, index, context_length)
                    members = range(group.size)
                    running.append([tasks.create_task(run(group, index, member, replies)) for member in members])
        except ExceptionGroup as unexpected:  # each task may have raised the error of `progress`
            raise unexpected.exceptions[0] from None
    rollouts = Rollouts(tuple(tuple(task.result() for task in group) for group in running), stats)
    if not any(trajectory.trainable for trajectory in rollouts.trajectories):
        errors = (failure.error for failure in rollouts.failures)
        raise AllTrajectoriesFailedError(_reasons(rollouts.trajectories)) from next(filter(None, errors), None)
    return rollouts


@dataclass(slots=True)
class _Run:
    """One episode from reset to its end."""

    episode: Episode
    seed: int | None
    member: int
    replies: GroupSampler
    max_turns: int | None
    stats: RolloutStats
    report: Report
    turns: list[Turn] = field(default_factory=list)

    async def run(self) -> Trajectory:
        try:
            end, reason, failure = await self._until_the_end()
        finally:
            await self.episode.close()
        trajectory = Trajectory(tuple(self.turns), end, reason, failure, self.episode.num_images)
        self.stats.done += 1
        if failure is None:
            self.stats.reward_sum += trajectory.reward
        else:
            self.stats.failed += 1
        self.report(self.stats)
        return trajectory

    async def _until_the_end(self) -> tuple[End, str, Failure | None]:
        try:
            await self.episode.reset(self.seed)
            with self.replies.expected():
                await self.episode.begin()
            self.stats.images += self.episode.num_images
            while not (end := await self._turn()):
                if self.max_turns is not None and len(self.turns) >= self.max_turns:
                    return "max_turns", f"not over after {len(self.turns)} turns", None
        except ContextOverflowError as error:
            return "context", str(error), None
        except EpisodeError as error:
            return "failed", str(error.failure), error.failure
        return end, "", None

    async def _turn(self) -> End | None:
        """Sample a reply and step the environment; returns why the episode is over, if it is."""
        conversation = self.episode.conversation
        prompt = conversation.prompt
        sampled = await self.replies.reply(prompt, self.member, len(self.turns))
        tokens = tuple(sampled.tokens)
        action = conversation.reply(tokens)
        logprobs = np.asarray(sampled.logprobs, np.float32)
        turn = Turn(prompt, tokens, logprobs, sampled.sequence_id, sampled.stop_reason, action)
        self.turns.append(turn)
        self.stats.turns += 1
        self.stats.tokens += len(tokens)
        answer = await self.episode.step(action)
        self.turns[-1] = replace(turn, observation=answer.observation, reward=answer.reward, info=answer.info)
        if answer.done:
            return "terminated" if answer.terminated else "truncated"
        images = self.episode.num_images
        if self.max_turns is None or len(self.turns) < self.max_turns:
            await self.episode.observe(answer.observation)
        self.stats.images += self.episode.num_images - images
        self.report(self.stats)
        return None


def _reasons(trajectories: Sequence[Trajectory]) -> str:
    counts = Counter(re.sub(" at 0x[0-9a-f]+", "", trajectory.reason) for trajectory in trajectories)
    listed = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))
    return f"none of {len(trajectories)} trajectories can be trained on: {listed}"
