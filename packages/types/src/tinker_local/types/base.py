"""What all public types are made of: strict, frozen models and immutable arrays.

A conversion may change the dtype of an array but never a value: values that do not fit are refused. Read-only memory is
shared and everything else is copied, so a type that holds an array never changes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from tinker_local.types.errors import InvalidRequestError

T = TypeVar("T")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


TupleOf = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""A tuple that may be given as a list."""


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
    """Strict, frozen pydantic model; arrays compare by dtype, shape and value (NaN equals NaN).

    Wherever one of these types is expected, the official SDK's object with the same meaning is accepted.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )

    _from_sdk: ClassVar[Callable[[Any], Any]]
    """`from_sdk` of `sdk.py`, which sets it: that module knows all types that derive from this one."""

    @model_validator(mode="wrap")
    @classmethod
    def _accept_sdk_object(cls, value: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        if type(value).__module__.partition(".")[0] == "tinker":
            value = Frozen._from_sdk(value)
        return build(value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _equal(self.__dict__, other.__dict__)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


_TAGS = {"encoded_text", "image", "image_asset_pointer", "text", "image_url", "tool_use", "tool_result"}
"""Of the members of lists. pydantic adds the tag of a tagged union to an error's location, where it looks like a
field."""

_TYPES = {"str", "int", "float", "bool"}


def _is_member(location: tuple[int | str, ...], place: int, missing: bool) -> bool:
    """Whether that part of a location is the member of a union, and not a field. `missing`: the last part is a field
    that is missing."""
    part, last = location[place], place == len(location) - 1
    if place == 0 or isinstance(part, int):
        return False
    if isinstance(location[place - 1], int):
        return part in _TAGS and not (last and missing)
    if part == location[place - 1]:
        return not (last and missing)
    return (part in _TYPES and last) or part.endswith("]") or part in _class_names(Frozen)


def _class_names(of: type) -> Iterator[str]:
    subclasses: list[type] = of.__subclasses__()
    for each in subclasses:
        yield each.__name__
        yield from _class_names(each)


def _field_path(where: str, location: tuple[int | str, ...], missing: bool) -> str:
    member = False
    for place, part in enumerate(location):
        member = not member and _is_member(location, place, missing)  # a field comes behind one
        if not member:
            where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
    return where


_INNER_FIELD = re.compile(r"(\[\d+\]|[a-z_]+)[\w.\[\]]*: ")
"""How the reason of a validator begins if it names a field of what it validates."""


def user_message(error: ValidationError, where: str = "") -> str:
    """One sentence for a user out of a pydantic error: field paths below `where` and reasons, joined by '; '."""
    parts = []
    for item in error.errors(include_url=False, include_context=False):
        path = _field_path(where, item["loc"], item["type"] == "missing")
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            reason = "this field is not supported by this server"
        elif item["input"] is None and item["type"] == "float_type":
            reason += ", not null (which is what the SDK sends for NaN and infinity)"
        elif item["type"] == "literal_error" or (isinstance(item["input"], (int, float)) and reason == item["msg"]):
            reason += f", not {item['input']!r}"
        joint = ": " if path else ""
        if item["type"] == "value_error" and path and _INNER_FIELD.match(reason):
            joint = "" if reason[0] == "[" else "."
        parts.append(f"{path}{joint}{reason}")
    return "; ".join(parts)


def invalid(error: ValidationError, where: str = "") -> InvalidRequestError:
    """`error` as the error that a client sees."""
    return InvalidRequestError(user_message(error, where))


@contextmanager
def errors_named(where: str) -> Iterator[None]:
    """A pydantic error inside becomes an InvalidRequestError whose fields are named from `where` on."""
    try:
        yield
    except ValidationError as error:
        raise invalid(error, where) from None


# Arrays ---------------------------------------------------------------------------------------------------------------


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
