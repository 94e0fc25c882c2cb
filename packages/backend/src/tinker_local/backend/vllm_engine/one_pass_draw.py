"""Draws a token from each row of logits, with its logprob, in one pass over the logits: a Triton kernel for CUDA.

The same in torch reads or writes arrays as large as the logits about twelve times (float32, temperature, softmax,
noise, race), which is 4 % of a step of 512 sequences of an 8B model on an H200.

Shape suffixes: b rows, v vocabulary.
"""

import torch
import triton
import triton.language as tl
from tinker_local.backend.vllm_engine.compat_vllm import SAMPLED_TEMPERATURE_MIN

_SPAN = 512
"""Columns that share random numbers: Philox gives four at a time, so a program reads four spans at once."""


def draw(logits_bv: torch.Tensor, temperature_b: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int32 [B], drawn from softmax(logits / T), and their logprobs, float32 [B].

    `logits_bv`: any floating dtype; rows may lie apart. `temperature_b`: float32; rows below
    `SAMPLED_TEMPERATURE_MIN` take the likeliest token, with its logprob at T = 1. `seed` of at most 62 bits: another
    for each call. A row with NaN has a logprob of NaN.

    Ids are the argmax of logits / T + g with g ~ Gumbel(0, 1), which has the distribution of the softmax
    (Gumbel-max; Maddison, Tarlow and Minka, "A* Sampling", 2014, section 2).
    """
    rows, width = logits_bv.shape
    assert logits_bv.stride(1) == 1
    ids = torch.empty(rows, dtype=torch.int32, device=logits_bv.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits_bv.device)
    if rows:
        # With bit 62 every seed has the same type for Triton, which compiles the kernel once.
        _draw[(rows,)](
            logits_bv, temperature_b, ids, logprobs, logits_bv.stride(0), width, seed | 2**62,
            greedy=SAMPLED_TEMPERATURE_MIN, span=_SPAN, num_warps=4,
        )  # fmt: skip
    return ids, logprobs


@triton.jit(do_not_specialize=["seed"])
def _draw(  # type: ignore[no-untyped-def]
    logits, temperatures, ids, logprobs, stride, width: tl.constexpr, seed, greedy: tl.constexpr, span: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row)
    draws = temperature >= greedy
    temperature = tl.where(draws, temperature, 1.0)
    lanes = tl.arange(0, span)
    # Each lane keeps the winner of its columns and a softmax of them; the lanes meet after the loop.
    best = tl.full((span,), float("-inf"), tl.float32)
    best_x = tl.zeros((span,), tl.float32)
    best_id = tl.zeros((span,), tl.int32)
    most = tl.full((span,), -3e38, tl.float32)  # not -inf, whose difference from itself is NaN
    total = tl.zeros((span,), tl.float32)
    first_group = row * tl.cdiv(width, 4 * span) * span
    for start in range(0, width, 4 * span):
        bits = tl.randint4x(seed, first_group + start // 4 + lanes)
        for part in tl.static_range(4):
            columns = start + part * span + lanes
            x = tl.load(row_logits + columns, mask=columns < width, other=float("-inf")).to(tl.float32) / temperature
            score = x + tl.where(draws, _gumbel(bits[part]), 0.0)
            wins = score > best
            best = tl.where(wins, score, best)
            best_x = tl.where(wins, x, best_x)
            best_id = tl.where(wins, columns, best_id)
            higher = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
            total = total * tl.exp(most - higher) + tl.exp(x - higher)
            most = higher
    winner = tl.max(best, 0)
    chosen = tl.min(tl.where(best == winner, best_id, 2147483647), 0)
    chosen_x = tl.max(tl.where((best == winner) & (best_id == chosen), best_x, float("-inf")), 0)
    highest = tl.max(most, 0)
    tl.store(ids + row, tl.minimum(chosen, width - 1))
    tl.store(logprobs + row, chosen_x - highest - tl.log(tl.sum(total * tl.exp(most - highest), 0)))


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def]
    """-log(e) with e ~ Exp(1). The largest values, which win, come from the smallest e; these are exact to float32,
    since -log(1 - u) is close to u + u^2 / 2 there."""
    u = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -tl.log(tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1.0 - tl.minimum(u, 0.99999994))))
