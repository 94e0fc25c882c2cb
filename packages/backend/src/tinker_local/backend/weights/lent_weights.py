"""The frozen weights of a trainer, as a sampler reads them."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import safetensors
import torch
from tinker_local.backend.weight_files import folder_of, weight_files
from tinker_local.backend.weights.checksum import checksum
from tinker_local.backend.weights.memory_holder import Deposit
from tinker_local.backend.weights.packed import ORDER, dense_name
from tinker_local.backend.weights.published import published_of
from tinker_local.backend.weights.read_published import reading
from tinker_local.backend.weights.shared_memory import CannotShareError, map_shared


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in several pieces of memory: `offset` bytes into number `piece`. `stride`: in numbers."""

    piece: int
    offset: int
    dtype: str
    shape: Sequence[int]
    stride: Sequence[int]

    @staticmethod
    def of(tensor: torch.Tensor, pieces: Mapping[int, int]) -> "Place | None":
        """`pieces`: the number of each, by the address of its storage. None if `tensor` is in none of them."""
        piece = pieces.get(tensor.untyped_storage()._cdata)
        if piece is None:
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Place(piece, tensor.storage_offset() * tensor.itemsize, dtype, [*tensor.shape], [*tensor.stride()])

    def tensor(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor there."""
        dtype, memory = getattr(torch, self.dtype), pieces[self.piece]
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset // dtype.itemsize, self.shape, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class SharedMatrices:
    """The matrices of transformers' model in `pieces` of memory that processes share, uint8 [size] each. `places`: by
    the names of parameters. `sums`: what each was as it was written. `again`: where those are that are there twice,
    since vLLM joins them to two others."""

    pieces: Sequence[torch.Tensor] = field(repr=False)
    places: Mapping[str, Place] = field(repr=False)
    sums: Mapping[str, int] = field(repr=False)
    again: Mapping[str, Place] = field(default_factory=dict, repr=False)

    @staticmethod
    def mapped(deposit: Deposit, device: torch.device) -> "SharedMatrices":
        """Maps memory of `deposit` and leaves its descriptors open."""
        said = deposit.said
        pieces = [map_shared(file, size, device) for file, size in zip(deposit.files, said["pieces"], strict=True)]
        places, again = ({name: Place(**place) for name, place in said[kind].items()} for kind in ("places", "again"))
        return SharedMatrices(pieces, places, said["sums"], again)

    def tensor(self, name: str) -> torch.Tensor:
        return self.places[name].tensor(self.pieces)

    def changed(self) -> list[str]:
        """The names of matrices that are not what was written: both engines would compute with them, and comparing
        these would not show it."""
        changed = {name for name, before in self.sums.items() if checksum(self.tensor(name)) != before}
        twice = {name for name, place in self.again.items() if checksum(place.tensor(self.pieces)) != self.sums[name]}
        return [name for name in self.sums if name in changed | twice]

    def verify(self) -> None:
        """RuntimeError if a matrix has changed."""
        if changed := self.changed():
            raise RuntimeError(in_words(changed))


def in_words(changed: Sequence[str]) -> str:
    """That the matrices of these names have changed; there is one at least."""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the frozen weights have changed in memory: {changed[0]}{more}"


@dataclass(frozen=True, slots=True, eq=False)
class LentWeights:
    """The `tensors` of a model's files, by name, with codes and scales in place of matrices that are packed; those
    named in `lent` are in `matrices`, the others of the sampler's own."""

    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    lent: Set[str] = field(repr=False)
    matrices: SharedMatrices = field(repr=False)

    @staticmethod
    def of(deposit: Deposit, source: str, device: torch.device) -> "LentWeights":
        """Those of the model at `source` that a trainer has shared; what it has not is read from the files."""
        matrices = SharedMatrices.mapped(deposit, device)
        lent = {name: Place(**place).tensor(matrices.pieces) for name, place in deposit.said["files"].items()}
        packed = set(deposit.said["packed"])
        orders: dict[str, torch.Tensor] = {}
        if (published := published_of(source)) is not None and (folder := folder_of(source)) is not None:
            packed |= published.consumed
            with reading(folder) as read:
                orders = {f"{module}.{ORDER}": read(name).int() for module, name in published.orders.items()}
        tensors = dict(stored_tensors(source, lent, packed)) | orders | lent
        return LentWeights(tensors, frozenset(lent), matrices)

    def codes_once(self) -> "LentWeights":
        """Without packed matrices that are those of another name before: of an LM head that the sampler ties."""
        given: set[int] = set()
        again = set()
        for name, tensor in self.tensors.items():
            if name in self.lent and name != dense_name(name):
                again |= {name} if tensor.data_ptr() in given else set()
                given.add(tensor.data_ptr())
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in again}
        return LentWeights(tensors, self.lent - again, self.matrices)

    def storages(self) -> dict[int, torch.Tensor]:
        """One of the lent tensors in each piece of memory, by the address of its storage."""
        return {self.tensors[name].untyped_storage()._cdata: self.tensors[name] for name in self.lent}

    def further(self) -> dict[tuple[int, int], int]:
        """How many numbers further a matrix is a second time, by the address of its storage and its place there."""
        found = {}
        for name, place in self.matrices.again.items():
            first, second = self.matrices.tensor(name), place.tensor(self.matrices.pieces)
            found[first.untyped_storage()._cdata, first.storage_offset()] = (
                second.storage_offset() - first.storage_offset()
            )
        return found


def stored_tensors(source: str, known: Mapping[str, Any], without: Set[str] = frozenset()) -> Any:
    """Each name in the files of `source`, but those `without`, with its tensor: that of `known`, if it is there, and
    otherwise the file's. CannotShareError if there are no safetensors files on this machine."""
    if (folder := folder_of(source)) is None:
        raise CannotShareError(f"{source} has no safetensors files on this machine")
    for file in weight_files(folder):
        with safetensors.safe_open(folder / file, "pt") as stored:
            for name in [name for name in stored.keys() if name not in without]:  # noqa: SIM118
                yield name, known[name] if name in known else stored.get_tensor(name)
