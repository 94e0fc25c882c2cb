"""Environments as Gymnasium has them, with text as actions and text and images as observations.

    class Quiz:
        def reset(self, *, seed=None):
            return ["What is this?", picture], {}

        def step(self, action):
            return "Right!", 1.0, True, False, {}

This module knows no tokens: `chat` turns observations into tokens, and `rollouts` runs the environments.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import PIL.Image
import tinker
from tinker_local.client.encode_images import Image
from tinker_local.types import InvalidRequestError

Part: TypeAlias = str | Image | tinker.types.ImageChunk | Mapping[str, Any]
"""Text; an image as `image_chunk` takes it; a ready `ImageChunk`; or HF's {"type": "text" | "image", ...}."""

Observation: TypeAlias = Part | Sequence[Part] | Sequence[Mapping[str, Any]] | None
"""A part, parts of one user message, or messages {"role": ..., "content": part or parts, ...}; None shows nothing."""

Reset: TypeAlias = tuple[Observation, Mapping[str, Any]]
Step: TypeAlias = tuple[Observation, float, bool, bool, Mapping[str, Any]]


class Environment(Protocol):
    """The world of one episode. Methods may be `async`. If there is a `close()`, it is called at the end.

    Each environment that is not async has a thread to itself, which makes all of its calls.
    """

    def reset(self, *, seed: int | None = None) -> Reset | Awaitable[Reset]:
        """Begin: (observation, info). Equal seeds give equal starts."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer the model's text: (observation, reward, terminated, truncated, info).

        `terminated`: the episode reached its end; `truncated`: it was cut off. The last observation is never shown.
        """
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """`size` environments with the same start, whose returns GRPO compares with each other.

    `make` is called once per environment, and each environment is reset with `seed`.
    """

    make: Callable[[], Environment]
    size: int = 16
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidRequestError(f"size: a group needs at least one environment, not {self.size}")


@dataclass(frozen=True, slots=True)
class Message:
    """A message. `further` holds other fields that the template may read (tool_call_id, name, ...)."""

    role: str
    parts: tuple[str | Image | tinker.types.ImageChunk, ...]
    further: Mapping[str, Any] = field(default_factory=dict)


def as_messages(observation: Observation, role: str = "user", where: str = "observation") -> list[Message]:
    """`observation` as messages; parts without a message form one message of `role`.

    Raises InvalidRequestError with the place of an invalid part. Images are not decoded here.
    """
    if isinstance(observation, (list, tuple)) and observation and all(_is_message(item) for item in observation):
        return [_message(item, f"{where}[{index}]") for index, item in enumerate(observation)]
    if _is_message(observation):
        return [_message(observation, where)]
    return [Message(role, _parts(observation, where))]


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _message(value: Any, where: str) -> Message:
    further = {key: entry for key, entry in value.items() if key not in ("role", "content")}
    return Message(str(value["role"]), _parts(value.get("content"), f"{where}.content"), further)


def _parts(content: Any, where: str) -> tuple[Any, ...]:
    if isinstance(content, (list, tuple)):
        return tuple(_part(item, f"{where}[{index}]") for index, item in enumerate(content))
    return () if content is None else (_part(content, where),)


def _part(part: Any, where: str) -> Any:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image", "image": image} if not isinstance(image, (str, Mapping)):  # a str would be read as text
            return _part(image, where)
        case str() | PIL.Image.Image() | Path() | bytes() | bytearray() | memoryview() | np.ndarray():
            return part
        case tinker.types.ImageChunk():
            return part
    kind = f"{dict(part)!r:.80}" if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{where}: must be text, an image (PIL, pathlib.Path, bytes, array) or a message with a role, not {kind}"
    )
