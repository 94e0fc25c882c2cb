"""The losses that exist, and the checks of a datum against them. Knows names and shapes, not formulas; needs no torch.

Formulas are in `losses.py`. Everything here raises InvalidRequestError (or UnsupportedError) with the field's name
and the numbers in it, and changes no value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.interface import RenderedInput
from tinker_local.backend.training.interface import TrainDatum
from tinker_local.types import Datum, InvalidRequestError, ProvenanceSpan, TensorData, UnsupportedError

TARGETS = "target_tokens"

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What one loss reads.

    `inputs`: names of the float32 tensors beside `target_tokens`. `switches`: those that switch a position off where
    all of them are 0. `optional`: the value that an absent input has everywhere. `config`: settings and their defaults.
    `candidates`: whether targets may be [N, K]. `shares`: the input that marks, by not being 0, the positions whose
    logprobs all positions of their datum depend on.
    """

    inputs: tuple[str, ...]
    switches: tuple[str, ...]
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    candidates: bool = False
    shares: str | None = None

    def active(self, inputs: Mapping[str, Float32Array]) -> npt.NDArray[np.bool_]:
        """Where a position takes part, bool of the inputs' shape."""
        return _any_of(inputs, self.switches)

    @property
    def readers(self) -> tuple[str, ...]:
        """The inputs of which one is not 0 wherever the loss depends on the target's logprob."""
        return self.switches if self.shares is None else (*self.switches, self.shares)


def _any_of(inputs: Mapping[str, Float32Array], names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Where one of the inputs of these names is not 0."""
    found = np.zeros(inputs[names[0]].shape, np.bool_)
    for name in names:
        found |= inputs[name] != 0
    return found


LOSS_SPECS: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("weights",), ("weights",), optional={"weights": 1.0}, candidates=True),
    "importance_sampling": LossSpec(("logprobs", "advantages"), ("advantages",)),
    "ppo": LossSpec(
        ("logprobs", "advantages"), ("advantages",), config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    ),
    "cispo": LossSpec(
        ("logprobs", "advantages"), ("advantages",), config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    "dro": LossSpec(("logprobs", "advantages"), ("advantages", "logprobs"), config={"beta": 0.05}),
    "gspo": LossSpec(
        ("logprobs", "advantages", "sequence_ratio_mask"),
        ("advantages",),
        config={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        shares="sequence_ratio_mask",
    ),
}
"""Inputs and settings as on the hosted service, and where it does not publish them (`dro`'s beta, `gspo`'s thresholds)
as in docs/losses.md; thresholds bound the ratio exp(l - q) itself, they are no epsilons."""

NEAREST: Mapping[str, str] = {
    "stable_reinforce": "importance_sampling",
    "custom": "cross_entropy",
}
"""Losses of the SDK that this server does not compute, and what comes closest."""


def loss_spec(loss_fn: str) -> LossSpec:
    """The spec of `loss_fn`; raises for a loss that is not computed here, naming those that are."""
    known = ", ".join(LOSS_SPECS)
    if loss_fn in NEAREST:
        advice = f"the nearest that works is {NEAREST[loss_fn]!r} (of {known})"
        if loss_fn == "custom":
            advice = f"forward_backward_custom with a Python function works, it is sent as {NEAREST[loss_fn]!r}"
        raise UnsupportedError(f"loss_fn: {loss_fn!r} is not supported by this server; {advice}")
    if loss_fn not in LOSS_SPECS:
        raise InvalidRequestError(f"loss_fn: unknown loss {loss_fn!r}; known are {known}")
    return LOSS_SPECS[loss_fn]


def check_config(loss_fn: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The complete settings of `loss_fn`: `given` over the defaults.

    Raises for unknown keys, text, negative or non-finite values, and thresholds that are out of order.
    """
    defaults = loss_spec(loss_fn).config
    for key, value in given.items():
        where = f"loss_fn_config.{key}"
        if key not in defaults:
            known = f"it has {', '.join(defaults)}" if defaults else "it has no settings"
            raise InvalidRequestError(f"{where}: unknown to {loss_fn}; {known}")
        if isinstance(value, (str, bool)) or not math.isfinite(value):
            raise InvalidRequestError(f"{where}: must be a finite number, not {value!r}")
        if value < 0:
            raise InvalidRequestError(f"{where}: must not be negative, not {value}")
    config = {**defaults, **{key: float(value) for key, value in given.items()}}
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", math.inf)
    if low > high:
        raise InvalidRequestError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return config


def make_train_datum(datum: Datum, rendered: RenderedInput, loss_fn: str, vocab_size: int, where: str) -> TrainDatum:
    """`datum` as the trainer takes it: dense arrays of one shape, names and numbers checked.

    `rendered` is its model input of N positions. `where` prefixes messages (`data[3]`). Absent weights are ones; a
    target outside [0, vocab_size) is refused only where its logprob counts. Provenance is checked and dropped.
    """
    spec = loss_spec(loss_fn)
    _check_names(datum, loss_fn, spec, where)
    if rendered.length == 0:
        raise InvalidRequestError(f"{where}.model_input: is empty, at least one position is needed")
    targets = _targets(datum.loss_fn_inputs[TARGETS], spec, rendered.length, loss_fn, where)
    inputs = {name: _loss_input(datum, name, targets, spec, where) for name in spec.inputs}
    _check_vocabulary(targets, spec, inputs, vocab_size, where)
    _check_shares(spec, inputs, where)
    _check_provenance(datum, rendered.length, targets, where)
    return TrainDatum(rendered, targets, inputs)


def check_train_datum(datum: TrainDatum, loss_fn: str, where: str) -> None:
    """That names and shapes are those of `make_train_datum`, for data that was put together in another way."""
    spec = loss_spec(loss_fn)
    shape = datum.target_tokens.shape
    if shape[:1] != (datum.input.length,) or len(shape) > (2 if spec.candidates else 1) or not datum.target_tokens.size:
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{TARGETS}: shape {list(shape)} for {datum.input.length} positions under {loss_fn}"
        )
    shapes = {name: values.shape for name, values in datum.loss_inputs.items()}
    if shapes != dict.fromkeys(spec.inputs, shape):
        given = ", ".join(f"{name} {list(size)}" for name, size in shapes.items()) or "nothing"
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs: {loss_fn} takes {', '.join(spec.inputs)} of shape {list(shape)}, not {given}"
        )


