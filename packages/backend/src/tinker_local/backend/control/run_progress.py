"""How far a live training run is: optimizer steps, tokens, loss, gradient norm, learning rate."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One optimizer step. `time`: of `time.time()`. `tokens`: positions trained on until then, images included.
    `loss`: the sum of this step's losses divided by `Loss.total_weight`; for cross_entropy the nats of a token, as
    recipes of the cookbook print them. `loss` and `gradient_norm` (before clipping) are None if they are not finite, or
    if there was no gradient."""

    step: int
    time: float
    tokens: int
    loss: float | None
    gradient_norm: float | None
    learning_rate: float | None


class RunProgress:
    """Counts what a run does on the event loop.

    `tokens`: positions trained on, images included. `loss_sum`, `total_weight`: of the gradient since the last step,
    the sum of its losses and what their mean is over. `last`: the newest step.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.loss_sum = 0.0
        self.total_weight = 0.0
        self.last: Point | None = None

    def gradient_ended(self) -> None:
        """The gradient was used or discarded."""
        self.loss_sum, self.total_weight = 0.0, 0.0

    def stepped(self, step: int, learning_rate: float | None, metrics: Mapping[str, float]) -> Point:
        """Optimizer step number `step` was taken; `metrics` are the trainer's."""
        loss = self.loss_sum / self.total_weight if self.total_weight else math.nan
        norm = metrics.get("grad_norm", math.nan)
        self.last = Point(step, time.time(), self.tokens, _finite(loss), _finite(norm), learning_rate)
        self.gradient_ended()
        return self.last


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
