"""The base of all public types: strict, frozen, unknown fields refused, equality that understands arrays."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from tinker_local.types.errors import InvalidRequestError

INT32_MAX = 2**31 - 1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view of `array`; nothing is copied."""
    view = array.view()
    view.flags.writeable = False
    return view


def _equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype != b.dtype:
            return False
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return a == b


class Frozen(BaseModel):
    """Strict, frozen pydantic model; arrays compare by dtype, shape and value (NaN equals NaN)."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _equal(self.__dict__, other.__dict__)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


def tokens_array(value: object) -> Int32Array:
    """`value` (ints, or an integer array of any width) as a read-only int32 array of shape [N].

    Raises ValueError for anything but whole numbers in [0, 2**31).
    """
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if any(type(item) is not int for item in value):
            kind = next(type(item).__name__ for item in value if type(item) is not int)
            raise ValueError(f"token ids must be integers, not {kind}")
        array = np.asarray(value, dtype=np.int64) if value else np.empty(0, np.int64)
    else:
        raise ValueError(f"token ids must be a list of integers, not {type(value).__name__}")
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, not of shape {list(array.shape)}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {array.dtype}")
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0:
            raise ValueError(f"token ids must not be negative, found {low} at position {int(array.argmin())}")
        if high > INT32_MAX:
            raise ValueError(f"token ids must be below 2**31, found {high} at position {int(array.argmax())}")
    return freeze(np.ascontiguousarray(array, dtype=np.int32))


Tokens = Annotated[
    npt.NDArray[np.int32],
    BeforeValidator(tokens_array),
    PlainSerializer(lambda array: array.tolist(), return_type=list[int]),
]
"""Token ids as a read-only int32 array of shape [N]; serialises to a list of integers."""


def user_message(error: ValidationError) -> str:
    """One sentence for a user out of a pydantic error: field paths and reasons, joined by '; '."""
    parts = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(p) for p in item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            reason = "this field is not supported by this server"
        parts.append(f"{where}: {reason}" if where else reason)
    return "; ".join(parts)


def invalid(error: ValidationError) -> InvalidRequestError:
    """`error` as the error that a client sees."""
    return InvalidRequestError(user_message(error))
