"""LoRA of linear layers on CUDA: Triton kernels in place of vLLM's.

vLLM fills a buffer with zeros, adds parts of A x to it by atomic operations, and then B A x to the output, rounded
before and after that addition. Here A x and the addition are a launch each, and A x needs only the layer's input, so
that it may run beside the base model's product. Few rows are multiplied one by one, many in tiles whose adapter is
found on the device, and parts of A x are added up where they are read. Sums have always the same order, and the output
is rounded once.

Shape suffixes: m rows, i width in, o width out (of all slices), s slices, l slots of adapters, r rank, p parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

FEW_ROWS = 16
"""Rows that each read the adapter for themselves; with more, tiles of rows share it."""
ROWS_BESIDE = 16
"""Rows whose A x is computed beside the base model's product, which with more takes the whole GPU."""
_PROGRAMS, _PARTS = 264, 8
"""Two programs for each multiprocessor of an H200: a launch of less is divided into parts."""
RANKS_AT_ONCE = 128
"""Ranks that a program of many rows has in registers; vLLM's operators multiply by more."""
FEW_RANKS: tl.constexpr = tl.constexpr(32)
"""An adapter of no more is multiplied in tiles of this size, however many its slot has room for."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which adapter each row of a step has, as vLLM's `LoRAKernelMeta` has it on the device, int32.

    `slot_m`: of each row; a number that is not of a slot stands for none. `order_m`: rows sorted by their slot.
    `counts`, `starts`, `slots`: of each adapter of the step, how many rows it has, where in `order_m` they begin, and
    its slot; those left over have slot -1. `rank_l`: ranks of the adapter in each slot, which has room for more: what
    lies beyond is not read.
    """

    slot_m: torch.Tensor
    order_m: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    rank_l: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Addresses of tensors and offsets of slices on the device, for modules that live as long as the engine."""

    _addresses: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _offsets: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def fill(self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], widths: Sequence[int]) -> None:
        """Copy to the device what the factors of a module need."""
        self.addresses(a)
        self.addresses(b)
        self.offsets(widths, a[0].device)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [S]."""
        key = tuple(tensor.data_ptr() for tensor in tensors)
        if key not in self._addresses:
            self._addresses[key] = torch.tensor(key, dtype=torch.int64, device=tensors[0].device)
        return self._addresses[key]

    def offsets(self, widths: Sequence[int], device: torch.device) -> torch.Tensor:
        """int32 [S + 1]: where each slice begins, and where the last one ends."""
        key = tuple(widths)
        if key not in self._offsets:
            starts = [sum(key[:at]) for at in range(len(key) + 1)]
            self._offsets[key] = torch.tensor(starts, dtype=torch.int32, device=device)
        return self._offsets[key]


def shrink(
    x_mi: torch.Tensor, a: Sequence[torch.Tensor], rows: Rows, tables: Tables, scale: float = 1.0
) -> torch.Tensor:
    """float32 [P, S, M, R], whose sum over parts is scale · A x of each row with the factors of its slot; of rows
    without an adapter, and of ranks that its adapter lacks, anything.

    `a`: for each slice, A [L, 1, R, I], contiguous, of 16 bits as `x_mi`, whose columns are beside each other.
    """
    if len(x_mi) <= FEW_ROWS:
        return shrink_few(x_mi, a, rows, tables, scale)[None]
    return shrink_many(x_mi, a, rows, tables, scale)


def expand(
    y_mo: torch.Tensor,
    h_psmr: torch.Tensor,
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    rows: Rows,
    tables: Tables,
) -> None:
    """y += B h, in place, with `h_psmr` of `shrink`. `b`: for each slice, B [L, 1, width, R], contiguous, of 16 bits as
    `y_mo`, whose columns are beside each other."""
    if len(y_mo) <= FEW_ROWS:
        expand_few(y_mo, h_psmr[0], b, widths, rows, tables)
    else:
        expand_many(y_mo, h_psmr, b, widths, rows, tables)


# Few rows -------------------------------------------------------------------------------------------------------------


