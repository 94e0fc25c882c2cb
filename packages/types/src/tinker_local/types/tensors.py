"""Immutable arrays from what users give, and `TensorData`: float32 or int64, dense or sparse (CSR).

A conversion may change the dtype but never a value: values that do not fit are refused. Read-only memory is shared and
everything else is copied, so a type that holds an array never changes.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ModelWrapValidatorHandler, PlainSerializer, model_validator
from tinker_local.types.base import Frozen, TupleOf

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make a newly created array read-only and return it."""
    array.flags.writeable = False
    return array


def _is_writable(array: npt.NDArray[Any]) -> bool:
    """Whether the memory of `array` is writable, through the array or through what it is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return not (owner is None or isinstance(owner, bytes))


def immutable(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`array` in `dtype` and C order, read-only: a view if its memory is read-only, else a copy."""
    result = np.ascontiguousarray(array, dtype=dtype)
    if (result is array or np.may_share_memory(result, array)) and _is_writable(array):
        result = result.copy()
    return freeze(result)


def number_array(value: object, ndim: int = 1) -> npt.NDArray[Any]:
    """`value` (an array or a sequence of numbers) as an array of floats or integers, neither copied nor frozen.

    Raises ValueError for anything but numbers (bools included) and for another number of dimensions.
    """
    if not isinstance(value, np.ndarray) and (not isinstance(value, Sequence) or isinstance(value, (str, bytes))):
        raise ValueError(f"must be a list of numbers or an array, not {type(value).__name__}")
    if isinstance(value, np.ndarray):
        array = value
    else:
        array = np.asarray(value) if value else np.empty((0,) * ndim, np.int64)
        if bool in set(map(type, value)):
            raise ValueError("must be numbers, not bool")
    if array.dtype.kind not in "fiu":
        raise ValueError(f"must be numbers of at most 64 bits, not {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"must have {ndim} dimension{'s' * (ndim > 1)}, not shape {list(array.shape)}")
    return array


def integer_array(value: object, dtype: type[np.signedinteger[Any]], ndim: int = 1) -> npt.NDArray[Any]:
    """`value` as an immutable array of `dtype`; ValueError if it holds anything but integers that fit."""
    array = number_array(value, ndim)
    if array.dtype.kind == "f" and array.size:
        raise ValueError(f"must be integers, not {array.dtype}")
    if array.size and not np.can_cast(array.dtype, dtype):
        limits = np.iinfo(dtype)
        for position in (int(array.argmin()), int(array.argmax())):
            found = int(array.flat[position])
            if not limits.min <= found <= limits.max:
                raise ValueError(f"must fit {np.dtype(dtype)}, found {found} at position {position}")
    return immutable(array, dtype)


def float32_array(value: object, ndim: int = 1) -> Float32Array:
    """`value` as an immutable float32 array, rounded; ValueError if a finite number would become infinite."""
    array = number_array(value, ndim)
    if np.can_cast(array.dtype, np.float32):
        return immutable(array, np.float32)
    with np.errstate(over="ignore"):
        result = immutable(array, np.float32)
    lost = np.flatnonzero(np.isinf(result) & np.isfinite(array))
    if lost.size:
        raise ValueError(f"must fit float32, found {array.flat[lost[0]]} at position {lost[0]}")
    return result


def tokens_array(value: object) -> Int32Array:
    """`value` (integers, or an integer array of any width) as an immutable int32 array of shape [N].

    Raises ValueError for anything but whole numbers in [0, 2**31).
    """
    try:
        tokens = integer_array(value, np.int32)
    except ValueError as error:
        raise ValueError(f"token ids {error}") from None
    if tokens.size and tokens.min() < 0:
        raise ValueError(f"token ids must not be negative, found {tokens.min()} at position {tokens.argmin()}")
    return tokens


def _unless_none(value: npt.NDArray[Any] | None) -> list[Any] | None:
    return None if value is None else value.tolist()


AsList = PlainSerializer(_unless_none)
"""Serialises an optional array to a (nested) list."""

Tokens = Annotated[npt.NDArray[np.int32], BeforeValidator(tokens_array), AsList]
"""Token ids as an immutable int32 array of shape [N]; serialises to a list of integers."""

Indices = Annotated[npt.NDArray[np.int64], BeforeValidator(lambda value: integer_array(value, np.int64)), AsList]
"""An immutable int64 array of shape [N]; serialises to a list of integers."""

Logprobs = Annotated[npt.NDArray[np.float32], BeforeValidator(float32_array), AsList]
"""An immutable float32 array of shape [N]; serialises to a list of numbers."""


TensorDtype = Literal["float32", "int64"]

MAX_SPARSE_CELLS = 2**27
"""Largest size of a sparse tensor once it is dense. Without a limit, a few bytes of CSR could ask for any amount of
memory."""

_Flat = Annotated[npt.NDArray[Any], BeforeValidator(number_array), AsList]


class TensorData(Frozen):
    """A tensor of one datum.

    `data`: the values, flat, in C order, float32 or int64 according to `dtype`, immutable. For a sparse tensor only the
    listed cells, row by row. `shape`: of the dense tensor; None means one-dimensional. `sparse_crow_indices`
    (int64 [rows+1]) and `sparse_col_indices` (int64 [nnz], rising within a row) are given together (CSR); unlisted
    cells are 0 unless the field's meaning says otherwise.
    """

    data: _Flat
    dtype: TensorDtype
    shape: TupleOf[int] | None = None
    sparse_crow_indices: Indices | None = None
    sparse_col_indices: Indices | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _check_once(cls, value: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        return value if isinstance(value, cls) else build(value)._check()

    def _check(self) -> Self:
        object.__setattr__(self, "data", _values(self.data, self.dtype))
        crow, col, shape = self.sparse_crow_indices, self.sparse_col_indices, self.shape
        if shape is not None and any(size < 0 for size in shape):
            raise ValueError(f"shape: negative size in {list(shape)}")
        if crow is not None and col is not None:
            _check_csr(shape, crow, col, self.data.size)
        elif crow is not None or col is not None:
            raise ValueError("sparse_crow_indices and sparse_col_indices must be given together or not at all")
        elif shape is not None and math.prod(shape) != self.data.size:
            raise ValueError(f"shape {list(shape)} holds {math.prod(shape)} values, not {self.data.size}")
        return self

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike) -> Self:
        """A dense tensor: floats become float32, integers int64."""
        value = np.asarray(array)
        if value.dtype.kind not in "fiu":
            raise ValueError(f"cannot make a tensor of {value.dtype}")
        dtype: TensorDtype = "float32" if value.dtype.kind == "f" else "int64"
        return cls(data=value.reshape(-1), dtype=dtype, shape=tuple(value.shape))

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is stored as CSR."""
        return self.sparse_crow_indices is not None

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape, with None read as one-dimensional."""
        return (int(self.data.size),) if self.shape is None else self.shape

    def to_numpy(self, fill: float = 0) -> npt.NDArray[Any]:
        """The dense tensor of shape `dense_shape`, read-only: a view if dense, `fill` in unlisted cells if sparse."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return self.data.reshape(self.dense_shape)
        dense = np.full(self.dense_shape, fill, dtype=self.data.dtype)
        rows = np.repeat(np.arange(self.dense_shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, self.sparse_col_indices] = self.data
        return freeze(dense)


def _values(data: npt.NDArray[Any], dtype: TensorDtype) -> npt.NDArray[Any]:
    try:
        return float32_array(data) if dtype == "float32" else integer_array(data, np.int64)
    except ValueError as error:
        raise ValueError(f"data: {dtype} values {error}") from None


def _check_csr(shape: tuple[int, ...] | None, crow: Int64Array, col: Int64Array, values: int) -> None:
    if shape is None or len(shape) != 2:
        raise ValueError(f"shape: a sparse tensor has two dimensions, not {None if shape is None else list(shape)}")
    if math.prod(shape) > MAX_SPARSE_CELLS:
        raise ValueError(f"shape {list(shape)} has {math.prod(shape)} cells, the limit is {MAX_SPARSE_CELLS}")
    rows, cols = shape
    if col.size != values:
        raise ValueError(f"sparse_col_indices: {col.size} entries for {values} values")
    if crow.size != rows + 1:
        raise ValueError(f"sparse_crow_indices: {crow.size} entries for {rows} rows, expected {rows + 1}")
    if crow[0] != 0 or crow[-1] != values or (crow[1:] < crow[:-1]).any():
        raise ValueError(f"sparse_crow_indices: must rise from 0 to {values}")
    if values and (col.min() < 0 or col.max() >= cols):
        raise ValueError(f"sparse_col_indices: must be in [0, {cols}), found {col.min()} to {col.max()}")
    row_of = np.repeat(np.arange(rows), np.diff(crow))
    repeated = np.flatnonzero((row_of[1:] == row_of[:-1]) & (col[1:] <= col[:-1]))
    if repeated.size:
        at = int(repeated[0])
        raise ValueError(f"sparse_col_indices: must rise within a row, found {col[at + 1]} after {col[at]}")
