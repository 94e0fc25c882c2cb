"""Tensors on the wire: raw little-endian bytes in C order, with a dtype and a shape."""

from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.types.base import errors_named, freeze
from tinker_local.types.datum import TensorData, TensorDtype
from tinker_local.types.errors import InvalidRequestError
from tinker_local.types.wire import tinker_local_wire_pb2 as wire
from tinker_local.types.wire_fields import refuse_unknown_fields

MAX_DIMENSIONS = 32
"""Of one tensor."""


INT32 = np.dtype("<i4")


INT64 = np.dtype("<i8")


FLOAT32 = np.dtype("<f4")


UINT16 = np.dtype("<u2")


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
