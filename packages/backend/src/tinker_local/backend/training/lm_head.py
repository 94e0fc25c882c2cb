"""Log-probabilities of the targets only, and their gradient, in chunks of rows: [T, vocabulary] is never whole.

Legend: T rows of hidden states, H their size, M targets (rows times candidates), V vocabulary. The forward keeps
nothing; the backward computes the logits again, and only for rows whose gradient is not zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.lora import AdapterSlices, LoraLayers

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """`rows` [C] of the hidden states; `targets` [m]: which of the M targets they predict, `local_rows` [m]: from
    which row of the chunk."""

    rows: Int64Array
    targets: Int64Array
    local_rows: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LmHead:
    """The output projection `module` of V tokens; adapters on it come through the hooks of `lora`.

    `chunk_elements` bounds the logits that exist at a time. `dtype`: of softmax and logprobs.
    """

    module: torch.nn.Module
    lora: LoraLayers
    vocab_size: int
    chunk_elements: int
    dtype: torch.dtype

    def logprobs(self, hidden: torch.Tensor, rows: Int64Array, ids: Int64Array, slices: AdapterSlices) -> torch.Tensor:
        """log softmax(logits)[id] for each target, [M] on the host. `hidden` [T, H]; `rows` [M] ascending."""
        result = torch.empty(len(rows), dtype=self.dtype)
        for chunk in self._chunks(np.arange(len(hidden)), rows, ids, hidden.device):
            with torch.no_grad(), self.lora.assigned(slices.select(chunk.rows)):
                logits = self.module(hidden[chunk.rows[0] : chunk.rows[-1] + 1]).to(self.dtype)
                chosen = logits[chunk.local_rows, chunk.ids] - logits.logsumexp(-1)[chunk.local_rows]
            result[torch.from_numpy(chunk.targets)] = chosen.cpu()
        return result

    def backward(
        self,
        hidden: torch.Tensor,
        rows: Int64Array,
        ids: Int64Array,
        derivative: torch.Tensor,
        slices: AdapterSlices,
        parameters: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Gradient of a loss by `hidden` [T, H] and by each of `parameters` (None where it plays no part), given its
        `derivative` by the logprobs, [M] on the host."""
        hidden_gradient = torch.zeros_like(hidden)
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        active = np.flatnonzero(derivative.numpy())
        active_rows = np.unique(rows[active])
        for chunk in self._chunks(active_rows, rows[active], ids[active], hidden.device):
            index = torch.from_numpy(chunk.rows).to(hidden.device)
            by_target = derivative[torch.from_numpy(active[chunk.targets])].to(hidden.device)
            with torch.enable_grad(), self.lora.assigned(slices.select(chunk.rows)):
                leaf = hidden[index].requires_grad_()
                logits = self.module(leaf)
            by_logits = self._derivative_by_logits(logits.detach(), chunk, by_target)
            by_leaf, *found = torch.autograd.grad(logits, [leaf, *parameters], by_logits, allow_unused=True)
            hidden_gradient[index] = by_leaf
            gradients = [_sum(before, new) for before, new in zip(gradients, found, strict=True)]
        return hidden_gradient, gradients

    def _chunks(
        self, rows: Int64Array, target_rows: Int64Array, ids: Int64Array, device: torch.device
    ) -> Iterator[_Chunk]:
        """`rows` (ascending) in chunks, with the targets of `target_rows` that belong to each."""
        size = max(1, self.chunk_elements // self.vocab_size)
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            first, stop = np.searchsorted(target_rows, (chunk[0], chunk[-1] + 1))
            targets = np.arange(first, stop)
            local = torch.from_numpy(np.searchsorted(chunk, target_rows[targets]))
            yield _Chunk(chunk, targets, local.to(device), torch.from_numpy(ids[targets]).to(device))

    def _derivative_by_logits(self, logits: torch.Tensor, chunk: _Chunk, by_target: torch.Tensor) -> torch.Tensor:
        """d loss / d logits [C, V]: each target adds g (onehot(id) - softmax(its row)), g its derivative."""
        result = logits.to(self.dtype).softmax(-1)
        by_row = torch.zeros(len(result), dtype=self.dtype, device=result.device)
        by_row.index_add_(0, chunk.local_rows, by_target)
        result.mul_(-by_row[:, None])
        result.index_put_((chunk.local_rows, chunk.ids), by_target, accumulate=True)
        return result.to(logits.dtype)


def _sum(before: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or new is None:
        return new if before is None else before
    return before + new
