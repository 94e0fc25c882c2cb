"""What a layer of routed experts with adapters computes beside the products with its frozen matrices, in Triton, for
16-bit activations on CUDA.

A program takes rows of one expert and one adapter, and of the adapters' matrices only the columns of that adapter, so
that a batch of several costs what one does. Every [S, ...] tensor is read and written once: low rank, SwiGLU and the
next low rank share a pass.

Legend: T tokens, S pairs of a token and an expert, sorted by expert and adapter, E experts, N adapters of a batch, I
intermediate size, R columns of adapters.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from tinker_local.backend.training.lora.lora_batch import LowRank, Owners

_ROWS = 64
"""Of a tile."""
_PAIRS = 64
"""That one program of the sort takes."""
_FEW_ROWS = 16
"""Of a tile, what one program of the backward pass takes: it holds more of each row."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnedRows:
    """Which rows belong to one expert and one adapter: group e N + n. `order` int64 [S]: of row s the pair, t K + k for
    the k-th expert of token t. `chosen`: K. `bounds` int32 [E N + 1]: the first row of each group, and S at the end.
    `tile_groups` int32: the group of each tile of `_ROWS` rows; the tiles at the end that no group needs have E N.
    `tile_ends` int32 [E N]: how many tiles a group and those before it have."""

    order: torch.Tensor
    chosen: int
    bounds: torch.Tensor
    tile_groups: torch.Tensor
    tile_ends: torch.Tensor


