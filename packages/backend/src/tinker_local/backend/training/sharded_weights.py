"""Large weights of which each rank holds an equal part of a copy (FSDP2), gathered just before they are read.

FSDP2's hooks are not used: a decoder without autograd would not call them, and every rank must gather the same units in
the same order even if it has nothing to compute. What is used is public: `fully_shard`, and `unshard` and `reshard` of
each unit. A unit, a layer or the LM head, is one flat parameter, so that any dtypes and shapes fit, a rank's part is
contiguous, and the tensors that modules read are views of what FSDP2 gathers.

On a GPU, gathers and their copies run on a separate stream, one unit ahead of the computation. Their memory is
always reserved: a gather that lacked memory on one rank would leave the other ranks waiting inside theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tinker_local.backend.training import compat_torch
from tinker_local.backend.training.joined_ranks import FOREVER
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

FLAT = torch.float64
"""The dtype of a flat parameter, which is only copied. torch 2.11 shards no parameters of integers; and FSDP2 copies
four elements at a time, so bytes would be slow."""

ALIGNMENT = 16
"""Tensors start at multiples of so many bytes, as matmuls on tensor cores need."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensor `name` of a unit, with its place in the unit's bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        size: int = self.shape.numel() * self.dtype.itemsize
        return self.start + size


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The places of `tensors`, in this order."""
    found: list[Piece] = []
    for name, tensor in tensors.items():
        start = found[-1].stop if found else 0
        found.append(Piece(name, tensor.shape, tensor.dtype, -(-start // ALIGNMENT) * ALIGNMENT))
    return found


def ranks_of_a_copy(device: torch.device, size: int) -> DeviceMesh:
    """The `size` ranks in a row, this one among them, that hold one copy together. All ranks call this."""
    if size == dist.get_world_size():
        return init_device_mesh(device.type, (size,))
    group, _ = dist.new_subgroups(size, timeout=FOREVER)
    return DeviceMesh.from_group(group, device.type)


ReadPart = Callable[[str, int, int], torch.Tensor]
"""The elements [start, stop) of a tensor in row-major order, by its name; on the host or the device, in any dtype."""


class Unit(torch.nn.Module):
    """What is gathered at a time: `pieces`, of which `read` reads those elements that are in this rank's part."""

    def __init__(self, pieces: Sequence[Piece], read: ReadPart, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__()
        self.pieces = pieces
        step = mesh.size() * ALIGNMENT
        self.nbytes = -(-pieces[-1].stop // step) * step
        empty = torch.empty(self.nbytes // FLAT.itemsize, dtype=FLAT, device="meta")
        self.flat = torch.nn.Parameter(empty, requires_grad=False)
        fully_shard(self, mesh=mesh)
        self.to_empty(device=device)
        self._read(read, mesh)

    def _read(self, read: ReadPart, mesh: DeviceMesh) -> None:
        part: Any = self.flat
        mine = part.to_local().view(torch.uint8)
        first = mesh.get_local_rank() * len(mine)
        for piece in self.pieces:
            start, stop = max(piece.start, first), min(piece.stop, first + len(mine))
            if start < stop:
                size = piece.dtype.itemsize
                elements = read(piece.name, (start - piece.start) // size, (stop - piece.start) // size)
                mine[start - first : stop - first] = elements.to(mine.device, piece.dtype).view(torch.uint8)

    def views(self) -> dict[str, torch.Tensor]:
        """The unit's tensors, by name. Only while it is gathered; they are readable whenever it is gathered again."""
        flat = self.flat.detach().view(torch.uint8)
        return {piece.name: flat[piece.start : piece.stop].view(piece.dtype).view(piece.shape) for piece in self.pieces}


class _Staging:
    """FSDP2's all-gather (`AllGather` of its custom communication), in memory that is allocated once."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = size[0] * dtype.itemsize
        if self._bytes is None or len(self._bytes) < count:
            self._bytes = None
            self._bytes = torch.empty(count, dtype=torch.uint8, device=device)
        return self._bytes[:count].view(dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return compat_torch.all_gather(output_tensor, input_tensor, group, async_op=async_op)


class ShardedWeights:
    """Implements `LargeWeights` for layers and an LM head of which `size` ranks hold one copy together. With more ranks
    than that there are several copies; ranks of one gather from each other alone."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.mesh = ranks_of_a_copy(device, size)
        self.gathered: dict[int, torch.cuda.Event | None] = {}
        self._device = device
        self._units: list[Any] = []
        self._layers = 0
        self._head: int | None = None
        self._staging = _Staging()
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._reserved: dict[int, list[torch.Tensor]] = {}

    def add_layer(self, tensors: Mapping[str, torch.Tensor], read: ReadPart) -> dict[str, torch.Tensor]:
        """Shard the next layer, whose `tensors` have shapes and dtypes; returns those that its modules must read."""
        self._layers += 1
        assert self._head is None, "the LM head is the last unit"
        return self._added(tensors, read, together=2)

    def add_head(self, tensors: Mapping[str, torch.Tensor], read: ReadPart) -> dict[str, torch.Tensor]:
        """The same for the LM head."""
        self._head = self._layers
        return self._added(tensors, read, together=1)

    @contextmanager
    def walk(self, *, backward: bool) -> Iterator["ShardedWalk"]:
        """See `LargeWeights.walk`."""
        order = order_of(self._layers, self._head, backward=backward)
        self.gather(order[0])
        walk = ShardedWalk(self, order)
        try:
            yield walk
        finally:
            walk.finish()

    @property
    def head_unit(self) -> int | None:
        """The number of the LM head's unit."""
        return self._head

    def gather(self, number: int) -> None:
        """Start to gather unit `number` unless that has been done. At most two units of layers at a time."""
        if number in self.gathered:
            return
        unit = self._units[number]
        with self._beside():
            if self._stream is not None:
                self._reserved[unit.nbytes].pop()  # for FSDP2 to allocate: nothing else does in this stream
            unit.unshard(async_op=True).wait()
            self.gathered[number] = None if self._stream is None else self._stream.record_event()

    def wait(self, number: int) -> None:
        """Let the current stream wait until unit `number` has been gathered."""
        event = self.gathered[number]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop what has been gathered of the units `numbers`, after all that the current stream has been told to do."""
        if self._stream is not None and numbers:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for number in numbers:
            with self._beside():
                self._units[number].reshard()
                self._reserve(self._units[number])
            del self.gathered[number]

    def _added(self, tensors: Mapping[str, torch.Tensor], read: ReadPart, together: int) -> dict[str, torch.Tensor]:
        unit: Any = Unit(pieces_of(tensors), read, self.mesh, self._device)
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(self._staging)
        self._units.append(unit)
        number = len(self._units) - 1
        with self._beside():
            for _ in range(together - len(self._reserved.get(unit.nbytes, ()))):
                self._reserve(unit)
        self.gather(number)
        self.wait(number)
        views: dict[str, torch.Tensor] = unit.views()
        self.drop([number])
        return views

    def _reserve(self, unit: Any) -> None:
        if self._stream is not None:
            memory = torch.empty(unit.nbytes, dtype=torch.uint8, device=self._device)
            self._reserved.setdefault(unit.nbytes, []).append(memory)

    def _beside(self) -> AbstractContextManager[Any]:
        """Beside the computation: in the stream of gathers."""
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream


def order_of(layers: int, head: int | None, *, backward: bool) -> list[int]:
    """The numbers of the units as a walk enters them. Without a unit for the `head`, the last layer turns around."""
    there = [*range(layers)]
    back = [*reversed(there)] if backward else []
    return [*there, *back[1:]] if head is None else [*there, head, *back]


class ShardedWalk:
    """Implements `Walk` through `weights`. `order`: the numbers of the units."""

    def __init__(self, weights: ShardedWeights, order: Sequence[int]) -> None:
        self._weights = weights
        self._order = order
        self._at = -1

    def layer(self, index: int) -> None:
        """See `Walk.layer`."""
        self._enter(index)

    def head(self) -> None:
        """See `Walk.head`."""
        if self._weights.head_unit is not None:
            self._enter(self._weights.head_unit)

    def finish(self) -> None:
        """Walk the rest of the way. Where a backward ends, the next walk begins: that layer stays."""
        while self._at + 1 < len(self._order):
            self._step()
        first = self._order[0]
        self._weights.drop([number for number in self._weights.gathered if number != first])

    def _enter(self, number: int) -> None:
        following = self._order[self._at + 1] if self._at + 1 < len(self._order) else None
        if self._at < 0 or self._order[self._at] != number:
            assert following == number, f"unit {number} is read out of order: {following} is next"
            self._step()
        self._weights.wait(number)

    def _step(self) -> None:
        """Go to the next unit: drop those that are behind, and send for the one after it."""
        self._at += 1
        near = self._order[self._at : self._at + 3]
        self._weights.drop([number for number in self._weights.gathered if number not in near])
        for number in near[:2]:
            self._weights.gather(number)
