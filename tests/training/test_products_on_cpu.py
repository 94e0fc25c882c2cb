"""Large products of float32 on a CPU, which oneDNN computes, beside float64 and beside small ones."""

import pytest
import torch
from tinker_local.backend.training import compat_torch
from tinker_local.backend.training.compat_torch import times, times_onto

SIZES = [(3, 8, 5), (0, 512, 512), (64, 512, 512), (130, 576, 300)]
"""Rows, inputs, outputs: small, empty, and twice large enough for oneDNN."""


@pytest.mark.mutation("onednn-never-multiplies", "compat_torch.py", "    return large and", "    return False and")
def test_large_products_go_to_onednn_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    assert compat_torch._by_onednn(x, weight)
    assert not compat_torch._by_onednn(x[:63], weight)
    assert not compat_torch._by_onednn(x.double(), weight.double())
    assert not compat_torch._by_onednn(x.bfloat16(), weight.bfloat16())  # torch takes oneDNN itself
    assert not compat_torch._by_onednn(x.to("meta"), weight.to("meta"))


@pytest.mark.mutation("product-onto-nothing", "compat_torch.py", 'weight, None, "add")', 'weight, None, "sub")')
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_products_of_any_size_and_layout_are_those_of_float64(rows: int, inputs: int, outputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    x, onto = torch.randn(rows, inputs, generator=random), torch.randn(rows, outputs, generator=random)
    stored = torch.randn(outputs, inputs, generator=random), torch.randn(inputs, outputs, generator=random).T
    bias = torch.randn(outputs, generator=random)
    strided = torch.randn(rows, 2 * inputs, generator=random)[:, :inputs]
    # Each of the `inputs` terms and the sum is rounded once, relative to sums of absolute values.
    bound = 2**-24 * inputs
    for weight in stored:  # as it lies in a model for the forward, and for the backward
        for given in (x, strided):
            product = given.double() @ weight.double().T
            size = given.double().abs() @ weight.double().abs().T + onto.double().abs() + bias.double().abs() + 1e-30
            before = onto.clone()
            for found, expected in (
                (times(given, weight), product),
                (times(given, weight, bias), product + bias.double()),
                (times_onto(onto, given, weight, keep=True), product + onto.double()),
                (times_onto(onto.clone(), given, weight), product + onto.double()),
            ):
                assert found.shape == expected.shape
                assert bool(((found.double() - expected).abs() / size <= bound).all())
            assert torch.equal(onto, before)
