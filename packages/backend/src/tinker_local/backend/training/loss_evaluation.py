"""The losses of one micro-batch on the device, evaluated portion by portion as logprobs of its targets become known.

Legend: M targets of the micro-batch, m those of one portion.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.interface import TrainWork
from tinker_local.backend.training.losses import Tensors, loss_and_derivative, with_shared
from tinker_local.backend.training.packing import Packed, spans
from tinker_local.backend.training.transfer import to_device

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Part:
    """The targets of one work: `span` of the M, its `inputs` there, and of which datum each is (`datum_of`).
    `complete`: `inputs` with what the positions of a datum share, once that can be known."""

    work: TrainWork
    span: slice
    inputs: Tensors
    datum_of: torch.Tensor
    complete: Tensors | None = None


class LossEvaluation:
    """Losses and derivatives of the `works` in `packed`, in `dtype` on `device`. Both are 0 for targets that are in no
    portion, because they are switched off."""

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
            if part.complete is None:
                part.complete = with_shared(part.work.loss_fn, logprobs[part.span], part.inputs, part.datum_of)
            own = on_device[first:stop]
            inputs = {name: values[own - part.span.start] for name, values in part.complete.items()}
            self._losses[own], self._derivative[own] = loss_and_derivative(
                part.work.loss_fn, logprobs[own], inputs, part.work.loss_config
            )
        portion = self.numbers(logprobs)[:, on_device]
        return torch.where(torch.isfinite(portion).all(0), portion[2], 0.0)

    def numbers(self, logprobs: torch.Tensor) -> torch.Tensor:
        """`logprobs`, losses and derivatives, [3, M]."""
        return torch.stack((logprobs, self._losses, self._derivative))


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
