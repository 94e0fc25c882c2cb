"""How far a live training run is: optimizer steps, tokens, loss, gradient norm, learning rate."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.trainer import TrainResult, TrainWork


@dataclass(frozen=True, slots=True)
class Point:
    """One optimizer step. `time`: of `time.time()`. `tokens`: positions trained on until then, images included. `loss`: the mean over the targets of this step that the loss does not mask; for cross_entropy in nats. `loss` and
    `gradient_norm` (before clipping) are None if they are not finite, or if there was no gradient."""

    step: int
    time: float
    tokens: int
    loss: float | None
    gradient_norm: float | None
    learning_rate: float | None


class RunProgress:
    """Counts what a run does on the event loop. `last`: its newest step."""

    def __init__(self) -> None:
        self.tokens = 0
        self.last: Point | None = None
        self._loss = 0.0
        self._targets = 0

    def trained(self, work: TrainWork, result: TrainResult, positions: int) -> None:
        """A forward/backward of `positions` tokens has run; its losses count for the next step."""
        self.tokens += positions
        self._loss += result.metrics.get("loss:sum", math.nan)
        self._targets += targets_of(work)

    def discarded(self) -> None:
        """The gradient since the last step was discarded."""
        self._loss, self._targets = 0.0, 0

    def stepped(self, step: int, learning_rate: float | None, metrics: Mapping[str, float]) -> Point:
        """Optimizer step number `step` was taken; `metrics` are the trainer's."""
        loss = self._loss / self._targets if self._targets else math.nan
        norm = metrics.get("grad_norm", math.nan)
        self.last = Point(step, time.time(), self.tokens, _finite(loss), _finite(norm), learning_rate)
        self.discarded()
        return self.last


def targets_of(work: TrainWork) -> int:
    """How many targets of `work` its loss does not mask."""
    loss = loss_of(work.loss_fn)
    return sum(int(loss.active(datum.loss_inputs).sum()) for datum in work.data)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
