"""Codes of 4 bits whose steps grow: the nearest codes and the best scales, beside a search in float64; what they lose,
beside even steps."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinker_local.backend.weights.codes import to_codes
from tinker_local.backend.weights.layout import OWN
from tinker_local.backend.weights.precision import group_of
from tinker_local.backend.weights.round_curved import round_curved

SIZE = 32
LEVELS = np.array([code * (10 + abs(code)) for code in range(-8, 8)], dtype=np.float64)
DIVISORS = (118, 122, 126, 138, 144, 147, 151, 156)


def drawn(make: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(make(np.random.default_rng(0), (500, SIZE))).float()


GROUPS = {
    "normal": drawn(lambda rng, shape: rng.normal(size=shape)),
    "uniform": drawn(lambda rng, shape: rng.uniform(-1, 1, shape)),
    "heavy tails": drawn(lambda rng, shape: rng.standard_t(2, shape)),
    "one large": drawn(lambda rng, shape: rng.normal(size=shape) * np.where(np.arange(SIZE) == 3, 100, 1)),
    "constant": drawn(lambda rng, shape: np.repeat(rng.normal(size=(shape[0], 1)), SIZE, 1)),
    "one sign": drawn(lambda rng, shape: rng.exponential(size=shape)),
    "tiny": drawn(lambda rng, shape: rng.normal(size=shape) * 1e-30),
    "huge": drawn(lambda rng, shape: rng.normal(size=shape) * 1e30),
    "few numbers": drawn(lambda rng, shape: rng.integers(-2, 3, shape).astype(float)),
    "zeros": torch.zeros(3, SIZE),
}


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(numbers).float().bfloat16().double().numpy()


def by_search(groups: np.ndarray) -> np.ndarray:
    """The least sum of squared errors of each group, in float64: all codes tried for each number, with each scale."""
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    largest = np.where(high > -low, high, low)
    found = np.full(len(groups), np.inf)
    for divisor in DIVISORS:
        scales = bfloat16(largest.astype(np.float32) * np.float32(-1 / divisor))
        apart = (scales[..., None] * LEVELS - groups[..., None]) ** 2
        found = np.minimum(found, apart.min(-1).sum(-1))
    return found


def errors(groups: torch.Tensor) -> np.ndarray:
    """The sum of squared errors of each group."""
    codes, scales = round_curved(groups)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.bfloat16
    assert int(codes.min()) >= -8
    assert int(codes.max()) <= 7
    integers = codes.double() * (10 + codes.double().abs())
    found: np.ndarray = (integers * scales.double()[:, None] - groups.double()).square().sum(1).numpy()
    return found


def even(groups: torch.Tensor) -> np.ndarray:
    """The same of codes from -7 to 7 rounded to nearest, where the largest number has 7: as earlier servers did."""
    scales = (groups.abs().amax(1, keepdim=True) / 7).bfloat16().float()
    scales[scales == 0] = 1
    rounded = (groups / scales).round().clamp(-7, 7) * scales
    found: np.ndarray = (rounded.double() - groups.double()).square().sum(1).numpy()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GROUPS)
def test_each_group_loses_what_a_search_in_float64_finds(kind: str, dtype: torch.dtype) -> None:
    """But for numbers as near to two codes as float32 tells, and scales as good as another: a number divided by its
    scale is at most 256 and is rounded thrice or so, by 2^-24 of that, and so are sums of 32 squares."""
    groups = GROUPS[kind].to(dtype).float()
    expected = by_search(groups.double().numpy())
    step = np.abs(groups.double().numpy()).max(1) / 118
    assert (errors(groups) <= expected * (1 + 2**-18) + SIZE * (2**-14 * step) * (25 * step)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "one large", "one sign", "tiny", "huge"])
def test_all_groups_together_lose_less_than_with_even_steps(kind: str, dtype: torch.dtype) -> None:
    """Single groups, and numbers that are not denser near 0, may lose more."""
    groups = GROUPS[kind].to(dtype).float()
    unit = float(groups.abs().max())
    assert (errors(groups) / unit**2).sum() < (even(groups) / unit**2).sum()


def test_zeros_stay_zeros_and_the_largest_number_is_kept() -> None:
    codes, scales = round_curved(torch.zeros(2, SIZE))
    assert not codes.any()
    assert scales.tolist() == [1, 1]
    group = torch.zeros(4, SIZE)
    group[:, 7] = torch.tensor([144.0, -144.0, 2.0**-120, -(2.0**-120)])
    codes, scales = round_curved(group)
    assert torch.equal(codes != 0, group != 0)
    kept = (codes.double() * (10 + codes.double().abs()) * scales.double()[:, None] - group.double()).abs().amax(1)
    assert bool((kept <= 2**-8 * group.double().abs().amax(1)).all())  # of bfloat16's scale


@pytest.mark.parametrize("exponent", [-149, -140, -133, -126])
def test_numbers_too_small_for_a_scale_stay_finite(exponent: int) -> None:
    group = torch.full((1, SIZE), 2.0**exponent)
    stored = to_codes(group, 4)
    assert bool(stored.numbers(torch.float32).isfinite().all())
    assert float((stored.numbers(torch.float32) - group).abs().max()) <= 2.0**exponent


def test_groups_do_not_depend_on_others() -> None:
    groups = GROUPS["normal"]
    codes, scales = round_curved(groups)
    other, others = round_curved(groups.flip(0))
    assert torch.equal(other.flip(0), codes)
    assert torch.equal(others.flip(0), scales)


def test_codes_are_the_same_as_ever() -> None:
    """Records say `int4-curved` of a base that has these codes. Another rounding needs another word."""
    weight = (torch.arange(2048) * 40503 % 65536 - 32768).float().view(2, 1024) * 2.0**-20
    weight = weight * weight.abs()
    stored = to_codes(weight, 4)
    found = hashlib.sha256(stored.numbers(torch.float32).numpy().tobytes())
    assert found.hexdigest() == "7697cc82eb86634fdab88a80d5286100aa53e880cc2d39f6ccadd2cedc1ba5d8"


def test_the_layout_is_that_of_the_codes() -> None:
    stored = to_codes(GROUPS["normal"].view(-1, 320), 4)
    layout = OWN["int4"]
    assert stored.curved == layout.curved
    assert layout.group == group_of(320, 4) == 32
    assert stored.scales.shape[1] == layout.groups(320)
    assert (layout.bits, layout.codes, layout.zeros) == (4, "int4", False)
