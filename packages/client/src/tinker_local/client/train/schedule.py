"""Which rows each step trains on and with which learning rate: functions of the settings and the step alone, so that a
run that is resumed goes on as if it had never stopped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tinker_local.client.train.settings import Shape, TrainSettings
from tinker_local.types import InvalidRequestError

_HELD_OUT, _ORDER = 0, 1
"""What a random order is for; the same seed gives each its own."""


def learning_rate(step: int, total: int, peak: float, warmup: float, shape: Shape) -> float:
    """Of step `step` of `total`, counted from 1.

    With w = round(warmup * total): peak * step / w up to step w. From there "cosine" is
    peak * (1 + cos(pi * p)) / 2 and "linear" peak * (1 - p), where p = (step - 1 - w) / (total - w) is the share of the
    rest that has been done before the step. So the last step still learns, and the first one does too.
    """
    rising = round(warmup * total)
    if step <= rising:
        return peak * step / rising
    if shape == "constant":
        return peak
    done = (step - 1 - rising) / (total - rising)
    return peak * (1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2)


def _shuffled(count: int, seed: int, purpose: int, epoch: int) -> np.ndarray:
    """0 ... count - 1 in a random order, int64 [count]. Numpy promises that neither `SeedSequence` nor `RandomState`
    ever changes its numbers, so the order is the same in any version."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, purpose, epoch]))
    return np.asarray(np.random.RandomState(bits).permutation(count), np.int64)


def row_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which epoch `epoch`, counted from 0, visits `count` rows: int64 [count]."""
    return _shuffled(count, seed, _ORDER, epoch)


def held_out_count(count: int, held_out: float) -> int:
    """How many of `count` rows are held out: a share below 1, of which at least one row if it is not 0, or a number."""
    return max(1, round(held_out * count)) if 0 < held_out < 1 else int(held_out)


def split_rows(count: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and those held out (`held_out_count`), int64, each ascending.

    InvalidRequestError if nothing would be left to train on.
    """
    wanted = held_out_count(count, held_out)
    if wanted >= count:
        raise InvalidRequestError(
            f"held_out: {held_out:g} holds out {wanted} of {count} rows and leaves none to train on; hold out fewer, "
            "or 0 for none"
        )
    order = _shuffled(count, seed, _HELD_OUT, 0)
    return np.sort(order[wanted:]), np.sort(order[:wanted])


@dataclass(slots=True)
class Plan:
    """The steps of a run over the rows `train`. Each epoch visits every row once; its last step may have fewer rows."""

    train: np.ndarray
    settings: TrainSettings
    _order: tuple[int, np.ndarray] | None = field(default=None, init=False, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.settings.batch_size)

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        steps = max(1, math.ceil(self.settings.epochs * self.steps_per_epoch - 1e-9))
        return steps if self.settings.steps is None else min(steps, self.settings.steps)

    def epoch_of(self, step: int) -> int:
        """Of step `step`; both are counted from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def rows_of(self, step: int) -> Sequence[int]:
        """The rows of step `step`, counted from 1, in the order in which they are sent."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.train[row_order(len(self.train), self.settings.seed, epoch)]
        size = self.settings.batch_size
        return [int(row) for row in self._order[1][place * size : (place + 1) * size]]

    def rows_used(self) -> np.ndarray:
        """Every row that a step trains on, int64, ascending: fewer than `train` if the run ends within an epoch."""
        if self.total >= self.steps_per_epoch:
            return self.train
        order = self.train[row_order(len(self.train), self.settings.seed, 0)]
        return np.sort(order[: self.total * self.settings.batch_size])

    def learning_rate(self, step: int) -> float:
        """Of step `step`, counted from 1."""
        chosen = self.settings
        return learning_rate(step, self.total, chosen.learning_rate, chosen.warmup, chosen.shape)
