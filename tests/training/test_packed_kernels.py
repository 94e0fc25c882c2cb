"""The kernels that make matrices of few bits, or multiply by them as they are read, equal plain torch."""

from pathlib import Path

import pytest
import torch
from tinker_local.backend.weights.codes import to_codes
from tinker_local.backend.weights.precision import BITS

from tests.interpreter import run_interpreted
from tests.training import codes_cases


@pytest.mark.more
def test_kernels_of_packed_matrices_equal_plain_torch_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("codes_cases.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_packed_matrices_equal_plain_torch_on_a_gpu() -> None:
    codes_cases.check_all(
        "cuda", ((1, 6144, 4096), (16, 4096, 12288), (40, 130, 96), (64, 24576, 4096), (200, 70, 128))
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", BITS)
def test_a_gpu_and_a_processor_round_to_the_same_codes(bits: str) -> None:
    weight = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, ::64] *= 16
    there, here = to_codes(weight.cuda(), BITS[bits]), to_codes(weight, BITS[bits])
    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.equal(there.scales.cpu(), here.scales)
