"""The results of one pass: outputs, loss sums, errors, and gradients not yet added to the adapters' own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.lora.lora import Adapter
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.run.micro_batch import Computed, Gradients
from tinker_local.backend.training.run.packing import Item, spans
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.types import ApiError

Output = Mapping[str, npt.NDArray[np.float32]]


@dataclass(slots=True, eq=False)
class WorkTally:
    """The results of one request: the outputs of its computed data (`elementwise`: with each position's loss), the sum
    of its loss so far, or its error."""

    outputs: list[Output]
    elementwise: bool
    loss: float = 0.0
    error: ApiError | None = None


class Tally:
    """Collects the results of one pass. `works`: by index in the call. `gradients` [n]: by adapter, the sum over all
    requests of the pass. `logit_gradients`: by adapter, the lowest and highest derivative of a loss with respect to its
    target's own logit, widened to include 0."""

    def __init__(self, works: Mapping[int, TrainWork]) -> None:
        self.works = {
            at: WorkTally([{}] * len(work.data), LOSSES[work.loss_fn].gives_elementwise(work.data))
            for at, work in works.items()
        }
        self.gradients: dict[str, torch.Tensor] = {}
        self.logit_gradients: dict[str, tuple[float, float]] = {}
        self._requests = works

    def add_all(self, computed: Iterable[Computed]) -> None:
        """Add the results of several micro-batches."""
        for each in computed:
            self.add(each)

    def add(self, computed: Computed) -> None:
        """Add the results of one micro-batch."""
        packed = computed.packed
        for at, error in computed.errors.items():
            self.works[at].error = self.works[at].error or error
        for at, span in spans(packed):
            self.works[at].loss += float(computed.losses[span].sum(dtype=torch.float64))
            if at not in computed.errors:
                self._add_logit_gradients(
                    self._requests[at].adapter_id, computed.derivative[span], computed.logprobs[span]
                )
        for place, item in enumerate(packed.items):
            span = packed.targets_of(place)
            tally = self.works[item.work]
            output = _output(item, tally.elementwise, computed.logprobs[span], computed.losses[span])
            tally.outputs[item.index] = output

    def add_gradients(self, found: Gradients, adapters: Mapping[str, Adapter]) -> None:
        """Add the gradients of one micro-batch, of adapters that have a sum by then. Allocates nothing, so that lack of
        memory leaves no partial sum."""
        in_batch = {id(adapter) for adapter in found.batch.adapters}
        for name in [name for name, adapter in adapters.items() if id(adapter) in in_batch]:
            found.batch.add_gradients(adapters[name], self.gradients[name], found.groups)

    def start_gradients(self, names: Sequence[str], adapters: Mapping[str, Adapter]) -> None:
        """Let the adapters `names` have a gradient, of zeros at first."""
        for name in names:
            if name not in self.gradients:
                self.gradients[name] = torch.zeros_like(adapters[name].weights)

    def _add_logit_gradients(self, adapter_id: str, derivative: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Widen the range by g (1 - p), the derivatives with respect to the targets' logits: 0 for p = 1."""
        # NumPy, because torch wakes threads for a few thousand numbers: 100 ms in a step of 65,536 on 32 cores.
        found = derivative.numpy() * -np.expm1(logprobs.numpy())
        low, high = self.logit_gradients.get(adapter_id, (0.0, 0.0))
        self.logit_gradients[adapter_id] = min(low, float(found.min())), max(high, float(found.max()))

    def result(self, at: int) -> TrainResult | ApiError:
        """The result of the request at index `at`."""
        work, loss = self.works[at], LOSSES[self._requests[at].loss_fn]
        return work.error or TrainResult(outputs=tuple(work.outputs), metrics=loss.metrics(work.loss))


def _output(item: Item, elementwise: bool, logprobs: torch.Tensor, losses: torch.Tensor) -> Output:
    output = {"logprobs": logprobs.to(torch.float32).numpy().reshape(item.datum.target_tokens.shape)}
    if elementwise:
        output["elementwise_loss"] = losses.to(torch.float32).numpy()
    return output
