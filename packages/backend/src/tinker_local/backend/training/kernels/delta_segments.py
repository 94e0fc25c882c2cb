"""Where the segments of a packed row lie, as the gated delta rule takes them (`delta_rule.py`): in chunks, and by
levels where sequences share their beginning (`segments.py`). Index tensors, made once for each row and kept for its
layers.

A segment with a parent starts from the parent's last state, and its convolution sees the end of its path. Legend: T
positions, S segments, W taps of the convolution, C channels, c positions of a chunk, M value heads."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tinker_local.backend.training.model.segments import NO_PARENT, Segments, wide_dtype
from tinker_local.backend.training.run.transfer import to_device

CHUNK = 64
"""Positions whose updates are one triangular system; what `fla` uses, too."""

Convolve = Callable[[torch.Tensor, torch.Tensor, Segments], torch.Tensor]
"""The convolution of `x` [T, C] by `taps` [C, W], in each of the segments alone, [T, C]."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Chunks of all segments, step by step: first the first of each root. Then those that follow on one of the step
    before, in its segment or as the first of a child, and so on.

    `alive`: how many chunks step 0, 1, ... has; `size`: c; `places` int64 [T]: of each position. `before`: of each
    step, for each of its chunks the one that it follows on, int64 [alive], by its number in the step before. None if
    these are the first ones in order, as they always are without parents.
    """

    alive: list[int]
    size: int
    places: torch.Tensor
    before: list[torch.Tensor | None]

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, lengths: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> "Chunks":
        """For segments of these `lengths` and `parents`, as `Segments` has them, on `device`."""
        size = min(CHUNK, max(lengths))
        parents = parents or (NO_PARENT,) * len(lengths)
        ends: list[int] = []
        for length, parent in zip(lengths, parents, strict=True):
            ends.append((0 if parent == NO_PARENT else ends[parent]) - (-length // size))
        # Those that end last come first: so one step's chunks are the first of the step before where none begins.
        order = sorted(range(len(lengths)), key=lambda segment: (-ends[segment], -lengths[segment]))
        steps: list[list[int]] = [[] for _ in range(max(ends))]
        for segment in order:
            parent = parents[segment]
            for step in range(0 if parent == NO_PARENT else ends[parent], ends[segment]):
                steps[step].append(segment)
        chunks: list[list[int]] = [[] for _ in lengths]
        for at, segment in enumerate(itertools.chain(*steps)):
            chunks[segment].append(at)
        places = [
            np.array(chunks[segment])[at // size] * size + at % size
            for segment, at in enumerate(map(np.arange, lengths))
        ]
        before: list[torch.Tensor | None] = [None]
        for earlier, later in itertools.pairwise(steps):
            there = {segment: at for at, segment in enumerate(earlier)}
            found = [there[segment if segment in there else parents[segment]] for segment in later]
            in_order = found == list(range(len(later)))
            before.append(None if in_order else to_device(np.array(found, np.int64), device))
        return cls(list(map(len, steps)), size, to_device(np.concatenate(places), device), before)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, heads, ...] in chunks [chunks, heads, c, ...], with zeros between."""
        padded = x.new_zeros(sum(self.alive) * self.size, *x.shape[1:]).index_copy(0, self.places, x)
        return padded.unflatten(0, (-1, self.size)).transpose(1, 2)

    def gathered(self, chunks: torch.Tensor) -> torch.Tensor:
        """The positions of `chunks` [chunks, heads, c, V], [T, heads, V]."""
        return chunks.transpose(1, 2).flatten(0, 1)[self.places]


