"""The processes that train one model together: one per GPU, each with the same calls in the same order.

A step that may fail on one rank alone is an attempt: afterwards every rank knows how it ended on all of them, and they
go on alike. So no rank waits for another that has failed, and nothing changes on one rank only. `Ranks` is the single
process of most trainers; `joined_ranks.py` has several, and is not imported without them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from tinker_local.backend.training.parallel.shared_rows import ONE_HAS_ALL, RowRanks

T = TypeVar("T")


class Ranks:
    """This process is rank `rank` of `size`: here, the only one. What several ranks call in another order, or not all
    of them, never returns."""

    rank: int = 0
    size: int = 1
    hosts: Sequence[int] = (0,)
    """The number of each rank's host."""

    def attempt(self, step: Callable[[], T]) -> tuple[T | None, Sequence[int]]:
        """Run `step`; its result, None if memory ran out, and the ranks where memory ran out. If it fails in another
        way on one rank, all ranks raise: that one its own error, the others an InternalError that quotes it."""
        try:
            return step(), ()
        except torch.OutOfMemoryError:
            return None, (0,)

    def together(self, step: Callable[[], T]) -> T:
        """The result of `step`; if it fails on one rank, also if memory runs out, all ranks raise."""
        return step()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The `numbers` of every rank, int64 and as many on each. Does not wait for a device."""
        return [list(numbers)]

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks, in place, to the same bits on each."""

    def compare(self, where: str, fingerprints: Callable[[], Mapping[str, int]]) -> None:
        """Raise InternalError, on all ranks, unless `fingerprints` returns the same numbers on each. The error names
        the ranks and the numbers that differ from those of rank 0. A single rank does not compute them."""

    def share_rows(self, size: int) -> RowRanks:
        """The `size` neighbours, this one among them, that share each packed row. All ranks call this; see
        `check_neighbours`."""
        self.check_neighbours(size, "context_parallel")
        return ONE_HAS_ALL

    def check_neighbours(self, size: int, setting: str) -> None:
        """ValueError, which names `setting`, unless each `size` ranks in a row are on one host: what they send each
        other is too much for the network between hosts."""
        if self.size % size:
            raise ValueError(f"{setting} {size}: it must divide the number of ranks, {self.size}")
        for first in range(0, self.size, size):
            if len(hosts := {*self.hosts[first : first + size]}) > 1:
                raise ValueError(
                    f"{setting} {size}: ranks {first} to {first + size - 1} must be on one host, and are on "
                    f"{', '.join(map(str, sorted(hosts)))}"
                )


ONE_RANK = Ranks()


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that differs, most likely, if one bit of `tensor` [n] (float32 or float64) does: the sum of its bits as
    integers, modulo 2^64."""
    return int(tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int64).sum(dtype=torch.int64))
