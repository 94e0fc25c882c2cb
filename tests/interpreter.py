"""Runs programs of this folder's tests with Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(program: Path) -> None:
    """Run `program` with kernels interpreted on the CPU; it has to succeed. Skips the test without Triton."""
    pytest.importorskip("triton")
    root = str(Path(__file__).parents[1])  # programs import from `tests`
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
