"""What a loss is: the inputs and settings it reads, its formula, and the checks of a datum against it.

Nothing here imports torch.

Notation of all formulas: l log-probability of the target under the model that is trained, q the input `logprobs` (the
sampler's), A `advantages`, w `weights`, r = exp(l - q), sg() a constant for the gradient. Every loss is a plain sum
over positions and data: no mean, no clamp of l - q, no repair of NaN.

A formula is written once, for the trainer's tensors and the fakes' arrays. It takes the functions it computes with as
`xp`: the module `torch`, or `fakes.numpy_as_torch`, which has the same functions for NumPy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.losses.recorded import (
    FindRecord,
    check_advantages,
    check_sent,
    recorded_inputs,
)
from tinker_local.backend.training.trainer import TrainDatum
from tinker_local.types import Datum, InvalidRequestError, ProvenanceSpan, TensorData

OWN_DEFINITION = "local_definition:mean"
"""A metric, 1, of losses whose formula is this project's (`Loss.own_definition`)."""

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
    elementwise: whether the result has each position's loss, if the targets of all data are [N].
    per_datum_input: an input that marks, by not being 0, the positions whose logprobs all positions of their datum
        depend on. They are computed first, and count as constants in the derivative.
    per_datum: `per_datum(xp, logprobs, inputs, datum_sum)`, further inputs [M] that the marked positions determine. Of
        `logprobs` only those at marked positions of data that are not wholly masked are known.
    recorded: the input that marks targets which were sampled and recorded; it and `logprobs` come from the records.
        None: all inputs come from the client.
    by_spans: the input that, if absent, is 1 where the datum's spans say that the target was sampled, and 0 elsewhere.
    own_definition: whether the formula is this project's, under a name of the hosted service whose own is not public.
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
    recorded: str | None = None
    by_spans: str | None = None
    own_definition: bool = False

    @property
    def sent_inputs(self) -> tuple[str, ...]:
        """The inputs that come from the client; with `recorded`, `logprobs` may be absent."""
        return tuple(name for name in self.inputs if name != self.recorded)

    @property
    def reads_sampler(self) -> bool:
        """Whether its data have the sampler's logprobs."""
        return LOGPROBS in self.inputs

    def metrics(self, total: float) -> dict[str, float]:
        """Of a request whose loss is `total`, by `name:reduction`."""
        return {"loss:sum": total, **({OWN_DEFINITION: 1.0} if self.own_definition else {})}

    @property
    def target_inputs(self) -> tuple[str, ...]:
        """The inputs of which one is not 0 wherever the loss depends on the target's logprob."""
        further = () if self.per_datum_input in (None, *self.mask_inputs) else (self.per_datum_input,)
        return (*self.mask_inputs, *further)

    def gives_elementwise(self, data: Sequence[TrainDatum]) -> bool:
        """Whether the outputs of a request of `data` have `elementwise_loss`: those of all data or of none, because
        the SDK reads only outputs that have the same fields."""
        return self.elementwise and all(datum.target_tokens.ndim == 1 for datum in data)

    def active(self, inputs: Inputs) -> Array:
        """Where a position is not masked, bool of the inputs' shape."""
        return any_of(inputs, self.mask_inputs)

    def total_weight(self, inputs: Inputs) -> float:
        """What the mean of this loss over a datum is divided by: the sum of its weights' magnitudes, so that negative
        ones do not cancel; for a loss without weights, the number of its targets that are not masked."""
        if "weights" in self.inputs:
            return float(np.abs(inputs["weights"]).sum(dtype=np.float64))
        return float(self.active(inputs).sum())

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


# A datum against its loss ---------------------------------------------------------------------------------------------
#
# Errors name the field and have the numbers; no value is changed.


TARGETS = "target_tokens"


LOGPROBS = "logprobs"

ONES = ("weights", "mask")
"""Programs send these beside losses that do not read them. Ones change nothing, so they are taken and dropped."""


Float32Array = npt.NDArray[np.float32]


Int64Array = npt.NDArray[np.int64]


