"""Matrices in 8 or 4 bits: a code for each number, and a scale for each group of numbers in a row.

A number is what its code stands for, times scale, rounded once to the dtype of activations. A code of 8 bits stands for
itself, one of 4 bits for code * (BEND + |code|) (`round_curved.py`): both have 8 bits at most, and scales the 8 of
bfloat16, so that their product is exact in float32. Both engines multiply by these numbers and by no others.

Published checkpoints (`published.py`) have codes of 4 bits that stand for themselves, as in vLLM's weight-only kernels
(Marlin, Triton, of CPUs), and more: scales of 11 or 24 bits, zero points, codes that are numbers of 8 bits, columns in
another order. Such a number is (code - zero) * scale in float32, rounded once to the dtype. That product is exact with
scales of 16 bits; with those of 32 it is rounded to float32 first, as transformers does, too.

Legend: N rows, K numbers in a row, G groups in a row.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from tinker_local.backend.weights.layout import Layout
from tinker_local.backend.weights.precision import GROUPS, HALF, Bits, group_of
from tinker_local.backend.weights.round_curved import BEND, round_curved

_LARGEST = 127
"""Code of 8 bits."""
_OFFSET = 8
"""Codes of 4 bits have this added."""
_PIECE = 2**24
"""Numbers that are made in float32 at a time."""
_PIECE_TO_ROUND = {"cpu": 2**17}
"""Numbers that are rounded at a time, some ten times: on a processor as many as its caches hold, else `_PIECE`."""

FEW = 64
"""Rows of activations up to which a kernel multiplies by a matrix as it reads its codes."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix [N, K]: `codes` int8 or float8_e4m3fn [N, K], or uint8 [N, K/2] for 4 bits; `scales` [N, G]; `zeros`
    int16 [N, G], of the same offset as codes; `order` int32 [K], the group of each column; `curved`: whether a code
    stands for code * (BEND + |code|), which those with zeros or in 8 bits never do."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    curved: bool = False

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [N, K] in `dtype`."""
        # A compiler makes kernels of what is in torch.
        if torch.compiler.is_compiling() or not _is_for_kernels(self, dtype):
            return in_torch(self, dtype)
        from tinker_local.backend.weights.triton_codes import unpacked

        return unpacked(self.codes, self.scales, dtype, self.zeros, curved=self.curved)

    def rows(self, which: slice) -> "Packed":
        """Of these rows of the matrix, in the same memory."""
        zeros = None if self.zeros is None else self.zeros[which]
        return replace(self, codes=self.codes[which], scales=self.scales[which], zeros=zeros)


def stacked(made: Iterable[Packed], place: torch.device) -> Packed:
    """One matrix of those that `to_codes` made, one below the other, each moved to `place` before the next is made."""
    moved = [replace(each, codes=each.codes.to(place), scales=each.scales.to(place)) for each in made]
    return replace(
        moved[0], codes=torch.cat([each.codes for each in moved]), scales=torch.cat([each.scales for each in moved])
    )


def to_codes(weight: torch.Tensor, bits: Bits) -> Packed:
    """`weight` [N, K] with codes int8 [N, K] rounded to nearest, or uint8 [N, K/2] for 4 bits as `round_curved` finds
    them; scales bfloat16 [N, G]. ValueError if no size of a group divides K.

    Equal weights have equal codes at each start on a kind of device. Those of 4 bits are made so that all devices find
    the same, which processors have been seen to do."""
    rows, inputs = weight.shape
    if (size := group_of(inputs, bits)) is None:
        raise ValueError(f"rows of {inputs} numbers cannot be divided into groups of {', '.join(map(str, GROUPS))}")
    place = weight.device
    width, dtype = (inputs, torch.int8) if bits == 8 else (inputs // 2, torch.uint8)
    codes = torch.empty(rows, width, dtype=dtype, device=place)
    scales = torch.empty(rows, inputs // size, dtype=torch.bfloat16, device=place)
    step = max(1, _PIECE_TO_ROUND.get(place.type, _PIECE) // inputs)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        groups = weight.detach()[piece].float().reshape(-1, size)
        found, of_groups = _rounded(groups) if bits == 8 else round_curved(groups)
        found = found.view(-1, inputs)
        codes[piece] = found if bits == 8 else in_pairs(found)
        scales[piece] = of_groups.view(-1, inputs // size)
    return Packed(codes, scales, curved=bits == 4)


def _rounded(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 8 bits and scales of `groups` float32 [n, size], rounded to nearest."""
    scales = (groups.abs().amax(-1) / _LARGEST).bfloat16()
    scales[scales == 0] = 1.0
    codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.nan_to_num_().to(torch.int8), scales  # a scale that is not a number is found as one


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7 [N, K] as uint8 [N, K/2]."""
    rows, inputs = codes.shape
    pairs = (codes + _OFFSET).to(torch.uint8).view(rows, -1, 2, _half_of(inputs))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).view(rows, inputs // 2)


def _half_of(inputs: int) -> int:
    """`HALF`, or less in rows of `inputs` numbers that it does not divide."""
    return math.gcd(inputs // 2, HALF)


def times(x: torch.Tensor, stored: Packed) -> torch.Tensor:
    """x W^T [M, N] for `x` [M, K] and the matrix W that is `stored`. On CUDA one operation for a compiler, which does
    not know M when it compiles."""
    if x.dim() != 2 or not _is_for_kernels(stored, x.dtype):
        return torch.nn.functional.linear(x, stored.numbers(x.dtype))
    return _times_on_cuda(x, stored.codes, stored.scales, stored.zeros, stored.curved)


@torch.library.custom_op("tinker_local::times_packed", mutates_args=())
def _times_on_cuda(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, curved: bool
) -> torch.Tensor:
    from tinker_local.backend.weights.triton_codes import times_few, unpacked

    if len(x) <= FEW:
        return times_few(x, codes, scales, zeros, curved=curved)
    return torch.nn.functional.linear(x, unpacked(codes, scales, x.dtype, zeros, curved=curved))


@_times_on_cuda.register_fake
def _(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, curved: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _is_for_kernels(stored: Packed, dtype: torch.dtype) -> bool:
    """Whether `triton_codes.py` has it."""
    codes = stored.codes
    if not codes.is_cuda or codes.dtype not in (torch.int8, torch.uint8) or stored.order is not None:
        return False
    inputs = inputs_of(codes)
    return dtype != torch.float64 and inputs % (2 * HALF) == 0 and inputs // stored.scales.shape[1] % (2 * HALF) == 0


def in_torch(stored: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [N, K] in `dtype`, by torch's operations."""
    codes, scales, zeros, order = stored.codes, stored.scales, stored.zeros, stored.order
    rows, inputs = len(codes), inputs_of(codes)
    if scales.dtype == torch.bfloat16 and zeros is None and order is None:  # exact in `dtype` before the product
        weight = _in(dtype, codes, curved=stored.curved).view(rows, scales.shape[1], -1)
        return weight.mul_(scales.to(dtype).unsqueeze(-1)).view(rows, inputs)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    result = torch.empty(rows, inputs, dtype=dtype, device=codes.device)
    step = max(1, _PIECE // inputs)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        numbers = _in(precise, codes[piece], curved=stored.curved)
        grouped = numbers if order is not None else numbers.view(len(numbers), scales.shape[1], -1)
        if zeros is not None:
            grouped -= _of_each(zeros[piece], order)
        grouped *= _of_each(scales[piece].to(precise), order)
        result[piece] = numbers
    return result


def _of_each(groups: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """What belongs to each number of a row, from that of its group [N, G]."""
    return groups.unsqueeze(-1) if order is None else groups.index_select(1, order)


def _in(dtype: torch.dtype, codes: torch.Tensor, *, curved: bool) -> torch.Tensor:
    """New [N, K] in `dtype` of what `codes` stand for without scales."""
    if codes.dtype != torch.uint8:
        return codes.to(dtype)
    rows, inputs = len(codes), inputs_of(codes)
    pairs = codes.view(rows, -1, _half_of(inputs))
    numbers = torch.empty(*pairs.shape[:2], 2, pairs.shape[2], dtype=dtype, device=codes.device)
    numbers[:, :, 0] = pairs & 15
    numbers[:, :, 1] = pairs >> 4
    numbers -= _OFFSET
    if curved:
        numbers *= numbers.abs().add_(BEND)
    return numbers.view(rows, inputs)


def inputs_of(codes: torch.Tensor) -> int:
    """K."""
    return int(codes.shape[1]) * (2 if codes.dtype == torch.uint8 else 1)


def codes_of(layout: Layout, rows: int, inputs: int) -> tuple[int, int, torch.dtype]:
    """Shape and dtype of the codes of a matrix [rows, inputs]."""
    if layout.codes == "int4":
        return rows, inputs // 2, torch.uint8
    return rows, inputs, torch.int8 if layout.codes == "int8" else torch.float8_e4m3fn
