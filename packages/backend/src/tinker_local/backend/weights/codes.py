"""Matrices in 8 or 4 bits: a code for each number, and a scale for each group of numbers in a row.

A number is code * scale, rounded once to the dtype of activations: codes have 8 bits at most and scales the 8 of
bfloat16, so that their product is exact in float32. vLLM's weight-only kernels (Marlin, Triton, of CPUs) compute the
same for groups. Both engines multiply by these numbers and by no others.

Legend: N rows, K numbers in a row, G groups in a row.
"""

import torch
from tinker_local.backend.weights.precision import GROUPS, Bits, group_of

_LARGEST = {8: 127, 4: 7}
_OFFSET = 8
"""Two codes of 4 bits are in one byte, the first in its low half, each with this added."""


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
    pairs = (codes + _OFFSET).to(torch.uint8).view(rows, inputs // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def from_codes(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [N, K] that `codes` and `scales` stand for, in `dtype`."""
    rows = len(codes)
    if codes.dtype == torch.uint8:
        weight = torch.empty(rows, codes.shape[1], 2, dtype=dtype, device=codes.device)
        weight[..., 0] = codes & 15
        weight[..., 1] = codes >> 4
        weight -= _OFFSET
    else:
        weight = codes.to(dtype)
    weight = weight.view(rows, scales.shape[1], -1)
    return weight.mul_(scales.to(dtype).unsqueeze(-1)).view(rows, -1)


def inputs_of(codes: torch.Tensor) -> int:
    """K."""
    return int(codes.shape[1]) * (2 if codes.dtype == torch.uint8 else 1)
