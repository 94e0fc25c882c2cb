"""Immutable arrays out of what users give.

A conversion may change the dtype, never a value: what does not fit is refused. Memory that nobody can write to is
shared, everything else is copied, so a type that holds an array cannot change later.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, PlainSerializer

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make an array that the caller has just created read-only; returns it."""
    array.flags.writeable = False
    return array


def _is_writable(array: npt.NDArray[Any]) -> bool:
    """Whether somebody may write to the memory of `array`, through it or through what it is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return not (owner is None or isinstance(owner, bytes))


def immutable(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`array` in `dtype` and C order, read-only: a view of it if nobody can write to it, else a copy."""
    result = np.ascontiguousarray(array, dtype=dtype)
    if (result is array or np.may_share_memory(result, array)) and _is_writable(array):
        result = result.copy()
    return freeze(result)


def number_array(value: object, ndim: int = 1) -> npt.NDArray[Any]:
    """`value` (an array or a sequence of numbers) as an array of floats or integers, neither copied nor frozen.

    Raises ValueError for anything but numbers (bools are none) and for another number of dimensions.
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
