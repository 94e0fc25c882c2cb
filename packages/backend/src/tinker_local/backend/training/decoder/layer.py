"""One decoder layer, forward and backward.

    y   = x + O attend(rope(norm(Q n)), rope(norm(K n)), V n)        n = norm(x)
    out = y + D (silu(G m) * (U m))                                  m = norm(y)

where each of Q, K, V, O, G, U, D is a frozen matrix plus the adapters' low rank. Legend: T tokens, H hidden size,
N query heads, M key-value heads, D head size, I intermediate size, p projections of a group, R columns of adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tinker_local.backend.training.attention import Segments, attend, attend_backward
from tinker_local.backend.training.decoder.kernels import Kernels
from tinker_local.backend.training.decoder.lora_batch import LoraBatch, LowRank
from tinker_local.backend.training.decoder.weights import DecoderWeights, LayerWeights

Parts = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Cuts the joined output of a group's projections, [T, ...], into theirs, as views."""


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """What all layers of a micro-batch share. `cos`, `sin` [T, D]: rotary positions."""

    weights: DecoderWeights
    kernels: Kernels
    segments: Segments
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(slots=True, eq=False)
class LayerActivations:
    """What the backward of a layer reads: its input `x` [T, H] always; the rest if it was kept.

    `qkv` [T, (N + 2 M) D] before norm and positions; `attended` [T, N, D] and its `logsumexp`; `y` [T, H];
    `gate_up` [T, 2 I]. `h_...` [T, p, R]: the adapters' low-rank inputs.
    """

    x: torch.Tensor
    qkv: torch.Tensor | None = None
    attended: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None
    y: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    h_qkv: torch.Tensor | None = None
    h_output: torch.Tensor | None = None
    h_gate_up: torch.Tensor | None = None
    h_down: torch.Tensor | None = None


