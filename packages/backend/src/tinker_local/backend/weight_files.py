"""The safetensors files that hold a model's weights, as Hugging Face lays them out: which they are and what is in them.

The format: 8 bytes with the length of a JSON object, which has dtype, shape and place of each tensor in what follows.
"""

import importlib.util
import json
import math
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinker_local.backend.heap import memory_of_machine

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100 * 2**20
"""Bytes of a safetensors header that its format allows."""

ITEMSIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
FLOATS = ("F64", "F32", "F16", "BF16")
"""Of these, the dtypes of weights that are not quantized."""

_CHUNK = 2**21
"""Bytes of a tensor that are read at a time: few enough for a processor's cache."""

_AHEAD = 2**24
"""Bytes that are read ahead at a time."""

_INFINITIES: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Without the sign, infinity and NaN are the integers from here on."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in `file`, whose bytes are [start, stop) of it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its count of numbers."""
        return math.prod(self.shape)


def read_ahead(source: str) -> threading.Thread | None:
    """Read the weights of `source`, a folder or a hub name, into the kernel's cache while libraries are imported.

    Trainer and sampler find them there, and the disk reads them once. The thread that does it; None if they are not
    here, or larger than half of the memory."""
    try:
        folder = folder_of(source)
        files = [] if folder is None else [folder / name for name in weight_files(folder) if (folder / name).is_file()]
        size = sum(file.stat().st_size for file in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the start says what is wrong with them
    if not 0 < size <= memory_of_machine() // 2:
        return None

    def read() -> None:
        buffer = bytearray(_AHEAD)
        for file in files:
            with suppress(OSError), file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):  # the kernel takes POSIX_FADV_WILLNEED for a fraction of this alone
                    pass

    thread = threading.Thread(target=read, daemon=True, name="read-ahead")
    thread.start()
    return thread


def weight_files(folder: Path) -> list[str]:
    """Names in `folder`: those of its index, or the single file; empty if it has neither. Files of the index may be
    missing. ValueError, KeyError, TypeError or AttributeError for an index of another form."""
    if (folder / INDEX).is_file():
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    return [SINGLE] if (folder / SINGLE).is_file() else []


def folder_on_disk(model: str) -> Path | None:
    """The folder of `model`, a folder or a name of the hub, whose cache may have it; None if this machine has none."""
    if Path(model).is_dir():
        return Path(model)
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a name that no model of the hub can have
        return None
    return Path(config).parent if isinstance(config, str) else None


def folder_of(model: str) -> Path | None:
    """The same if it has all weights, else None."""
    if (folder := folder_on_disk(model)) is None:
        return None
    names = weight_files(folder)
    return folder if names and all((folder / name).is_file() for name in names) else None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Those of all `weight_files`, by name. The errors of `weight_files` and `tensors_in`."""
    return {name: tensor for file in weight_files(folder) for name, tensor in tensors_in(folder / file).items()}


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Those of a safetensors file, by name, from its header; ValueError if it is cut off or something else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(_cut_off(size))
        try:
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        except ValueError:
            raise ValueError("it is not a safetensors file") from None
    if not isinstance(header, dict):
        raise ValueError("it is not a safetensors file")
    found = {name: _tensor(name, path, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    whole = max((tensor.stop for tensor in found.values()), default=8 + length)
    if whole != size:
        raise ValueError(_cut_off(size, whole))
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda each: (each.start, each.stop)):
        if tensor.start != end:  # programs that read a file by its format refuse it
            raise ValueError(f"its header has {tensor.name!r} from byte {tensor.start:,}, and {end:,} is due")
        end = tensor.stop
    return found


def _tensor(name: str, path: Path, entry: Any, start: int) -> StoredTensor:
    try:
        begin, end = map(int, entry["data_offsets"])
        tensor = StoredTensor(
            name, path, str(entry["dtype"]), tuple(map(int, entry["shape"])), start + begin, start + end
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header has no place for {name!r}") from None
    if tensor.dtype in ITEMSIZES and tensor.size * ITEMSIZES[tensor.dtype] != end - begin:
        raise ValueError(
            f"its header gives {name!r} the shape {[*tensor.shape]} in {tensor.dtype}, and {end - begin:,} bytes"
        )
    return tensor


def _cut_off(size: int, whole: int | None = None) -> str:
    """In words. A pointer of git-lfs is the usual reason for a tiny file."""
    told = f"it has {size:,} bytes" + ("" if whole is None else f" of {whole:,}")
    return f"{told}, a pointer of git-lfs?" if 0 < size < 1024 else f"{told}: it is cut off"


def not_finite(tensors: Iterable[StoredTensor]) -> str | None:
    """The first of `tensors` with a number that is NaN or infinite, in words; None if there is none. Reads them."""
    for tensor in tensors:
        if tensor.dtype in _INFINITIES and (first := _first_not_finite(tensor)) is not None:
            place = [int(at) for at in np.unravel_index(first, tensor.shape)]
            return f"{tensor.file}: {tensor.name} has a number that is NaN or infinite, at {place} of {[*tensor.shape]}"
    return None


def _first_not_finite(tensor: StoredTensor) -> int | None:
    integer, infinity = _INFINITIES[tensor.dtype]
    buffer = np.empty(_CHUNK // np.dtype(integer).itemsize, integer)
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        for done in range(0, tensor.size, len(buffer)):
            part = buffer[: tensor.size - done]
            read = 0
            while read < part.nbytes:
                more = file.readinto(part.view(np.uint8)[read:].data)
                if not more:
                    raise OSError(f"{tensor.file} became shorter while it was read")
                read += more
            part &= integer(np.iinfo(integer).max >> 1)
            if part.max(initial=0) >= infinity:
                return done + int(np.argmax(part >= infinity))
    return None
