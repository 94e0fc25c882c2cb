"""Products of groups of rows with one matrix each: torch's grouped matmul on CUDA, a matmul per group elsewhere.

Legend: S rows, sorted by group, E groups.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from tinker_local.backend.training.kernels import compat_torch


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Where groups of rows end: `ends` int32 [E]. Groups may be empty."""

    ends: torch.Tensor

    @cached_property
    def _bounds(self) -> list[tuple[int, int, int]]:
        """(group, start, stop) of those that have rows. Waits for the device."""
        ends = self.ends.tolist()
        starts = [0, *ends[:-1]]
        return [(e, a, b) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]

    def multiply(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Each row of `x` [S, in] times its group's matrix of `matrices` [E, in, out]: [S, out]."""
        return self.multiply_made(x, matrices.shape[-1], lambda e: matrices[e], lambda: matrices)

    def multiply_made(
        self,
        x: torch.Tensor,
        outputs: int,
        one: Callable[[int], torch.Tensor],
        every: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """`multiply` by matrices that are made for it: `every` one of them at once, [E, in, outputs], or `one` [in,
        outputs] at a time, of each group that has rows."""
        if compat_torch.grouped_mm_works(x):
            return compat_torch.grouped_mm(_dense(x), every(), self.ends)
        found = x.new_empty(len(x), outputs)
        for e, a, b in self._filled(x):
            torch.mm(x[a:b], one(e), out=found[a:b])
        return found

    def add_product(self, onto: torch.Tensor, x: torch.Tensor, matrices: torch.Tensor) -> None:
        """`multiply`, added to `onto` [S, out]."""
        if compat_torch.grouped_mm_works(x):
            onto.add_(compat_torch.grouped_mm(x, matrices, self.ends))
            return
        for e, a, b in self._filled(x):
            onto[a:b].addmm_(x[a:b], matrices[e])

    def write_outer(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of each group's transposed rows of `a` [S, m] with those of `b` [S, n] to `out` [E, m, n];
        zeros for an empty group."""
        if compat_torch.grouped_mm_works(a):
            empty = self.ends.diff(prepend=self.ends.new_zeros(1)) == 0
            out.copy_(compat_torch.grouped_mm(_dense(a).T, b, self.ends).masked_fill_(empty[:, None, None], 0))
            return
        out.zero_()
        for e, start, stop in self._filled(a):
            compat_torch.mm_into_float32(a[start:stop].T, b[start:stop], out[e])

    def _filled(self, x: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """The groups that have rows; on the meta device, which has no values, none."""
        yield from () if x.is_meta else self._bounds


def _dense(x: torch.Tensor) -> torch.Tensor:
    """`x` with numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
