"""What an optimizer is: the state it keeps of a vector of parameters, the settings of a step, and the step itself.

A step is written once for the trainer's tensors and the fakes' arrays. It takes the functions it computes with as `xp`:
the module `torch`, or `fakes.numpy_as_torch`, which has the same functions for NumPy. So nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinker_local.types.base import Frozen

Array = Any
"""A `torch.Tensor` or a `numpy.ndarray`; in one call all are of one kind."""


@dataclass(slots=True, eq=False)
class OptimizerState:
    """State of one flat vector of n parameters: `tensors` [n] by name; `step` counts the updates."""

    tensors: dict[str, Array]
    step: int = 0


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
        completes or, raising InvalidRequestError or an out-of-memory error, changes nothing.
    """

    name: str
    source: str
    state_names: tuple[str, ...]
    settings: type[Frozen]
    update: Callable[[Any, Array, Array, OptimizerState, Any, float], None]

    def new_state(self, xp: Any, weights: Array) -> OptimizerState:
        """The state before the first step, all zeros."""
        return OptimizerState({name: xp.zeros_like(weights) for name in self.state_names})

    def bytes_per_parameter(self, itemsize: int) -> int:
        """Bytes of a parameter, its gradient and its state, in numbers of `itemsize` bytes."""
        return (2 + len(self.state_names)) * itemsize
