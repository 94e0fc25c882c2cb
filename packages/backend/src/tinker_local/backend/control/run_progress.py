"""How far a live training run is: optimizer steps, tokens, loss, gradient norm, learning rate, and how far its trainer
is from its sampler."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tinker_local.backend.control.mismatch import Mismatch, Watch, added, measures, telling


@dataclass(frozen=True, slots=True)
class Point:
    """One optimizer step. `time`: of `time.time()`. `tokens`: positions trained on until then, images included.
    `loss`: the sum of this step's losses divided by `Loss.total_weight`; for cross_entropy the nats of a token, as
    recipes of the cookbook print them. `loss` and `gradient_norm` (before clipping) are None if they are not finite, or
    if there was no gradient. `mismatch`: by group of sampled tokens and name of `mismatch.MEASURES`, in five digits;
    None if no data had the sampler's logprobs."""

    step: int
    time: float
    tokens: int
    loss: float | None
    gradient_norm: float | None
    learning_rate: float | None
    mismatch: Mapping[str, Mapping[str, float]] | None = None

    def line(self) -> dict[str, Any]:
        """For a line of JSON: the fields, without `mismatch` if it is None."""
        found = {name: getattr(self, name) for name in _FIELDS}
        if self.mismatch is not None:
            found["mismatch"] = self.mismatch
        return found


_FIELDS = tuple(field.name for field in fields(Point) if field.name != "mismatch")


class RunProgress:
    """Counts what a run does on the event loop.

    `tokens`: positions trained on, images included. `loss_sum`, `total_weight`: of the gradient since the last step,
    the sum of its losses and what their mean is over. `measured`: of each of its requests that has the sampler's
    logprobs, in order, how far they are from the trainer's; empty until a thread has computed it. `last`: the newest
    step.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.loss_sum = 0.0
        self.total_weight = 0.0
        self.measured: list[Mismatch] = []
        self._measuring: set[asyncio.Future[Any]] = set()
        self.last: Point | None = None
        self._watch = Watch()

    def gradient_ended(self) -> None:
        """The gradient was used or discarded."""
        self.loss_sum, self.total_weight, self.measured = 0.0, 0.0, []

    def measuring(self, ends: "asyncio.Future[Any]") -> None:
        """What measures one of `measured` ends with this."""
        self._measuring.add(ends)
        ends.add_done_callback(self._measuring.discard)

    async def mismatch(self) -> Mismatch:
        """Of the gradient since the last step, the groups that tell something. A request whose measurement failed has
        failed with it, and is left out."""
        if self._measuring:
            await asyncio.wait(self._measuring)
        return telling(added(self.measured)) if self.measured else {}

    def notice(self, mismatch: Mismatch) -> str | None:
        """What the log is to say of the newest step's `mismatch`, once; None: nothing."""
        return None if self.last is None else self._watch.note(self.last.step, mismatch)

    def stepped(
        self, step: int, learning_rate: float | None, metrics: Mapping[str, float], mismatch: Mismatch
    ) -> Point:
        """Optimizer step number `step` was taken; `metrics` are the trainer's, `mismatch` as of `RunProgress`."""
        loss = self.loss_sum / self.total_weight if self.total_weight else math.nan
        norm = metrics.get("grad_norm", math.nan)
        shown = {group: _rounded(measures(distance)) for group, distance in mismatch.items()}
        self.last = Point(step, time.time(), self.tokens, _finite(loss), _finite(norm), learning_rate, shown or None)
        self.gradient_ended()
        return self.last


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Five digits, so that a line of a curve stays short."""
    return {name: float(f"{value:.5g}") for name, value in values.items()}
