"""Matrices in 8 or 4 bits: a code for each number, and a scale for each group of numbers in a row.

A number is code * scale, rounded once to the dtype of activations: codes have 8 bits at most and scales the 8 of
bfloat16, so that their product is exact in float32. vLLM's weight-only kernels (Marlin, Triton, of CPUs) compute the
same for groups. Both engines multiply by these numbers and by no others.

Published checkpoints (`published.py`) have more: scales of 11 or 24 bits, zero points, codes that are numbers of 8
bits, columns in another order. Such a number is (code - zero) * scale in float32, rounded once to the dtype. That
product is exact with scales of 16 bits; with those of 32 it is rounded to float32 first, as transformers does, too.

Legend: N rows, K numbers in a row, G groups in a row.
"""

from dataclasses import dataclass

import torch
from tinker_local.backend.weights.layout import Layout
from tinker_local.backend.weights.precision import GROUPS, Bits, group_of

_LARGEST = {8: 127, 4: 7}
_OFFSET = 8
"""Two codes of 4 bits are in one byte, the first in its low half, each with this added."""
_PIECE = 2**24
"""Numbers that are made in float32 at a time."""

FEW = 64
"""Rows of activations up to which a kernel multiplies by a matrix as it reads its codes."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix [N, K]: `codes` int8 or float8_e4m3fn [N, K], or uint8 [N, K/2] for 4 bits; `scales` [N, G]; `zeros`
    int16 [N, G], of the same offset as codes; `order` int32 [K], the group of each column."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [N, K] in `dtype`."""
        return from_codes(self.codes, self.scales, dtype, self.zeros, self.order)


def to_codes(weight: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `weight` [N, K], rounded to nearest: int8 [N, K], or uint8 [N, K/2] for 4 bits; bfloat16
    [N, G]. ValueError if no size of a group divides K."""
    rows, inputs = weight.shape
    if (size := group_of(inputs)) is None:
        raise ValueError(f"rows of {inputs} numbers cannot be divided into groups of {', '.join(map(str, GROUPS))}")
    groups = weight.detach().float().view(rows, inputs // size, size)
    scales = (groups.abs().amax(-1) / _LARGEST[bits]).bfloat16()
    scales[scales == 0] = 1.0
    codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-_LARGEST[bits], _LARGEST[bits])
    codes = codes.nan_to_num_().to(torch.int8).view(rows, inputs)  # a scale that is not a number is found as one
    if bits == 8:
        return codes, scales
    return in_pairs(codes), scales


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7 [N, K] as uint8 [N, K/2]."""
    pairs = (codes + _OFFSET).to(torch.uint8).view(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def from_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix [N, K] that the tensors of a `Packed` stand for, in `dtype`."""
    if not _by_kernel(codes, dtype, order):
        return in_torch(codes, scales, dtype, zeros, order)
    from tinker_local.backend.weights.triton_codes import unpacked

    return unpacked(codes, scales, dtype, zeros)


def times(x: torch.Tensor, stored: Packed) -> torch.Tensor:
    """x W^T [M, N] for `x` [M, K] and the matrix W that is `stored`."""
    groups = stored.scales.shape[1]
    few = x.dim() == 2 and len(x) <= FEW and inputs_of(stored.codes) in {groups * size for size in GROUPS}
    if not few or not _by_kernel(stored.codes, x.dtype, stored.order):
        return torch.nn.functional.linear(x, stored.numbers(x.dtype))
    from tinker_local.backend.weights.triton_codes import times_few

    return times_few(x, stored.codes, stored.scales, stored.zeros)


def _by_kernel(codes: torch.Tensor, dtype: torch.dtype, order: torch.Tensor | None) -> bool:
    """Whether `triton_codes.py` has it. A compiler makes kernels of what is in torch."""
    integers = codes.dtype in (torch.int8, torch.uint8) and order is None
    return codes.is_cuda and integers and dtype != torch.float64 and not torch.compiler.is_compiling()


def in_torch(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `from_codes` returns, by torch's operations."""
    rows, inputs = len(codes), inputs_of(codes)
    if scales.dtype == torch.bfloat16 and zeros is None and order is None:  # exact in `dtype` before the product
        weight = _in(dtype, codes).view(rows, scales.shape[1], -1)
        return weight.mul_(scales.to(dtype).unsqueeze(-1)).view(rows, inputs)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    result = torch.empty(rows, inputs, dtype=dtype, device=codes.device)
    step = max(1, _PIECE // inputs)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        numbers = _in(precise, codes[piece])
        grouped = numbers if order is not None else numbers.view(len(numbers), scales.shape[1], -1)
        if zeros is not None:
            grouped -= _of_each(zeros[piece], order)
        grouped *= _of_each(scales[piece].to(precise), order)
        result[piece] = numbers
    return result


def _of_each(groups: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """What belongs to each number of a row, from that of its group [N, G]."""
    return groups.unsqueeze(-1) if order is None else groups.index_select(1, order)


def _in(dtype: torch.dtype, codes: torch.Tensor) -> torch.Tensor:
    """New [N, K] in `dtype` of what `codes` are without scales."""
    if codes.dtype != torch.uint8:
        return codes.to(dtype)
    numbers = torch.empty(*codes.shape, 2, dtype=dtype, device=codes.device)
    numbers[..., 0] = codes & 15
    numbers[..., 1] = codes >> 4
    numbers -= _OFFSET
    return numbers.view(len(codes), -1)


def inputs_of(codes: torch.Tensor) -> int:
    """K."""
    return int(codes.shape[1]) * (2 if codes.dtype == torch.uint8 else 1)


def codes_of(layout: Layout, rows: int, inputs: int) -> tuple[int, int, torch.dtype]:
    """Shape and dtype of the codes of a matrix [rows, inputs]."""
    if layout.codes == "int4":
        return rows, inputs // 2, torch.uint8
    return rows, inputs, torch.int8 if layout.codes == "int8" else torch.float8_e4m3fn
