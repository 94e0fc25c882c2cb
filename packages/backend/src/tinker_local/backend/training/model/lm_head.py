"""Log-probabilities of the targets, the losses and their gradient, in chunks of rows: all [T, V] logits never exist.

Legend: T rows of hidden states, H their size, M targets (rows times candidates), V vocabulary, C rows of a chunk.

Each chunk's logits are computed once: a loss is a function of each target's own logprob, so its derivative is known as
soon as the chunk's logprobs are, and the gradient of the logits, g (onehot - softmax), overwrites them. Rows whose
targets are all masked get logprobs and no gradient. If a loss also depends on other targets' logprobs through a
constant, a prepass computes those, and the chunk's logits are computed a second time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.families.family import PLAIN_LOGITS, LogitRule
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.lora.lora_batch import LowRank
from tinker_local.backend.training.run.transfer import to_device
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix

Int64Array = npt.NDArray[np.int64]

Derive = Callable[[Int64Array, torch.Tensor], torch.Tensor]
"""From the places [m] of some targets and the logprobs [M] of all (known at these places and for prepass targets) to
the derivative of the loss with respect to the logprobs at the places, [m]; 0 for non-finite ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Which token each row predicts, on the host. `rows` [M] and `ids` [M], in any order; `active` bool [M]: not
    masked; `prepass` bool [M]: the derivatives of other targets depend on this one's logprob. Rows below 0 and from T
    on are those of other ranks."""

    rows: Int64Array
    ids: Int64Array
    active: npt.NDArray[np.bool_]
    prepass: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """`rows` [C] of the hidden states; `places` [m] (and `host_places`): which of the M targets they predict;
    `local_rows` [m]: from which row of the chunk; `ids` [m]; `same` [m]: equal numbers for equal (row, id)."""

    host_places: Int64Array
    rows: torch.Tensor
    places: torch.Tensor
    local_rows: torch.Tensor
    ids: torch.Tensor
    same: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LmHead:
    """The output projection `matrix` [V, H], with `bias` [V] if the family has one, and the family's `rule` for logits.
    `chunk_elements`: maximum number of logits in memory at once. `dtype`: of logprobs."""

    matrix: FrozenMatrix
    kernels: Kernels
    chunk_elements: int
    dtype: torch.dtype
    bias: torch.Tensor | None = None
    rule: LogitRule = PLAIN_LOGITS

    def logprobs(self, hidden: torch.Tensor, targets: Targets, low_rank: LowRank | None) -> torch.Tensor:
        """log softmax(logits)[id] for each target, [M] on the device; 0 for those that no row of `hidden` [T, H]
        predicts."""
        result = torch.zeros(len(targets.rows), dtype=self.dtype, device=hidden.device)
        self._forward(hidden, targets, np.unique(targets.rows), low_rank, result)
        return result

    def logprobs_and_gradient(
        self,
        hidden: torch.Tensor,
        targets: Targets,
        low_rank: LowRank | None,
        derive: Derive,
        complete: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs [M] as of `logprobs`, and the gradient with respect to `hidden` [T, H] of the loss that `derive`
        differentiates. Adds the gradients of `low_rank` to its own. `complete`: adds to the logprobs, between prepass
        and gradient, those that other ranks know."""
        logprobs = torch.zeros(len(targets.rows), dtype=self.dtype, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        active_rows = np.unique(targets.rows[targets.active])
        before = np.union1d(np.setdiff1d(targets.rows, active_rows), targets.rows[targets.prepass])
        self._forward(hidden, targets, before, low_rank, logprobs)
        complete(logprobs)
        for chunk in self._chunks(_within(active_rows, hidden), targets, hidden.device):
            self._gradient(chunk, hidden, low_rank, derive, logprobs, grad_hidden)
        return logprobs, grad_hidden

    def _forward(
        self, hidden: torch.Tensor, targets: Targets, rows: Int64Array, low_rank: LowRank | None, result: torch.Tensor
    ) -> None:
        """Write the logprobs of the targets of `rows` to `result`."""
        for chunk in self._chunks(_within(rows, hidden), targets, hidden.device):
            logits, _, _ = self._logits(hidden[chunk.rows], chunk, low_rank)
            result[chunk.places] = self._target_logprobs(logits, chunk, self.kernels.logsumexp(logits))

    def _gradient(
        self,
        chunk: _Chunk,
        hidden: torch.Tensor,
        low_rank: LowRank | None,
        derive: Derive,
        all_logprobs: torch.Tensor,
        grad_hidden: torch.Tensor,
    ) -> None:
        """Compute the chunk's part of the logprobs and of the gradient of the hidden states."""
        x = hidden[chunk.rows]
        logits, h, part = self._logits(x, chunk, low_rank)
        logsumexp = self.kernels.logsumexp(logits)
        logprobs = self._target_logprobs(logits, chunk, logsumexp)
        all_logprobs[chunk.places] = logprobs
        derivative = derive(chunk.host_places, all_logprobs)

        # d loss / d logits: each target adds g (onehot(id) - softmax). At the targets, add before rounding: g - g p
        # would vanish for p near 1.
        row_derivative = _sums(derivative, chunk.local_rows, len(x))
        slope = self._slope(logits)
        grad_logits = self.kernels.scaled_softmax(logits, logsumexp, -row_derivative)
        of_row = row_derivative[chunk.local_rows]
        of_target = _sums(derivative, chunk.same, len(chunk.same))[chunk.same]
        at_targets = of_target - torch.where(of_row != 0, of_row * torch.exp(logprobs), 0.0)
        grad_logits[chunk.local_rows, chunk.ids] = at_targets.to(grad_logits.dtype)
        if slope is not None:
            grad_logits *= slope

        grad_x = self.matrix.back(grad_logits)
        if part is not None and h is not None and low_rank is not None:
            grad_h = part.up_gradient(h, (grad_logits,))
            part.write_a_gradient(grad_h, x)
            grad_x.addmm_(grad_h.flatten(1), part.a)
            _add(low_rank, part)
        grad_hidden[chunk.rows] = grad_x

    def _logits(
        self, x: torch.Tensor, chunk: _Chunk, low_rank: LowRank | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, LowRank | None]:
        """Logits [C, V] of rows `x` [C, H]; the adapters' h; and their low rank for these rows, with its own memory for
        gradients."""
        if low_rank is None:
            return self._with_rule(self.matrix.times(x)), None, None
        part = _with_own_gradients(low_rank.rows(chunk.rows))
        h = part.down(x)
        return self._with_rule(self.matrix.add_times(h[:, 0] @ part.b[0].T, x)), h, part

    def _with_rule(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn the projection's output into logits, in place."""
        if self.bias is not None:
            logits += self.bias
        if self.rule.scale != 1:
            logits *= self.rule.scale
        if self.rule.softcap is not None:
            logits.div_(self.rule.softcap).tanh_().mul_(self.rule.softcap)
        return logits

    def _slope(self, logits: torch.Tensor) -> torch.Tensor | float | None:
        """The derivative of the logits with respect to the projection's output; None if it is 1 everywhere."""
        if self.rule.softcap is None:
            return None if self.rule.scale == 1 else self.rule.scale
        return (1 - (logits / self.rule.softcap) ** 2).mul_(self.rule.scale)

    def _target_logprobs(self, logits: torch.Tensor, chunk: _Chunk, logsumexp: torch.Tensor) -> torch.Tensor:
        return (logits[chunk.local_rows, chunk.ids].to(self.dtype) - logsumexp[chunk.local_rows]).to(self.dtype)

    def _chunks(self, rows: Int64Array, targets: Targets, device: torch.device) -> Iterator[_Chunk]:
        """Split `rows` (ascending) into chunks, each with its targets."""
        size = max(1, self.chunk_elements // self.matrix.outputs)
        order = np.argsort(targets.rows, kind="stable")
        in_order = targets.rows[order]
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            first, stop = np.searchsorted(in_order, (chunk[0], chunk[-1] + 1))
            places = np.sort(order[first:stop][np.isin(in_order[first:stop], chunk)])
            local_rows, ids = np.searchsorted(chunk, targets.rows[places]), targets.ids[places]
            _, same = np.unique(local_rows * self.matrix.outputs + ids, return_inverse=True)
            arrays = (chunk, places, local_rows, ids, same)
            yield _Chunk(places, *(to_device(array, device) for array in arrays))


def _within(rows: Int64Array, hidden: torch.Tensor) -> Int64Array:
    return rows[(rows >= 0) & (rows < len(hidden))]


def _sums(values: torch.Tensor, into: torch.Tensor, count: int) -> torch.Tensor:
    """Sum `values` [m] by their number in `into` [m], [count]."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, into, values)


def _with_own_gradients(low_rank: LowRank) -> LowRank:
    """`low_rank` with new memory for the gradients of one chunk, if it has gradients."""
    if low_rank.grad_a is None:
        return low_rank
    return replace(
        low_rank,
        grad_a=torch.empty_like(low_rank.grad_a),
        grad_b=tuple(torch.empty_like(grad) for grad in low_rank.grad_b),
    )


def _add(low_rank: LowRank, part: LowRank) -> None:
    """Add the gradients of a chunk to those of all chunks."""
    assert low_rank.grad_a is not None
    assert part.grad_a is not None
    low_rank.grad_a.add_(part.grad_a)
    for total, grad in zip(low_rank.grad_b, part.grad_b, strict=True):
        total.add_(grad)
