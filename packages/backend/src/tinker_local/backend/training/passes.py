"""A pass over several requests: runs all their micro-batches, as large as memory allows."""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from tinker_local.backend.training.lora import Adapter
from tinker_local.backend.training.micro_batch import MicroBatchRunner, Pending
from tinker_local.backend.training.packing import Item, items_of, pack, split
from tinker_local.backend.training.tally import Tally
from tinker_local.backend.training.token_budget import TokenBudget
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.types import NotEnoughMemoryError


class Passes:
    """Fills micro-batches across requests and adapters, and runs each.

    `adapters` is read during a pass and must hold every adapter that its requests name.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        adapters: Mapping[str, Adapter],
        budget: TokenBudget,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._budget = budget
        self._vocab_size = vocab_size
        self._device = device

    def run(self, works: Mapping[int, TrainWork], *, gradient: bool) -> Tally:
        """Run all micro-batches of `works`. If memory runs out, the micro-batch is halved and tried again; a single
        datum that does not fit fails its request."""
        tally = Tally(works)
        pending: list[Pending] = []
        enough_memory = True
        batches = deque(self._split(items_of(list(works.items()))))
        while batches:
            items = batches.popleft()
            started = self._start(items, works, tally, gradient=gradient)
            if started is None:
                enough_memory = False
                batches = deque(self._smaller(items, batches, tally))
            else:
                pending.append(started)
        if pending and enough_memory:
            self._budget.succeeded()
        for started in pending:  # everything is queued on the device by now
            tally.add(self._runner.finish(started))
        return tally

    def _split(self, items: Sequence[Item]) -> list[list[Item]]:
        ranks = {item.adapter_id: self._adapters[str(item.adapter_id)].config.rank for item in items}
        return split(items, self._budget.tokens, ranks)

    def _start(
        self, items: Sequence[Item], works: Mapping[int, TrainWork], tally: Tally, *, gradient: bool
    ) -> Pending | None:
        """Start one micro-batch and add its gradients to `tally`; None, with `tally` unchanged, if memory runs out."""
        packed = pack(items, self._vocab_size)
        try:
            started: Pending
            started, gradients = self._runner.run(packed, self._adapters, works, gradient=gradient)
            if gradients is not None:
                tally.add_gradients(gradients, self._adapters)
        except torch.OutOfMemoryError:
            return None
        return started

    def _smaller(self, items: Sequence[Item], waiting: Sequence[list[Item]], tally: Tally) -> Sequence[list[Item]]:
        """The micro-batches to try after `items` did not fit in memory. Splits those `waiting` again, too: at their old
        size each would run out of memory in turn and halve the budget once more."""
        release_unused_memory(self._device)
        if len(items) == 1:
            (item,) = items
            tally.works[item.work].error = NotEnoughMemoryError(
                f"data[{item.index}]: {item.length} positions do not fit in the trainer's memory"
            )
            return waiting
        self._budget.ran_out(sum(item.length for item in items))
        return self._split([*items, *itertools.chain.from_iterable(waiting)])


def release_unused_memory(device: torch.device) -> None:
    """Release the memory that torch's allocator caches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
