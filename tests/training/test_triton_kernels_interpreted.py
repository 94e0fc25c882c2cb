"""The Triton kernels keep their contract as far as Triton's interpreter can tell: it runs the same code on a CPU.

It knows no warps and no memory beyond the tensors; `test_training_on_gpu.py` runs the same cases there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_kernels_equal_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("kernel_cases.py")
    done = subprocess.run(
        [sys.executable, str(cases)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
