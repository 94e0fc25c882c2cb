"""Context parallelism: ranks that share each packed row, so that it can be longer than the memory of one of them allows.

Each rank has a part of the row's positions in everything but attention. There it has all positions of some heads: an
all-to-all before and after it (arXiv 2309.14509) exchanges parts of all heads for all parts of some heads. So a
decoder's layers do not change, and each rank has an equal share of the work, whatever the lengths of the sequences.

A rank that fails leaves the others in front of their next exchange. Therefore they agree before each, on the host,
which does not wait for the device. Legend: T positions of the row, t those of this rank, P ranks, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tinker_local.backend.training.attention import AttentionRule


class RowLeftError(Exception):
    """Another rank that shares the row has failed, and says why where all ranks agree how the step ended."""


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
        widths = [tensor.shape[1] // size for tensor in tensors]
        send = tensors[0].new_empty(size, rows, sum(widths), tensors[0].shape[2])
        for part, tensor in zip(send.split(widths, 2), tensors, strict=True):
            part.copy_(tensor.unflatten(1, (size, -1)).transpose(0, 1))
        return self.ranks.exchange(send.flatten(0, 1), [rows] * size, self.counts).split(widths, 1)

    def to_rows(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inverse of `to_heads`."""
        size, rows = self.ranks.size, self.counts[self.ranks.rank]
        widths = [tensor.shape[1] for tensor in tensors]
        found = self.ranks.exchange(torch.cat(tensors, 1), self.counts, [rows] * size)
        parts = found.unflatten(0, (size, rows)).transpose(0, 1).split(widths, 2)
        return tuple(part.flatten(1, 2) for part in parts)

    def of_heads(self, rule: "AttentionRule") -> "AttentionRule":
        """`rule` for this rank's heads."""
        return rule if rule.sinks is None else replace(rule, sinks=rule.sinks.chunk(self.ranks.size)[self.ranks.rank])


def counts_of(positions: int, ranks: int) -> tuple[int, ...]:
    """How many `positions` each of `ranks` has, as equal as can be."""
    return tuple(positions // ranks + (rank < positions % ranks) for rank in range(ranks))
