"""Ways to round a matrix in 4 bits, of this project, of before and of others, as numbers in float32 [out, in]."""

from collections.abc import Callable, Mapping

import torch
from scipy import stats  # type: ignore[import-untyped]
from tinker_local.backend.weights.codes import to_codes

Round = Callable[[torch.Tensor], torch.Tensor]


def curved(weight: torch.Tensor) -> torch.Tensor:
    """As `--base-precision int4`."""
    return to_codes(weight, 4).numbers(torch.float32)


def even(weight: torch.Tensor, most: int = 128) -> torch.Tensor:
    """Codes from -7 to 7, their scale a 7th of the largest number of a group, in bfloat16: groups of `most` numbers, or
    a half or a quarter where that does not divide a row. `--base-precision int4` was so, with 128."""
    group = next(size for size in (most, most // 2, most // 4) if weight.shape[1] % size == 0)
    groups = weight.view(-1, group)
    scales = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    scales[scales == 0] = 1.0
    return ((groups / scales).round().clamp(-7, 7) * scales).view(weight.shape)


def normal_floats() -> torch.Tensor:
    """The 16 numbers of NF4: quantiles of the normal distribution, divided by the largest (Dettmers et al., QLoRA,
    2023): 8 from above 0, 7 from below, and 0; `edge` is the mean of 1 - 1/32 and 1 - 1/30."""
    edge = 1 - (1 / 32 + 1 / 30) / 2
    above = stats.norm.ppf(torch.linspace(edge, 0.5, 9, dtype=torch.float64)[:-1])
    below = -stats.norm.ppf(torch.linspace(edge, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.tensor([*below, 0.0, *above], dtype=torch.float64).sort().values
    return (found / found.max()).float()


def nf4(weight: torch.Tensor, group: int = 64) -> torch.Tensor:
    """As bitsandbytes loads a model in NF4: each number the nearest of 16 times the largest of its group."""
    numbers = normal_floats()
    groups = weight.view(-1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    places = torch.bucketize(
        groups / largest.clamp(min=torch.finfo(torch.float32).tiny), (numbers[1:] + numbers[:-1]) / 2
    )
    return (numbers[places] * largest).view(weight.shape)


WAYS: Mapping[str, tuple[float, Round]] = {
    "int4": (4.5, curved),
    "NF4, groups of 64, scales in float32": (4.5, nf4),
    "even steps, groups of 32": (4.5, lambda weight: even(weight, 32)),
    "even steps, groups of 128: int4 of before": (4.125, even),
}
"""By name: bits of a number with its part of a scale, where all rows have such groups."""


def shuffled(rounded: Round, weight: torch.Tensor) -> torch.Tensor:
    """`weight` as it is rounded with its columns in another order, in their own again."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    result = torch.empty_like(weight)
    result[:, order] = rounded(weight[:, order].contiguous())
    return result
