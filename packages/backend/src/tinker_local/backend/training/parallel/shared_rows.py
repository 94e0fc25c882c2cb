"""Context parallelism: ranks that share each packed row, which can then be longer than one of them has memory for.

Each rank has a part of the row's positions in everything but attention. There it has all positions of some heads: an
all-to-all before and one after it (arXiv 2309.14509) exchange its positions of all heads for all positions of its
heads. So layers do not change, and all ranks have the same amount of work, whatever the lengths of the sequences.

If a rank fails, the others must not wait for it in their next exchange. So before each, all ranks agree that they are
there, on the host, which does not wait for the device. Legend: T positions of the row, t those of this rank, P ranks,
N heads, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tinker_local.types import UnsupportedError


class RowLeftError(Exception):
    """Another rank that shares the row has failed, and says why where all ranks agree how the step ended."""

    def __init__(self) -> None:
        super().__init__("another rank of the trainer that shares the row failed")


class RowRanks:
    """The ranks that share each row, of which this one is `rank` of `size`: here, the only one. All of them make the
    same calls in the same order, within `sharing`."""

    rank: int = 0
    size: int = 1

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Compute one row together. If it fails on one rank, it ends on all: on the others with RowLeftError, at their
        next call below or at the end."""
        yield

    def least(self, number: int) -> int:
        """The least `number` of all ranks; not negative."""
        return number

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the ranks, in place."""

    def exchange(self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send `sent[r]` rows of `send`, in order, to each rank r; the rows that come, `received[r]` from r, in
        order."""
        raise NotImplementedError("a single rank exchanges nothing")


ONE_HAS_ALL = RowRanks()


@dataclass(frozen=True, slots=True, eq=False)
class SharedRow:
    """A row of which each of `ranks` has `counts` positions, in order."""

    ranks: RowRanks
    counts: Sequence[int]

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's positions of all heads, [t, N, D] each, to all positions of its heads, [T, N / P, D] each."""
        size, rows = self.ranks.size, self.counts[self.ranks.rank]
        widths = [self.share_of(tensor.shape[1]) for tensor in tensors]
        send = tensors[0].new_empty(size, rows, sum(widths), tensors[0].shape[2])
        for part, tensor in zip(send.split(widths, 2), tensors, strict=True):
            part.copy_(tensor.unflatten(1, (size, -1)).transpose(0, 1))
        return tuple(self.ranks.exchange(send.flatten(0, 1), [rows] * size, self.counts).split(widths, 1))

    def to_rows(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inverse of `to_heads`."""
        size, rows = self.ranks.size, self.counts[self.ranks.rank]
        widths = [tensor.shape[1] for tensor in tensors]
        found = self.ranks.exchange(torch.cat(tensors, 1), self.counts, [rows] * size)
        parts = found.unflatten(0, (size, rows)).transpose(0, 1).split(widths, 2)
        return tuple(part.flatten(1, 2) for part in parts)

    @property
    def own(self) -> slice:
        """The positions of this rank."""
        start = sum(self.counts[: self.ranks.rank])
        return slice(start, start + self.counts[self.ranks.rank])

    @property
    def or_none(self) -> "SharedRow | None":
        """None if one rank has all."""
        return self if self.ranks.size > 1 else None

    def share_of(self, heads: int) -> int:
        """How many of so many heads each rank has; UnsupportedError if they cannot be divided."""
        if heads % self.ranks.size:
            raise UnsupportedError(f"its {heads} heads cannot be divided among {self.ranks.size} ranks")
        return heads // self.ranks.size


def share(positions: int, ranks: RowRanks) -> SharedRow:
    """A row of so many positions, divided as equally as can be."""
    size = ranks.size
    return SharedRow(ranks, [positions // size + (rank < positions % size) for rank in range(size)])
