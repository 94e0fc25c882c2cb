"""Where the sequences of one packed row begin, and where they part.

A segment is the contiguous positions of one sequence, or of all sequences that begin alike: what they share is in the
row once, and what follows in each is a segment with a *parent*. So the segments are a forest, and a sequence is a path
from a root. Without parents each segment is a sequence. Bounds are explicit, never inferred from position ids.

All that goes on from a segment follows it in the row. Legend: T positions of the row, S segments. *Keys* of a segment:
the positions of its path, which its own positions may attend to.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.parallel.shared_rows import SharedRow
from tinker_local.backend.training.run.transfer import to_device

Int64Array = npt.NDArray[np.int64]

NO_PARENT = -1


MOST_KEYS = 2**15
"""Maximum number of keys that are copied at once, but for one segment with more."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """`count` adjacent segments of the same `length`, from position `start` on, and the `key_length` positions of the
    path of each. `key_rows` int64 [count * key_length]: where these are in the row; None if they are the segments
    themselves."""

    start: int
    count: int
    length: int
    key_length: int
    key_rows: torch.Tensor | None

    @property
    def before(self) -> int:
        """Positions of the path before each segment."""
        return self.key_length - self.length

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length

    def queries_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of `tensor` [T, ...] the positions of each segment, a view [count, length, ...]."""
        return tensor[self.start : self.stop].unflatten(0, (self.count, self.length))

    def keys_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of `tensor` [T, ...] the positions of each path, [count, key_length, ...]; a view of segments without
        parents."""
        if self.key_rows is None:
            return self.queries_of(tensor)
        return tensor.index_select(0, self.key_rows).unflatten(0, (self.count, self.key_length))

    def zeros_for_keys(self, total: torch.Tensor) -> torch.Tensor:
        """Where to add the gradients of `keys_of`, so that `add_keys` adds them to `total` [T, ...]."""
        if self.key_rows is None:
            return self.queries_of(total)
        return total.new_zeros(self.count, self.key_length, *total.shape[1:])

    def add_keys(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add what was added to `zeros_for_keys`."""
        if self.key_rows is not None:
            total.index_add_(0, self.key_rows, part.flatten(0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where each segment begins, then the end, int32 [S + 1] on the device, and the longest one's length: of the
    `queries` and of their `keys`, as kernels of attention take them."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "Bounds":
        """Of segments of these lengths."""
        starts = key_starts = _starts(queries, device)
        if keys is not queries:
            key_starts = _starts(keys, device)
        return cls(starts, key_starts, max(queries), max(keys))


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array([0, *itertools.accumulate(lengths)], np.int32), device)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Some positions of the row and the keys that they see: `rows` int64, `key_rows` int64, and their `bounds`."""

    rows: torch.Tensor
    key_rows: torch.Tensor
    bounds: Bounds


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
    _within: dict[int, tuple[Call, ...]] = field(default_factory=dict, compare=False)
    _back: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @cached_property
    def gathered(self) -> "Segments":
        """The same row where all of its positions are on this rank, with some heads of each."""
        return replace(self, shared=None)

    @cached_property
    def without_images(self) -> "Segments":
        """The same row where images are read as text."""
        return replace(self, images=())

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

    def rows_before(self, last: int | None = None) -> list[Int64Array]:
        """For each segment the positions in the row of its path before it, or the `last` of them. Segments with one
        parent have one array."""
        after = {NO_PARENT: np.empty(0, np.int64)}
        parents = self.parents or (NO_PARENT,) * len(self.lengths)
        for parent in sorted({*parents} - {NO_PARENT}):
            rows = np.concatenate([after[parents[parent]], self._rows(parent)])
            after[parent] = rows if last is None else rows[max(0, len(rows) - last) :]
        return [after[parent] for parent in parents]

    def rows_back(self, steps: int) -> torch.Tensor:
        """int64 [steps, T]: the positions in the row that are 1, 2, ... `steps` before each on its path; T where there
        is none."""
        if steps not in self._back:
            found, none = np.empty((steps, sum(self.lengths)), np.int64), sum(self.lengths)
            for before, start, length in zip(self.rows_before(steps), self.starts, self.lengths, strict=True):
                stop = start + length
                path = np.concatenate([np.full(steps - len(before), none), before, np.arange(start, stop)])
                for back in range(1, steps + 1):
                    found[back - 1, start:stop] = path[steps - back : steps - back + length]
            self._back[steps] = to_device(found, self.device)
        return self._back[steps]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Adjacent segments of equal length with paths of equal length, grouped so that each group makes one batched
        call."""
        runs: list[Run] = []
        before = self.rows_before()
        start = at = 0
        sizes = zip(self.lengths, self.key_lengths, strict=True)
        for (length, keys), group in itertools.groupby(sizes):
            count = len(list(group))
            most = count if keys == length else max(1, MOST_KEYS // keys)
            for first in range(at, at + count, most):
                some = range(first, min(first + most, at + count))
                key_rows = None if keys == length else self._together(before, some)
                runs.append(Run(start, len(some), length, keys, key_rows))
                start = runs[-1].stop
            at += count
        return tuple(runs)

    def _rows(self, segment: int) -> Int64Array:
        """The positions in the row of `segment` itself."""
        return np.arange(self.starts[segment], self.starts[segment] + self.lengths[segment])

    def _together(self, before: Sequence[Int64Array], some: Iterable[int]) -> torch.Tensor:
        """The positions in the row of the segments `some`, each after what of its path is `before` it."""
        parts = itertools.chain.from_iterable((before[segment], self._rows(segment)) for segment in some)
        return to_device(np.concatenate(list(parts)), self.device)

    @cached_property
    def bounds(self) -> Bounds:
        """Of each segment by itself, for kernels of attention."""
        return Bounds.of(self.lengths, self.lengths, self.device)

    @cached_property
    def levels(self) -> tuple[Call, ...]:
        """What segments with parents see of their paths: at each depth, all that goes on from a segment sees all of
        it."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        last = list(ends)  # where all that goes on from a segment ends, which follows it
        for segment in reversed(range(len(self.parents))):
            if (parent := self.parents[segment]) != NO_PARENT:
                last[parent] = max(last[parent], last[segment])
        depths: list[int] = []
        members: dict[int, list[int]] = {}  # by depth, the segments from which something goes on
        path: list[int] = []
        for segment, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            assert path or parent == NO_PARENT, "all that goes on from a segment follows it in the row"
            path.append(segment)
            depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
            if last[segment] > ends[segment]:
                members.setdefault(depths[-1], []).append(segment)
        calls = []
        for _, some in sorted(members.items()):
            rows = np.concatenate([np.arange(ends[at], last[at]) for at in some])
            keys = np.concatenate([self._rows(at) for at in some])
            bounds = Bounds.of([last[at] - ends[at] for at in some], [self.lengths[at] for at in some], self.device)
            calls.append(Call(to_device(rows, self.device), to_device(keys, self.device), bounds))
        return tuple(calls)

    def within(self, window: int) -> tuple[Call, ...]:
        """Each segment with as much of its path as a `window` reaches, in calls of about `MOST_KEYS` keys."""
        if window not in self._within:
            self._within[window] = tuple(self._calls_within(window))
        return self._within[window]

    def _calls_within(self, window: int) -> Iterator[Call]:
        before = self.rows_before(window - 1)
        sizes = [len(reached) + own for reached, own in zip(before, self.lengths, strict=True)]
        ends = np.cumsum(sizes)
        for _, group in itertools.groupby(range(len(sizes)), lambda segment: (ends[segment] - 1) // MOST_KEYS):
            some = list(group)
            start = self.starts[some[0]]
            rows = np.arange(start, start + sum(self.lengths[at] for at in some))
            bounds = Bounds.of([self.lengths[at] for at in some], [sizes[at] for at in some], self.device)
            yield Call(to_device(rows, self.device), self._together(before, some), bounds)

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
