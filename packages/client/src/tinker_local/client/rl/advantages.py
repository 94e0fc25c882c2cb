"""Advantages of the trajectories of one group: how much better each was than its siblings.

Each function takes the trajectories of one group and returns one advantage per trajectory, or one per turn of it.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from tinker_local.client.rl.trajectory import Trajectory

Advantage: TypeAlias = float | Sequence[float]
Advantages: TypeAlias = Callable[[Sequence[Trajectory]], Sequence[Advantage]]


def centered_returns(trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """Return minus the group's mean: GRPO without its division, which favours easy and hard groups.

    Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025, section 3.2.
    """
    returns = np.array([trajectory.reward for trajectory in trajectories])
    return [float(value) for value in returns - returns.mean()]


def normalized_returns(trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """Return minus the group's mean, over its standard deviation: GRPO.

    Shao et al., "DeepSeekMath", 2024, section 4.1.2. Zero in a group whose returns agree.
    """
    returns = np.array([trajectory.reward for trajectory in trajectories])
    deviation = returns.std()
    if deviation == 0:
        return [0.0] * len(trajectories)
    return [float(value) for value in (returns - returns.mean()) / deviation]


def centered_returns_to_go(trajectories: Sequence[Trajectory]) -> list[Advantage]:
    """Per turn, the rewards from that turn on minus their mean over the siblings that came so far.

    Credit for what a reply can still change (policy gradient theorem; Sutton and Barto, 2018, section 13.3); for
    environments that give rewards along the way.
    """
    to_go = [np.cumsum([turn.reward for turn in trajectory.turns][::-1])[::-1] for trajectory in trajectories]
    longest = max(len(values) for values in to_go)
    means = [np.mean([values[turn] for values in to_go if turn < len(values)]) for turn in range(longest)]
    return [[float(value - mean) for value, mean in zip(values, means, strict=False)] for values in to_go]
