"""RL that samples while it trains: the next groups run while a step is trained, on the weights that there are."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker
from tinker_local.client.rl.advantages import Advantages, centered_returns
from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.environment import Group
from tinker_local.client.rl.rollouts import AllTrajectoriesFailedError, Rollouts, rollout
from tinker_local.types import InvalidRequestError


@dataclass(frozen=True, slots=True)
class AsyncStep:
    """One step of `train_asynchronously`.

    `groups`: what it trained. `staleness`: of each, the optimizer steps between the client that it was sampled with and
    this step: the most that it can be, since tokens of in-flight clients are of those weights or newer ones
    (`weights_of_tokens` tells). `tokens`: sampled tokens of each. `waited`: seconds without anything to train.
    `seconds`: of the whole step, `waited` included. `thrown_away`: sampled tokens since the last step of failed
    trajectories and of groups that were too stale. `gradient` and `update`: None if all returns of each group were
    equal, so that there was nothing to train.
    """

    step: int
    groups: tuple[Rollouts, ...] = field(repr=False)
    staleness: tuple[int, ...]
    tokens: tuple[int, ...]
    waited: float
    seconds: float
    thrown_away: int
    gradient: tinker.ForwardBackwardOutput | None = field(repr=False)
    update: tinker.types.OptimStepResponse | None = field(repr=False)

    @property
    def mean_reward(self) -> float:
        """Mean return of the trajectories that can be trained on."""
        rewards = [each.reward for group in self.groups for each in group.trajectories if each.trainable]
        return float(np.mean(rewards))

    def metrics(self) -> dict[str, float]:
        """Numbers for `log_metrics`. `fresh_share`: of the tokens, those of staleness 1 or less."""
        tokens = np.array(self.tokens)
        stale = np.array(self.staleness)
        return {
            "reward": self.mean_reward,
            "async/staleness_mean": float(np.average(stale, weights=tokens)),
            "async/staleness_max": float(stale.max()),
            "async/fresh_share": float(tokens[stale <= 1].sum() / tokens.sum()),
            "async/waited_seconds": self.waited,
            "async/step_seconds": self.seconds,
            "async/tokens_thrown_away": float(self.thrown_away),
        }


@dataclass(slots=True, eq=False)
class _Finished:
    rollouts: Rollouts
    began: int

    @property
    def tokens(self) -> int:
        return sum(each.num_tokens for each in self.rollouts.trajectories if each.trainable)


async def train_asynchronously(
    client: tinker.TrainingClient,
    groups: Iterable[Group],
    chat: Chat,
    params: tinker.SamplingParams,
    adam: tinker.AdamParams | Callable[[int], tinker.AdamParams],
    *,
    steps: int,
    groups_per_step: int,
    steps_ahead: int = 1,
    max_staleness: int | None = None,
    in_flight: bool = True,
    advantages: Advantages = centered_returns,
    loss_fn: tinker.types.LossFnType = "ppo",
    loss_fn_config: Mapping[str, float] | None = None,
    max_turns: int | None = None,
    context_length: int | None = None,
    step_timeout: float | None = None,
    on_step: Callable[[AsyncStep], None] = lambda step: None,
) -> int:
    """Train `steps` optimizer steps on `groups`, each on `groups_per_step` of them; how many steps were taken.

    At most `groups_per_step * (steps_ahead + 1)` groups are begun and not trained at any time. A step takes those that
    were begun on the oldest weights. After it, new groups begin with a new sampling client, and nothing waits for those
    that run.

    Args:
        groups: May have no end. If it ends early, what is left is trained as a last, smaller step.
        adam: Of all steps, or a function that gives those of each step by its number, from 0.
        max_staleness: Groups that were begun more optimizer steps ago are thrown away. None: none is.
        in_flight: Running samples go on under each new version (`kind="inflight"`); otherwise each group is sampled
            from the weights of its beginning.
        advantages: As `Rollouts.data` takes it.
        loss_fn: As `Rollouts.data` takes it; a clipped one bears stale data best.
        max_turns: As `rollout` takes it.
        context_length: As `rollout` takes it.
        step_timeout: As `rollout` takes it.
        on_step: Called after each step, for example with a function that logs `AsyncStep.metrics()`.

    A group of which every trajectory has failed is replaced by the next one. Raises what a request or `on_step` raises,
    after ending all that runs, InvalidRequestError for a number, and AllTrajectoriesFailedError if as many groups as a
    step has fail in a row.
    """
    least = {"steps": (steps, 1), "groups_per_step": (groups_per_step, 1), "steps_ahead": (steps_ahead, 0)}
    if max_staleness is not None:
        least["max_staleness"] = (max_staleness, 0)
    for name, (value, bound) in least.items():
        if value < bound:
            raise InvalidRequestError(f"{name}: must be at least {bound}, not {value}")

    async def save() -> tinker.SamplingClient:
        kind: tinker.types.SamplingClientKind = "inflight" if in_flight else "snapshot"
        saved: tinker.SamplingClient = await client.save_weights_and_get_sampling_client(kind=kind)
        return saved

    async def sample(group: Group, sampler: tinker.SamplingClient) -> Rollouts:
        return await rollout(
            [group],
            sampler,
            chat,
            params,
            max_turns=max_turns,
            context_length=context_length,
            step_timeout=step_timeout,
            progress=None,
        )

    ahead = _Ahead(iter(groups), groups_per_step * (steps_ahead + 1), groups_per_step, sample)
    sampler, taken = await save(), 0
    try:
        for step in range(steps):
            began = time.monotonic()
            batch, thrown_away = await ahead.next_batch(sampler, taken, max_staleness)
            waited = time.monotonic() - began
            if not batch:
                break
            data = [datum for each in batch for datum in each.rollouts.data(advantages, loss_fn)]
            gradient = update = None
            if data:
                config = None if loss_fn_config is None else dict(loss_fn_config)
                wanted = (
                    client.forward_backward(data, loss_fn, config),
                    client.optim_step(adam(step) if callable(adam) else adam),
                )
                saved = asyncio.ensure_future(save())  # in order behind the step; nothing waits in between
                try:
                    gradient, update = [await future for future in wanted]
                    sampler = await saved
                finally:
                    saved.cancel()
            found = AsyncStep(
                step,
                tuple(each.rollouts for each in batch),
                tuple(taken - each.began for each in batch),
                tuple(each.tokens for each in batch),
                waited,
                time.monotonic() - began,
                thrown_away,
                gradient,
                update,
            )
            taken += bool(data)
            ahead.begin(sampler, taken)
            on_step(found)
    finally:
        await ahead.end()
    return taken


class _Ahead:
    """Groups that run and wait to be trained."""

    def __init__(
        self,
        source: Iterator[Group],
        most: int,
        batch: int,
        sample: Callable[[Group, tinker.SamplingClient], Coroutine[Any, Any, Rollouts]],
    ) -> None:
        self._source = source
        self._most = most
        self._batch = batch
        self._sample = sample
        self._running: dict[asyncio.Task[Rollouts], int] = {}
        self._finished: list[_Finished] = []
        self._failed_in_a_row = 0
        self._ended = False

    def begin(self, sampler: tinker.SamplingClient, step: int) -> None:
        """Fill the places with groups of `sampler`, which has the weights after `step` optimizer steps."""
        while not self._ended and len(self._running) + len(self._finished) < self._most:
            group = next(self._source, None)
            if group is None:
                self._ended = True
                return
            self._running[asyncio.create_task(self._sample(group, sampler))] = step

    async def next_batch(
        self, sampler: tinker.SamplingClient, step: int, max_staleness: int | None
    ) -> tuple[Sequence[_Finished], int]:
        """The groups of the next step, fewer only if there are no more; and the tokens that were thrown away."""
        thrown_away = 0
        while True:
            self.begin(sampler, step)
            if max_staleness is not None:
                stale = [each for each in self._finished if step - each.began > max_staleness]
                self._finished = [each for each in self._finished if each not in stale]
                thrown_away += sum(each.tokens for each in stale)
                if stale:
                    continue
            if len(self._finished) >= self._batch or not self._running:
                break
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                thrown_away += self._take(task)
        self._finished.sort(key=lambda each: each.began)
        batch, self._finished = self._finished[: self._batch], self._finished[self._batch :]
        return batch, thrown_away

    def _take(self, task: "asyncio.Task[Rollouts]") -> int:
        """Keep what `task` has sampled; how many tokens of it have failed."""
        began = self._running.pop(task)
        try:
            rollouts = task.result()
        except AllTrajectoriesFailedError:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._batch:
                raise
            return 0
        self._failed_in_a_row = 0
        self._finished.append(_Finished(rollouts, began))
        return sum(each.num_tokens for each in rollouts.trajectories if not each.trainable)

    async def end(self) -> None:
        """Cancel what runs."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