@dataclass(frozen=True, slots=True, eq=False)
class Beginnings:
    """The first W - 1 positions of each segment with a parent, at most, whose convolution sees positions before the
    segment.

    `alone`: the segments of the row, without their paths. `segments`: of each that has a parent, the last W - 1
    positions before it in its path, at most, and then the beginning. `read` int64: the positions of the row in these,
    each once; `copies` int64: for each position of `segments` the one of `read`. `kept` int64: those of `segments` that
    are a beginning; `places` int64: where these are in the row.
    """

    alone: Segments
    segments: Segments
    read: torch.Tensor
    copies: torch.Tensor
    kept: torch.Tensor
    places: torch.Tensor

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, lengths: tuple[int, ...], parents: tuple[int, ...], width: int, device: torch.device) -> "Beginnings":
        """Of segments of these `lengths` and `parents`, at least one of which is not `NO_PARENT`, for `width` taps."""
        row = Segments(lengths, device, parents=parents)
        reach = max(1, width - 1)
        before = row.rows_before(reach)
        rows, kept, parts = [], [], []
        for segment, parent in enumerate(parents):
            if parent == NO_PARENT:
                continue
            start = row.starts[segment]
            own = np.arange(start, start + min(reach, lengths[segment]))
            rows.append(np.concatenate([before[segment], own]))
            kept.append(np.repeat([False, True], [len(before[segment]), len(own)]))
            parts.append(len(rows[-1]))
        together, is_kept = np.concatenate(rows), np.concatenate(kept)
        read, copies = np.unique(together, return_inverse=True)
        of_device = functools.partial(to_device, device=device)
        indices = map(of_device, (read, copies, np.flatnonzero(is_kept), together[is_kept]))
        return cls(Segments(lengths, device), Segments(tuple(parts), device), *indices)

    def convolved(self, x: torch.Tensor, taps: torch.Tensor, convolve: Convolve) -> torch.Tensor:
        """The convolution of `x` [T, C] by `taps` [C, W] where each segment sees its path, [T, C]. Gradients of what
        several see are added in float32, or wider."""
        copies = x.index_select(0, self.read).to(wide_dtype(x)).index_select(0, self.copies).to(x.dtype)
        beginnings = convolve(copies, taps, self.segments).index_select(0, self.kept)
        return convolve(x, taps, self.alone).index_copy(0, self.places, beginnings)


class FlaBounds(NamedTuple):
    """Where segments and their chunks begin, as `fla` takes it, int64 on the device. `segments` [S + 1]: the start of
    each, then the end. `chunks` [chunks, 2]: of each its segment, and its number in it. Without them `fla` finds chunks
    in each layer again, and the host waits for the device each time."""

    segments: torch.Tensor
    chunks: torch.Tensor

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> "FlaBounds":
        """Of segments of these `lengths`. The same tensors for the same row: `fla` knows them again by identity."""
        counts = [-(-length // CHUNK) for length in lengths]
        chunks = [(segment, chunk) for segment, count in enumerate(counts) for chunk in range(count)]
        bounds = np.array([0, *itertools.accumulate(lengths)], np.int64)
        return cls(to_device(bounds, device), to_device(np.array(chunks, np.int64), device))


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The segments with equally many ancestors. `positions`: how many they have together. `parents` int64 [S]: of each
    its parent, by its number in the level before; None of roots."""

    positions: int
    bounds: FlaBounds
    parents: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Segments by their number of ancestors, one level after the other. `order` int64 [T]: the position in the row of
    each position of the levels; `inverse` int64 [T]: the other way round."""

    levels: list[Level]
    order: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, lengths: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> "Levels":
        """Of segments of these `lengths` and `parents`."""
        row = Segments(lengths, device)
        members: list[list[int]] = []
        level_of: list[int] = []
        number: list[int] = []
        for segment, parent in enumerate(parents):
            level = 0 if parent == NO_PARENT else level_of[parent] + 1
            if level == len(members):
                members.append([])
            level_of.append(level)
            number.append(len(members[level]))
            members[level].append(segment)
        levels = []
        for level, its in enumerate(members):
            of_its = tuple(lengths[segment] for segment in its)
            above = np.array([number[parents[segment]] for segment in its], np.int64) if level else None
            on_device = None if above is None else to_device(above, device)
            levels.append(Level(sum(of_its), FlaBounds.of(of_its, device), on_device))
        each = [np.arange(row.starts[at], row.starts[at] + lengths[at]) for at in itertools.chain(*members)]
        order = np.concatenate(each)
        return cls(levels, to_device(order, device), to_device(np.argsort(order), device))

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of each level its rows of `x` [T, ...], contiguous."""
        ordered: torch.Tensor = _Reordered.apply(x, self.order, self.inverse)
        found: tuple[torch.Tensor, ...] = ordered.split([level.positions for level in self.levels])
        return found

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`."""
        ordered: torch.Tensor = _Reordered.apply(torch.cat(parts), self.inverse, self.order)
        return ordered


class _Reordered(torch.autograd.Function):
    """x[order], for a permutation: its backward is one, too, and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None
