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
) -> None:
    """Write x W_e^T + bias_e of each pair to `found` [T, K, out], times its score in `scores` [T, K] if they are given.

    `x`: [T, in], or [P, in] with a row for each pair. `codes`: int8 [E, out, in], or uint8 [E, out, in/2] with two of 4
    bits; `scales` [E, out, G]; `bias` [E, out].
    """
    pairs, outputs, inputs = found.shape[0] * found.shape[1], codes.shape[1], x.shape[1]
    m = blocks.size
    n = 128 if m == 64 else 64
    assert x.stride(1) == 1
    assert found.is_contiguous()
    _times_experts[(len(blocks.experts), triton.cdiv(outputs, n))](
        x, codes, scales, bias, scores, blocks.pairs, blocks.experts, blocks.filled, found,
        pairs, outputs, x.stride(0), pairs // len(x),
        inputs=inputs, group=inputs // scales.shape[2], nibbles=codes.dtype == torch.uint8,
        m=m, n=n, num_warps=n // 16, num_stages=4,
    )  # fmt: skip


@triton.jit
def _times_experts(  # type: ignore[no-untyped-def]
    x, codes, scales, bias, scores, rows, experts, filled, found, pairs, outputs, stride, pairs_of_row,
    inputs: tl.constexpr, group: tl.constexpr, nibbles: tl.constexpr, m: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = inputs // group
    dtype = x.dtype.element_ty
    block = tl.program_id(0)  # blocks of one expert are neighbours, so that its codes are read once
    if block * m >= tl.load(filled):
        return
    pair = tl.load(rows + block * m + tl.arange(0, m)).to(tl.int64)
    outs = tl.program_id(1) * n + tl.arange(0, n)
    here, there = pair[:, None] < pairs, outs[:, None] < outputs
    row = tl.load(experts + block).to(tl.int64) * outputs + outs
    of_x = x + (pair // pairs_of_row)[:, None] * stride
    of_codes = codes + row[:, None] * (inputs // 2 if nibbles else inputs)
    total = tl.zeros((m, n), tl.float32)
    for number in range(groups):
        scale = tl.load(scales + row * groups + number, mask=outs < outputs, other=0).to(tl.float32)[:, None]
        if nibbles:  # even and odd columns apart, as in `_times_few`
            half = tl.arange(0, group // 2)
            both = tl.load(of_codes + number * (group // 2) + half[None, :], mask=there, other=0)
            low = (((both & 15).to(tl.float32) - 8) * scale).to(dtype)
            high = (((both >> 4).to(tl.float32) - 8) * scale).to(dtype)
            at = of_x + number * group + 2 * half[None, :]
            total = tl.dot(tl.load(at, mask=here, other=0), low.T, total, input_precision="ieee")
            total = tl.dot(tl.load(at + 1, mask=here, other=0), high.T, total, input_precision="ieee")
        else:
            every = tl.arange(0, group)
            code = tl.load(of_codes + number * group + every[None, :], mask=there, other=0).to(tl.float32)
            given = tl.load(of_x + number * group + every[None, :], mask=here, other=0)
            total = tl.dot(given, (code * scale).to(dtype).T, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + row, mask=outs < outputs, other=0).to(tl.float32)[None, :]
    if scores is not None:
        total *= tl.load(scores + pair, mask=pair < pairs, other=0).to(tl.float32)[:, None]
    places = found + pair[:, None] * outputs + outs[None, :]
    tl.store(places, total.to(found.dtype.element_ty), mask=here & (outs[None, :] < outputs))
