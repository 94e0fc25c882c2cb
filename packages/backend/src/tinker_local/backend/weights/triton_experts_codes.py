"""Products with packed stacks of experts (`packed_stack.py`) on CUDA, in Triton, which read the codes: of those experts
alone that a row goes to, and without waiting for the device to know which these are.

Numbers are those of `triton_codes.py`: code * scale, rounded once to the dtype of activations; sums are in float32.

Legend: T tokens, K experts of a token, P = T K pairs of both; pair t K + k is the k-th of token t. E experts, G groups
in a row of a matrix, M pairs in a block, B blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from tinker_local.backend.weights.precision import HALF
from tinker_local.backend.weights.triton_codes import both_halves, column_of, is_pairwise, of_bytes, step_of

_HALF = tl.constexpr(HALF)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Which pairs go where, as vLLM's `moe_align_block_size` says. `pairs` int32 [B M or less]: by expert, with numbers
    from P on to fill blocks of `size` M; `experts` int32 [B]: of each block; `filled` int32 [1]: where the blocks end
    that have pairs."""

    pairs: torch.Tensor
    experts: torch.Tensor
    filled: torch.Tensor
    size: int


def block_size(pairs: int, count: int) -> int:
    """M for `pairs` that go to `count` experts: about what an expert has."""
    return min(max(16, int(triton.next_power_of_2(pairs // count))), 64)


def times_experts(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    blocks: Blocks,
    found: torch.Tensor,
    bias: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    *,
    curved: bool = False,
) -> None:
    """Write x W_e^T + bias_e of each pair to `found` [T, K, out], times its score in `scores` [T, K] if they are given.

    `x`: [T, in], or [P, in] with a row for each pair. `codes`: int8 [E, out, in], or uint8 [E, out, in/2] with two of 4
    bits, `curved` as of `codes.Packed`; `scales` [E, out, G]; `bias` [E, out].
    """
    pairs, outputs, inputs = found.shape[0] * found.shape[1], codes.shape[1], x.shape[1]
    m, group, nibbles = blocks.size, inputs // scales.shape[2], codes.dtype == torch.uint8
    pairwise = is_pairwise(x.dtype, scales, None, nibbles)
    n = 128 if m == 64 else 64
    assert x.stride(1) == 1
    assert found.is_contiguous()
    _times_experts[(len(blocks.experts), triton.cdiv(outputs, n))](
        x, codes, scales, bias, scores, blocks.pairs, blocks.experts, blocks.filled, found,
        pairs, outputs, x.stride(0), pairs // len(x),
        inputs=inputs, group=group, nibbles=nibbles, curved=curved, pairwise=pairwise,
        m=m, n=n, k=step_of(inputs, group, 128), num_warps=4, num_stages=3 if nibbles else 2,
    )  # fmt: skip


@triton.jit
def _times_experts(  # type: ignore[no-untyped-def]
    x, codes, scales, bias, scores, rows, experts, filled, found, pairs, outputs, stride, pairs_of_row,
    inputs: tl.constexpr, group: tl.constexpr, nibbles: tl.constexpr, curved: tl.constexpr, pairwise: tl.constexpr,
    m: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = inputs // group
    width: tl.constexpr = k // 2 if nibbles else k
    row_bytes: tl.constexpr = inputs // 2 if nibbles else inputs
    dtype = x.dtype.element_ty
    block = tl.program_id(0)  # blocks of one expert are neighbours, so that its codes are read once
    if block * m >= tl.load(filled):
        return
    pair = tl.load(rows + block * m + tl.arange(0, m)).to(tl.int64)
    outs = tl.program_id(1) * n + tl.arange(0, n)
    here = pair[:, None] < pairs
    row = tl.load(experts + block).to(tl.int64) * outputs + outs % outputs
    place = tl.arange(0, width)
    of_x = x + (pair // pairs_of_row)[:, None] * stride + (column_of(place) if nibbles else place)[None, :]
    of_codes = codes + row[:, None] * row_bytes + place[None, :]
    of_groups = scales + row[:, None] * groups + tl.arange(0, k // group if k > group else 1)[None, :]
    total = tl.zeros((m, n), tl.float32)
    for step in range(inputs // k):
        scale = tl.load(of_groups + step * k // group)
        code = tl.load(of_codes + step * width)
        given = tl.load(of_x + step * k, mask=here, other=0)
        if nibbles:
            low, high = both_halves(code, scale, None, dtype, curved, pairwise)
            total = tl.dot(given, low.T, total, input_precision="ieee")
            given = tl.load(of_x + step * k + _HALF, mask=here, other=0)
            total = tl.dot(given, high.T, total, input_precision="ieee")
        else:
            total = tl.dot(given, of_bytes(code, scale, None, dtype, pairwise).T, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    if scores is not None:
        total *= tl.load(scores + pair, mask=pair < pairs, other=0).to(tl.float32)[:, None]
    places = found + pair[:, None] * outputs + outs[None, :]
    tl.store(places, total.to(found.dtype.element_ty), mask=here & (outs[None, :] < outputs))