def shrink_few(
    x_mi: torch.Tensor, a: Sequence[torch.Tensor], rows: Rows, tables: Tables, scale: float = 1.0
) -> torch.Tensor:
    """float32 [S, M, R]: scale · A x; of rows without an adapter, and of ranks that it lacks, anything."""
    number, width = x_mi.shape
    count, _, rank, _ = a[0].shape
    h_smr = torch.empty((len(a), number, rank), dtype=torch.float32, device=x_mi.device)
    at_once = 2 if rank % 2 == 0 else 1
    _shrink_few[(rank // at_once, len(a), number)](
        x_mi, tables.addresses(a), rows.slot_m, rows.rank_l, h_smr, scale, x_mi.stride(0), number, count,
        width=width, rank=rank, at_once=at_once, span=min(2048, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return h_smr


@triton.jit(do_not_specialize=["rows", "count"])  # else it would be compiled for 1, and for multiples of 16
def _shrink_few(  # type: ignore[no-untyped-def]
    x, table, slots, rank_l, h, scale, x_stride, rows, count,
    width: tl.constexpr, rank: tl.constexpr, at_once: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    address = tl.load(table + piece)
    if (slot < 0) | (slot >= count):  # rows that fill up a CUDA graph have any number
        return
    if tl.program_id(0) * at_once >= tl.load(rank_l + slot):
        return
    ranks = tl.program_id(0) * at_once + tl.arange(0, at_once)
    a = address.to(tl.pointer_type(x.dtype.element_ty)) + slot * rank * width
    total = tl.zeros((at_once, span), tl.float32)
    for start in range(0, width, span):
        columns = start + tl.arange(0, span)
        inside = columns < width
        values = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        of_a = tl.load(a + ranks[:, None] * width + columns[None, :], mask=inside[None, :], other=0.0)
        total += of_a.to(tl.float32) * values[None, :]
    tl.store(h + (piece * rows + row) * rank + ranks, tl.sum(total, 1) * scale)


def expand_few(
    y_mo: torch.Tensor,
    h_smr: torch.Tensor,
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    rows: Rows,
    tables: Tables,
) -> None:
    """y += B h, in place."""
    _, number, rank = h_smr.shape
    padded = triton.next_power_of_2(rank)
    span = max(8, min(64, 4096 // padded))
    _expand_few[(triton.cdiv(max(widths), span), len(b), number)](
        y_mo, tables.addresses(b), tables.offsets(widths, y_mo.device), rows.slot_m, rows.rank_l, h_smr, y_mo.stride(0),
        number, len(b[0]), rank=rank, span=span, padded=padded, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "count"])
def _expand_few(  # type: ignore[no-untyped-def]
    y, table, offsets, slots, rank_l, h, y_stride, rows, count,
    rank: tl.constexpr, span: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    # It waits for memory three times: for these, for the adapter's rank, and for what they say where it is.
    row, piece = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    address = tl.load(table + piece)
    first = tl.load(offsets + piece)
    width = tl.load(offsets + piece + 1) - first
    ranks = tl.arange(0, padded)
    known = (slot >= 0) & (slot < count)
    used = tl.minimum(tl.load(rank_l + slot, mask=known, other=0), rank)
    of_h = tl.load(h + (piece * rows + row) * rank + ranks, mask=ranks < used, other=0.0)
    outputs = tl.program_id(0) * span + tl.arange(0, span)
    inside = (outputs < width) & known
    b = address.to(tl.pointer_type(y.dtype.element_ty)) + slot * rank * width
    place = y + row.to(tl.int64) * y_stride + first + outputs
    of_b = tl.load(
        b + outputs[:, None] * rank + ranks[None, :], mask=inside[:, None] & (ranks < used)[None, :], other=0.0
    )
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    found = before + tl.sum(of_b.to(tl.float32) * of_h[None, :], 1)
    tl.store(place, found.to(y.dtype.element_ty), mask=inside)


# Many rows ------------------------------------------------------------------------------------------------------------


def _padded(rank: int) -> int:
    """A size of Triton's products."""
    return max(16, int(triton.next_power_of_2(rank)))


@triton.jit
def _tile_of(number, counts, slots, axis: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """The adapter whose rows the tile of this number has, and which of these is its first; -1 if there is none."""
    adapter = -1
    first = 0
    left = number
    for at in tl.static_range(axis):
        tiles = tl.where(tl.load(slots + at) < 0, 0, tl.cdiv(tl.load(counts + at), tile))
        here = (adapter < 0) & (left < tiles)
        first = tl.where(here, left * tile, first)
        adapter = tl.where(here, at, adapter)
        left -= tiles
    return adapter, first


def shrink_many(
    x_mi: torch.Tensor,
    a: Sequence[torch.Tensor],
    rows: Rows,
    tables: Tables,
    scale: float = 1.0,
    *,
    parts: int | None = None,
    tile: int = 32,
    reads: int = 128,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """float32 [P, S, M, R], whose sum over parts is scale · A x; of rows without an adapter, anything."""
    count, width = x_mi.shape
    rank, axis, tiles = a[0].shape[-2], len(rows.slots), triton.cdiv(count, tile)
    if parts is None:  # two numbers, for each of which kernels are compiled
        parts = _PARTS if tiles * len(a) * _PARTS <= _PROGRAMS * 2 and width >= 2 * reads * _PARTS else 1
    h = torch.empty((parts, len(a), count, rank), dtype=torch.float32, device=x_mi.device)
    _shrink_many[((tiles + axis - 1) * parts, len(a))](
        x_mi, tables.addresses(a), rows.order_m, rows.counts, rows.starts, rows.slots, rows.rank_l, h, scale,
        x_mi.stride(0), count, len(a), axis=axis, width=width, rank=rank, parts=parts, tile=tile, reads=reads,
        padded=_padded(rank), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return h


@triton.jit(do_not_specialize=["rows", "slices"])
def _shrink_many(  # type: ignore[no-untyped-def]
    x, table, order, counts, starts, slots, rank_l, h, scale, x_stride, rows, slices,
    axis: tl.constexpr, width: tl.constexpr, rank: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr,
    reads: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    adapter, first = _tile_of(tl.program_id(0) // parts, counts, slots, axis, tile)
    if adapter < 0:
        return
    part = tl.program_id(0) % parts
    piece = tl.program_id(1)
    at = first + tl.arange(0, tile)
    known = at < tl.load(counts + adapter)
    row = tl.load(order + tl.load(starts + adapter) + at, mask=known, other=0).to(tl.int64)
    slot = tl.load(slots + adapter)
    used = tl.minimum(tl.load(rank_l + slot), rank)
    a = tl.load(table + piece).to(tl.pointer_type(x.dtype.element_ty))
    a += slot.to(tl.int64) * rank * width
    place = h + ((part * slices + piece) * rows + row) * rank
    x += row * x_stride
    if padded > FEW_RANKS:
        if used <= FEW_RANKS:
            _shrink_tile(x, a, place, known, used, scale, part, width, parts, tile, reads, FEW_RANKS)
        else:
            _shrink_tile(x, a, place, known, used, scale, part, width, parts, tile, reads, padded)
    else:
        _shrink_tile(x, a, place, known, used, scale, part, width, parts, tile, reads, padded)


@triton.jit
def _shrink_tile(  # type: ignore[no-untyped-def]
    x, a, place, known, used, scale, part, width: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr,
    reads: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """The `used` ranks, `padded` at most, of the rows of `tile` that are `known`, whose x and h begin at `x` and
    `place`."""
    ranks = tl.arange(0, padded)
    total = tl.zeros((tile, padded), tl.float32)
    for start in range(part * reads, width, parts * reads):
        columns = start + tl.arange(0, reads)
        inside = columns < width
        of_x = tl.load(x[:, None] + columns[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        of_a = tl.load(
            a + ranks[None, :] * width + columns[:, None], mask=(ranks < used)[None, :] & inside[:, None], other=0.0
        )
        total += tl.dot(of_x, of_a)
    tl.store(place[:, None] + ranks[None, :], total * scale, mask=known[:, None] & (ranks < used)[None, :])


def expand_many(
    y_mo: torch.Tensor,
    h_psmr: torch.Tensor,
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    rows: Rows,
    tables: Tables,
    *,
    tile: int = 32,
    span: int | None = None,
    spans: int = 4,
    warps: int = 8,
) -> None:
    """y += B h, in place, with h summed over parts. A program writes `spans` times `span` columns of `tile` rows."""
    parts, slices, count, rank = h_psmr.shape
    axis = len(rows.slots)
    tiles = triton.cdiv(count, tile) + axis - 1
    if span is None:
        span = 128 if rank <= RANKS_AT_ONCE // 2 else 64
    _expand_many[(tiles * triton.cdiv(max(widths), span * spans), slices)](
        y_mo, tables.addresses(b), tables.offsets(widths, y_mo.device), rows.order_m, rows.counts, rows.starts,
        rows.slots, rows.rank_l, h_psmr, y_mo.stride(0), count, slices, tiles,
        axis=axis, rank=rank, parts=parts, tile=tile, span=span, spans=spans, padded=_padded(rank),
        fits=y_mo.stride(0) * count < 2**31, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "slices", "tiles"])
def _expand_many(  # type: ignore[no-untyped-def]
    y, table, offsets, order, counts, starts, slots, rank_l, h, y_stride, rows, slices, tiles,
    axis: tl.constexpr, rank: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, span: tl.constexpr,
    spans: tl.constexpr, padded: tl.constexpr, fits: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1)
    begin = tl.load(offsets + piece)
    width = tl.load(offsets + piece + 1) - begin
    column = tl.program_id(0) // tiles * span * spans
    if column >= width:
        return
    adapter, first = _tile_of(tl.program_id(0) % tiles, counts, slots, axis, tile)
    if adapter < 0:
        return
    at = first + tl.arange(0, tile)
    known = at < tl.load(counts + adapter)
    row = tl.load(order + tl.load(starts + adapter) + at, mask=known, other=0)
    y += (row if fits else row.to(tl.int64)) * y_stride + begin
    slot = tl.load(slots + adapter)
    used = tl.minimum(tl.load(rank_l + slot), rank)
    b = tl.load(table + piece).to(tl.pointer_type(y.dtype.element_ty))
    b += slot.to(tl.int64) * rank * width
    place, step = h + (piece * rows + row) * rank, slices * rows * rank
    if padded > FEW_RANKS:
        if used <= FEW_RANKS:
            _expand_tile(y, b, place, known, used, column, width, step, rank, parts, span, spans, FEW_RANKS)
        else:
            _expand_tile(y, b, place, known, used, column, width, step, rank, parts, span, spans, padded)
    else:
        _expand_tile(y, b, place, known, used, column, width, step, rank, parts, span, spans, padded)


@triton.jit
def _expand_tile(  # type: ignore[no-untyped-def]
    y, b, place, known, used, column, width, step, rank: tl.constexpr, parts: tl.constexpr, span: tl.constexpr,
    spans: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Of rows whose outputs and h begin at `y` and `place`, the columns from `column` on, by `used` ranks, `padded` at
    most. The parts of h are `step` numbers apart."""
    dtype = y.dtype.element_ty
    ranks = tl.arange(0, padded)
    of_rank = known[:, None] & (ranks < used)[None, :]
    total = tl.load(place[:, None] + ranks[None, :], mask=of_rank, other=0.0)
    for part in tl.static_range(1, parts):
        total += tl.load(place[:, None] + part * step + ranks[None, :], mask=of_rank, other=0.0)
    of_h = total.to(dtype)
    for _ in range(spans):
        columns = column + tl.arange(0, span)
        inside = known[:, None] & (columns < width)[None, :]
        where = y[:, None] + columns[None, :]
        before = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        of_b = tl.load(
            b + columns[None, :] * rank + ranks[:, None],
            mask=(columns < width)[None, :] & (ranks < used)[:, None], other=0.0,
        )  # fmt: skip
        found = before + tl.dot(of_h, of_b)
        tl.store(where, found.to(dtype), mask=inside)
        column += span
