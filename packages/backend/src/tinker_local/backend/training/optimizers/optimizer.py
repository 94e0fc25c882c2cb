"""What an optimizer is: the state it keeps of a vector of parameters, the settings of a step, and the step itself.

A step is written once for the trainer's tensors and the fakes' arrays. It takes the functions it computes with as `xp`:
the module `torch`, or `fakes.numpy_as_torch`, which has the same functions for NumPy. So nothing here imports torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.adapters.adapter import WEIGHTS_VECTOR
from tinker_local.types import InvalidRequestError
from tinker_local.types.base import Frozen

Array = Any
"""A `torch.Tensor` or a `numpy.ndarray`; in one call all are of one kind."""

Span = tuple[float, float]
"""The smallest and the largest number of a vector; both NaN if one is."""

TRIED_AT_ONCE = 2**20
"""Numbers of a step that are computed beside the adapter before it is taken: 4 MiB of each vector."""


@dataclass(slots=True, eq=False)
class OptimizerState:
    """State of one flat vector of n parameters: `tensors` [n] by name; `step` counts the updates."""

    tensors: dict[str, Array]
    step: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest magnitudes that a step may leave: of weights, and of the optimizer's state."""

    weights: float
    state: float


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """One optimizer.

    Attributes
    ----------
    name: the `type` in `optimizer_config`.
    source: where the update rule is from.
    state_names: names of its state tensors; in a checkpoint, `NAME.PARAMETER` is the state of one parameter matrix.
    settings: what each step is given. `AdamParams` comes as the request's `adam_params`, any other type as its
        `optimizer_params`.
    update: `update(xp, weights, gradient, state, settings, norm)` changes `weights` [n] and `state` in place, and
        `gradient` [n] not at all; `norm` is the gradient's Euclidean norm over all trained parameters. It either
        completes or, raising InvalidRequestError or an out-of-memory error, changes nothing. What it makes of a number
        depends on that number, its gradient and state, the settings and `norm` alone, so that a part of the vectors can
        be tried first.
    surely_stays_within: `surely_stays_within(limits, settings, step, norm, spans)` is true only if the next update
        leaves nothing beyond `limits`, whatever the numbers between those of `spans`, by the names of vectors. It saves
        the trial; without it, every step is tried.
    """

    name: str
    source: str
    state_names: tuple[str, ...]
    settings: type[Frozen]
    update: Callable[[Any, Array, Array, OptimizerState, Any, float], None]
    surely_stays_within: Callable[[Limits, Any, int, float, Mapping[str, Span]], bool] | None = None

    def new_state(self, xp: Any, weights: Array) -> OptimizerState:
        """The state before the first step, all zeros."""
        return OptimizerState({name: xp.zeros_like(weights) for name in self.state_names})

    def bytes_per_parameter(self, itemsize: int) -> int:
        """Bytes of a parameter, its gradient and its state, in numbers of `itemsize` bytes."""
        return (2 + len(self.state_names)) * itemsize

    def step(
        self,
        xp: Any,
        weights: Array,
        gradient: Array,
        state: OptimizerState,
        settings: Frozen,
        norm: float,
        tensors: Mapping[str, tuple[int, int]],
        limits: Limits,
    ) -> None:
        """`update`, or InvalidRequestError without any change if it would leave a number that is not finite, or beyond
        `limits`. `tensors`: where each begins and ends in the vectors."""
        if not math.isfinite(norm):
            raise InvalidRequestError(
                f"optim_step: the norm of the accumulated gradient is {norm}; the step was not taken and the gradient "
                "was discarded"
            )
        vectors = {WEIGHTS_VECTOR: weights, **state.tensors}
        spans = dict(zip(vectors, spans_of(xp, list(vectors.values())), strict=True))
        safe = self.surely_stays_within
        if safe is None or not safe(limits, settings, state.step, norm, spans):
            self._try(xp, weights, gradient, state, settings, norm, tensors, limits)
        self.update(xp, weights, gradient, state, settings, norm)

    def _try(
        self,
        xp: Any,
        weights: Array,
        gradient: Array,
        state: OptimizerState,
        settings: Frozen,
        norm: float,
        tensors: Mapping[str, tuple[int, int]],
        limits: Limits,
    ) -> None:
        """Compute the update of one part after the other, and keep only the span of each."""
        tried: list[tuple[str, str]] = []
        found: list[Array] = []
        for name, (start, stop) in tensors.items():
            for begin in range(start, stop, TRIED_AT_ONCE):
                part = slice(begin, min(begin + TRIED_AT_ONCE, stop))
                trial = OptimizerState({key: xp.clone(flat[part]) for key, flat in state.tensors.items()}, state.step)
                vectors = {WEIGHTS_VECTOR: xp.clone(weights[part]), **trial.tensors}
                self.update(xp, vectors[WEIGHTS_VECTOR], gradient[part], trial, settings, norm)
                tried += [(key, name) for key in vectors]
                found += [xp.stack(xp.aminmax(values)) for values in vectors.values()]
        beyond = []
        for (key, name), (low, high) in zip(tried, xp.stack(found).tolist(), strict=True):
            limit = limits.weights if key == WEIGHTS_VECTOR else limits.state
            if not (-limit <= low and high <= limit):  # nor if they are NaN
                beyond.append(name if key == WEIGHTS_VECTOR else f"{key} of {name}")
        if beyond := list(dict.fromkeys(beyond)):
            more = f" and of {len(beyond) - 1} more" if len(beyond) > 1 else ""
            raise InvalidRequestError(
                f"optim_step: with {settings}, values of {beyond[0]}{more} would not be finite; the step was not taken "
                "and the gradient was discarded"
            )


def spans_of(xp: Any, vectors: list[Array]) -> list[Span]:
    """The span of each, in one pass over each and without a copy; on a device, with one wait for all."""
    return [(low, high) for low, high in xp.stack([xp.stack(xp.aminmax(flat)) for flat in vectors]).tolist()]
