"""LoRA of linear layers on CUDA: the kernels equal float64 up to one rounding, for rows of any adapters."""

from pathlib import Path

import pytest
import torch

from tests.interpreter import run_interpreted
from tests.sampling import lora_kernel_cases


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the next test runs on it")
@pytest.mark.mutation("lora-tile-of-another", "lora_kernels._tile_of", "left -= tiles", "left -= 0")
def test_rows_of_many_adapters_are_multiplied_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("lora_kernel_cases.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [8, 32, 128])
def test_rows_of_many_adapters_are_multiplied_on_a_gpu(dtype: torch.dtype, rank: int) -> None:
    for width, widths in ((4096, (4096, 1024, 1024)), (12288, (4096,)), (2880, (96, 24576))):
        module = lora_kernel_cases.Module("cuda", dtype, width, widths, rank)
        for rows in (1, 16, 17, 512, 1000):
            lora_kernel_cases.check_rows(module, [2 - at % 4 for at in range(rows)])
            lora_kernel_cases.check_rows(module, [1] * rows)
        lora_kernel_cases.check_repeats(module, 300)
        roomy = lora_kernel_cases.Module("cuda", dtype, width, widths, 128, rank)
        for rows in (1, 16, 17, 512, 1000):
            lora_kernel_cases.check_rows(roomy, [2 - at % 4 for at in range(rows)])
