"""Rounds numbers to codes of 4 bits whose steps grow with them, with the scales that lose least.

Most numbers of a group are small beside its largest, so that finer steps there lose less than even ones; codes of NF4
and of llama.cpp's IQ4_NL are such, by tables. Here a code stands for code * (BEND + |code|), which needs no table, has
0, and fits into 8 bits: from -144 to 119, in steps of 11 to 25. The largest number of a group has the code -8, or
another if a scale for that leaves a smaller sum of squared errors.

Every operation is one on single numbers that IEEE 754 rounds in one way, and sums are added in one order, so that
devices that keep to it find the same codes.

Legend: n groups of `size` numbers.
"""

import torch

BEND = 10
"""8 and 10 left a real model equally near to itself, by KL, and nearer than 13; squared errors of normal numbers differ
little between them."""
_LEAST, _MOST = -8, 7
_DIVISORS = (144.0, 118.0, 122.0, 126.0, 138.0, 147.0, 151.0, 156.0)
"""What of a scale the largest number of a group is tried to be, its sign turned: what the codes -8 and -7 stand for,
144 and 119, and near these, since all other numbers move with it. Chosen for normal and t-distributed numbers: their
error is 1 % above that with all integers from 84 to 180."""


def round_curved(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [n, size] from -8 to 7, and scales bfloat16 [n], of `groups` float32 [n, size], where `size` is a
    power of two. A group with a number that is not finite has such a scale."""
    columns = groups.T.contiguous()
    low, high = columns.amin(0), columns.amax(0)
    largest = torch.where(high > -low, high, low)
    first = best = _scales(largest, _DIVISORS[0])
    least = _errors(columns, first)
    for divisor in _DIVISORS[1:]:
        scales = _scales(largest, divisor)
        errors = _errors(columns, scales) * (scales / first).square_()
        better = errors < least
        best, least = torch.where(better, scales, best), torch.where(better, errors, least)
    codes = _codes(columns / best).nan_to_num_()  # a scale that is not a number is found as one
    return codes.to(torch.int8).T.contiguous(), best.bfloat16()


def _scales(largest: torch.Tensor, divisor: float) -> torch.Tensor:
    """Numbers of bfloat16 in float32 [n]; 1 where they would be 0."""
    scales = (largest * (-1 / divisor)).bfloat16().float()  # dividing by a constant is not exact on CUDA
    return scales.masked_fill_(scales == 0, 1.0)


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest, in float32, to `numbers` that are divided by their scale.

    Between code c and c + 1 the middle is (c + 1/2) * (BEND + c + 1/2) + 1/4, so that c is what the inverse function
    rounds to, a quarter less. In float32 numbers that are equally near to two codes, but for rounding, may have
    either."""
    codes = numbers.abs().add_((BEND**2 - 1) / 4).sqrt_().sub_(BEND / 2).round_()
    return codes.copysign_(numbers).clamp_(_LEAST, _MOST)


def _errors(columns: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Sums of squared errors [n] in units of `scales`, whose own squares may be too small for float32."""
    numbers = columns / scales
    codes = _codes(numbers)
    squares = codes.mul_(codes.abs().add_(BEND)).sub_(numbers).square_()
    while len(squares) > 1:  # halves, so that the order is the same everywhere
        squares = squares[::2] + squares[1::2]
    return squares[0]