def make_train_datum(
    datum: Datum,
    rendered: RenderedInput,
    loss: Loss,
    vocab_size: int,
    where: str,
    find_record: FindRecord | None = None,
) -> TrainDatum:
    """`datum` as the trainer takes it: dense arrays of one shape, names and numbers checked.

    `rendered` is its model input of N positions. `where` prefixes messages (`data[3]`). Absent weights are ones; a
    target outside [0, vocab_size) is refused only where its logprob counts. Provenance is checked and dropped.
    `find_record`: for losses whose inputs are `recorded`.
    """
    _check_names(datum, loss, where)
    if rendered.length == 0:
        raise InvalidRequestError(f"{where}.model_input: is empty, at least one position is needed")
    targets = _targets(datum.loss_fn_inputs[TARGETS], loss, rendered.length, where)
    _check_provenance(datum, rendered.length, targets, where)
    for name in _ones_for(loss):
        _check_ones(datum, name, targets, loss, where)
    inputs = {
        name: _loss_input(datum, name, targets, loss, where)
        for name in loss.sent_inputs
        if loss.recorded is None or name in datum.loss_fn_inputs
    }
    if loss.recorded is not None:
        assert find_record is not None
        logprobs, sampled = recorded_inputs(datum, rendered.token_ids, targets, find_record, where)
        check_sent(inputs.get(LOGPROBS, logprobs), logprobs, sampled, where)
        check_advantages(inputs["advantages"], sampled, where)
        inputs |= {LOGPROBS: logprobs, loss.recorded: sampled}
    _check_vocabulary(targets, loss, inputs, vocab_size, where)
    _check_per_datum_input(loss, inputs, where)
    return TrainDatum(rendered, targets, inputs)


def check_train_datum(datum: TrainDatum, loss: Loss, where: str) -> None:
    """That names and shapes are those of `make_train_datum`, for data that was put together in another way."""
    shape = datum.target_tokens.shape
    if shape[:1] != (datum.input.length,) or len(shape) > (2 if loss.candidates else 1) or not datum.target_tokens.size:
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{TARGETS}: shape {list(shape)} for {datum.input.length} positions under "
            f"{loss.name}"
        )
    shapes = {name: values.shape for name, values in datum.loss_inputs.items()}
    if shapes != dict.fromkeys(loss.inputs, shape):
        given = ", ".join(f"{name} {list(size)}" for name, size in shapes.items()) or "nothing"
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs: {loss.name} takes {', '.join(loss.inputs)} of shape {list(shape)}, not {given}"
        )


def _check_names(datum: Datum, loss: Loss, where: str) -> None:
    known = (TARGETS, *loss.sent_inputs)
    for name in datum.loss_fn_inputs:
        if name in loss.settings:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: is one number for all positions on this server, not a tensor; "
                f"send it in loss_fn_config"
            )
        if name not in (*known, *_ones_for(loss)):
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: unknown to {loss.name}, which takes {', '.join(known)}"
            )
    for name in known:
        optional = name in loss.optional or (name == LOGPROBS and loss.recorded is not None)
        if name in datum.loss_fn_inputs or optional:
            continue
        if name != loss.by_spans:
            raise InvalidRequestError(f"{where}.loss_fn_inputs.{name}: is missing, {loss.name} needs it")
        if datum.loss_fn_input_spans is None:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: is missing, {loss.name} needs it, or provenance spans, which say what "
                "was sampled"
            )


def _ones_for(loss: Loss) -> tuple[str, ...]:
    """`ONES`, except for a loss that reads weights: a mask beside them may mean anything."""
    return () if "weights" in loss.inputs else ONES


def _check_ones(datum: Datum, name: str, targets: Int64Array, loss: Loss, where: str) -> None:
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None:
        return
    field_name = f"{where}.loss_fn_inputs.{name}"
    values = _of_targets_shape(tensor, targets, field_name)
    if (values != 1).any():
        at = tuple(int(i) for i in np.argwhere(values != 1)[0])
        masks = [f"{mask} 0" for mask in loss.mask_inputs if mask in loss.sent_inputs]
        instead = f"; to leave out a position, make its {' and '.join(masks)}" if masks else ""
        raise InvalidRequestError(
            f"{field_name}: {values[at]} at position {_index(at)}, but {loss.name} has no {name}, so only 1 is "
            f"accepted{instead}"
        )


