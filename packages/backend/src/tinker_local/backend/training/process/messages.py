"""What the two processes say to each other, as bytes: pickles whose arrays stay outside of them (PEP 574).

A pickle is read from nobody but the process that this one started, or that started this one. Images are named by their
content hash: a process is sent each image before the first call that needs it, and keeps it until it is told to forget
it (`sent_images.py`).
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.interface import RenderedImage
from tinker_local.backend.training.interface import Trainer
from tinker_local.types import ApiError

TrainerFactory = Callable[[], Trainer]
"""Makes the trainer in its process: a function of a module that can be imported (so not `__main__`), or a
`functools.partial` of one or of a class."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The first message. `log_level`: of what is worth sending back."""

    factory: TrainerFactory
    log_level: int


@dataclass(frozen=True, slots=True, eq=False)
class KeepImage:
    """A `RenderedImage` for the calls that follow, without vLLM's own item, which only the sampler reads."""

    content_hash: str
    num_tokens: int
    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]

    @classmethod
    def of(cls, image: RenderedImage) -> "KeepImage":
        return cls(image.content_hash, image.num_tokens, image.pixel_values, image.grid_thw)

    def rendered(self) -> RenderedImage:
        return RenderedImage(self.content_hash, self.num_tokens, self.pixel_values, self.grid_thw)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Run a method of the trainer and answer under `number`."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ForgetImages:
    """Let go of these images."""

    content_hashes: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The trainer is there. `adapter_bytes`: by (unembed, mlp, attn), what an adapter takes at some ranks."""

    vocab_size: int
    max_context_length: int
    adapter_bytes: Mapping[tuple[bool, bool, bool], Mapping[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a call gave. `images_encoded`: the trainer's count by now."""

    number: int
    value: Any
    images_encoded: int


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """What a call raised. `final`: the process ends, as its device no longer works."""

    number: int
    error: Exception
    images_encoded: int
    final: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Attributes of a `logging.LogRecord` whose message is complete."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """`segments`: the pickle, then the bytes of each array. `images`: those that the message names, by their hash."""

    segments: list[memoryview]
    images: Mapping[str, RenderedImage]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arrays: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: arrays.append(buffer.raw()))
        self.images: dict[str, RenderedImage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Images travel by their hash."""
        if type(obj) is not RenderedImage:
            return None
        self.images[obj.content_hash] = obj
        return obj.content_hash

    def reducer_override(self, obj: Any) -> Any:
        """Errors that clients see are their type and their message, whatever else they carry."""
        return (type(obj), (str(obj),)) if isinstance(obj, ApiError) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Sequence[memoryview], images: Mapping[str, RenderedImage]) -> None:
        super().__init__(file, buffers=arrays)
        self._images = images

    def persistent_load(self, pid: str) -> RenderedImage:
        return self._images[pid]


def encode(message: Any) -> Encoded:
    """`message` in segments; contiguous arrays are not copied."""
    file, arrays = io.BytesIO(), list[memoryview]()
    pickler = _Pickler(file, arrays)
    pickler.dump(message)
    return Encoded([file.getbuffer(), *arrays], pickler.images)


def decode(segments: Sequence[memoryview], images: Mapping[str, RenderedImage]) -> Any:
    """The message; its arrays lie in `segments`, its images are those of `images`."""
    return _Unpickler(io.BytesIO(segments[0]), segments[1:], images).load()


def travels(error: Exception) -> bool:
    """Whether an exception comes out of a pickle as the same type with the same words."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return type(copy) is type(error) and str(copy) == str(error)
