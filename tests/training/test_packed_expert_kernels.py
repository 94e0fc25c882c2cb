"""Products with packed experts in Triton equal plain torch."""

from pathlib import Path

import pytest
import torch
from tinker_local.backend.training.kernels.grouped_products import RowGroups
from tinker_local.backend.weights.codes import Packed, in_torch
from tinker_local.backend.weights.dense import DenseStack
from tinker_local.backend.weights.packed_stack import PackedMatrices
from tinker_local.backend.weights.precision import Bits

from tests.interpreter import run_interpreted
from tests.training import expert_codes_cases


@pytest.mark.more
def test_products_with_packed_experts_equal_plain_torch_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("expert_codes_cases.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_with_packed_experts_equal_plain_torch_on_a_gpu() -> None:
    """In shapes of Qwen3-30B-A3B with fewer experts, and in some that no block divides."""
    large = ((1, 8, 16, 1536, 2048), (64, 8, 16, 2048, 768))
    expert_codes_cases.check_all("cuda", (*large, (600, 8, 16, 1536, 2048), (5, 3, 4, 130, 96), (40, 2, 3, 20, 320)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [8, 4])
def test_products_of_the_trainer_with_packed_experts_are_those_of_their_numbers_on_a_gpu(bits: Bits) -> None:
    """To the bit: all numbers are made in one pass, and torch's grouped product is the same one."""
    weight = torch.randn(16, 1536, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = PackedMatrices.rounded(weight, bits, torch.device("cuda")).cuda()
    stack = packed.stack()
    codes, scales = (each.flatten(0, 1) for each in (packed.qweight, packed.scales))
    numbers = in_torch(Packed(codes, scales, curved=packed.curved), torch.bfloat16).view(weight.shape)
    assert torch.equal(stack.numbers(), numbers)
    dense, groups = DenseStack(numbers), RowGroups(torch.arange(0, 16 * 40, 40, dtype=torch.int32, device="cuda"))
    x, grad = (torch.randn(600, width, device="cuda").bfloat16() for width in (2048, 1536))
    assert torch.equal(stack.times(x, groups), dense.times(x, groups))
    assert torch.equal(stack.back(grad, groups), dense.back(grad, groups))
