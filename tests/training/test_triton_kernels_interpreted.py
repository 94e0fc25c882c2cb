"""The Triton kernels equal plain torch in Triton's interpreter, which runs the same code on a CPU.

It simulates neither warps nor accesses outside the tensors; `test_training_on_gpu.py` runs the same cases on a GPU.
"""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

pytestmark = pytest.mark.more


@pytest.mark.mutation(
    "rows-by-expert-alone",
    "Routing.of",
    "keys = experts if of_tokens is None else experts * several + of_tokens[:, None]",
    "keys = experts if of_tokens is None else experts * several",
)
@pytest.mark.mutation(
    "last-tile-of-a-group-left-out",
    "_start_groups",
    "needed = (found + tile_rows - 1) // tile_rows",
    "needed = found // tile_rows",
)
def test_triton_kernels_equal_plain_torch_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("kernel_cases.py"))