class Layer:
    """Layer `index` of `context.weights` under the adapters of `lora`."""

    def __init__(self, index: int, context: RowContext, lora: LoraBatch) -> None:
        self._w: LayerWeights = context.weights.layers[index]
        self._context = context
        self._qkv = lora.group("qkv", index)
        self._output = lora.group("output", index)
        self._gate_up = lora.group("gate_up", index)
        self._down = lora.group("down", index)

    # Forward --------------------------------------------------------------------------------------------------------

    def forward(self, kept: LayerActivations) -> torch.Tensor:
        """Output [T, H]; `kept`, which holds the input, gets everything that the backward reads."""
        self._attention(kept)
        self._to_gate_up(kept)
        a = self._context.kernels.swiglu(_there(kept.gate_up))
        kept.h_down, output = _project_onto(_there(kept.y), a, self._w.down, self._down)
        return output

    def recompute(self, kept: LayerActivations) -> None:
        """Compute again what `kept` lacks."""
        if kept.y is None:
            self._attention(kept)
        if kept.gate_up is None:
            self._to_gate_up(kept)
        if kept.h_down is None and self._down is not None:
            kept.h_down = self._down.down(self._context.kernels.swiglu(_there(kept.gate_up)))

    def _attention(self, kept: LayerActivations) -> None:
        w, c = self._w, self._context
        n = c.kernels.rms_norm(kept.x, w.input_norm, c.weights.epsilon)
        kept.h_qkv, kept.qkv = _project(n, w.qkv, w.qkv_bias, self._qkv, self._qkv_parts)
        kept.attended, kept.logsumexp = attend(*self._query_key_value(kept.qkv), c.segments, c.weights.scaling)
        kept.h_output, kept.y = _project_onto(kept.x, kept.attended.flatten(1), w.output, self._output)
        if w.output_bias is not None:
            kept.y += w.output_bias

    def _to_gate_up(self, kept: LayerActivations) -> None:
        m = self._context.kernels.rms_norm(_there(kept.y), self._w.mlp_norm, self._context.weights.epsilon)
        kept.h_gate_up, kept.gate_up = _project(m, self._w.gate_up, None, self._gate_up, _halves)

    def _query_key_value(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What attention reads: heads with norm and positions, [T, N, D], [T, M, D] and [T, M, D]."""
        w, c = self._w, self._context
        query, key, value = self._heads(qkv)
        return (
            c.kernels.norm_rope(query, w.q_norm, c.weights.epsilon, c.cos, c.sin),
            c.kernels.norm_rope(key, w.k_norm, c.weights.epsilon, c.cos, c.sin),
            value,
        )

    # Backward -------------------------------------------------------------------------------------------------------

    def backward(self, grad: torch.Tensor, kept: LayerActivations) -> torch.Tensor:
        """The gradient by the layer's input from that by its output, both [T, H]; adapters' gradients are written.

        `kept` is complete; what it holds is used up, as memory for gradients.
        """
        by_y = self._mlp_backward(grad, kept)
        return self._attention_backward(by_y, kept)

    def _mlp_backward(self, grad: torch.Tensor, kept: LayerActivations) -> torch.Tensor:
        w, c = self._w, self._context
        y, gate_up = _there(kept.y), _there(kept.gate_up)
        by_h = None if self._down is None else self._down.up_gradient(_there(kept.h_down), (grad,))
        by_a = _through(grad, w.down, self._down, by_h)
        by_gate_up, a = c.kernels.swiglu_backward(by_a, gate_up)
        if self._down is not None and by_h is not None:
            self._down.write_a_gradient(by_h, a)
        del by_a, a
        m = c.kernels.rms_norm(y, w.mlp_norm, c.weights.epsilon)
        by_m = _project_backward(by_gate_up, m, w.gate_up, self._gate_up, kept.h_gate_up, _halves)
        return c.kernels.rms_norm_backward(by_m, y, w.mlp_norm, c.weights.epsilon, grad)

    def _attention_backward(self, grad: torch.Tensor, kept: LayerActivations) -> torch.Tensor:
        w, c = self._w, self._context
        qkv, attended = _there(kept.qkv), _there(kept.attended)
        by_attended = _project_backward(grad, attended.flatten(1), w.output, self._output, kept.h_output, _whole)
        query, key, value = self._query_key_value(qkv)
        by_query, by_key, by_value = attend_backward(
            by_attended.view_as(attended), query, key, value, attended, kept.logsumexp, c.segments, c.weights.scaling
        )
        by_qkv = torch.empty_like(qkv)
        to_query, to_key, to_value = self._heads(by_qkv)
        raw_query, raw_key, _ = self._heads(qkv)
        c.kernels.norm_rope_backward(by_query, raw_query, w.q_norm, c.weights.epsilon, c.cos, c.sin, to_query)
        c.kernels.norm_rope_backward(by_key, raw_key, w.k_norm, c.weights.epsilon, c.cos, c.sin, to_key)
        to_value.copy_(by_value)
        n = c.kernels.rms_norm(kept.x, w.input_norm, c.weights.epsilon)
        by_n = _project_backward(by_qkv, n, w.qkv, self._qkv, kept.h_qkv, self._qkv_parts)
        return c.kernels.rms_norm_backward(by_n, kept.x, w.input_norm, c.weights.epsilon, grad)

    # Shapes ---------------------------------------------------------------------------------------------------------

    def _qkv_parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = self._context.weights
        return tuple(qkv.split([weights.q_width, weights.kv_width, weights.kv_width], dim=-1))

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (part.unflatten(-1, (-1, self._context.weights.head_size)) for part in self._qkv_parts(qkv))
        return query, key, value


def _project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low_rank: LowRank | None, parts: Parts
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h [T, p, R] and x weight^T + bias + low rank. The low rank comes first: the large product adds onto it as it
    writes, so nothing passes over the output again."""
    if low_rank is None:
        return None, x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
    h = low_rank.down(x)
    output = x.new_empty(len(x), len(weight))
    low_rank.up(h, parts(output))
    output.addmm_(x, weight.T)
    return h, output if bias is None else output.add_(bias)


def _project_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, low_rank: LowRank | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h [T, 1, R] and residual + x weight^T + low rank, for a group of one projection."""
    if low_rank is None:
        return None, torch.addmm(residual, x, weight.T)
    h = low_rank.down(x)
    return h, torch.addmm(residual, h[:, 0], low_rank.b[0].T).addmm_(x, weight.T)


def _project_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    low_rank: LowRank | None,
    h: torch.Tensor | None,
    parts: Parts,
) -> torch.Tensor:
    """The gradient by x from that by the output; the adapters' are written."""
    if low_rank is None:
        return grad @ weight
    by_h = low_rank.up_gradient(_there(h), parts(grad))
    low_rank.write_a_gradient(by_h, x)
    return _through(grad, weight, low_rank, by_h)


def _through(
    grad: torch.Tensor, weight: torch.Tensor, low_rank: LowRank | None, by_h: torch.Tensor | None
) -> torch.Tensor:
    """grad weight + by_h A: through a group's projections from their output to their input."""
    if low_rank is None or by_h is None:
        return grad @ weight
    return (by_h.flatten(1) @ low_rank.a).addmm_(grad, weight)


def _halves(joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(joined.chunk(2, dim=-1))


def _whole(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (output,)


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "kept or computed again before the backward"
    return tensor
