"""In 16 bits the steps between numbers of a residual are wider than what an adapter adds to them at first. On average
over positions it counts all the same, as in transformers and in vLLM, which add the residual last."""

from typing import Any

import pytest
import torch
from tinker_local.backend.training.lora.lora_batch import LowRank, Owners, project_onto
from tinker_local.backend.weights.dense import DenseMatrix

POSITIONS, INPUTS, OUTPUTS = 1024, 32, 64
STEP = 2.0**-4
"""Between numbers of bfloat16 from 8 to 16."""


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def residual() -> torch.Tensor:
    return (8 + 7 * torch.rand(POSITIONS, OUTPUTS, generator=torch.Generator().manual_seed(0))).bfloat16()


@pytest.fixture
def x() -> torch.Tensor:
    return _random(POSITIONS, INPUTS, seed=1).bfloat16()


@pytest.fixture
def matrix() -> DenseMatrix:
    return DenseMatrix((_random(OUTPUTS, INPUTS, seed=2) * INPUTS**-0.5).bfloat16())


def _share_that_arrives(moved: torch.Tensor, added: torch.Tensor) -> float:
    """1 if `moved` is `added` and rounding to either side. Every number added must be less than half a step."""
    assert 0 < float(added.abs().max()) < STEP / 2
    return float((moved * added).sum() / added.square().sum())


@pytest.mark.parametrize(("low_rank", "bias"), [(True, False), (False, True), (True, True)])
def test_what_is_less_than_half_a_step_of_the_residual_arrives(
    residual: Any, x: Any, matrix: Any, low_rank: bool, bias: bool
) -> None:
    given = residual.clone()
    a, b = _random(16, INPUTS, seed=3) * INPUTS**-0.5, _random(OUTPUTS, 16, seed=4) * 1e-3
    adapter = LowRank(a.bfloat16(), (b.bfloat16(),), Owners(torch.zeros(1, 2, dtype=torch.int32), 16))
    offset = (_random(OUTPUTS, seed=5) * 4e-3).bfloat16()
    h, y = project_onto(residual, x, matrix, adapter if low_rank else None, offset if bias else None)
    none, without = project_onto(residual, x, matrix, None)
    assert torch.equal(residual, given)
    assert none is None
    assert (h is not None) == low_rank
    added = torch.zeros(POSITIONS, OUTPUTS, dtype=torch.float64)
    if low_rank:
        added += x.double() @ adapter.a.double().T @ adapter.b[0].double().T
    if bias:
        added += offset.double()
    # A number that moves, moves by a whole step: of 65,536, a share of 1 has a standard error of about 0.02.
    assert _share_that_arrives(y.double() - without.double(), added) == pytest.approx(1, abs=0.15)
