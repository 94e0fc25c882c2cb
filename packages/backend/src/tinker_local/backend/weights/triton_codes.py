"""Matrices of 8 or 4 bits (`codes.py`) on CUDA, in Triton: made whole in one pass, or multiplied by as they are read.

Both round code * scale once to the dtype of activations, as `Packed.numbers` does, so that all multiply by the same
numbers. In torch the same matrix is written and read four times.

Of the layouts of `codes.Packed` those with integers and groups side by side, with or without zero points.

A product has to make numbers as fast as memory gives codes. Conversions of integers are too slow for that, so in
bfloat16 codes become the last bits of numbers from 128 on, two at a time, and the rest is arithmetic that is exact
until the scale. Triton's language has no instructions for two numbers of bfloat16, hence PTX.

Legend: M rows of activations, N rows of the matrix, K numbers in a row, G groups in a row.
"""

import math
import struct

import torch
import triton
import triton.language as tl
from tinker_local.backend.weights.precision import HALF
from tinker_local.backend.weights.round_curved import BEND

_BLOCK = 2048
"""Codes that a program unpacks, or pairs of them."""

_PROGRAMS = 264
"""Most that parts of a sum make of a product: two for each multiprocessor of large GPUs, so that memory stays busy."""

_HALF, _BEND = tl.constexpr(HALF), tl.constexpr(BEND)


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
    rows, width = codes.shape
    nibbles = codes.dtype == torch.uint8
    inputs = width * (2 if nibbles else 1)
    weight = torch.empty(rows, inputs, dtype=dtype, device=codes.device)
    _unpack[(rows, triton.cdiv(width, _BLOCK))](
        codes, scales, zeros, weight, width, inputs, scales.shape[1],
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
    """x W^T, [M, N] in the dtype of `x` [M, K]; sums are in float32. Reads the codes once for each 64 rows of `x`, so
    it is for few of them. The others as for `unpacked`. Equal inputs have equal results: parts of a sum are added in
    one order."""
    (rows, inputs), outputs = x.shape, len(codes)
    if not rows:
        return x.new_empty(0, outputs)
    assert x.stride(1) == 1
    nibbles = codes.dtype == torch.uint8
    common = {"inputs": inputs, "group": inputs // scales.shape[1], "nibbles": nibbles, "curved": curved}
    common["pairwise"] = is_pairwise(x.dtype, scales, zeros, nibbles)
    if rows == 1:
        k = step_of(inputs, common["group"], 1024)
        n = 8192 // max(k, 512)
        found = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
        _times_one[(triton.cdiv(outputs, n),)](x, codes, scales, zeros, found, outputs, n=n, k=k, num_warps=4, **common)
        return found
    m = min(max(16, triton.next_power_of_2(rows)), 64)
    n = 128 if nibbles or zeros is None else 64  # what registers hold
    k = step_of(inputs, common["group"], 256 if nibbles and zeros is None and m == 16 else 128)
    tiles = triton.cdiv(rows, m) * triton.cdiv(outputs, n)
    parts = min(2 ** int(math.log2(max(1, _PROGRAMS // tiles))), 8, inputs // k)
    found = torch.empty(parts, rows, outputs, dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    _times_few[(triton.cdiv(outputs, n), triton.cdiv(rows, m), parts)](
        x, codes, scales, zeros, found, rows, outputs, x.stride(0), triton.cdiv(inputs // k, parts),
        m=m, n=n, k=k, num_warps=4, num_stages=3 if nibbles else 2, **common,
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0).to(x.dtype)


def is_pairwise(dtype: torch.dtype, scales: torch.Tensor, zeros: torch.Tensor | None, nibbles: bool) -> bool:
    """Whether numbers are made two at a time, in bfloat16. Triton's interpreter knows no PTX."""
    exact = scales.dtype == torch.bfloat16 and (nibbles or zeros is None)
    return dtype == torch.bfloat16 and exact and not triton.knobs.runtime.interpret


def step_of(inputs: int, group: int, most: int) -> int:
    """The most numbers up to `most` of a row that are read at a time: a power of two that divides a row, and a whole
    number of groups or a part of one."""
    found = most
    while inputs % found or (group % found and found % group):
        found //= 2
    return found


def _ptx(*lines: str) -> tl.constexpr:
    """A block of PTX whose constants are pairs of bfloat16."""
    constants = {"C128": 128, "MINUS128": -128, "MINUS2176": -2176, "ONE": 1, "C16": 16, "C_BEND": BEND, "MINUS0": -0.0}
    bits = {name: struct.pack(">f", number)[:2].hex() for name, number in constants.items()}
    declared = [f".reg .b32 {name}; mov.b32 {name}, 0x{each}{each};" for name, each in bits.items()]
    return tl.constexpr("{\n.reg .b32 a, b, c, d, u;\n" + "\n".join([*declared, *lines]) + "\n}")


def _nibbles(shift: int, *, curved: bool) -> tl.constexpr:
    """$0, $1: four numbers (code - zero) * scale, by the low or the high halves of the bytes $2, scales $3, $4 and
    offsets $5, $6, which are -136 - zero. `curved`: code * (BEND + |code|) in place of the code."""
    curve = (
        "and.b32 c, a, 0x7FFF7FFF;",
        "and.b32 d, b, 0x7FFF7FFF;",
        "fma.rn.bf16x2 c, c, ONE, C_BEND;",
        "fma.rn.bf16x2 d, d, ONE, C_BEND;",
        "fma.rn.bf16x2 a, a, c, MINUS0;",
        "fma.rn.bf16x2 b, b, d, MINUS0;",
    )
    return _ptx(
        "prmt.b32 a, $2, 0, 0x4140;",  # bytes 0 and 1 in the halves of a register, 2 and 3 in those of another one
        "prmt.b32 b, $2, 0, 0x4342;",
        f"shr.u32 a, a, {shift};",
        f"shr.u32 b, b, {shift};",
        "lop3.b32 a, a, 0x000F000F, C128, 0xEA;",  # and, or: 128 + code + 8
        "lop3.b32 b, b, 0x000F000F, C128, 0xEA;",
        "fma.rn.bf16x2 a, a, ONE, $5;",
        "fma.rn.bf16x2 b, b, ONE, $6;",
        *(curve if curved else ()),
        "fma.rn.bf16x2 $0, a, $3, MINUS0;",
        "fma.rn.bf16x2 $1, b, $4, MINUS0;",
    )


_LOW, _HIGH = _nibbles(0, curved=False), _nibbles(4, curved=False)
_CURVED_LOW, _CURVED_HIGH = _nibbles(0, curved=True), _nibbles(4, curved=True)
_BYTES = _ptx(
    # $0, $1: four numbers code * scale, by the bytes $2 and scales $3, $4. Halves of code + 128 become 128 + each, then
    # low and 16 high - 128.
    "xor.b32 u, $2, 0x80808080;",
    "prmt.b32 a, u, 0, 0x4140;",
    "prmt.b32 b, u, 0, 0x4342;",
    "lop3.b32 c, a, 0x000F000F, C128, 0xEA;",
    "lop3.b32 d, b, 0x000F000F, C128, 0xEA;",
    "shr.u32 a, a, 4;",
    "shr.u32 b, b, 4;",
    "lop3.b32 a, a, 0x000F000F, C128, 0xEA;",
    "lop3.b32 b, b, 0x000F000F, C128, 0xEA;",
    "fma.rn.bf16x2 c, c, ONE, MINUS128;",
    "fma.rn.bf16x2 d, d, ONE, MINUS128;",
    "fma.rn.bf16x2 a, a, C16, MINUS2176;",
    "fma.rn.bf16x2 b, b, C16, MINUS2176;",
    "fma.rn.bf16x2 a, a, ONE, c;",
    "fma.rn.bf16x2 b, b, ONE, d;",
    "fma.rn.bf16x2 $0, a, $3, MINUS0;",
    "fma.rn.bf16x2 $1, b, $4, MINUS0;",
)


@triton.jit
def spread(of_groups, n: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """[n, width]: what belongs to each number, from that of its group [n, groups]."""
    groups: tl.constexpr = of_groups.shape[1]
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], (n, groups, width // groups)), (n, width))


@triton.jit
def both_halves(  # type: ignore[no-untyped-def]
    pairs, scale, zero, dtype: tl.constexpr, curved: tl.constexpr, pairwise: tl.constexpr
):
    """Numbers [n, width] in `dtype` by the low halves of the bytes `pairs` [n, width], and by the high ones. `scale`,
    `zero`: [n, groups], `zero` may be None."""
    n: tl.constexpr = pairs.shape[0]
    width: tl.constexpr = pairs.shape[1]
    if pairwise:
        offset = (
            tl.full(scale.shape, -136, tl.bfloat16) if zero is None else (-136 - zero.to(tl.float32)).to(tl.bfloat16)
        )
        given = [pairs, spread(scale, n, width), spread(offset, n, width)]
        low = tl.inline_asm_elementwise(
            _CURVED_LOW if curved else _LOW, "=&r,=&r,r,r,r,r,r", given, dtype=tl.bfloat16, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            _CURVED_HIGH if curved else _HIGH, "=&r,=&r,r,r,r,r,r", given, dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        low, high = (pairs & 15).to(tl.float32) - 8, (pairs >> 4).to(tl.float32) - 8
        if zero is not None:
            zeros = spread(zero.to(tl.float32), n, width)
            low, high = low - zeros, high - zeros
        if curved:
            low, high = low * (_BEND + tl.abs(low)), high * (_BEND + tl.abs(high))
        scales = spread(scale.to(tl.float32), n, width)
        low, high = (low * scales).to(dtype), (high * scales).to(dtype)
    return low, high


@triton.jit
def of_bytes(codes, scale, zero, dtype: tl.constexpr, pairwise: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers [n, width] in `dtype` by `codes` int8 [n, width]; the others as above."""
    n: tl.constexpr = codes.shape[0]
    width: tl.constexpr = codes.shape[1]
    if pairwise:
        given = [codes, spread(scale, n, width)]
        found = tl.inline_asm_elementwise(_BYTES, "=&r,=&r,r,r,r", given, dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        number = codes.to(tl.float32)
        if zero is not None:
            number -= spread(zero.to(tl.float32), n, width)
        found = (number * spread(scale.to(tl.float32), n, width)).to(dtype)
    return found


@triton.jit
def column_of(place):  # type: ignore[no-untyped-def]
    """Of the number whose code is in the low half of the byte `place`. That of the high half is `HALF` further."""
    return place // _HALF * (2 * _HALF) + place % _HALF


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    codes, scales, zeros, weight, width, inputs, groups,
    nibbles: tl.constexpr, curved: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    column = column_of(place) if nibbles else place
    of_group = row * groups + column // (inputs // groups)
    scale = tl.load(scales + of_group, mask=inside, other=0).to(tl.float32)
    code = tl.load(codes + row * width + place, mask=inside, other=0)
    found = weight + row * inputs + column
    zero = 0.0
    if zeros is not None:
        zero = tl.load(zeros + of_group, mask=inside, other=0).to(tl.float32)
    if nibbles:
        low, high = (code & 15).to(tl.float32) - 8 - zero, (code >> 4).to(tl.float32) - 8 - zero
        if curved:
            low, high = low * (_BEND + tl.abs(low)), high * (_BEND + tl.abs(high))
        tl.store(found, (low * scale).to(weight.dtype.element_ty), mask=inside)
        tl.store(found + _HALF, (high * scale).to(weight.dtype.element_ty), mask=inside)
    else:
        tl.store(found, ((code.to(tl.float32) - zero) * scale).to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _times_few(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, found, rows, outputs, stride, steps_of_part,
    inputs: tl.constexpr, group: tl.constexpr, nibbles: tl.constexpr, curved: tl.constexpr, pairwise: tl.constexpr,
    m: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = inputs // group
    width: tl.constexpr = k // 2 if nibbles else k
    row_bytes: tl.constexpr = inputs // 2 if nibbles else inputs
    dtype = x.dtype.element_ty
    outs = tl.program_id(0) * n + tl.arange(0, n)
    ins = tl.program_id(1) * m + tl.arange(0, m)
    part = tl.program_id(2)
    place = tl.arange(0, width)
    of_codes = codes + (outs % outputs)[:, None].to(tl.int64) * row_bytes + place[None, :]
    of_x = x + (ins % rows)[:, None].to(tl.int64) * stride + (column_of(place) if nibbles else place)[None, :]
    of_groups = (outs % outputs)[:, None].to(tl.int64) * groups + tl.arange(0, k // group if k > group else 1)[None, :]
    total = tl.zeros((m, n), tl.float32)
    for step in range(part * steps_of_part, min(part * steps_of_part + steps_of_part, inputs // k)):
        scale = tl.load(scales + of_groups + step * k // group)
        zero = None if zeros is None else tl.load(zeros + of_groups + step * k // group)
        code = tl.load(of_codes + step * width)
        given = tl.load(of_x + step * k)
        if nibbles:
            low, high = both_halves(code, scale, zero, dtype, curved, pairwise)
            total = tl.dot(given, low.T, total, input_precision="ieee")
            total = tl.dot(tl.load(of_x + step * k + _HALF), high.T, total, input_precision="ieee")
        else:
            total = tl.dot(given, of_bytes(code, scale, zero, dtype, pairwise).T, total, input_precision="ieee")
    places = found + (part * rows + ins[:, None]).to(tl.int64) * outputs + outs[None, :]
    tl.store(places, total.to(found.dtype.element_ty), mask=(ins[:, None] < rows) & (outs[None, :] < outputs))


@triton.jit
def _times_one(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, found, outputs,
    inputs: tl.constexpr, group: tl.constexpr, nibbles: tl.constexpr, curved: tl.constexpr, pairwise: tl.constexpr,
    n: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = inputs // group
    width: tl.constexpr = k // 2 if nibbles else k
    row_bytes: tl.constexpr = inputs // 2 if nibbles else inputs
    dtype = x.dtype.element_ty
    outs = tl.program_id(0) * n + tl.arange(0, n)
    place = tl.arange(0, width)
    of_codes = codes + (outs % outputs)[:, None].to(tl.int64) * row_bytes + place[None, :]
    of_x = x + (column_of(place) if nibbles else place)
    of_groups = (outs % outputs)[:, None].to(tl.int64) * groups + tl.arange(0, k // group if k > group else 1)[None, :]
    total = tl.zeros((n, width), tl.float32)
    for step in range(inputs // k):
        scale = tl.load(scales + of_groups + step * k // group)
        zero = None if zeros is None else tl.load(zeros + of_groups + step * k // group)
        code = tl.load(of_codes + step * width)
        given = tl.load(of_x + step * k)[None, :].to(tl.float32)
        if nibbles:
            low, high = both_halves(code, scale, zero, dtype, curved, pairwise)
            total += low.to(tl.float32) * given
            total += high.to(tl.float32) * tl.load(of_x + step * k + _HALF)[None, :].to(tl.float32)
        else:
            total += of_bytes(code, scale, zero, dtype, pairwise).to(tl.float32) * given
    tl.store(found + outs, tl.sum(total, 1).to(found.dtype.element_ty), mask=outs < outputs)
