"""The decoder's kernels in Triton, for 16-bit activations on CUDA: each reads and writes memory once.

All are bound by memory bandwidth, so a program loads a whole row (or head) into registers and computes in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from tinker_local.backend.training.kernels.kernels import Activation
from tinker_local.backend.training.kernels.triton_experts import TritonExperts


class TritonKernels:
    """Implements `kernels.Kernels`."""

    experts = TritonExperts()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        result = torch.empty_like(x)
        rows, width = x.shape
        _rms_norm[(rows,)](
            x, weight, result, width, epsilon, block=triton.next_power_of_2(width), num_warps=_warps(width)
        )
        return result

    def rms_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        rows, width = x.shape
        block = triton.next_power_of_2(width)
        result = torch.empty_like(grad) if residual is None else grad
        _rms_norm_backward[(rows,)](
            grad, x, weight, residual, result, width, epsilon, block=block, num_warps=_warps(width)
        )
        return result

    def norm_rope(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        tokens, heads, size = x.shape
        result = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
        _norm_rope[(tokens,)](
            x, weight, cos, sin, result, x.stride(0), x.stride(1), heads, size, cos.shape[1], epsilon,
            has_norm=weight is not None, **_head_blocks(heads, size, cos.shape[1]),
        )  # fmt: skip
        return result

    def norm_rope_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        tokens, heads, size = x.shape
        grad = grad.contiguous()
        _norm_rope_backward[(tokens,)](
            grad, x, weight, cos, sin, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            heads, size, cos.shape[1], epsilon,
            has_norm=weight is not None, **_head_blocks(heads, size, cos.shape[1]),
        )  # fmt: skip

    def glu(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        result = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        block = _span(width)
        _glu[(rows, triton.cdiv(width, block))](
            gate_up, result, width, gelu=activation == "gelu_tanh", block=block, num_warps=4
        )
        return result

    def glu_backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        block = _span(width)
        _glu_backward[(rows, triton.cdiv(width, block))](
            grad, gate_up, None, None, width,
            routed=False, gelu=activation == "gelu_tanh", block=block, num_warps=4,
        )  # fmt: skip
        return gate_up, grad

    def routed_swiglu_backward(
        self, grad: torch.Tensor, gate_up: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        grad_shares = torch.empty(rows, dtype=torch.float32, device=grad.device)
        block = triton.next_power_of_2(width)
        _glu_backward[(rows, 1)](
            grad, gate_up, shares, grad_shares, width,
            routed=True, gelu=False, block=block, num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
        return gate_up, grad, grad_shares

    def weighted_sum(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        tokens, chosen = places.shape
        width = rows.shape[1]
        result = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
        block = _span(width)
        weights = None if weights is None else weights.contiguous()
        _weighted_sum[(tokens, triton.cdiv(width, block))](
            rows, places, weights, result, width,
            chosen=chosen, has_weights=weights is not None, block=block, num_warps=_span_warps(block),
        )  # fmt: skip
        return result

    def spread(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        tokens, chosen = places.shape
        width = x.shape[1]
        result = torch.empty(tokens * chosen, width, dtype=x.dtype, device=x.device)
        block = _span(width)
        _spread[(tokens, triton.cdiv(width, block))](
            x, places, result, x.stride(0), width, chosen=chosen, block=block, num_warps=_span_warps(block)
        )
        return result

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        rows, width = logits.shape
        result = torch.empty(rows, dtype=torch.float32, device=logits.device)
        _logsumexp[(rows,)](logits, result, width, block=_LONG_SPAN, num_warps=8)
        return result

    def scaled_softmax(self, logits: torch.Tensor, logsumexp: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows, width = logits.shape
        grid = (rows, triton.cdiv(width, _LONG_SPAN))
        _scaled_softmax[grid](logits, logsumexp, scale, width, block=_LONG_SPAN, num_warps=8)
        return logits


_SPAN = 2048
_LONG_SPAN = 4096


def _span(width: int) -> int:
    """How much of a row of `width` numbers a program takes."""
    return min(_SPAN, int(triton.next_power_of_2(width)))


def _span_warps(block: int) -> int:
    """For a program that holds a few numbers of `block` at once."""
    return max(1, min(4, block // 256))


def _warps(width: int) -> int:
    """Enough warps that each thread holds a few dozen numbers of a row."""
    return min(16, max(1, int(triton.next_power_of_2(width)) // 512))


def _head_blocks(heads: int, size: int, rotary: int) -> dict[str, Any]:
    """`half_block`: of the numbers that rotate, half; `rest_block`: of the others, or 0."""
    half = triton.next_power_of_2(rotary // 2)
    rest = triton.next_power_of_2(size - rotary) if rotary < size else 0
    block = triton.next_power_of_2(heads)
    warps = min(8, max(1, block * (half + rest // 2) // 256))
    return {"head_block": block, "half_block": half, "rest_block": rest, "num_warps": warps}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rms_norm(x, weight, result, width, epsilon, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    normalized = (values * inverse).to(result.dtype.element_ty).to(tl.float32)
    scaled = normalized * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + at, scaled, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rms_norm_backward(grad, x, weight, residual, result, width, epsilon, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    normalized = values * inverse
    grad_output = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    grad_normalized = grad_output * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(grad_normalized * normalized, 0) / width
    found = (grad_normalized - normalized * along) * inverse
    if residual is not None:
        found += tl.load(residual + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + at, found, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_rope(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, result, stride, head_stride, heads, size, rotary, epsilon,
    has_norm: tl.constexpr, head_block: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, head_block)[:, None]
    at = tl.arange(0, half_block)[None, :]
    half = rotary // 2
    inside = (head < heads) & (at < half)
    source = x + token * stride + head * head_stride
    goal = result + token * heads * size + head * size
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if rest_block > 0:
        after = rotary + tl.arange(0, rest_block)[None, :]
        inside_rest = (head < heads) & (after < size)
        rest = tl.load(source + after, mask=inside_rest, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
        if has_norm:
            scale = tl.rsqrt(squares / size + epsilon)[:, None]
            rest = rest * scale * tl.load(weight + after, mask=after < size, other=0.0).to(tl.float32)
        tl.store(goal + after, rest, mask=inside_rest)
    if has_norm:
        inverse = tl.rsqrt(squares / size + epsilon)[:, None]
        first = first * inverse * tl.load(weight + at, mask=at < half, other=0.0).to(tl.float32)
        second = second * inverse * tl.load(weight + half + at, mask=at < half, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + token * rotary + at, mask=at < half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + token * rotary + half + at, mask=at < half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + token * rotary + at, mask=at < half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + token * rotary + half + at, mask=at < half, other=0.0).to(tl.float32)
    tl.store(goal + at, first * cos_first - second * sin_first, mask=inside)
    tl.store(goal + half + at, second * cos_second + first * sin_second, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_rope_backward(  # type: ignore[no-untyped-def]
    grad, x, weight, cos, sin, result, stride, head_stride, result_stride, result_head_stride,
    heads, size, rotary, epsilon,
    has_norm: tl.constexpr, head_block: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, head_block)[:, None]
    at = tl.arange(0, half_block)[None, :]
    half = rotary // 2
    inside = (head < heads) & (at < half)
    given = grad + token * heads * size + head * size
    source = x + token * stride + head * head_stride
    goal = result + token * result_stride + head * result_head_stride
    grad_rotated_first = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
    grad_rotated_second = tl.load(given + half + at, mask=inside, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + token * rotary + at, mask=at < half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + token * rotary + half + at, mask=at < half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + token * rotary + at, mask=at < half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + token * rotary + half + at, mask=at < half, other=0.0).to(tl.float32)
    grad_first = grad_rotated_first * cos_first + grad_rotated_second * sin_second
    grad_second = grad_rotated_second * cos_second - grad_rotated_first * sin_first
    if has_norm:
        first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
        grad_first = grad_first * tl.load(weight + at, mask=at < half, other=0.0).to(tl.float32)
        grad_second = grad_second * tl.load(weight + half + at, mask=at < half, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, 1)
        along = tl.sum(grad_first * first + grad_second * second, 1)
    if rest_block > 0:
        after = rotary + tl.arange(0, rest_block)[None, :]
        inside_rest = (head < heads) & (after < size)
        grad_rest = tl.load(given + after, mask=inside_rest, other=0.0).to(tl.float32)
        if has_norm:
            rest = tl.load(source + after, mask=inside_rest, other=0.0).to(tl.float32)
            grad_rest = grad_rest * tl.load(weight + after, mask=after < size, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
            along += tl.sum(grad_rest * rest, 1)
            scale = tl.rsqrt(squares / size + epsilon)[:, None]
            grad_rest = (grad_rest - rest * scale * scale * (along / size)[:, None]) * scale
        tl.store(goal + after, grad_rest, mask=inside_rest)
    if has_norm:
        inverse = tl.rsqrt(squares / size + epsilon)[:, None]
        mean = inverse * inverse * (along / size)[:, None]
        grad_first = (grad_first - first * mean) * inverse
        grad_second = (grad_second - second * mean) * inverse
    tl.store(goal + at, grad_first, mask=inside)
    tl.store(goal + half + at, grad_second, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sigmoid_of(gate, gelu: tl.constexpr):  # type: ignore[no-untyped-def]
    """s such that gate s is the activation, and its gradient is s + gate s (1 - s) slope; s and slope. GELU by tanh has
    (1 + tanh z) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (gate + 0.044715 gate^3)."""
    slope = 1.0
    argument = gate
    if gelu:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    return tl.sigmoid(argument), slope


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _glu(gate_up, result, width, gelu: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid, _ = _sigmoid_of(gate, gelu)
    tl.store(result + row * width + at, gate * sigmoid * up, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _glu_backward(  # type: ignore[no-untyped-def]
    grad, gate_up, shares, grad_shares, width, routed: tl.constexpr, gelu: tl.constexpr, block: tl.constexpr
):
    """Overwrite gate and up with their gradients, and `grad` with the forward's output. `routed`: of rows times their
    `shares`; then a program has a whole row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate_place = gate_up + row * 2 * width + at
    grad_place = grad + row * width + at
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_place + width, mask=inside, other=0.0).to(tl.float32)
    grad_output = tl.load(grad_place, mask=inside, other=0.0).to(tl.float32)
    sigmoid, slope = _sigmoid_of(gate, gelu)
    active = gate * sigmoid
    if routed:
        tl.store(grad_shares + row, tl.sum(grad_output * active * up, 0))
        grad_output *= tl.load(shares + row).to(tl.float32)
    tl.store(gate_place, grad_output * up * (sigmoid + active * (1 - sigmoid) * slope), mask=inside)
    tl.store(gate_place + width, grad_output * active, mask=inside)
    tl.store(grad_place, active * up, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weighted_sum(  # type: ignore[no-untyped-def]
    rows, places, weights, result, width, chosen: tl.constexpr, has_weights: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    total = tl.zeros((block,), tl.float32)
    for k in tl.static_range(chosen):  # unrolled, so that all rows are on their way at once
        place = tl.load(places + token * chosen + k)
        values = tl.load(rows + place * width + at, mask=inside, other=0.0).to(tl.float32)
        if has_weights:
            values *= tl.load(weights + token * chosen + k).to(tl.float32)
        total += values
    tl.store(result + token * width + at, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _spread(x, places, result, stride, width, chosen: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads each row once, which a gather of the result's rows does `chosen` times."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    values = tl.load(x + token * stride + at, mask=inside)
    for k in tl.static_range(chosen):
        place = tl.load(places + token * chosen + k)
        tl.store(result + place * width + at, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _logsumexp(logits, result, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    largest = tl.full((block,), float("-inf"), tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, width, block):
        inside = start + at < width
        values = tl.load(logits + row * width + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, values)
        # A lane that has only seen -inf (as beyond the width) would compute -inf - -inf, which is NaN. Testing `higher`
        # would not do: the maximum of -inf and NaN is -inf, and a NaN must stay in the sum.
        nothing = (largest == float("-inf")) & (values == float("-inf"))
        total = tl.where(nothing, total, total * tl.exp(largest - higher) + tl.exp(values - higher))
        largest = higher
    most = tl.max(largest, 0)
    tl.store(result + row, most + tl.log(tl.sum(total * tl.exp(largest - most), 0)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scaled_softmax(logits, logsumexp, scale, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    values = tl.load(logits + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + row)
    softmax = factor * tl.exp(values - tl.load(logsumexp + row))
    tl.store(logits + row * width + at, tl.where(factor == 0.0, 0.0, softmax), mask=inside)