def _check_names(datum: Datum, loss_fn: str, spec: LossSpec, where: str) -> None:
    known = (TARGETS, *spec.inputs)
    for name in datum.loss_fn_inputs:
        if name in spec.config:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: is one number for all positions on this server, not a tensor; "
                f"send it in loss_fn_config"
            )
        if name not in known:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: unknown to {loss_fn}, which takes {', '.join(known)}"
            )
    for name in known:
        if name not in datum.loss_fn_inputs and name not in spec.optional:
            raise InvalidRequestError(f"{where}.loss_fn_inputs.{name}: is missing, {loss_fn} needs it")


def _targets(tensor: TensorData, spec: LossSpec, length: int, loss_fn: str, where: str) -> Int64Array:
    """int64 [N] or [N, K]; a sparse tensor's unlisted cells are token 0."""
    field_name = f"{where}.loss_fn_inputs.{TARGETS}"
    if tensor.dtype != "int64":
        raise InvalidRequestError(f"{field_name}: must be int64, not {tensor.dtype}")
    targets = np.asarray(tensor.to_numpy(), dtype=np.int64)
    allowed = (1, 2) if spec.candidates else (1,)
    if targets.ndim not in allowed:
        wanted = "[N] or [N, K]" if spec.candidates else "[N]"
        raise InvalidRequestError(f"{field_name}: {loss_fn} takes shape {wanted}, not {list(targets.shape)}")
    if targets.shape[0] != length:
        raise InvalidRequestError(
            f"{field_name}: {targets.shape[0]} rows for a model_input of {length} positions (images included)"
        )
    if targets.size == 0:
        raise InvalidRequestError(f"{field_name}: shape {list(targets.shape)} holds no target")
    return targets


def _loss_input(datum: Datum, name: str, targets: Int64Array, spec: LossSpec, where: str) -> Float32Array:
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None:
        return np.full(targets.shape, spec.optional[name], np.float32)
    field_name = f"{where}.loss_fn_inputs.{name}"
    values = np.asarray(tensor.to_numpy(), dtype=np.float32)
    if values.shape != targets.shape:
        raise InvalidRequestError(f"{field_name}: shape {list(values.shape)}, but {TARGETS} has {list(targets.shape)}")
    if not np.isfinite(values).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise InvalidRequestError(
            f"{field_name}: {values[at]} at position {_index(at)}, only finite numbers are allowed"
        )
    return values


def _check_vocabulary(
    targets: Int64Array, spec: LossSpec, inputs: Mapping[str, Float32Array], vocab_size: int, where: str
) -> None:
    outside = ((targets < 0) | (targets >= vocab_size)) & _any_of(inputs, spec.readers)
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        verb = "is" if len(spec.readers) == 1 else "are"
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{TARGETS}: token {targets[at]} at position {_index(at)} is outside the vocabulary "
            f"of {vocab_size} (allowed only where {' and '.join(spec.readers)} {verb} 0)"
        )


def _check_shares(spec: LossSpec, inputs: Mapping[str, Float32Array], where: str) -> None:
    """There is no mean over no positions; a datum whose advantages are all 0 needs none."""
    if spec.shares is not None and spec.active(inputs).any() and not inputs[spec.shares].any():
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{spec.shares}: is 0 at all {inputs[spec.shares].size} positions, but "
            f"{' and '.join(spec.switches)} are not; mark the sampled tokens with 1"
        )


def _check_provenance(datum: Datum, length: int, targets: Int64Array, where: str) -> None:
    """Spans tile their field; what they refer to is not looked up (no loss here needs it)."""
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
