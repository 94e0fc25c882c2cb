"""Frozen matrices of 8 and 4 bits: what is stored, and products with it and their gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.weights import codes
from tinker_local.backend.weights.codes import Packed, to_codes
from tinker_local.backend.weights.dense import DenseMatrix
from tinker_local.backend.weights.packed import (
    PackedLinear,
    PackedMatrix,
    is_packed,
    pack_layers,
    packable_modules,
    packed,
)
from tinker_local.backend.weights.precision import BITS, Bits, Packable, group_of

SIZES = {8: {32: 32, 96: 32, 192: 64, 256: 128}, 4: dict.fromkeys((32, 96, 192, 256), 32)}
"""Of groups, by bits and numbers in a row."""


def numbers(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """With a row that is 100 times larger, and a group of zeros."""
    made = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    made[1] *= 100
    made[2, :32] = 0
    return made


def integers(stored: Packed) -> torch.Tensor:
    """What codes stand for without scales, int64 [N, K]."""
    if stored.codes.dtype == torch.int8:
        return stored.codes.long()
    steps = torch.cat([part for each in stored.codes.split(16, 1) for part in (each & 15, each >> 4)], 1).long() - 8
    return steps * (10 + steps.abs())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", [32, 96, 192, 256])
def test_each_number_is_what_its_code_stands_for_times_the_scale_of_its_group(bits: Bits, inputs: int) -> None:
    weight = numbers(5, inputs)
    stored = to_codes(weight, bits)
    size = group_of(inputs, bits)
    assert size == SIZES[bits][inputs]
    assert stored.codes.nbytes == weight.numel() * bits // 8
    assert stored.scales.shape == (5, inputs // size)
    exact = integers(stored) * stored.scales.double().repeat_interleave(size, 1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(stored.numbers(dtype), exact.to(dtype))
    assert torch.equal(exact.float().double(), exact)  # the product is exact there
    assert not exact[2, :32].any()


@pytest.mark.parametrize("inputs", [96, 256])
def test_codes_of_8_bits_are_the_nearest(inputs: int) -> None:
    weight, size = numbers(5, inputs), SIZES[8][inputs]
    groups = weight.view(-1, size)
    scales = (groups.abs().amax(1) / np.float32(127)).bfloat16().float()
    scales[scales == 0] = 1
    expected = (groups / scales[:, None]).round().clamp(-127, 127) * scales[:, None]
    assert torch.equal(to_codes(weight, 8).numbers(torch.float32), expected.view(weight.shape))


def test_rows_that_no_group_divides_are_refused() -> None:
    assert group_of(48, 8) is None
    assert group_of(48, 4) is None
    with pytest.raises(ValueError, match=r"^rows of 48 numbers cannot be divided into groups of 128, 64, 32$"):
        to_codes(torch.ones(2, 48), 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_stays_none(bits: Bits, poison: float) -> None:
    weight = numbers(4, 64)
    expected = to_codes(weight, bits)
    weight[3, 5] = poison
    found = to_codes(weight, bits)
    assert not found.scales[3, 0].isfinite()
    assert torch.equal(
        found.scales.flatten()[: -1 if bits == 8 else -2], expected.scales.flatten()[: -1 if bits == 8 else -2]
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_pieces_of_a_matrix_that_is_rounded_are_those_of_the_whole(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(7, 96)
    whole = to_codes(weight, bits)
    monkeypatch.setattr(codes, "_PIECE_TO_ROUND", {"cpu": 2 * 96 + 1})
    seen: list[int] = []
    name = "_rounded" if bits == 8 else "round_curved"
    original = getattr(codes, name)

    def watched(groups: torch.Tensor) -> Any:
        seen.append(groups.numel())
        return original(groups)

    monkeypatch.setattr(codes, name, watched)
    found = to_codes(weight, bits)
    assert seen == [2 * 96] * 3 + [96]  # so that little memory is needed besides it
    assert torch.equal(found.codes, whole.codes)
    assert torch.equal(found.scales, whole.scales)


def linears() -> list[torch.nn.Linear]:
    return [torch.nn.Linear(64, rows, bias=False).requires_grad_(False) for rows in (24, 8, 8)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_products_are_those_of_the_numbers_that_are_stored(bits: Bits, dtype: torch.dtype, count: int) -> None:
    """Joined modules keep their parts, which are views of what is joined."""
    modules = [PackedLinear.rounded(each.to(dtype), bits) for each in linears()[:count]]
    dense = DenseMatrix(torch.cat([each.weight for each in modules]))
    matrix = packed(modules)
    assert isinstance(matrix, PackedMatrix)
    assert (matrix.outputs, matrix.inputs, matrix.dtype) == (dense.outputs, 64, dtype)
    x, grad = torch.randn(3, 64).to(dtype), torch.randn(3, dense.outputs).to(dtype)
    assert torch.equal(matrix.times(x), dense.times(x))
    assert torch.equal(matrix.times_plus(x, grad), dense.times_plus(x, grad))
    assert torch.equal(matrix.add_times(grad.clone(), x), dense.add_times(grad.clone(), x))
    assert torch.equal(matrix.back(grad), dense.back(grad))
    assert torch.equal(matrix.add_back(x.clone(), grad), dense.add_back(x.clone(), grad))
    assert torch.equal(torch.cat([each.weight for each in modules]), dense.weight)
    assert {each.qweight.untyped_storage().data_ptr() for each in modules} == {
        matrix.stored.codes.untyped_storage().data_ptr()
    }


def test_a_module_that_is_not_packed_gives_a_dense_matrix() -> None:
    assert isinstance(packed(linears()[:1]), DenseMatrix)


def test_the_gradient_is_that_of_the_numbers_that_are_stored() -> None:
    linear = torch.nn.Linear(64, 24).double()
    module = PackedLinear.rounded(linear, 4)
    weight = module.weight
    x = torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(module(x).square().sum(), x)
    (expected,) = torch.autograd.grad(torch.nn.functional.linear(x, weight, linear.bias).square().sum(), x)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)
    assert {name for name, _ in module.named_parameters()} == {"qweight", "scales", "bias"}


@pytest.mark.parametrize(
    ("path", "inputs", "expected"),
    [
        ("layers.0.self_attn.q_proj", 64, True),
        ("language_model.model.layers.11.mlp.gate_up_proj", 96, True),
        ("layers.0.mlp.down_proj", 48, False),
        ("layers.0.mlp.gate", 64, False),
        ("layers.0.linear_attn.out_proj", 64, True),
        ("layers.0.linear_attn.in_proj_qkvz", 64, True),
        ("layers.0.linear_attn.in_proj_b", 64, False),
        ("layers.0.mlp.experts.0.down_proj", 64, False),
        ("lm_head", 64, False),
    ],
)
def test_projections_of_layers_are_packed(path: str, inputs: int, expected: bool) -> None:
    assert is_packed(path, inputs) == expected


def test_what_can_be_packed_is_counted() -> None:
    """By the modules that are packed: of other architectures some, or none, have these names."""
    found = Packable.of([(24, 64), (8, 96)])
    assert found == Packable(24 * 64 + 8 * 96, {8: 24 + 8 * 3, 4: 24 * 2 + 8 * 3}, 24 * 64)
    for bits in BITS.values():
        packed = [to_codes(torch.ones(shape), bits) for shape in ((24, 64), (8, 96))]
        assert found.bytes(bits) == sum(each.codes.nbytes + each.scales.nbytes for each in packed)
    assert Packable.of([]) is None
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"down_proj": linears()[0], "c_fc": linears()[1]})})
    decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    assert [path for path, _ in packable_modules(decoder)] == ["layers.0.mlp.down_proj"]
    pack_layers(decoder, "int4")
    assert {name for name, _ in decoder.named_parameters()} == {
        *(f"layers.0.mlp.down_proj.{kind}" for kind in ("qweight", "scales")),
        "layers.0.mlp.c_fc.weight",
    }
