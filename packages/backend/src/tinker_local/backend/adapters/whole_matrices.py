"""Whole matrices of the base model beside an adapter's factors: PEFT's `save_pretrained` writes that of the LM head or
the embedding if the adapter is on it. Here they stay as they are, so they must be the base model's own."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import HEAD
from tinker_local.backend.adapters.adapter_files import WEIGHTS
from tinker_local.backend.adapters.adapter_tensors import in_float32
from tinker_local.backend.weight_files import StoredTensor, folder_of, stored_tensors
from tinker_local.backend.weights.joined_names import DRAFT
from tinker_local.types import InvalidRequestError

EMBEDDING = "embed_tokens"

_NAME = re.compile(rf"base_model\.model\.(?:.+\.)?({HEAD}|{EMBEDDING})(?:\.base_layer)?\.weight")
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_PART = 2**22
"""Numbers that are compared at a time."""


def is_whole_matrix(name: str) -> bool:
    """Whether the tensor `name` of an adapter is the LM head's or the embedding's matrix itself."""
    return _NAME.fullmatch(name) is not None


def check_whole_matrices(matrices: Mapping[str, npt.NDArray[Any]], source: str) -> None:
    """InvalidRequestError unless each of `matrices` [vocabulary, hidden], by name in the adapter, equals the one of the
    base model in `source`, a folder or hub name, bit for bit. Of both, uint16 are the bits of bfloat16."""
    if not matrices:
        return
    folder = folder_of(source)
    stored = {} if folder is None else stored_tensors(folder)
    for name, array in matrices.items():
        match = _NAME.fullmatch(name)
        if match is None or (own := _own(match[1], stored)) is None:
            raise InvalidRequestError(
                f"{WEIGHTS}: {name}: is a whole matrix of the base model, and {source!r} has no safetensors file with "
                "that matrix to compare it with; delete it from the adapter if it is the base model's own"
            )
        _compare(name, array, own)


def bytes_of_whole_matrices(source: str) -> int:
    """At most, in float32, of the base model in `source`; 0 if its files are not here."""
    folder = folder_of(source)
    stored = {} if folder is None else stored_tensors(folder)
    own = [_own(each, stored) for each in (HEAD, EMBEDDING)]
    return sum(4 * each.size for each in own if each is not None)


def _own(kind: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The LM head or the embedding among the files' tensors; a head that is not there is tied to the embedding."""
    for last in dict.fromkeys((kind, EMBEDDING)):
        for name, tensor in stored.items():
            if f".{name}".endswith(f".{last}.weight") and not name.startswith(DRAFT):
                return tensor
    return None


def _compare(name: str, array: npt.NDArray[Any], own: StoredTensor) -> None:
    if own.dtype not in _DTYPES:
        raise InvalidRequestError(
            f"{WEIGHTS}: {name}: is a whole matrix, and cannot be compared with the base model's {own.name}, which is "
            f"stored as {own.dtype}"
        )
    if array.shape != own.shape:
        raise InvalidRequestError(
            f"{WEIGHTS}: {name}: has shape {list(array.shape)}, and the base model's {own.name} {list(own.shape)}: "
            "adapters here do not change a matrix itself, nor the size of the vocabulary"
        )
    wanted = np.memmap(own.file, _DTYPES[own.dtype], "r", own.start, own.shape).reshape(-1)
    given, differing, largest = array.reshape(-1), 0, 0.0
    for begin in range(0, own.size, _PART):
        part = slice(begin, begin + _PART)
        one, other = in_float32(given[part]), in_float32(np.asarray(wanted[part]))
        if unequal := int((one.view(np.uint32) != other.view(np.uint32)).sum()):
            with np.errstate(invalid="ignore", over="ignore"):
                differing, largest = differing + unequal, max(largest, float(np.abs(one - other).max()))
    if differing:
        raise InvalidRequestError(
            f"{WEIGHTS}: {name}: differs from the base model's {own.name} in {differing:,} of {own.size:,} numbers, by "
            f"{largest:g} at most: adapters here change no matrix itself, so that it would be lost"
        )
