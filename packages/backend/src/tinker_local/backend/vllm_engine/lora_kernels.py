"""LoRA of few rows, such as one sequence that decodes: Triton kernels for CUDA.

vLLM's kernels multiply tiles of 32 rows and more, fill their buffer with zeros first, and add up parts of a row by
atomic operations: three launches beside each product of the base model, which take longer than the product of a small
layer. Here a row is multiplied by itself, in two launches, and always in the same order.

Shape suffixes: m rows, i width in, o width out (of all slices), s slices, l slots of adapters, r rank.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MOST_ROWS = 16
"""Each row reads the adapter by itself, so vLLM's tiles are faster beyond."""


@functools.cache
def _table(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)


@functools.cache
def _widths(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [S + 1]: where each slice begins, and where the last one ends."""
    starts = [sum(widths[:at]) for at in range(len(widths) + 1)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def table_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses, int64 [S], of tensors that live as long as the model."""
    return _table(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)


def shrink(x_mi: torch.Tensor, a: Sequence[torch.Tensor], slot_m: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [S, M, R]: scale · A x of each row, with A of the row's slot; of rows whose slot is none of L, anything.

    `a`: a tensor [L, 1, R, I] for each slice, contiguous, in the dtype of `x_mi`. `slot_m`: integers.
    """
    rows, width = x_mi.shape
    rank = a[0].shape[-2]
    h_smr = torch.empty((len(a), rows, rank), dtype=torch.float32, device=x_mi.device)
    at_once = 2 if rank % 2 == 0 else 1
    _shrink[(rank // at_once, len(a), rows)](
        x_mi, table_of(a), slot_m, h_smr, scale, x_mi.stride(0), width, rank, rows, len(a[0]),
        at_once=at_once, span=min(2048, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return h_smr


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x, table, slots, h, scale, x_stride, width: tl.constexpr, rank: tl.constexpr, rows, count,
    at_once: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= count):  # rows that fill up a CUDA graph have any number
        return
    piece = tl.program_id(1)
    ranks = tl.program_id(0) * at_once + tl.arange(0, at_once)
    a = tl.load(table + piece).to(tl.pointer_type(x.dtype.element_ty)) + slot * rank * width
    total = tl.zeros((at_once, span), tl.float32)
    for start in range(0, width, span):
        columns = start + tl.arange(0, span)
        inside = columns < width
        values = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        of_a = tl.load(a + ranks[:, None] * width + columns[None, :], mask=inside[None, :], other=0.0)
        total += of_a.to(tl.float32) * values[None, :]
    tl.store(h + (piece * rows + row) * rank + ranks, tl.sum(total, 1) * scale)


def expand(
    y_mo: torch.Tensor, h_smr: torch.Tensor, b: Sequence[torch.Tensor], widths: Sequence[int], slot_m: torch.Tensor
) -> None:
    """y += B h of each row, in place; rows whose slot is none of L stay. `b`: a tensor [L, 1, O of the slice, R] for
    each slice, in the dtype of `y_mo`."""
    rank, span = h_smr.shape[-1], 128
    _expand[(triton.cdiv(max(widths), span), len(b), len(y_mo))](
        y_mo, table_of(b), _widths(tuple(widths), y_mo.device), slot_m, h_smr, y_mo.stride(0), rank, len(y_mo),
        len(b[0]), span=span, padded=triton.next_power_of_2(rank), num_warps=4,
    )  # fmt: skip


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    y, table, starts, slots, h, y_stride, rank: tl.constexpr, rows, count,
    span: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    row = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= count):  # rows that fill up a CUDA graph have any number
        return
    piece = tl.program_id(1)
    first = tl.load(starts + piece)
    width = tl.load(starts + piece + 1) - first
    outputs = tl.program_id(0) * span + tl.arange(0, span)
    if tl.program_id(0) * span >= width:
        return
    ranks = tl.arange(0, padded)
    inside = (outputs < width)[:, None] & (ranks < rank)[None, :]
    b = tl.load(table + piece).to(tl.pointer_type(y.dtype.element_ty)) + slot * rank * width
    of_b = tl.load(b + outputs[:, None] * rank + ranks[None, :], mask=inside, other=0.0).to(tl.float32)
    of_h = tl.load(h + (piece * rows + row) * rank + ranks, mask=ranks < rank, other=0.0)
    place = y + row.to(tl.int64) * y_stride + first + outputs
    before = tl.load(place, mask=outputs < width, other=0.0).to(tl.float32)
    found = before + tl.sum(of_b * of_h[None, :], 1)
    tl.store(place, found.to(y.dtype.element_ty), mask=outputs < width)


def one_row(
    x_1i: torch.Tensor,
    weight_oi: torch.Tensor,
    h_s1r: torch.Tensor,
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    slot_1: torch.Tensor,
    span: int = 8,
    reads: int = 1024,
    warps: int = 4,
) -> torch.Tensor:
    """[1, O]: W x + B h, rounded once. The widths of slices are multiples of `span`."""
    out, width = weight_oi.shape
    y = torch.empty((1, out), dtype=x_1i.dtype, device=x_1i.device)
    _one_row[(triton.cdiv(out, span),)](
        x_1i, weight_oi, table_of(b), _widths(tuple(widths), x_1i.device), slot_1, h_s1r, y,
        weight_oi.stride(0),
        len(b[0]), width, out, h_s1r.shape[-1], slices=len(b), span=span,
        reads=min(reads, triton.next_power_of_2(width)), padded=triton.next_power_of_2(h_s1r.shape[-1]),
        num_warps=warps,
    )  # fmt: skip
    return y


@triton.jit
def _one_row(  # type: ignore[no-untyped-def]
    x, weight, table, starts, slots, h, y, stride, count, width: tl.constexpr, out: tl.constexpr, rank: tl.constexpr,
    slices: tl.constexpr, span: tl.constexpr, reads: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * span + tl.arange(0, span)
    total = tl.zeros((span, reads), tl.float32)
    for start in range(0, width, reads):
        columns = start + tl.arange(0, reads)
        values = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)
        of_w = tl.load(
            weight + outputs.to(tl.int64)[:, None] * stride + columns[None, :],
            mask=(outputs < out)[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        total += of_w.to(tl.float32) * values[None, :]
    found = tl.sum(total, 1)
    slot = tl.load(slots).to(tl.int64)
    if (slot >= 0) & (slot < count):
        piece = 0
        for at in tl.static_range(1, slices):
            piece = tl.where(tl.load(starts + at) <= tl.program_id(0) * span, at, piece)
        first = tl.load(starts + piece)
        of_slice = tl.load(starts + piece + 1) - first
        ranks = tl.arange(0, padded)
        b = tl.load(table + piece).to(tl.pointer_type(x.dtype.element_ty)) + slot * rank * of_slice
        of_b = tl.load(
            b + (outputs - first)[:, None] * rank + ranks[None, :],
            mask=(outputs < first + of_slice)[:, None] & (ranks < rank)[None, :],
            other=0.0,
        )
        of_h = tl.load(h + piece * rank + ranks, mask=ranks < rank, other=0.0)
        found += tl.sum(of_b.to(tl.float32) * of_h[None, :], 1)
    tl.store(y + outputs, found.to(y.dtype.element_ty), mask=outputs < out)


# Many rows ------------------------------------------------------------------------------------------------------------


def shrink_many(
    x_mi: torch.Tensor,
    a: Sequence[torch.Tensor],
    rows_by_adapter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    adapters: int,
    parts: int,
    tile: int = 32,
    reads: int = 128,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """float32 [parts, S, M, R], whose sum over parts is A x of each row that has an adapter.

    `rows_by_adapter`: as vLLM's `LoRAKernelMeta` has them on the device: rows by their slot, how many each adapter has,
    where they begin, and the slots. `adapters`: how many of these to look at.
    """
    order, counts, starts, slots = rows_by_adapter
    rows, width = x_mi.shape
    rank = a[0].shape[-2]
    h = torch.empty((parts, len(a), rows, rank), dtype=torch.float32, device=x_mi.device)
    _shrink_many[(triton.cdiv(rows, tile) * parts, len(a), adapters)](
        x_mi, table_of(a), order, counts, starts, slots, h, x_mi.stride(0), rows, len(a),
        width=width, rank=rank, parts=parts, tile=tile, reads=reads, padded=max(16, triton.next_power_of_2(rank)),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return h


@triton.jit
def _shrink_many(  # type: ignore[no-untyped-def]
    x, table, order, counts, starts, slots, h, x_stride, rows, slices,
    width: tl.constexpr, rank: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, reads: tl.constexpr,
    padded: tl.constexpr,
):  # fmt: skip
    adapter = tl.program_id(2)
    slot = tl.load(slots + adapter).to(tl.int64)
    count = tl.load(counts + adapter)
    part = tl.program_id(0) % parts
    first = tl.program_id(0) // parts * tile
    if (slot < 0) | (first >= count):
        return
    piece = tl.program_id(1)
    at = first + tl.arange(0, tile)
    row = tl.load(order + tl.load(starts + adapter) + at, mask=at < count, other=0).to(tl.int64)
    ranks = tl.arange(0, padded)
    a = tl.load(table + piece).to(tl.pointer_type(x.dtype.element_ty)) + slot * rank * width
    total = tl.zeros((tile, padded), tl.float32)
    for start in range(part * reads, width, parts * reads):
        columns = start + tl.arange(0, reads)
        of_x = tl.load(
            x + row[:, None] * x_stride + columns[None, :],
            mask=(at < count)[:, None] & (columns < width)[None, :], other=0.0,
        )  # fmt: skip
        of_a = tl.load(
            a + ranks[None, :] * width + columns[:, None],
            mask=(ranks < rank)[None, :] & (columns < width)[:, None], other=0.0,
        )  # fmt: skip
        total += tl.dot(of_x, of_a)
    place = h + ((part * slices + piece) * rows + row[:, None]) * rank + ranks[None, :]
    tl.store(place, total, mask=(at < count)[:, None] & (ranks < rank)[None, :])


def expand_many(
    y_mo: torch.Tensor,
    h: torch.Tensor,
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    rows_by_adapter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    adapters: int,
    tile: int = 32,
    span: int = 128,
    spans: int = 4,
    warps: int = 4,
) -> None:
    """y += B h, in place, with `h` of `shrink_many`. A program writes `spans` times `span` columns of `tile` rows."""
    order, counts, starts, slots = rows_by_adapter
    parts, slices, rows, rank = h.shape
    _expand_many[(triton.cdiv(rows, tile) * triton.cdiv(max(widths), span * spans), slices, adapters)](
        y_mo, table_of(b), _widths(tuple(widths), y_mo.device), order, counts, starts, slots, h, y_mo.stride(0), rows,
        slices, triton.cdiv(rows, tile), rank=rank, parts=parts, tile=tile, span=span, spans=spans,
        padded=max(16, triton.next_power_of_2(rank)), fits=y_mo.numel() < 2**31, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _expand_many(  # type: ignore[no-untyped-def]
    y, table, begins, order, counts, starts, slots, h, y_stride, rows, slices, tiles,
    rank: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, span: tl.constexpr, spans: tl.constexpr,
    padded: tl.constexpr, fits: tl.constexpr,
):  # fmt: skip
    adapter = tl.program_id(2)
    slot = tl.load(slots + adapter).to(tl.int64)
    count = tl.load(counts + adapter)
    first = tl.program_id(0) % tiles * tile
    if (slot < 0) | (first >= count):
        return
    piece = tl.program_id(1)
    begin = tl.load(begins + piece)
    width = tl.load(begins + piece + 1) - begin
    column = tl.program_id(0) // tiles * span * spans
    if column >= width:
        return
    at = first + tl.arange(0, tile)
    row = tl.load(order + tl.load(starts + adapter) + at, mask=at < count, other=0)
    offset = row * y_stride if fits else row.to(tl.int64) * y_stride
    ranks = tl.arange(0, padded)
    known = (at < count)[:, None] & (ranks < rank)[None, :]
    total = tl.zeros((tile, padded), tl.float32)
    for part in tl.static_range(parts):
        total += tl.load(
            h + ((part * slices + piece) * rows + row[:, None]) * rank + ranks[None, :], mask=known, other=0.0
        )
    total = total.to(y.dtype.element_ty)
    b = tl.load(table + piece).to(tl.pointer_type(y.dtype.element_ty)) + slot * rank * width
    for _ in range(spans):
        columns = column + tl.arange(0, span)
        of_b = tl.load(
            b + columns[None, :] * rank + ranks[:, None],
            mask=(columns < width)[None, :] & (ranks < rank)[:, None], other=0.0,
        )  # fmt: skip
        place = y + (offset + begin)[:, None] + columns[None, :]
        inside = (at < count)[:, None] & (columns < width)[None, :]
        found = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.dot(total, of_b)
        tl.store(place, found.to(y.dtype.element_ty), mask=inside)
        column += span
