"""The Triton kernels equal plain torch in Triton's interpreter, which runs the same code on a CPU.

It simulates neither warps nor accesses outside the tensors; `test_training_on_gpu.py` runs the same cases on a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.mutation(
    "rows-by-expert-alone",
    "training/experts.py",
    "keys = experts if of_tokens is None else experts * several + of_tokens[:, None]",
    "keys = experts if of_tokens is None else experts * several",
)
@pytest.mark.mutation(
    "pairs-sorted-without-those-of-earlier-blocks",
    "triton_experts.py",
    "row += tl.load(counts + key * blocks + number, mask=inside, other=0)",
    "row += 0",
)
@pytest.mark.mutation(
    "columns-of-the-first-adapter", "triton_experts.py", "owner = tl.load(owners + token)", "owner = 0"
)
@pytest.mark.mutation("counts-of-later-programs-lost", "triton_experts.py", "before += tl.sum(found, 0)", "before += 0")
@pytest.mark.mutation(
    "last-tile-of-a-group-left-out",
    "triton_experts.py",
    "needed = (found + tile_rows - 1) // tile_rows",
    "needed = found // tile_rows",
)
@pytest.mark.mutation(
    "gradient-of-experts-without-their-share", "triton_experts.py", "grad_value *= score[:, None]", "grad_value *= 1.0"
)
@pytest.mark.mutation(
    "first-tile-of-a-group-alone", "triton_experts.py", "(tile - before) * tile_rows", "0 * tile_rows"
)
@pytest.mark.mutation(
    "first-rows-of-a-tile-alone", "triton_experts.py", "tl.program_id(0) % parts * row_block", "0 * row_block"
)
@pytest.mark.mutation(
    "slope-of-gelu-forgotten",
    "triton_kernels.py",
    "(sigmoid + active * (1 - sigmoid) * slope)",
    "(sigmoid + active * (1 - sigmoid))",
)
@pytest.mark.mutation(
    "spread-to-one-place",
    "triton_kernels.py",
    "tl.store(result + place * width + at, values",
    "tl.store(result + at, values",
)
def test_triton_kernels_equal_plain_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("kernel_cases.py")
    done = subprocess.run(
        [sys.executable, str(cases)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
