"""The checks of a datum against its loss: names, shapes and numbers. Needs no torch.

Everything here raises InvalidRequestError (or UnsupportedError) with the field's name and the numbers in it, and
changes no value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.losses.loss import Loss, any_of
from tinker_local.backend.training.trainer import TrainDatum
from tinker_local.types import Datum, InvalidRequestError, ProvenanceSpan, TensorData

TARGETS = "target_tokens"

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


def make_train_datum(datum: Datum, rendered: RenderedInput, loss_fn: str, vocab_size: int, where: str) -> TrainDatum:
    """`datum` as the trainer takes it: dense arrays of one shape, names and numbers checked.

    `rendered` is its model input of N positions. `where` prefixes messages (`data[3]`). Absent weights are ones; a
    target outside [0, vocab_size) is refused only where its logprob counts. Provenance is checked and dropped.
    """
    loss = loss_of(loss_fn)
    _check_names(datum, loss, where)
    if rendered.length == 0:
        raise InvalidRequestError(f"{where}.model_input: is empty, at least one position is needed")
    targets = _targets(datum.loss_fn_inputs[TARGETS], loss, rendered.length, where)
    inputs = {name: _loss_input(datum, name, targets, loss, where) for name in loss.inputs}
    _check_vocabulary(targets, loss, inputs, vocab_size, where)
    _check_per_datum_input(loss, inputs, where)
    _check_provenance(datum, rendered.length, targets, where)
    return TrainDatum(rendered, targets, inputs)


def check_train_datum(datum: TrainDatum, loss_fn: str, where: str) -> None:
    """That names and shapes are those of `make_train_datum`, for data that was put together in another way."""
    loss = loss_of(loss_fn)
    shape = datum.target_tokens.shape
    if shape[:1] != (datum.input.length,) or len(shape) > (2 if loss.candidates else 1) or not datum.target_tokens.size:
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs.{TARGETS}: shape {list(shape)} for {datum.input.length} positions under {loss_fn}"
        )
    shapes = {name: values.shape for name, values in datum.loss_inputs.items()}
    if shapes != dict.fromkeys(loss.inputs, shape):
        given = ", ".join(f"{name} {list(size)}" for name, size in shapes.items()) or "nothing"
        raise InvalidRequestError(
            f"{where}.loss_fn_inputs: {loss_fn} takes {', '.join(loss.inputs)} of shape {list(shape)}, not {given}"
        )


def _check_names(datum: Datum, loss: Loss, where: str) -> None:
    known = (TARGETS, *loss.inputs)
    for name in datum.loss_fn_inputs:
        if name in loss.settings:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: is one number for all positions on this server, not a tensor; "
                f"send it in loss_fn_config"
            )
        if name not in known:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs.{name}: unknown to {loss.name}, which takes {', '.join(known)}"
            )
    for name in known:
        if name not in datum.loss_fn_inputs and name not in loss.optional:
            raise InvalidRequestError(f"{where}.loss_fn_inputs.{name}: is missing, {loss.name} needs it")


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
    if tensor is None:
        return np.full(targets.shape, loss.optional[name], np.float32)
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
