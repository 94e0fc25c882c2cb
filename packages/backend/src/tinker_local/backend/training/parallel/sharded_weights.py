"""Large weights of which each rank holds an equal part of a copy (FSDP2), gathered just before they are read.

FSDP2's hooks are not used: a decoder without autograd would not call them, and every rank must gather the same units in
the same order even if it has nothing to compute. What is used is public: `fully_shard`, and `unshard` and `reshard` of
each unit. A unit, a layer or the LM head, is one flat parameter, so that any dtypes and shapes fit, a rank's part is
contiguous, and the tensors that modules read are views of what has been gathered.

Frozen weights need no collective: ranks on one machine read each other's parts (`peer_memory.py`), each when it wants
to, straight into the place where modules read them. Where they cannot, FSDP2 gathers.

On a GPU, gathers and their copies run on a separate stream, one unit ahead of the computation. Their memory is
always reserved: a gather that lacked memory on one rank would leave the other ranks waiting inside theirs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tinker_local.backend.training.kernels import compat_torch
from tinker_local.backend.training.parallel.joined_ranks import FOREVER
from tinker_local.backend.training.parallel.peer_memory import Peers, connect
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

log = logging.getLogger(__name__)

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
        mine = self.part
        first = mesh.get_local_rank() * len(mine)
        for piece in self.pieces:
            start, stop = max(piece.start, first), min(piece.stop, first + len(mine))
            if start < stop:
                size = piece.dtype.itemsize
                elements = read(piece.name, (start - piece.start) // size, (stop - piece.start) // size)
                mine[start - first : stop - first] = elements.to(mine.device, piece.dtype).view(torch.uint8)

    @property
    def part(self) -> torch.Tensor:
        """The bytes of this rank. While the unit is not gathered."""
        flat: Any = self.flat
        part: torch.Tensor = flat.to_local().view(torch.uint8)
        return part

    def views(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The unit's tensors, by name, in the bytes of the `whole` unit."""
        return {
            piece.name: whole[piece.start : piece.stop].view(piece.dtype).view(piece.shape) for piece in self.pieces
        }


class Gathers(Protocol):
    """How units become whole. What is done on a GPU is done by the current stream."""

    together: bool
    """Whether all ranks of a copy must gather the same units in the same order."""

    def begin(self, number: int) -> None:
        """Make unit `number` whole."""

    def end(self, number: int) -> None:
        """Give up its memory."""

    def views(self, number: int) -> dict[str, torch.Tensor]:
        """Its tensors by name, readable whenever it is whole."""


class PeerReads:
    """Implements `Gathers` by reading from the memory of other ranks. Neighbouring layers have separate places, and
    the LM head has one."""

    together = False

    def __init__(self, units: Sequence[Unit], head: int | None, peers: Peers, device: torch.device) -> None:
        self._units = units
        self._peers = peers
        self._places = {number: 2 if number == head else number % 2 for number in range(len(units))}
        sizes = dict.fromkeys(self._places.values(), 0)
        for number, place in self._places.items():
            sizes[place] = max(sizes[place], units[number].nbytes)
        self._memory = {place: torch.empty(n, dtype=torch.uint8, device=device) for place, n in sizes.items()}

    def begin(self, number: int) -> None:
        """See `Gathers.begin`."""
        self._peers.read(number, self._whole(number))

    def end(self, number: int) -> None:
        """See `Gathers.end`: the place is used again."""

    def views(self, number: int) -> dict[str, torch.Tensor]:
        """See `Gathers.views`."""
        return self._units[number].views(self._whole(number))

    def _whole(self, number: int) -> torch.Tensor:
        return self._memory[self._places[number]][: self._units[number].nbytes]


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


class Collectives:
    """Implements `Gathers` with FSDP2, for GPUs that cannot read each other's memory."""

    together = True

    def __init__(self, units: Sequence[Any], head: int | None, device: torch.device) -> None:
        """Called with the stream of the gathers as the current one."""
        self._units = units
        self._device = device
        self._reserved: dict[int, list[torch.Tensor]] = {}
        self._views: list[dict[str, torch.Tensor]] = []
        staging = _Staging()
        for number, unit in enumerate(units):
            assert isinstance(unit, FSDPModule)
            unit.set_custom_all_gather(staging)
            for _ in range((1 if number == head else 2) - len(self._reserved.get(unit.nbytes, ()))):
                self._reserve(unit)
            self.begin(number)
            self._views.append(unit.views(unit.flat.detach().view(torch.uint8)))
            self.end(number)

    def begin(self, number: int) -> None:
        """See `Gathers.begin`."""
        unit = self._units[number]
        if self._device.type == "cuda":
            self._reserved[unit.nbytes].pop()  # for FSDP2 to allocate: nothing else does in this stream
        unit.unshard(async_op=True).wait()

    def end(self, number: int) -> None:
        """See `Gathers.end`."""
        self._units[number].reshard()
        self._reserve(self._units[number])

    def views(self, number: int) -> dict[str, torch.Tensor]:
        """See `Gathers.views`."""
        return self._views[number]

    def _reserve(self, unit: Any) -> None:
        if self._device.type == "cuda":
            memory = torch.empty(unit.nbytes, dtype=torch.uint8, device=self._device)
            self._reserved.setdefault(unit.nbytes, []).append(memory)


class ShardedWeights:
    """Implements `LargeWeights` for layers and an LM head of which `size` ranks hold one copy together. With more ranks
    than that there are several copies; ranks of one gather from each other alone. Add all units, then `connect`."""

    gathers: Gathers

    def __init__(self, device: torch.device, size: int) -> None:
        self.mesh = ranks_of_a_copy(device, size)
        self.gathered: dict[int, torch.cuda.Event | None] = {}
        self._device = device
        self._units: list[Unit] = []
        self._layers = 0
        self._head: int | None = None
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def add_layer(self, tensors: Mapping[str, torch.Tensor], read: ReadPart) -> None:
        """Shard the next layer, whose `tensors` have shapes and dtypes."""
        assert self._head is None, "the LM head is the last unit"
        self._layers += 1
        self._units.append(Unit(pieces_of(tensors), read, self.mesh, self._device))

    def add_head(self, tensors: Mapping[str, torch.Tensor], read: ReadPart) -> None:
        """The same for the LM head."""
        self._head = self._layers
        self._units.append(Unit(pieces_of(tensors), read, self.mesh, self._device))

    def connect(self) -> list[dict[str, torch.Tensor]]:
        """Decide with the other ranks how units are gathered; the tensors that the modules of each must read."""
        found = connect([unit.part for unit in self._units], self.mesh.get_group())
        if isinstance(found, str):
            log.warning("ranks gather layers through %s: %s", dist.get_backend(self.mesh.get_group()), found)
            with self._beside():
                self.gathers = Collectives(self._units, self._head, self._device)
        else:
            self.gathers = PeerReads(self._units, self._head, found, self._device)
        return [self.gathers.views(number) for number in range(len(self._units))]

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
        with self._beside():
            self.gathers.begin(number)
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
                self.gathers.end(number)
            del self.gathered[number]

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
        """Walk the rest of the way, if others wait for that. Where a backward ends, the next walk begins: that layer
        stays."""
        while self._weights.gathers.together and self._at + 1 < len(self._order):
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
