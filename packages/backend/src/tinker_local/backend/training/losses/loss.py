"""What a loss is: the inputs and settings it reads, and its formula. Nothing here imports torch.

Notation of all formulas: l log-probability of the target under the model that is trained, q the input `logprobs` (the
sampler's), A `advantages`, w `weights`, r = exp(l - q), sg() a constant for the gradient. Every loss is a plain sum
over positions and data: no mean, no clamp of l - q, no repair of NaN.

A formula is written once, for the trainer's tensors and the fakes' arrays. It takes the functions it computes with as
`xp`: the module `torch`, or `fakes.numpy_as_torch`, which has the same functions for NumPy.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from tinker_local.types import InvalidRequestError

Array = Any
"""A `torch.Tensor` or a `numpy.ndarray`; in one call all are of one kind."""

Inputs = Mapping[str, Array]
Settings = Mapping[str, float]

DatumSum = Callable[[Array], Array]
"""The sum over all positions of each datum, at each of its positions: [M] to float64 [M]."""


class Terms(NamedTuple):
    """`values`: each position's part of the loss. `derivative`: of that part by the position's own l."""

    values: Array
    derivative: Array


def _no_check(settings: Settings) -> None:
    """All finite settings that are not negative will do."""


def _nothing(xp: Any, logprobs: Array, inputs: Inputs, datum_sum: DatumSum) -> Inputs:
    """The positions of a datum share nothing."""
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """One loss.

    Attributes
    ----------
    name: its `loss_fn`.
    formula: the loss as documented, in the notation above.
    source: where the formula is from; a path is a page of tinker-docs.thinkingmachines.ai.
    terms: `terms(xp, logprobs, inputs, settings)`, the formula. `logprobs` and `inputs` are flat, of one shape [M] and
        one float dtype; M runs over positions (times candidates). What it returns at masked positions is dropped, even
        NaN.
    inputs: names of the float32 inputs beside `target_tokens`.
    mask_inputs: a position is masked where all of these are exactly 0: it adds exactly 0 to loss and gradient.
    optional: the value that an absent input has everywhere.
    settings: the settings in `loss_fn_config` and their defaults.
    check: raises InvalidRequestError for complete settings that do not fit together.
    candidates: whether targets may be [N, K].
    elementwise: whether the result has each position's loss, where targets are [N].
    per_datum_input: an input that marks, by not being 0, the positions whose logprobs all positions of their datum
        depend on. They are computed first, and count as constants in the derivative.
    per_datum: `per_datum(xp, logprobs, inputs, datum_sum)`, further inputs [M] that the marked positions determine. Of
        `logprobs` only those at marked positions of data that are not wholly masked are known.
    """

    name: str
    formula: str
    source: str
    terms: Callable[[Any, Array, Inputs, Settings], Terms]
    inputs: tuple[str, ...]
    mask_inputs: tuple[str, ...]
    optional: Settings = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    check: Callable[[Settings], None] = _no_check
    candidates: bool = False
    elementwise: bool = False
    per_datum_input: str | None = None
    per_datum: Callable[[Any, Array, Inputs, DatumSum], Inputs] = _nothing

    @property
    def target_inputs(self) -> tuple[str, ...]:
        """The inputs of which one is not 0 wherever the loss depends on the target's logprob."""
        return self.mask_inputs if self.per_datum_input is None else (*self.mask_inputs, self.per_datum_input)

    def active(self, inputs: Inputs) -> Array:
        """Where a position is not masked, bool of the inputs' shape."""
        return any_of(inputs, self.mask_inputs)

    def evaluate(self, xp: Any, logprobs: Array, inputs: Inputs, settings: Settings) -> Terms:
        """`terms`, and exactly 0 at masked positions. `inputs` include those of `per_datum`."""
        active = self.active(inputs)
        values, derivative = self.terms(xp, logprobs, inputs, settings)
        return Terms(xp.where(active, values, 0.0), xp.where(active, derivative, 0.0))

    def complete_settings(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """`given` over the defaults. InvalidRequestError for unknown keys, text, negative or non-finite values, and
        for what `check` refuses."""
        for key, value in given.items():
            where = f"loss_fn_config.{key}"
            if key not in self.settings:
                known = f"it has {', '.join(self.settings)}" if self.settings else "it has no settings"
                raise InvalidRequestError(f"{where}: unknown to {self.name}; {known}")
            if isinstance(value, (str, bool)) or not math.isfinite(value):
                raise InvalidRequestError(f"{where}: must be a finite number, not {value!r}")
            if value < 0:
                raise InvalidRequestError(f"{where}: must not be negative, not {value}")
        settings = {**self.settings, **{key: float(value) for key, value in given.items()}}
        self.check(settings)
        return settings


def any_of(inputs: Inputs, names: tuple[str, ...]) -> Array:
    """Where one of the inputs of these names is not 0."""
    return reduce(or_, (inputs[name] != 0 for name in names))
