"""Advantages of the trajectories of one group: how much better each is than the others.

Each function takes the trajectories of one group and returns one advantage per trajectory, or one per turn of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tinker_local.client.rl.trajectory import Trajectory
from tinker_local.types import InvalidRequestError

Advantage: TypeAlias = float | Sequence[float]
Advantages: TypeAlias = Callable[[Sequence[Trajectory]], Sequence[Advantage]]

_ROUNDING = 1e-12
"""Relative to the summed rewards: differences up to this count as rounding."""


def centered_returns(trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """Return minus the group's mean: GRPO without the division by the deviation, which favours easy and hard groups.

    Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025, section 3.2.
    """
    return list(map(float, _centered([_rewards(trajectory) for trajectory in trajectories])))


def normalized_returns(trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """Return minus the group's mean, over its standard deviation: GRPO.

    Shao et al., "DeepSeekMath", 2024, section 4.1.2. Zero in a group whose returns are equal. The deviation is that of
    the population: squares are divided by the group's size.
    """
    centered = _centered([_rewards(trajectory) for trajectory in trajectories])
    if not centered.any():
        return [0.0] * len(centered)
    centered = centered / np.abs(centered).max()  # keeps squares of very large and very small numbers in range
    return list(map(float, centered / np.sqrt(np.mean(centered**2))))


def centered_returns_to_go(trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """Per turn, the rewards from that turn on, minus their mean over the trajectories that reached that turn.

    A reply gets credit only for what it can still change (policy gradient theorem; Sutton and Barto, 2018, section
    13.3). Use it for environments that give rewards along the way.
    """
    rewards = [_rewards(trajectory) for trajectory in trajectories]
    advantages: list[list[float]] = [[] for _ in rewards]
    for turn in range(max(map(len, rewards), default=0)):
        there = [index for index, values in enumerate(rewards) if turn < len(values)]
        for index, value in zip(there, _centered([rewards[index][turn:] for index in there]), strict=True):
            advantages[index].append(float(value))
    return list(advantages)


def _rewards(trajectory: Trajectory) -> list[float]:
    return [turn.reward for turn in trajectory.turns]


def _centered(rewards: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Sums of `rewards` minus their mean; exactly 0 where they differ only by rounding.

    0.1 + 0.2 - 0.3 is not 0, and the mean of three times 0.1 is not 0.1. Dividing by the deviation would turn such a
    difference into 1.
    """
    if not rewards:
        return np.zeros(0)
    largest = max(sum(map(abs, values)) for values in rewards)
    if not math.isfinite(sum(sum(map(abs, values)) for values in rewards)):
        raise InvalidRequestError("rewards: must be finite, and so must be the sum of their absolute values")
    returns = np.array([math.fsum(values) for values in rewards])
    if returns.max() - returns.min() <= _ROUNDING * largest:
        return np.zeros_like(returns)
    centered: npt.NDArray[np.float64] = returns - returns.mean()
    return centered