def _of_targets_shape(tensor: TensorData, targets: Int64Array, field_name: str) -> npt.NDArray[Any]:
    values = tensor.to_numpy()
    if values.shape != targets.shape:
        raise InvalidRequestError(f"{field_name}: shape {list(values.shape)}, but {TARGETS} has {list(targets.shape)}")
    return values


def _targets(tensor: TensorData, loss: Loss, length: int, where: str) -> Int64Array:
    """int64 [N] or [N, K]; a sparse tensor's unlisted cells are token 0."""
    field_name = f"{where}.loss_fn_inputs.{TARGETS}"
    if tensor.dtype != "int64":
        raise InvalidRequestError(f"{field_name}: must be int64, not {tensor.dtype}")
    targets = np.asarray(tensor.to_numpy(), dtype=np.int64)
    allowed = (1, 2) if loss.candidates else (1,)
    if targets.ndim not in allowed:
        wanted = "[N] or [N, K]" if loss.candidates else "[N]"
        raise InvalidRequestError(f"{field_name}: {loss.name} takes shape {wanted}, not {list(targets.shape)}")
    if targets.shape[0] != length:
        raise InvalidRequestError(
            f"{field_name}: {targets.shape[0]} rows for a model_input of {length} positions (images included)"
        )
    if targets.size == 0:
        raise InvalidRequestError(f"{field_name}: shape {list(targets.shape)} holds no target")
    return targets


def _loss_input(datum: Datum, name: str, targets: Int64Array, loss: Loss, where: str) -> Float32Array:
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None and name == loss.by_spans and datum.loss_fn_input_spans is not None:
        spans = datum.loss_fn_input_spans
        sampled = np.array([span.source == "sampled" for span in spans], np.float32)
        return np.repeat(sampled, [span.length for span in spans])
    if tensor is None:
        return np.full(targets.shape, loss.optional[name], np.float32)
    field_name = f"{where}.loss_fn_inputs.{name}"
    values = np.asarray(_of_targets_shape(tensor, targets, field_name), dtype=np.float32)
    if not np.isfinite(values).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise InvalidRequestError(
            f"{field_name}: {values[at]} at position {_index(at)}, only finite numbers are allowed"
        )
    return values


def _check_vocabulary(
    targets: Int64Array, loss: Loss, inputs: Mapping[str, Float32Array], vocab_size: int, where: str
) -> None:
    outside = ((targets < 0) | (targets >= vocab_size)) & any_of(inputs, loss.target_inputs)
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        verb = "is" if len(loss.target_inputs) == 1 else "are"
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{TARGETS}: token {targets[at]} at position {_index(at)} is outside the vocabulary "
            f"of {vocab_size} (allowed only where {' and '.join(loss.target_inputs)} {verb} 0)"
        )


def _check_per_datum_input(loss: Loss, inputs: Mapping[str, Float32Array], where: str) -> None:
    """A mean needs a marked position; a datum whose positions are all masked needs none."""
    name = loss.per_datum_input
    if name is not None and loss.active(inputs).any() and not inputs[name].any():
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{name}: is 0 at all {inputs[name].size} positions, but "
            f"{' and '.join(loss.mask_inputs)} are not; mark the sampled tokens with 1"
        )


def _check_provenance(datum: Datum, length: int, targets: Int64Array, where: str) -> None:
    """Spans tile their field. What they refer to is looked up for losses that need it alone."""
    if datum.model_input_spans is None or datum.loss_fn_input_spans is None:
        return
    if targets.ndim != 1:
        raise InvalidRequestError(
            f"{where}.loss_fn_input_spans: need one-dimensional {TARGETS}, not shape {list(targets.shape)}"
        )
    for name, spans in (
        ("model_input_spans", datum.model_input_spans),
        ("loss_fn_input_spans", datum.loss_fn_input_spans),
    ):
        covered = _covered(spans)
        if covered != length:
            raise InvalidRequestError(f"{where}.{name}: the spans cover {covered} of {length} positions")


def _covered(spans: Sequence[ProvenanceSpan]) -> int:
    return sum(span.length for span in spans)


def _index(at: tuple[Any, ...]) -> str:
    return str(at[0]) if len(at) == 1 else str(list(at))
