"""`TensorData`: a float32 or int64 tensor of one datum, dense or sparse (CSR)."""

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ModelWrapValidatorHandler, model_validator
from tinker_local.types.arrays import AsList, Indices, Int64Array, float32_array, freeze, integer_array, number_array
from tinker_local.types.base import Frozen, TupleOf

TensorDtype = Literal["float32", "int64"]

MAX_SPARSE_CELLS = 2**27
"""Cells that a sparse tensor may have once it is dense; a few bytes of CSR could otherwise ask for any memory."""

_Flat = Annotated[npt.NDArray[Any], BeforeValidator(number_array), AsList]


class TensorData(Frozen):
    """A tensor of one datum.

    `data`: the values, flat, in C order, float32 or int64 as `dtype` says, immutable. For a sparse tensor only the
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
            raise ValueError("sparse_crow_indices and sparse_col_indices come together or not at all")
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
