"""`forward_backward` results: the outputs of all datums in a few batched arrays."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.types.base import errors_named
from tinker_local.types.codec.tensors import (
    INT64,
    TENSOR_DTYPES,
    WIRE_DTYPES,
    decode_values,
    parse,
    raw_bytes,
    refuse_unknown_fields,
    view,
)
from tinker_local.types.errors import InternalError, InvalidRequestError
from tinker_local.types.results import ForwardBackwardOutput
from tinker_local.types.tensors import TensorData
from tinker_local.types.wire import tinker_local_wire_pb2 as wire


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """`output` as the SDK reads it; sparse tensors become dense, a scalar becomes [1].

    Consecutive datums whose fields have the same names, dtypes and trailing shapes share one record. The SDK reads
    records with different field *names* wrongly, so let all datums of a result have the same fields. InternalError
    for a tensor like [3, 0], whose first dimension the format cannot hold.
    """
    message = wire.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    datums = [{name: _at_least_1d(tensor) for name, tensor in datum.items()} for datum in output.loss_fn_outputs]
    for layout, group in groupby(datums, key=_layout):
        members = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(members))
        for name in layout:
            _encode_batch([datum[name] for datum in members], record.fields[name], name)
    return bytes(message.SerializeToString())


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """The inverse of `encode_forward_backward_output`: every tensor dense, with its shape."""
    message = parse(wire.ForwardBackwardOutput(), body)
    refuse_unknown_fields(message, "body")
    datums: list[dict[str, TensorData]] = []
    for index, record in enumerate(message.loss_fn_outputs):
        where = f"loss_fn_outputs[{index}]"
        refuse_unknown_fields(record, where)
        first = len(datums)
        datums.extend({} for _ in range(record.num_datums))
        for name, batch in record.fields.items():
            tensors = _decode_batch(batch, record.num_datums, f"{where}.fields[{name!r}]")
            for datum, tensor in zip(datums[first:], tensors, strict=True):
                datum[name] = tensor
    return ForwardBackwardOutput(
        loss_fn_output_type=message.loss_fn_output_type,
        loss_fn_outputs=tuple(datums),
        metrics=dict(message.metrics),
    )


def _at_least_1d(tensor: TensorData) -> npt.NDArray[Any]:
    return np.atleast_1d(tensor.to_numpy())


def _layout(datum: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What datums of one record have in common: dtype and trailing shape of each field."""
    return {name: (array.dtype.str, array.shape[1:]) for name, array in datum.items()}


def _encode_batch(arrays: Sequence[npt.NDArray[Any]], message: wire.BatchedTensor, name: str) -> None:
    trailing = arrays[0].shape[1:]
    if 0 in trailing and any(array.shape[0] for array in arrays):
        shapes = sorted({array.shape for array in arrays})
        raise InternalError(f"loss_fn_outputs[{name!r}]: the wire format cannot hold the shapes {shapes}")
    dtype, as_numpy = TENSOR_DTYPES["float32" if arrays[0].dtype.kind == "f" else "int64"]
    message.dtype = dtype
    message.data = b"".join(raw_bytes(array, as_numpy) for array in arrays)
    message.offsets = raw_bytes(np.cumsum([0, *(array.nbytes for array in arrays)]), INT64)
    message.trailing_shape.extend(trailing)


def _decode_batch(message: wire.BatchedTensor, num_datums: int, where: str) -> list[TensorData]:
    refuse_unknown_fields(message, where)
    offsets = view(message.offsets, INT64, f"{where}.offsets")
    data = message.data
    if offsets.size != num_datums + 1:
        raise InvalidRequestError(f"{where}.offsets: {offsets.size} entries for {num_datums} datums")
    if offsets[0] != 0 or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
        raise InvalidRequestError(f"{where}.offsets: must rise from 0 to {len(data)}, the length of data")
    values, dtype = decode_values(data, message.dtype, where)
    itemsize = WIRE_DTYPES[message.dtype][0].itemsize
    if (offsets % itemsize).any():
        raise InvalidRequestError(f"{where}.offsets: must be multiples of {itemsize}, the bytes of one value")
    trailing = tuple(message.trailing_shape)
    row = math.prod(trailing)
    tensors = []
    for start, end in pairwise((offsets // itemsize).tolist()):
        shape = ((end - start) // row if row else 0, *trailing)
        with errors_named(where):
            tensors.append(TensorData(data=values[start:end], dtype=dtype, shape=shape))
    return tensors
