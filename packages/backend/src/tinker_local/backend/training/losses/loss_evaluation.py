"""The losses of one micro-batch on the device, evaluated portion by portion as logprobs of its targets become known.

Legend: M targets of the micro-batch, m those of one portion.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.losses.loss import Loss
from tinker_local.backend.training.run.packing import Packed, spans
from tinker_local.backend.training.run.transfer import to_device
from tinker_local.backend.training.trainer import TrainWork

Int64Array = npt.NDArray[np.int64]
Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class _Part:
    """The targets of one work: `span` of the M, its `inputs` there, and of which datum each is (`datum_of`).
    `complete`: `inputs` with those that `Loss.per_datum` adds, once they can be known."""

    work: TrainWork
    span: slice
    inputs: Tensors
    datum_of: torch.Tensor
    complete: Tensors | None = None


class LossEvaluation:
    """Losses and derivatives of the `works` in `packed`, in `dtype` on `device`. Both are 0 for targets that are in no
    portion, because they are masked."""

    def __init__(
        self, packed: Packed, works: Mapping[int, TrainWork], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = [_part(packed, at, span, works[at], dtype, device) for at, span in spans(packed)]
        self._losses = torch.zeros(len(packed.target_rows), dtype=dtype, device=device)
        self._derivative = torch.zeros_like(self._losses)

    def derive(self, places: Int64Array, logprobs: torch.Tensor) -> torch.Tensor:
        """`lm_head.Derive`: also keeps the losses and derivatives as they are, for `numbers`."""
        on_device = to_device(places, logprobs.device)
        for part in self._parts:
            first, stop = (int(i) for i in np.searchsorted(places, (part.span.start, part.span.stop)))
            if first == stop:
                continue
            loss = LOSSES[part.work.loss_fn]
            if part.complete is None:
                part.complete = with_per_datum(loss, logprobs[part.span], part.inputs, part.datum_of)
            own = on_device[first:stop]
            inputs = {name: values[own - part.span.start] for name, values in part.complete.items()}
            terms = loss.evaluate(torch, logprobs[own], inputs, part.work.loss_config)
            self._losses[own], self._derivative[own] = terms
        portion = self.numbers(logprobs)[:, on_device]
        return torch.where(torch.isfinite(portion).all(0), portion[2], 0.0)

    def numbers(self, logprobs: torch.Tensor) -> torch.Tensor:
        """`logprobs`, losses and derivatives, [3, M]."""
        return torch.stack((logprobs, self._losses, self._derivative))


def with_per_datum(loss: Loss, logprobs: torch.Tensor, inputs: Tensors, datum_of: torch.Tensor) -> Tensors:
    """`inputs` of whole data and those that `loss.per_datum` adds, all [M].

    `datum_of` int64 [M], ascending from 0: which datum each position is of.
    """

    def datum_sum(values: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(len(values), dtype=torch.float64, device=values.device)  # no more data than positions
        return empty.index_add_(0, datum_of, values.double())[datum_of]

    added = loss.per_datum(torch, logprobs, inputs, datum_sum)
    return {**inputs, **{name: values.to(logprobs.dtype) for name, values in added.items()}}


def _part(packed: Packed, at: int, span: slice, work: TrainWork, dtype: torch.dtype, device: torch.device) -> _Part:
    data = [item.datum for item in packed.items if item.work == at]
    inputs = {
        name: torch.from_numpy(np.concatenate([datum.loss_inputs[name].reshape(-1) for datum in data])).to(dtype)
        for name in data[0].loss_inputs
    }
    datum_of = np.repeat(np.arange(len(data)), [datum.target_tokens.size for datum in data])
    return _Part(
        work,
        span,
        {name: to_device(values.numpy(), device) for name, values in inputs.items()},
        to_device(datum_of, device),
    )
