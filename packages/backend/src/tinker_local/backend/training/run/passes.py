"""A pass over several requests: runs all their micro-batches, as large as memory allows, each on one of the ranks."""

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from tinker_local.backend.training.lora.lora import Adapter
from tinker_local.backend.training.parallel.ranks import Ranks
from tinker_local.backend.training.parallel.shared_rows import RowRanks
from tinker_local.backend.training.run.micro_batch import MicroBatchRunner, Pending, towers_of
from tinker_local.backend.training.run.packing import (
    Item,
    Limits,
    Packed,
    in_order,
    items_of,
    pack,
    rounds,
    row_length,
)
from tinker_local.backend.training.run.tally import Tally
from tinker_local.backend.training.run.token_budget import TokenBudget
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.types import NotEnoughMemoryError

Round = Sequence[Sequence[Item]]
"""Micro-batches that run at the same time, by rank, or by group of ranks that share rows; the last may have none."""


class Passes:
    """Fills micro-batches across requests and adapters, and runs each.

    `adapters` is read during a pass and must hold every adapter that its requests name. Every one of `ranks` computes
    the same plan and runs its own micro-batches; after a pass, all have the results and gradients of all. `row_ranks`
    run a micro-batch together, which then may have as many times the positions of the budget. `share`: whether what
    data of a request begin with is computed once.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        adapters: Mapping[str, Adapter],
        budget: TokenBudget,
        vocab_size: int,
        device: torch.device,
        ranks: Ranks,
        row_ranks: RowRanks,
        *,
        share: bool,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._budget = budget
        self._vocab_size = vocab_size
        self._device = device
        self._ranks = ranks
        self._row_ranks = row_ranks
        self._share = share

    def run(self, works: Mapping[int, TrainWork], *, gradient: bool) -> Tally:
        """Run all micro-batches of `works`. If memory runs out, the micro-batch is halved and tried again; a single
        datum that does not fit fails its request."""
        tally = Tally(works)
        done: list[tuple[Sequence[Item], Pending | None]] = []
        enough_memory = True
        items = items_of(list(works.items()), share=self._share)
        waiting = deque(self._rounds(items, beyond=not self._budget.halved))
        while waiting:
            batches = waiting.popleft()
            here = self._ranks.rank // self._row_ranks.size
            mine = batches[here] if here < len(batches) else ()
            backward = gradient and any(self._runner.goes_back(each, self._adapters, works) for each in batches)
            start = functools.partial(self._start, mine, works, tally, gradient=gradient, backward=backward)
            started, short = self._ranks.attempt(start)
            lacked = sorted({rank // self._row_ranks.size for rank in short})
            done += [(each, started if at == here else None) for at, each in enumerate(batches) if at not in lacked]
            if lacked:
                enough_memory = False
                waiting = deque(self._smaller([batches[at] for at in lacked], waiting, tally))
        if done and enough_memory:
            self._budget.succeeded()
        pending = self._of_all_ranks(done)  # everything is queued on the device by now
        self._ranks.together(lambda: tally.add_all(map(self._runner.finish, pending)))
        self._add_up_gradients(tally, works)
        return tally

    def _rounds(self, items: Sequence[Item], *, beyond: bool) -> Sequence[Round]:
        columns = {item.adapter_id: self._runner.columns_of(self._adapters[str(item.adapter_id)]) for item in items}
        limits = Limits(self._budget.tokens * self._row_ranks.size, self._least(items), beyond=beyond)
        return rounds(items, limits, columns, self._ranks.size // self._row_ranks.size)

    def _least(self, items: Iterable[Item]) -> int:
        return min(self._runner.least_segment, max((item.length for item in items), default=1))

    def _start(
        self, items: Sequence[Item], works: Mapping[int, TrainWork], tally: Tally, *, gradient: bool, backward: bool
    ) -> Pending | None:
        """Start one micro-batch and add its gradients to `tally`, whose sums are unchanged if memory runs out. None
        without items. `backward`: see `MicroBatchRunner.walk`."""
        with self._runner.walk(backward=backward) as walk:
            if not items:
                return None
            started: Pending
            with self._row_ranks.sharing():  # all that may fail on one rank alone
                if gradient:
                    # First of all that this micro-batch allocates: they stay when the rest is free again, and would
                    # leave that in pieces which are too small for the next ones.
                    tally.start_gradients(list(dict.fromkeys(str(item.adapter_id) for item in items)), self._adapters)
                packed = pack(items, self._vocab_size, towers_of(self._adapters))
                started, gradients = self._runner.run(packed, self._adapters, works, walk, gradient=gradient)
            for each in gradients:
                tally.add_gradients(each, self._adapters)
        return started

    def _smaller(self, lacked: Sequence[Sequence[Item]], waiting: Iterable[Round], tally: Tally) -> Iterable[Round]:
        """The rounds to run after the micro-batches `lacked` did not fit in memory. Splits those `waiting` again, too:
        at their old size each would run out of memory in turn and halve the budget once more."""
        release_unused_memory(self._device)
        for item in [items[0] for items in lacked if len(items) == 1]:
            tally.works[item.work].error = NotEnoughMemoryError(
                f"data[{item.index}]: {item.length} positions do not fit in the trainer's memory"
            )
        larger = [items for items in lacked if len(items) > 1]
        if not larger:
            return waiting
        least = self._least(itertools.chain(*larger))
        tried = max(row_length(items, least) for items in larger)
        self._budget.ran_out(-(-tried // self._row_ranks.size))
        later = (item for each in waiting for items in each for item in items)
        # Not beyond the budget: a row of a long datum and others that it begins with would stay as it is.
        return self._rounds(in_order([*itertools.chain(*larger), *later], share=self._share), beyond=False)

    def _of_all_ranks(self, done: Sequence[tuple[Sequence[Item], Pending | None]]) -> list[Pending]:
        """The numbers of the micro-batches `done`, also of those that other ranks have run."""
        if self._ranks.size == 1 or not done:
            return [pending for _, pending in done if pending is not None]

        packs, numbers = self._ranks.together(functools.partial(self._joined, done))
        self._ranks.add_up(numbers)  # each number is one rank's and 0 on the others
        parts = self._ranks.together(numbers.cpu).split([len(packed.target_rows) for packed in packs], 1)
        return [Pending(packed, part) for packed, part in zip(packs, parts, strict=True)]

    def _joined(self, done: Sequence[tuple[Sequence[Item], Pending | None]]) -> tuple[list[Packed], torch.Tensor]:
        """All micro-batches, and the numbers of their targets [3, M] on the device, 0 for those of other ranks."""
        packs = [pack(items, self._vocab_size) if mine is None else mine.packed for items, mine in done]
        counts = [len(packed.target_rows) for packed in packs]
        numbers = torch.zeros(3, sum(counts), dtype=self._runner.float_dtype, device=self._device)
        for part, (_, mine) in zip(numbers.split(counts, 1), done, strict=True):
            if mine is not None:
                part.copy_(mine.numbers)
        return packs, numbers

    def _add_up_gradients(self, tally: Tally, works: Mapping[int, TrainWork]) -> None:
        """Add up the gradients of all ranks, one sum for each adapter that has one on any rank."""
        if self._ranks.size == 1:
            return
        names = list(dict.fromkeys(work.adapter_id for work in works.values()))
        found = self._ranks.gather([name in tally.gradients for name in names])
        summed = [name for name, flags in zip(names, zip(*found, strict=True), strict=True) if any(flags)]
        if not summed:
            return
        self._ranks.together(lambda: tally.start_gradients(summed, self._adapters))
        for name in summed:
            self._ranks.add_up(tally.gradients[name])


def release_unused_memory(device: torch.device) -> None:
    """Release the memory that torch's allocator caches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
