"""The base of all public types: strict, frozen, unknown fields refused, equality that understands arrays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
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


_CHUNK_TAGS = {"encoded_text", "image", "image_asset_pointer"}
"""pydantic adds the tag of a tagged union to an error's location, where it looks like a field."""


def _field_path(where: str, location: tuple[int | str, ...]) -> str:
    for part in location:
        if part in _CHUNK_TAGS:
            continue
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
    return where


def user_message(error: ValidationError, where: str = "") -> str:
    """One sentence for a user out of a pydantic error: field paths below `where` and reasons, joined by '; '."""
    parts = []
    for item in error.errors(include_url=False, include_context=False):
        path = _field_path(where, item["loc"])
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            reason = "this field is not supported by this server"
        elif item["input"] is None and item["type"] == "float_type":
            reason += ", not null (which is what the SDK sends for NaN and infinity)"
        elif item["type"] == "literal_error" or (isinstance(item["input"], (int, float)) and reason == item["msg"]):
            reason += f", not {item['input']!r}"
        parts.append(f"{path}: {reason}" if path else reason)
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
