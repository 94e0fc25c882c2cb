"""The messages between the two processes, as bytes: pickles whose arrays are sent outside of the pickle (PEP 574).

Tensors travel as arrays. A process only reads pickles of its child or parent. Images are named by their content hash:
the server sends each image before the first call that needs it, and later sends a message to forget it
(`sent_images.py`).
"""

import io
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter_tensors import as_numpy, as_torch
from tinker_local.backend.rendering.rendered_input import ImagePositions, RenderedImage
from tinker_local.types import ApiError

Program = Callable[..., None]
"""What a child process runs, called with its `child.Inbox`: a function of a module that can be imported (so not
`__main__`), or a `functools.partial` of one."""


ALIGNMENT = 64
"""Alignment of arrays in memory, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepare:
    """The first message to a process that is started before it is known what it runs: import what it
    will need, a "module", and then call a function of it if that is a "module:function"."""

    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The first message, or the one after `Prepare`. `name`: what the process is called in log records. `log_level`:
    the lowest level of log records to send back."""

    name: str
    program: Program
    log_level: int


@dataclass(frozen=True, slots=True, eq=False)
class KeepImage:
    """A `RenderedImage` for later calls, with what its reader needs: the sampler vLLM's own item if there is one, the
    trainer only the pixel values."""

    content_hash: str
    num_tokens: int
    pixel_values: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    vllm_item: Any = None
    positions: ImagePositions | None = None
    further: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, image: RenderedImage, *, sampler: bool = False) -> "KeepImage":
        item = image.vllm_item if sampler else None
        pixels = image.pixel_values if item is None else np.zeros((0, 0), np.float32)
        further = image.further if item is None else {}
        return cls(image.content_hash, image.num_tokens, pixels, image.grid_thw, item, image.positions, further)

    def rendered(self) -> RenderedImage:
        return RenderedImage(
            self.content_hash,
            self.num_tokens,
            self.pixel_values,
            self.grid_thw,
            self.vllm_item,
            positions=self.positions,
            further=self.further,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Run a method of what the process serves and answer under `number`."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ForgetImages:
    """Forget these images."""

    content_hashes: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """A value that later calls refer to by its name."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """Forget these values."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Cancel:
    """Cancel a call, which is not answered."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Notes:
    """What happened in calls that go on: pairs of a call's number and what it tells. Those of one moment are a single
    message, as each token of each streamed sequence is one."""

    told: Sequence[tuple[int, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Several messages in one: their heads, and where the arrays of each start."""

    heads: Sequence[bytes]
    starts: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The result of a call. `state`: attributes of what the process serves, as they are now."""

    number: int
    value: Any
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """The error of a call. `final`: the process ends, because its device no longer works."""

    number: int
    error: Exception
    state: Mapping[str, Any]
    final: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Attributes of a `logging.LogRecord` whose message is complete."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """`head`: a pickle that refers to `arrays` by their index and to `images` by their hash, and contains `offsets`:
    where each array starts, relative to the first one, and where the last one ends. All are aligned."""

    head: bytes
    arrays: Sequence[npt.NDArray[Any]]
    offsets: Sequence[int]
    images: Mapping[str, RenderedImage]


class _Pickler(pickle.Pickler):
    """Faster than pickle's own protocol for out-of-band arrays, which costs several microseconds per array."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[npt.NDArray[Any]] = []
        self.images: dict[str, RenderedImage] = {}
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | str | None:
        """Arrays of numbers become their index, images their hash."""
        kind = type(obj)
        if kind is np.ndarray and obj.dtype.kind in "biuf":
            place = self._places.setdefault(id(obj), len(self.arrays))
            if place == len(self.arrays):
                self.arrays.append(obj)
            return place
        if kind is RenderedImage:
            self.images[obj.content_hash] = obj
            return str(obj.content_hash)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce dataclasses to their fields, and errors that clients see to their message."""
        kind = type(obj)
        if hasattr(kind, "__dataclass_fields__") and kind.__module__.startswith("tinker_local."):
            return kind, tuple([getattr(obj, name) for name in kind.__dataclass_fields__])
        if kind.__module__ == "torch" and kind.__name__ == "Tensor":  # of vLLM's images; torch may not be imported
            return as_torch, (as_numpy(obj),)
        return (kind, (str(obj),), vars(obj) or None) if isinstance(obj, ApiError) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, arrays: Sequence[npt.NDArray[Any]], images: Mapping[str, RenderedImage]
    ) -> None:
        super().__init__(file)
        self._arrays = arrays
        self._images = images

    def persistent_load(self, pid: int | str) -> npt.NDArray[Any] | RenderedImage:
        return self._images[pid] if isinstance(pid, str) else self._arrays[pid]


def encode(message: Any) -> Encoded:
    """Separate `message` from its arrays, without copying them."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    arrays = pickler.arrays
    offsets = [0, *itertools.accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]
    places = ([array.dtype.str for array in arrays], [array.shape for array in arrays], offsets[:-1])
    return Encoded(pickle.dumps((file.getvalue(), places), protocol=5), arrays, offsets, pickler.images)


def join(messages: Sequence[Encoded]) -> Encoded:
    """One message, which is received as a list of `messages`."""
    starts = list(itertools.accumulate((message.offsets[-1] for message in messages), initial=0))
    offsets = [start + at for start, each in zip(starts, messages, strict=False) for at in each.offsets[:-1]]
    arrays = [array for message in messages for array in message.arrays]
    images = {name: image for message in messages for name, image in message.images.items()}
    head = encode(Joined([message.head for message in messages], starts[:-1])).head
    return Encoded(head, arrays, [*offsets, starts[-1]], images)


def decode(head: bytes, memory: Any, first: int, images: Mapping[str, RenderedImage]) -> Any:
    """The message whose arrays are in the buffer `memory` from `first` on. The arrays keep the buffer alive."""
    pickled, places = pickle.loads(head)
    arrays = [np.ndarray(shape, dtype, memory, first + at) for dtype, shape, at in zip(*places, strict=True)]
    message = _Unpickler(io.BytesIO(pickled), arrays, images).load()
    if isinstance(message, Joined):
        starts = zip(message.heads, message.starts, strict=True)
        return [decode(head, memory, first + start, images) for head, start in starts]
    return message


def travels(error: Exception) -> bool:
    """Whether an exception survives pickling with the same type and message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return type(copy) is type(error) and str(copy) == str(error)
