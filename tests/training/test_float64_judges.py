"""The judge of `tests/float64.py` lets rounding pass, and nothing that is much larger."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.float64 import Exact, InFloat64


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_float32_is_near_and_what_is_off_by_a_ten_thousandth_is_not(
    family: str, trainer: Any, make: Any, add_adapter: Any
) -> None:
    ours = trainer(family)
    add_adapter(ours, "a")
    given = make.input(30, [(4, (4, 4))] if family == "qwen3_vl" else [])
    exact, found = Exact(ours), ours.logprobs("a", given)
    exact.assert_near("a", [given], found)
    with pytest.raises(AssertionError):
        exact.assert_near("a", [given], found * (1 + 1e-4))
    np.testing.assert_array_equal(exact.logprobs("a", given)[0], exact.logprobs("a", given)[0])


def test_what_asks_for_float32_gets_float64_also_backward() -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    with InFloat64():
        y = x.to(torch.float32).softmax(-1, dtype=torch.float32) * x.float()
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert {y.dtype, gradient.dtype} == {torch.float64}
    assert y.tolist() == pytest.approx([1 / 9] * 3, rel=1e-15)
