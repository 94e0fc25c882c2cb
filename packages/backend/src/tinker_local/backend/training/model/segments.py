"""Where the sequences of one packed row begin, and where they part.

A segment is the contiguous positions of one sequence, or of all sequences that begin alike: what they share is in the
row once, and what follows in each is a segment with a *parent*. So the segments are a forest, and a sequence is a path
from a root. Without parents each segment is a sequence. Bounds are explicit, never inferred from position ids.

Legend: T positions of the row, S segments. *Keys*: for each segment in turn, the positions of its path, which its own
positions may attend to. Without parents the keys are the row.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.parallel.shared_rows import SharedRow
from tinker_local.backend.training.run.transfer import to_device

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Run:
    """`count` adjacent segments of the same `length`, from position `start` on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where each segment begins, then the end, int32 [S + 1] on the device, and the longest one's length: of the
    `queries` and of their `keys`, as kernels of attention take them."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_keys: int


@dataclass(frozen=True)
class Segments:
    """The `lengths` of the segments that tile a row, in order, and their bounds on the device.

    `images`: start and stop in the row of each image whose positions also see those after them in the image. `shared`:
    if several ranks share the row. All else is of the whole row. `parents`: of each segment the one that it goes on
    from, which is before it, or `NO_PARENT`; empty if none has one. An image is in one segment.
    """

    lengths: tuple[int, ...]
    device: torch.device
    images: tuple[tuple[int, int], ...] = ()
    shared: SharedRow | None = None
    parents: tuple[int, ...] = ()

    @cached_property
    def gathered(self) -> "Segments":
        """The same row where all of its positions are on this rank, with some heads of each."""
        return replace(self, shared=None)

    @property
    def forks(self) -> bool:
        """Whether any segment has a parent."""
        return bool(self.parents)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each segment."""
        return (0, *itertools.accumulate(self.lengths[:-1]))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """How many positions of its path are before each segment."""
        found: list[int] = []
        for parent in self.parents or [NO_PARENT] * len(self.lengths):
            found.append(0 if parent == NO_PARENT else found[parent] + self.lengths[parent])
        return tuple(found)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """How many positions the path of each segment has, its own at the end."""
        return tuple(before + length for before, length in zip(self.before, self.lengths, strict=True))

    def path(self, segment: int) -> tuple[int, ...]:
        """The segments from a root to `segment`."""
        found = [segment]
        while self.parents and (parent := self.parents[found[-1]]) != NO_PARENT:
            found.append(parent)
        return tuple(reversed(found))

    @cached_property
    def host_key_rows(self) -> npt.NDArray[np.int64]:
        """[keys]: the position in the row of each key."""
        own = [np.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]
        return np.concatenate([own[each] for segment in range(len(self.lengths)) for each in self.path(segment)])

    @cached_property
    def key_rows(self) -> torch.Tensor:
        """int64 [keys], on the device: see `host_key_rows`."""
        return to_device(self.host_key_rows, self.device)

    def to_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of `tensor` [T, ...], the rows of all keys, [keys, ...]."""
        return tensor.index_select(0, self.key_rows) if self.forks else tensor

    def sum_of_keys(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The inverse of `to_keys` for gradients [keys, ...]: the sum at each position, [T, ...] in `dtype`. Adds in
        float32, or wider."""
        if not self.forks:
            return grad.to(dtype)
        wide = wide_dtype(grad)
        total = torch.zeros(sum(self.lengths), *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, self.key_rows, grad.to(wide)).to(dtype)

    @cached_property
    def runs(self) -> tuple[tuple[Run, Run], ...]:
        """Adjacent segments of equal length with paths of equal length, grouped so that each group makes one batched
        call: their positions in the row, and in the keys."""
        runs, start, key_start = [], 0, 0
        for (length, keys), group in itertools.groupby(zip(self.lengths, self.key_lengths, strict=True)):
            count = len(list(group))
            run, of_keys = Run(start, count, length), Run(key_start, count, keys)
            runs.append((run, of_keys))
            start, key_start = run.stop, of_keys.stop
        return tuple(runs)

    @cached_property
    def bounds(self) -> Bounds:
        """For kernels of attention."""
        queries = self._bounds(self.lengths)
        keys = self._bounds(self.key_lengths) if self.forks else queries
        return Bounds(queries, keys, max(self.lengths), self.longest)

    def _bounds(self, lengths: tuple[int, ...]) -> torch.Tensor:
        return to_device(np.array([0, *itertools.accumulate(lengths)], np.int32), self.device)

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 [T]: each position's place in its sequences, from 0."""
        return to_device(np.concatenate(list(self._places())), self.device)

    @cached_property
    def horizon(self) -> torch.Tensor:
        """int64 [T]: the first place of its sequences that each position does not see because it comes later."""
        found = np.concatenate(list(self._places())) + 1
        for start, stop in self.images:
            found[start:stop] = found[stop - 1]
        return to_device(found, self.device)

    def _places(self) -> Iterator[npt.NDArray[np.int64]]:
        for before, length in zip(self.before, self.lengths, strict=True):
            yield np.arange(before, before + length)

    @cached_property
    def keys_seen(self) -> float:
        """How many positions each position sees, itself included, on average."""
        pairs = sum(
            length * before + length * (length + 1) // 2
            for length, before in zip(self.lengths, self.before, strict=True)
        )
        return pairs / sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return max(self.key_lengths)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What sums of many numbers of `tensor` are computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