class TritonExperts:
    """For SwiGLU. `h` [T, 2, R]: what A of gate and up gave; `gate_up` [S, 2 I]: what the frozen matrices gave."""

    most_rank = 128
    """Of an adapter: what a program holds of its rows' h and its gradient."""

    def sort(
        self, experts: torch.Tensor, owners: torch.Tensor | None, count: int, several: int
    ) -> tuple[torch.Tensor, OwnedRows]:
        """Sort the pairs of tokens and their `experts` int64 [T, K] by expert, of `count`, then by the tokens' `owners`
        int64 [T], of `several` (None: of one), then by token. Returns the rows, and before them the row of each pair,
        int64 [T, K]. Waits for nothing: there are as many tiles as there can be.

        A counting sort: one kernel counts the groups in blocks of pairs, the next ones add up what comes before each
        block and each group, and the last writes every pair to its place.
        """
        pairs, groups, chosen = experts.numel(), count * several, experts.shape[1]
        blocks, tiles = triton.cdiv(pairs, _PAIRS), triton.cdiv(pairs, _ROWS) + groups
        whole = {"dtype": torch.int32, "device": experts.device}
        counts, totals = torch.zeros(groups, blocks, **whole), torch.empty(groups, **whole)
        bounds, tile_ends = torch.empty(groups + 1, **whole), torch.empty(groups, **whole)
        tile_groups = torch.empty(tiles, **whole)
        places = torch.empty(experts.shape, dtype=torch.int64, device=experts.device)
        order = torch.empty(pairs, dtype=torch.int64, device=experts.device)
        keys = experts.contiguous(), None if owners is None else owners.contiguous()
        sizes = {"several": several, "blocks": blocks, "chosen": chosen, "block": _PAIRS}
        _count[(blocks,)](*keys, places, counts, pairs, **sizes)
        _count_before[(groups,)](counts, totals, blocks, block=min(1024, triton.next_power_of_2(blocks)))
        _start_groups[(1,)](totals, bounds, tile_ends, groups, tile_rows=_ROWS, block=1024)
        _place[(max(blocks, groups + 1),)](
            *keys, counts, bounds, tile_ends, places, order, tile_groups, pairs, groups, tiles,
            **sizes,
        )  # fmt: skip
        return places, OwnedRows(order, chosen, bounds, tile_groups, tile_ends)

    def activate(
        self, gate_up: torch.Tensor, h: torch.Tensor, rows: OwnedRows, first: LowRank, second: LowRank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """swiglu(gate_up + B h) [S, I], and what A of down makes of it, for `sum_columns`. `first`: of gate and up,
        `second`: of down."""
        count, width = len(gate_up), gate_up.shape[1] // 2
        activated = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
        found = _own_columns(gate_up, count, 1, first.owners)
        _activate[(len(rows.tile_groups),)](
            gate_up, h, second.a, *first.b, *_places(rows, first.owners), activated, found,
            *_sizes(rows, first.owners, width, h), chosen=rows.chosen, **_blocks(first.owners, 32),
        )  # fmt: skip
        return activated, found

    def backward(
        self,
        grad: torch.Tensor,
        gate_up: torch.Tensor,
        h: torch.Tensor,
        grad_mid: torch.Tensor,
        scores: torch.Tensor,
        rows: OwnedRows,
        first: LowRank,
        second: LowRank,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of `gate_up`, of `scores` [T, K], and of each row's h, for `sum_columns`. `grad` [S, I]: of the
        activations without their scores, by the frozen matrix alone; `grad_mid` [T, R]: of what A of down gave. Writes
        the gradients of B of gate and up and of A of down. Overwrites `grad` and `gate_up`."""
        count, width = grad.shape
        scores = scores.contiguous()
        grad_scores = torch.empty_like(scores)
        grad_h = _own_columns(grad, count, 2, first.owners)
        sizes, places = _sizes(rows, first.owners, width, h), _places(rows, first.owners)
        _activate_backward[(len(rows.tile_groups) * (_ROWS // _FEW_ROWS),)](
            grad, gate_up, h, grad_mid, scores, second.a, *first.b, *places, grad_scores, grad_h,
            *sizes, chosen=rows.chosen, **_few_rows(first.owners, shared_memory(grad.device)),
        )  # fmt: skip
        assert second.grad_a is not None
        _write_gradients[(len(rows.bounds) - 1, triton.cdiv(width, 64))](
            gate_up, grad, h, grad_mid, scores, rows.order, rows.bounds, first.owners.columns,
            second.grad_a, *first.grad_b, *sizes[1:], chosen=rows.chosen, **_blocks(first.owners, 64),
        )  # fmt: skip
        return gate_up, grad_scores, grad_h

    def sum_columns(
        self, rows: torch.Tensor, places: torch.Tensor, scores: torch.Tensor | None, low_rank: LowRank
    ) -> torch.Tensor:
        """For each token the sum of its `rows`, [S, p, W], times its `scores` [T, K] if there are any: [T, p, R], with
        zeros in the columns of other adapters. `rows` have W columns, those of the adapter that a row belongs to, and
        `places` [T, K] says which are a token's."""
        (tokens, chosen), (_, parts, own), owners = places.shape, rows.shape, low_rank.owners
        ranks = low_rank.b[0].shape[-1]
        result = torch.empty(tokens, parts, ranks, dtype=rows.dtype, device=rows.device)
        block = triton.next_power_of_2(ranks)
        _sum_columns[(tokens, parts)](
            rows, places, None if scores is None else scores.contiguous(), owners.of_tokens, owners.columns, result,
            ranks, parts, own, chosen=chosen, block=block, num_warps=max(1, min(4, block // 128)),
        )  # fmt: skip
        return result


def _own_columns(like: torch.Tensor, count: int, parts: int, owners: Owners) -> torch.Tensor:
    """[count, parts, W], for the columns of one adapter in each row; those beyond them are neither written nor read."""
    return torch.empty(count, parts, _rank_block(owners), dtype=like.dtype, device=like.device)


def _places(rows: OwnedRows, owners: Owners) -> tuple[torch.Tensor, ...]:
    return rows.order, rows.bounds, rows.tile_groups, rows.tile_ends, owners.columns


def _sizes(rows: OwnedRows, owners: Owners, width: int, h: torch.Tensor) -> tuple[int, ...]:
    return len(rows.bounds) - 1, len(owners.columns), width, h.shape[-1]


def _rank_block(owners: Owners) -> int:
    """How many columns a program holds: all of an adapter."""
    return max(16, int(triton.next_power_of_2(owners.widest)))


def _blocks(owners: Owners, block: int) -> dict[str, int]:
    """`block`: how many of I a program takes at once."""
    rank_block = _rank_block(owners)
    return {"row_block": _ROWS, "block": block, "rank_block": rank_block, "num_warps": 4 if rank_block <= 64 else 8}


def _few_rows(owners: Owners, available: float) -> dict[str, int]:
    """The blocks of the backward pass: on an H200 it takes 0.27 ms where 64 rows took 0.31 (Qwen3-30B-A3B, rank 32).
    `available`: bytes of shared memory."""
    rank_block = _rank_block(owners)
    warps = 2 if rank_block <= 32 else 4
    # What two turns of the loop read of three matrices waits in shared memory: with blocks of 64 and the largest rank
    # 114 KiB. A block of an RTX 3090, 4090 or 5090, an L4 or an L40S may have 99.
    block = 32 if rank_block > 64 and available < 114 * 1024 else 64
    return {"tile_rows": _ROWS, "row_block": _FEW_ROWS, "block": block, "rank_block": rank_block, "num_warps": warps}


@functools.cache
def shared_memory(device: torch.device) -> float:
    """How many bytes of it a block of threads may have on a GPU. Triton's interpreter, on a CPU, has no limit."""
    if device.type != "cuda":
        return math.inf
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keys(  # type: ignore[no-untyped-def]
    experts, owners, pair, pairs, several, chosen: tl.constexpr
):
    """The groups of pairs; -1 beyond the last pair."""
    inside = pair < pairs
    key = tl.load(experts + pair, mask=inside, other=-1).to(tl.int32)
    if owners is not None:
        owner = tl.load(owners + pair // chosen, mask=inside, other=0).to(tl.int32)
        key = tl.where(inside, key * several + owner, -1)
    return key


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _count(  # type: ignore[no-untyped-def]
    experts, owners, places, counts, pairs, several, blocks, chosen: tl.constexpr, block: tl.constexpr
):
    """Write how many pairs of its group come before each pair in its block, and how many of each group a block has."""
    at = tl.arange(0, block)
    pair = tl.program_id(0) * block + at
    inside = pair < pairs
    key = _keys(experts, owners, pair, pairs, several, chosen)
    same = key[:, None] == key[None, :]
    before = tl.sum((same & (at[None, :] < at[:, None])).to(tl.int32), 1)
    tl.store(places + pair, before, mask=inside)
    tl.atomic_max(counts + key * blocks + tl.program_id(0), before + 1, mask=inside, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _count_before(counts, totals, blocks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one group: overwrite the counts of blocks of pairs with those of all blocks before."""
    group, before = tl.program_id(0), 0
    for start in range(0, blocks, block):
        at = start + tl.arange(0, block)
        place = counts + group * blocks + at
        found = tl.load(place, mask=at < blocks, other=0)
        tl.store(place, before + tl.cumsum(found, 0) - found, mask=at < blocks)
        before += tl.sum(found, 0)
    tl.store(totals + group, before)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _start_groups(  # type: ignore[no-untyped-def]
    totals, bounds, tile_ends, groups, tile_rows: tl.constexpr, block: tl.constexpr
):
    rows, tiles = 0, 0
    tl.store(bounds, 0)
    for start in range(0, groups, block):
        group = start + tl.arange(0, block)
        found = tl.load(totals + group, mask=group < groups, other=0)
        needed = (found + tile_rows - 1) // tile_rows
        tl.store(bounds + 1 + group, rows + tl.cumsum(found, 0), mask=group < groups)
        tl.store(tile_ends + group, tiles + tl.cumsum(needed, 0), mask=group < groups)
        rows += tl.sum(found, 0)
        tiles += tl.sum(needed, 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _place(  # type: ignore[no-untyped-def]
    experts, owners, counts, bounds, tile_ends, places, order, tile_groups, pairs, groups, tiles,
    several, blocks, chosen: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Of one block of pairs their rows, and of one group its tiles; after the last group, the tiles without one."""
    number = tl.program_id(0)
    if number < blocks:
        pair = number * block + tl.arange(0, block)
        inside = pair < pairs
        key = _keys(experts, owners, pair, pairs, several, chosen)
        row = tl.load(places + pair, mask=inside, other=0) + tl.load(bounds + key, mask=inside, other=0)
        row += tl.load(counts + key * blocks + number, mask=inside, other=0)
        tl.store(places + pair, row, mask=inside)
        tl.store(order + row, pair, mask=inside)
    if number <= groups:
        first = tl.load(tile_ends + number - 1, mask=number > 0, other=0)
        stop = tl.load(tile_ends + number, mask=number < groups, other=tiles)
        for start in range(first, stop, block):
            tile = start + tl.arange(0, block)
            tl.store(tile_groups + tile, number, mask=tile < stop)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _first_row(tile, group, bounds, tile_ends, tile_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a tile of the group."""
    before = tl.load(tile_ends + group - 1, mask=group > 0, other=0)
    return tl.load(bounds + group) + (tile - before) * tile_rows


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _columns_of(columns, owner, rank_block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of an adapter: numbers from its first column on, and whether they are columns of it."""
    first, count = tl.load(columns + 2 * owner), tl.load(columns + 2 * owner + 1)
    at = tl.arange(0, rank_block)
    return tl.multiple_of(first, 8) + at, at < tl.multiple_of(count, 8)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _activate(  # type: ignore[no-untyped-def]
    gate_up, h, a, b_gate, b_up, order, bounds, tile_groups, tile_ends, columns, activated, found,
    groups, owners, width, ranks,
    chosen: tl.constexpr, row_block: tl.constexpr, block: tl.constexpr, rank_block: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.load(tile_groups + tile)
    if group < groups:
        row = _first_row(tile, group, bounds, tile_ends, row_block) + tl.arange(0, row_block)
        inside = (row < tl.load(bounds + group + 1))[:, None]
        row = row.to(tl.int64)[:, None]
        token = tl.load(order + row, mask=inside, other=0) // chosen
        expert, owner = (group // owners).to(tl.int64), group % owners
        column, used = _columns_of(columns, owner, rank_block)
        h_place = h + token * 2 * ranks + column[None, :]
        h_gate = tl.load(h_place, mask=inside & used[None, :], other=0.0)
        h_up = tl.load(h_place + ranks, mask=inside & used[None, :], other=0.0)
        total = tl.zeros((row_block, rank_block), tl.float32)
        at = tl.arange(0, block)
        place = gate_up + row * 2 * width + at[None, :]
        next_gate = tl.load(place, mask=inside & (at < width)[None, :], other=0.0)
        next_up = tl.load(place + width, mask=inside & (at < width)[None, :], other=0.0)
        for start in range(0, width, block):
            # What the next turn needs is on its way during this one.
            gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
            ahead = start + block + tl.arange(0, block)
            place = gate_up + row * 2 * width + ahead[None, :]
            next_gate = tl.load(place, mask=inside & (ahead < width)[None, :], other=0.0)
            next_up = tl.load(place + width, mask=inside & (ahead < width)[None, :], other=0.0)
            at = start + tl.arange(0, block)
            here = inside & (at < width)[None, :]
            of_b = (expert * width + at)[:, None] * ranks + column[None, :]
            known = (at < width)[:, None] & used[None, :]
            gate += tl.dot(h_gate, tl.trans(tl.load(b_gate + of_b, mask=known, other=0.0)))
            up += tl.dot(h_up, tl.trans(tl.load(b_up + of_b, mask=known, other=0.0)))
            value = (gate * tl.sigmoid(gate) * up).to(activated.dtype.element_ty)
            tl.store(activated + row * width + at[None, :], value, mask=here)
            of_a = (expert * ranks + column)[:, None] * width + at[None, :]
            total += tl.dot(value, tl.trans(tl.load(a + of_a, mask=used[:, None] & (at < width)[None, :], other=0.0)))
        own = tl.arange(0, rank_block)[None, :]
        tl.store(found + row * rank_block + own, total, mask=inside & used[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _activate_backward(  # type: ignore[no-untyped-def]
    grad, gate_up, h, grad_mid, scores, a, b_gate, b_up, order, bounds, tile_groups, tile_ends, columns,
    grad_scores, grad_h,
    groups, owners, width, ranks, chosen: tl.constexpr,
    tile_rows: tl.constexpr, row_block: tl.constexpr, block: tl.constexpr, rank_block: tl.constexpr,
):  # fmt: skip
    """Overwrite gate and up with their gradients, and `grad` with the activations."""
    parts: tl.constexpr = tile_rows // row_block
    tile = tl.program_id(0) // parts
    group = tl.load(tile_groups + tile)
    first, stop = 0, 0
    if group < groups:
        first = _first_row(tile, group, bounds, tile_ends, tile_rows) + tl.program_id(0) % parts * row_block
        stop = tl.load(bounds + group + 1)
    if first < stop:
        row = first + tl.arange(0, row_block)
        is_row = row < stop
        pair = tl.load(order + row, mask=is_row, other=0)
        score = tl.load(scores + pair, mask=is_row, other=0.0).to(tl.float32)
        inside = is_row[:, None]
        row = row.to(tl.int64)[:, None]
        token = (pair // chosen)[:, None]
        expert, owner = (group // owners).to(tl.int64), group % owners
        column, used = _columns_of(columns, owner, rank_block)
        h_place = h + token * 2 * ranks + column[None, :]
        h_gate = tl.load(h_place, mask=inside & used[None, :], other=0.0)
        h_up = tl.load(h_place + ranks, mask=inside & used[None, :], other=0.0)
        mid = tl.load(grad_mid + token * ranks + column[None, :], mask=inside & used[None, :], other=0.0)
        grad_score = tl.zeros((row_block,), tl.float32)
        total_gate = tl.zeros((row_block, rank_block), tl.float32)
        total_up = tl.zeros((row_block, rank_block), tl.float32)
        at = tl.arange(0, block)
        place = gate_up + row * 2 * width + at[None, :]
        next_gate = tl.load(place, mask=inside & (at < width)[None, :], other=0.0)
        next_up = tl.load(place + width, mask=inside & (at < width)[None, :], other=0.0)
        next_grad = tl.load(grad + row * width + at[None, :], mask=inside & (at < width)[None, :], other=0.0)
        for start in range(0, width, block):
            gate, up, grad_value = next_gate.to(tl.float32), next_up.to(tl.float32), next_grad.to(tl.float32)
            ahead = start + block + tl.arange(0, block)
            is_ahead = inside & (ahead < width)[None, :]
            place = gate_up + row * 2 * width + ahead[None, :]
            next_gate = tl.load(place, mask=is_ahead, other=0.0)
            next_up = tl.load(place + width, mask=is_ahead, other=0.0)
            next_grad = tl.load(grad + row * width + ahead[None, :], mask=is_ahead, other=0.0)
            at = start + tl.arange(0, block)
            here = inside & (at < width)[None, :]
            place = gate_up + row * 2 * width + at[None, :]
            grad_place = grad + row * width + at[None, :]
            of_b = (expert * width + at)[:, None] * ranks + column[None, :]
            known = (at < width)[:, None] & used[None, :]
            of_gate = tl.load(b_gate + of_b, mask=known, other=0.0)
            of_up = tl.load(b_up + of_b, mask=known, other=0.0)
            of_a = (expert * ranks + column)[:, None] * width + at[None, :]
            of_down = tl.load(a + of_a, mask=used[:, None] & (at < width)[None, :], other=0.0)
            gate += tl.dot(h_gate, tl.trans(of_gate))
            up += tl.dot(h_up, tl.trans(of_up))
            grad_value += tl.dot(mid, of_down)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            value = silu * up
            grad_score += tl.sum(grad_value * value, 1)
            tl.store(grad_place, value, mask=here)
            grad_value *= score[:, None]
            grad_gate = (grad_value * up * (sigmoid + silu * (1 - sigmoid))).to(gate_up.dtype.element_ty)
            grad_up = (grad_value * silu).to(gate_up.dtype.element_ty)
            tl.store(place, grad_gate, mask=here)
            tl.store(place + width, grad_up, mask=here)
            total_gate += tl.dot(grad_gate, of_gate)
            total_up += tl.dot(grad_up, of_up)
        tl.store(grad_scores + pair, grad_score, mask=is_row)
        total_place = grad_h + row * 2 * rank_block + tl.arange(0, rank_block)[None, :]
        tl.store(total_place, total_gate, mask=inside & used[None, :])
        tl.store(total_place + rank_block, total_up, mask=inside & used[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_gradients(  # type: ignore[no-untyped-def]
    grad_gate_up, activated, h, grad_mid, scores, order, bounds, columns, grad_a, grad_gate, grad_up,
    owners, width, ranks,
    chosen: tl.constexpr, row_block: tl.constexpr, block: tl.constexpr, rank_block: tl.constexpr,
):  # fmt: skip
    """Of one group, and `block` numbers of its expert's I: the gradients of B of gate and up, and of A of down."""
    group = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    expert, owner = (group // owners).to(tl.int64), group % owners
    column, used = _columns_of(columns, owner, rank_block)
    stop = tl.load(bounds + group + 1)
    total_gate = tl.zeros((block, rank_block), tl.float32)
    total_up = tl.zeros((block, rank_block), tl.float32)
    total_down = tl.zeros((rank_block, block), tl.float32)
    for start in range(tl.load(bounds + group), stop, row_block):
        row = start + tl.arange(0, row_block)
        is_row = row < stop
        pair = tl.load(order + row, mask=is_row, other=0)
        score = tl.load(scores + pair, mask=is_row, other=0.0).to(tl.float32)
        inside = is_row[:, None]
        row = row.to(tl.int64)[:, None]
        token = (pair // chosen)[:, None]
        here = inside & (at < width)[None, :]
        place = grad_gate_up + row * 2 * width + at[None, :]
        of_gate = tl.load(place, mask=here, other=0.0)
        of_up = tl.load(place + width, mask=here, other=0.0)
        value = tl.load(activated + row * width + at[None, :], mask=here, other=0.0)
        h_place = h + token * 2 * ranks + column[None, :]
        total_gate += tl.dot(tl.trans(of_gate), tl.load(h_place, mask=inside & used[None, :], other=0.0))
        total_up += tl.dot(tl.trans(of_up), tl.load(h_place + ranks, mask=inside & used[None, :], other=0.0))
        mid = tl.load(grad_mid + token * ranks + column[None, :], mask=inside & used[None, :], other=0.0)
        mid = (mid.to(tl.float32) * score[:, None]).to(value.dtype)
        total_down += tl.dot(tl.trans(mid), value)
    of_b = (expert * width + at)[:, None] * ranks + column[None, :]
    known = (at < width)[:, None] & used[None, :]
    tl.store(grad_gate + of_b, total_gate, mask=known)
    tl.store(grad_up + of_b, total_up, mask=known)
    of_a = (expert * ranks + column)[:, None] * width + at[None, :]
    tl.store(grad_a + of_a, total_down, mask=used[:, None] & (at < width)[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_columns(  # type: ignore[no-untyped-def]
    rows, places, scores, owners, columns, result, ranks, parts, own, chosen: tl.constexpr, block: tl.constexpr
):
    """Of one token and one part."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(columns), tl.load(columns + 1)
    if owners is not None:
        owner = tl.load(owners + token)
        first, count = tl.load(columns + 2 * owner), tl.load(columns + 2 * owner + 1)
    at = tl.arange(0, block)
    is_own = (at >= first) & (at < first + count)
    total = tl.zeros((block,), tl.float32)
    for k in tl.static_range(chosen):  # unrolled, so that all rows are on their way at once
        place = tl.load(places + token * chosen + k)
        values = tl.load(rows + (place * parts + part) * own + at - first, mask=is_own, other=0.0).to(tl.float32)
        if scores is not None:
            values *= tl.load(scores + token * chosen + k).to(tl.float32)
        total += values
    tl.store(result + (token * parts + part) * ranks + at, total, mask=at < ranks)
