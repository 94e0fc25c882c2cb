"""Several ranks: tensors over NCCL (on the CPU over gloo), numbers of the host over gloo.

On one host all connections are over the loopback interface. On several they are over the network that
`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name, or the one that the libraries choose, and not encrypted.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from tinker_local.backend.process.child import message_of
from tinker_local.backend.training.parallel.ranks import Ranks
from tinker_local.backend.training.parallel.shared_rows import RowLeftError, RowRanks
from tinker_local.backend.training.trainer import Seat
from tinker_local.types import InternalError

T = TypeVar("T")

DONE, LACKED_MEMORY, FAILED, LEFT = range(4)
"""How an attempt ended on a rank; `LEFT`: because another one that shares its row lacked memory or failed."""

GONE = -1
"""What a rank that fails says to those that share its row."""

FOREVER = timedelta(days=1)
"""The server limits the time of a call and ends processes that take longer."""

_QUOTED_BYTES = 400
"""Of an error's text."""


class JoinedRanks(Ranks):
    """See `Ranks`. Connecting waits for all others."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.rank = seat.rank
        self.size = seat.size
        self._device = device
        over_network = seat.meeting.startswith("tcp://")
        if not over_network:
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=seat.meeting if over_network else f"file://{seat.meeting}",
            rank=seat.rank,
            world_size=seat.size,
            timeout=FOREVER,
        )
        if device.type == "cuda":  # NCCL takes its memory now, and not in a step in which it may be short on one rank
            dist.all_reduce(torch.zeros(1, device=device))
        self.hosts = [host for (host,) in self.gather([seat.host])]

    def attempt(self, step: Callable[[], T]) -> tuple[T | None, Sequence[int]]:
        """See `Ranks.attempt`."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = step()
        except Exception as raised:
            error = raised
        try:
            ended = _ended(error)
            words = [word for (word,) in self.gather([ended])]
            if FAILED in words:
                failed = words.index(FAILED)
                text = self._quoted(failed, error)
                if ended == FAILED and error is not None:
                    raise error
                raise InternalError(f"rank {failed} of the trainer failed: {text}") from error
            return result, tuple(rank for rank, word in enumerate(words) if word == LACKED_MEMORY)
        finally:
            # Its traceback refers to this frame, so that together they would keep what the step has allocated.
            del error

    def together(self, step: Callable[[], T]) -> T:
        """See `Ranks.together`."""
        results: list[T] = []
        _, lacked = self.attempt(lambda: results.append(step()))
        if lacked:
            raise torch.OutOfMemoryError(f"the trainer's memory ran out on rank {lacked[0]}")
        return results[0]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Ranks.gather`."""
        found = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor(numbers, dtype=torch.int64))
        return [[int(number) for number in of_rank] for of_rank in found]

    def add_up(self, tensor: torch.Tensor) -> None:
        """See `Ranks.add_up`."""
        dist.all_reduce(tensor)

    def compare(self, where: str, fingerprints: Callable[[], Mapping[str, int]]) -> None:
        """See `Ranks.compare`."""
        mine = self.together(fingerprints)
        first, *others = self.gather(list(mine.values()))
        differing = {
            f"rank {rank}: {', '.join(name for name, a, b in zip(mine, first, other, strict=True) if a != b)}"
            for rank, other in enumerate(others, 1)
            if other != first
        }
        if differing:
            raise InternalError(
                f"{where}: the trainer's ranks have other results than rank 0, and nothing was changed "
                f"({'; '.join(sorted(differing))}); load a checkpoint"
            )

    def share_rows(self, size: int) -> RowRanks:
        """See `Ranks.share_rows`."""
        alone = super().share_rows(size)
        return alone if size == 1 else JoinedRowRanks(size, self._device)

    def _quoted(self, rank: int, error: Exception | None) -> str:
        """The beginning of the text of the error on `rank`."""
        said = "" if error is None else message_of(error)
        # Nothing here may fail on one rank alone, whatever the error says.
        text = f"{type(error).__name__}: {said}".encode(errors="replace")[:_QUOTED_BYTES].ljust(_QUOTED_BYTES, b"\0")
        return bytes(self.gather(list(text))[rank]).rstrip(b"\0").decode(errors="replace")


class JoinedRowRanks(RowRanks):
    """See `RowRanks`: each `size` ranks in a row. Connects, on all ranks."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.rank = dist.get_rank() % size
        self._group, _ = dist.new_subgroups(size, timeout=FOREVER)
        if device.type == "cuda":  # as above: NCCL takes its memory now
            self.add_up(torch.zeros(1, device=device))
            self.exchange(torch.zeros(size, 1, device=device), [1] * size, [1] * size)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """See `RowRanks.sharing`."""
        try:
            yield
        except RowLeftError:
            raise
        except Exception:
            self._leave()
            raise
        self.least(0)

    def least(self, number: int) -> int:
        """See `RowRanks.least`."""
        found = self._least(number)
        if found == GONE:
            raise RowLeftError
        return found

    def add_up(self, tensor: torch.Tensor) -> None:
        """See `RowRanks.add_up`."""
        self.least(0)
        dist.all_reduce(tensor, group=self._group)

    def exchange(self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """See `RowRanks.exchange`."""
        found = send.new_empty(sum(received), *send.shape[1:])
        self.least(0)
        dist.all_to_all_single(found, send, [*received], [*sent], group=self._group)
        return found

    def _least(self, number: int) -> int:
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        return int(least)

    def _leave(self) -> None:
        """Say `GONE`, and do not wait for the others: they may still be waiting for this rank, in a gather of sharded
        weights."""
        gone = torch.tensor([GONE])
        self._leaving = gone, dist.all_reduce(gone, dist.ReduceOp.MIN, group=self._group, async_op=True)


def _ended(error: Exception | None) -> int:
    if error is None:
        return DONE
    if isinstance(error, RowLeftError):
        return LEFT
    return LACKED_MEMORY if isinstance(error, torch.OutOfMemoryError) else FAILED
