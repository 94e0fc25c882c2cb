"""`TensorData`: a float32 or int64 tensor of one datum, dense or sparse (CSR)."""

from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, PlainSerializer, model_validator
from tinker_local.types.base import Frozen, freeze

TensorDtype = Literal["float32", "int64"]
_NUMPY: dict[TensorDtype, type[np.generic]] = {"float32": np.float32, "int64": np.int64}


def _values(value: object) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"data must be flat, not of shape {list(array.shape)}; give the shape beside it")
    if array.dtype.kind not in "fiu" and array.size:
        raise ValueError(f"data must be numbers, not {array.dtype}")
    return array


def _indices(value: object) -> npt.NDArray[np.int64] | None:
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError("indices must be a flat list of integers")
    return freeze(np.ascontiguousarray(array, dtype=np.int64))


_List = PlainSerializer(lambda array: None if array is None else array.tolist())
_Flat = Annotated[npt.NDArray[Any], BeforeValidator(_values), _List]
_Indices = Annotated[npt.NDArray[np.int64] | None, BeforeValidator(_indices), _List]


class TensorData(Frozen):
    """A tensor of one datum.

    `data`: the values, flat, in C order, float32 or int64 as `dtype` says, read-only. For a sparse tensor only the
    listed cells, row by row. `shape`: of the dense tensor; None means one-dimensional. `sparse_crow_indices`
    (int64 [rows+1]) and `sparse_col_indices` (int64 [nnz]) are given together (CSR); unlisted cells are 0 unless the
    field's meaning says otherwise.
    """

    data: _Flat
    dtype: TensorDtype
    shape: tuple[int, ...] | None = None
    sparse_crow_indices: _Indices = None
    sparse_col_indices: _Indices = None

    @model_validator(mode="before")
    @classmethod
    def _shape_as_tuple(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("shape"), list):
            values = {**values, "shape": tuple(values["shape"])}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        wanted = _NUMPY[self.dtype]
        if self.dtype == "int64" and self.data.dtype.kind == "f" and self.data.size:
            raise ValueError("data: floating-point values in an int64 tensor")
        object.__setattr__(self, "data", freeze(np.ascontiguousarray(self.data, dtype=wanted)))
        crow, col = self.sparse_crow_indices, self.sparse_col_indices
        if (crow is None) != (col is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices come together or not at all")
        if self.shape is not None and any(size < 0 for size in self.shape):
            raise ValueError(f"shape: negative size in {list(self.shape)}")
        if crow is None or col is None:
            if self.shape is not None and int(np.prod(self.shape, dtype=np.int64)) != self.data.size:
                raise ValueError(f"shape {list(self.shape)} does not hold {self.data.size} values")
            return self
        if self.shape is None or len(self.shape) != 2:
            raise ValueError("shape: a sparse tensor needs two dimensions")
        rows, cols = self.shape
        if crow.size != rows + 1:
            raise ValueError(f"sparse_crow_indices: {crow.size} entries for {rows} rows, expected {rows + 1}")
        if crow[0] != 0 or crow[-1] != col.size or (np.diff(crow) < 0).any():
            raise ValueError(f"sparse_crow_indices: must rise from 0 to {col.size}")
        if col.size != self.data.size:
            raise ValueError(f"sparse_col_indices: {col.size} entries for {self.data.size} values")
        if col.size and (col.min() < 0 or col.max() >= cols):
            raise ValueError(f"sparse_col_indices: out of range for {cols} columns")
        return self

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike) -> Self:
        """A dense tensor: floats become float32, integers int64."""
        value = np.asarray(array)
        if value.dtype.kind == "f":
            dtype: TensorDtype = "float32"
        elif value.dtype.kind in "iu":
            dtype = "int64"
        else:
            raise ValueError(f"cannot make a tensor of {value.dtype}")
        return cls(data=np.ascontiguousarray(value).reshape(-1), dtype=dtype, shape=tuple(value.shape))

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is stored as CSR."""
        return self.sparse_crow_indices is not None

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape, with None read as one-dimensional."""
        return (int(self.data.size),) if self.shape is None else self.shape

    def to_numpy(self, fill: float = 0) -> npt.NDArray[Any]:
        """The dense tensor of shape `dense_shape`; a read-only view if dense, `fill` in unlisted cells if sparse."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return self.data.reshape(self.dense_shape)
        dense = np.full(self.dense_shape, fill, dtype=self.data.dtype)
        rows = np.repeat(np.arange(self.dense_shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, self.sparse_col_indices] = self.data
        return freeze(dense)
