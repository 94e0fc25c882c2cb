"""Matrices of 8 or 4 bits (`codes.py`) on CUDA, in Triton: made whole in one pass, or multiplied by as they are read.

Both round code * scale once to the dtype of activations, as `codes.from_codes` does, so that all multiply by the same
numbers. In torch the same matrix is written and read four times.

Of the layouts of `codes.Packed` those with integers and groups side by side, with or without zero points.

Legend: M rows of activations, N rows of the matrix, K numbers in a row, G groups in a row.
"""

import math

import torch
import triton
import triton.language as tl
from tinker_local.backend.weights.precision import GROUPS
from tinker_local.backend.weights.round_curved import BEND

_BEND: tl.constexpr = tl.constexpr(BEND)

_BLOCK = 1024
"""Codes that a program unpacks."""

_PROGRAMS = 512
"""About how many a product is divided into: some for each multiprocessor of large GPUs, so that memory stays busy."""

_SPAN = GROUPS[0]
"""Columns that a program multiplies by at once, those of several small groups, where rows can be divided so."""


def unpacked(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    zeros: torch.Tensor | None = None,
    *,
    curved: bool = False,
) -> torch.Tensor:
    """[N, K] in `dtype`. `codes`: int8 [N, K], or uint8 [N, K/2] with two of 4 bits; `scales`, `zeros`: [N, G];
    `curved`: as of `codes.Packed`."""
    rows, in_bytes = codes.shape
    nibbles = codes.dtype == torch.uint8
    inputs = in_bytes * (2 if nibbles else 1)
    weight = torch.empty(rows, inputs, dtype=dtype, device=codes.device)
    _unpack[(rows, triton.cdiv(inputs, _BLOCK))](
        codes, scales, zeros, weight, inputs, scales.shape[1],
        nibbles=nibbles, curved=curved, block=_BLOCK, num_warps=4,
    )  # fmt: skip
    return weight


def times_few(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    curved: bool = False,
) -> torch.Tensor:
    """x W^T, [M, N] in the dtype of `x` [M, K]; sums are in float32. Reads the codes once for each
    64 rows of `x`, so it is for few of them. The others as for `unpacked`. Equal inputs have equal results:
    parts of a sum are added in one order."""
    (rows, inputs), outputs = x.shape, len(codes)
    assert x.stride(1) == 1
    group = inputs // scales.shape[1]
    span = math.lcm(group, math.gcd(inputs, _SPAN))
    m = min(max(16, triton.next_power_of_2(rows)), 64)
    n = 128 if m == 64 else 64
    tiles = triton.cdiv(rows, m) * triton.cdiv(outputs, n)
    parts = min(triton.next_power_of_2(triton.cdiv(_PROGRAMS, tiles)), 8, inputs // span)
    found = torch.empty(parts, rows, outputs, dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    _times_few[(triton.cdiv(outputs, n), triton.cdiv(rows, m), parts)](
        x, codes, scales, zeros, found, rows, outputs, x.stride(0), triton.cdiv(inputs // span, parts),
        inputs=inputs, group=group, span=span, nibbles=codes.dtype == torch.uint8, curved=curved,
        m=m, n=n, num_warps=n // 16,
        # Scales of several groups take room, too, of the 99 KiB that consumer cards have.
        num_stages=3 if m == 64 and span > group else 4,
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0).to(x.dtype)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    codes, scales, zeros, weight, inputs, groups, nibbles: tl.constexpr, curved: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * block
    columns = first + tl.arange(0, block)
    inside = columns < inputs
    if nibbles:
        at = first // 2 + tl.arange(0, block // 2)
        pairs = tl.load(codes + row * (inputs // 2) + at, mask=at < inputs // 2, other=0)
        code = tl.interleave((pairs & 15).to(tl.float32) - 8, (pairs >> 4).to(tl.float32) - 8)
    else:
        code = tl.load(codes + row * inputs + columns, mask=inside, other=0).to(tl.float32)
    if curved:
        code *= _BEND + tl.abs(code)
    of_group = row * groups + columns // (inputs // groups)
    if zeros is not None:
        code -= tl.load(zeros + of_group, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + of_group, mask=inside, other=0).to(tl.float32)
    tl.store(weight + row * inputs + columns, (code * scale).to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _times_few(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, found, rows, outputs, stride, spans_of_part,
    inputs: tl.constexpr, group: tl.constexpr, span: tl.constexpr, nibbles: tl.constexpr, curved: tl.constexpr,
    m: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = inputs // group
    each: tl.constexpr = span // group
    dtype = x.dtype.element_ty
    outs = tl.program_id(0) * n + tl.arange(0, n)
    ins = tl.program_id(1) * m + tl.arange(0, m)
    part = tl.program_id(2)
    of_x = x + ins[:, None].to(tl.int64) * stride
    of_codes = codes + outs[:, None, None].to(tl.int64) * (inputs // 2 if nibbles else inputs)
    of_groups = outs[:, None].to(tl.int64) * groups + tl.arange(0, each)[None, :]
    here, there = ins[:, None] < rows, outs[:, None] < outputs
    total = tl.zeros((m, n), tl.float32)
    for number in range(part * spans_of_part, min(part * spans_of_part + spans_of_part, inputs // span)):
        scale = tl.load(scales + of_groups + number * each, mask=there, other=0).to(tl.float32)[:, :, None]
        zero = tl.zeros((n, each, 1), tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + of_groups + number * each, mask=there, other=0).to(tl.float32)[:, :, None]
        if nibbles:  # even and odd columns apart, which spares the exchange between threads that interleaving takes
            at = number * (span // 2) + _places(each, group // 2)
            pairs = tl.load(of_codes + at, mask=there[:, :, None], other=0)
            even, odd = (pairs & 15).to(tl.float32) - 8 - zero, (pairs >> 4).to(tl.float32) - 8 - zero
            if curved:
                even, odd = even * (_BEND + tl.abs(even)), odd * (_BEND + tl.abs(odd))
            low = tl.reshape((even * scale).to(dtype), (n, span // 2))
            high = tl.reshape((odd * scale).to(dtype), (n, span // 2))
            given = of_x + number * span + 2 * tl.arange(0, span // 2)[None, :]
            total = tl.dot(tl.load(given, mask=here, other=0), low.T, total, input_precision="ieee")
            total = tl.dot(tl.load(given + 1, mask=here, other=0), high.T, total, input_precision="ieee")
        else:
            at = number * span + _places(each, group)
            code = tl.load(of_codes + at, mask=there[:, :, None], other=0).to(tl.float32)
            weight = tl.reshape(((code - zero) * scale).to(dtype), (n, span))
            given = tl.load(of_x + number * span + tl.arange(0, span)[None, :], mask=here, other=0)
            total = tl.dot(given, weight.T, total, input_precision="ieee")
    places = found + (part * rows + ins[:, None]).to(tl.int64) * outputs + outs[None, :]
    tl.store(places, total.to(found.dtype.element_ty), mask=here & (outs[None, :] < outputs))


@triton.jit
def _places(groups: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the codes of groups of `size`, side by side: [1, groups, size]."""
    return (tl.arange(0, groups)[:, None] * size + tl.arange(0, size)[None, :])[None, :, :]
