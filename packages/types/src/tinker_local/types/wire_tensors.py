"""Tensors on the wire: raw little-endian bytes in C order, with a dtype and a shape."""

from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message
from tinker_local.types.base import errors_named, freeze
from tinker_local.types.datum import TensorData, TensorDtype
from tinker_local.types.errors import InvalidRequestError
from tinker_local.types.wire import tinker_local_wire_pb2 as wire
from tinker_local.types.wire_fields import BYTES, refuse_unknown_fields, varint

MAX_DIMENSIONS = 32
"""Of one tensor."""


INT32 = np.dtype("<i4")


INT64 = np.dtype("<i8")


FLOAT32 = np.dtype("<f4")


UINT16 = np.dtype("<u2")


Parts = list[bytes | memoryview]
"""Bytes that follow each other. A result may have 8 MiB: setting fields and serializing would copy them three times,
and nothing else runs meanwhile."""


WIRE_DTYPES: dict[int, tuple[np.dtype[Any], TensorDtype]] = {
    wire.DTYPE_FLOAT32: (FLOAT32, "float32"),
    wire.DTYPE_INT64: (INT64, "int64"),
    wire.DTYPE_INT32: (INT32, "int64"),
    wire.DTYPE_BFLOAT16: (UINT16, "float32"),
}
"""For each wire dtype: how to read its bytes, and the dtype of the resulting tensor."""


TENSOR_DTYPES: dict[TensorDtype, tuple[wire.DType, np.dtype[Any]]] = {
    "float32": (wire.DTYPE_FLOAT32, FLOAT32),
    "int64": (wire.DTYPE_INT64, INT64),
}


def encode_tensor(tensor: TensorData, message: wire.Tensor) -> None:
    dtype, as_numpy = TENSOR_DTYPES[tensor.dtype]
    message.dtype = dtype
    message.shape.extend(tensor.shape or ())
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = raw_bytes(tensor.data, as_numpy)
        return
    message.sparse_csr.values = raw_bytes(tensor.data, as_numpy)
    message.sparse_csr.crow_indices = raw_bytes(tensor.sparse_crow_indices, INT64)
    message.sparse_csr.col_indices = raw_bytes(tensor.sparse_col_indices, INT64)


def tensor_parts(tensor: TensorData) -> Parts:
    """A tensor as a message with its shape spelled out: in results the SDK reads a missing one as that of a scalar."""
    if tensor.sparse_crow_indices is not None:
        message = wire.Tensor()
        encode_tensor(tensor, message)
        return [message.SerializeToString()]
    dtype, as_numpy = TENSOR_DTYPES[tensor.dtype]
    return message_parts(wire.Tensor(dtype=dtype, shape=tensor.dense_shape), dense=(tensor.data, as_numpy))


def decode_tensor(message: wire.Tensor, where: str) -> TensorData:
    refuse_unknown_fields(message, where)
    if len(message.shape) > MAX_DIMENSIONS:
        raise InvalidRequestError(f"{where}.shape: {len(message.shape)} dimensions, the most is {MAX_DIMENSIONS}")
    shape = tuple(message.shape) or None
    encoding = message.WhichOneof("encoding")
    if encoding is None:
        raise InvalidRequestError(f"{where}: neither dense nor sparse_csr is set")
    if encoding == "dense":
        values, dtype = decode_values(message.dense, message.dtype, where)
        with errors_named(where):
            return TensorData(data=values, dtype=dtype, shape=shape)
    csr = message.sparse_csr
    refuse_unknown_fields(csr, where)
    values, dtype = decode_values(csr.values, message.dtype, where)
    crow = view(csr.crow_indices, INT64, f"{where}.crow_indices")
    col = view(csr.col_indices, INT64, f"{where}.col_indices")
    with errors_named(where):
        return TensorData(data=values, dtype=dtype, shape=shape, sparse_crow_indices=crow, sparse_col_indices=col)


def decode_values(raw: bytes, wire_dtype: int, where: str) -> tuple[npt.NDArray[Any], TensorDtype]:
    """The numbers in `raw`, and the dtype of the resulting tensor."""
    if wire_dtype not in WIRE_DTYPES:
        known = ", ".join(f"{number} {wire.DType.Name(number)}" for number in WIRE_DTYPES)
        raise InvalidRequestError(f"{where}.dtype: unknown value {wire_dtype}, known are {known}")
    numpy_dtype, dtype = WIRE_DTYPES[wire_dtype]
    values = view(raw, numpy_dtype, where)
    if wire_dtype == wire.DTYPE_INT32:
        return freeze(values.astype(np.int64)), dtype
    if wire_dtype == wire.DTYPE_BFLOAT16:  # the upper half of a float32
        halves = freeze(values.astype(np.uint32) << 16)
        return halves.view(np.float32), dtype
    return values, dtype


def view(raw: bytes, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """`raw` as a flat read-only array, without a copy."""
    if len(raw) % dtype.itemsize:
        raise InvalidRequestError(f"{where}: {len(raw)} bytes are not a multiple of {dtype.itemsize} ({dtype})")
    return np.frombuffer(raw, dtype)


def raw_bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """The bytes of `array` in C order and little-endian `dtype`."""
    return np.ascontiguousarray(array, dtype).tobytes()


def message_parts(message: Message, **arrays: tuple[npt.NDArray[Any], np.dtype[Any]]) -> Parts:
    """`message`, and then its fields `arrays` of bytes, each an array and its dtype on the wire."""
    parts: Parts = [message.SerializeToString()]
    for name, (array, dtype) in arrays.items():
        values = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data
        parts += field_parts(message, name, [values])
    return parts


def field_parts(message: Message, name: str, content: Parts) -> Parts:
    """The field `name` of a message like `message`, which holds bytes or a message."""
    tag = message.DESCRIPTOR.fields_by_name[name].number << 3 | BYTES
    return [varint(tag) + varint(sum(map(len, content))), *content]
