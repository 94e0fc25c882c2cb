"""The examples run, as a user runs them, against the tiny models, and reach what they promise."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.more

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, seconds: float = 240) -> str:
    """What an example prints; fails with it if the example fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "model"), [("sl_loop.py", "tiny/text"), ("rl_loop.py", "tiny/text"), ("red_square.py", "tiny/vision")]
)
def test_example_reaches_its_mark(real_server: Any, name: str, model: str) -> None:
    printed = run(name, "--base-url", real_server.url, "--model", model)
    for divergence in re.findall(r"KL.*: ([0-9.e+-]+)", printed):
        assert float(divergence) < (0.02 if torch.cuda.is_available() else 1e-6)  # bfloat16 there, float32 here
    assert name != "rl_loop.py" or "KL" in printed


def test_in_process_example_needs_no_server(tiny_models: dict[str, Path]) -> None:
    assert "loss" in run("in_process.py", "--model", f"tiny/text={tiny_models['tiny/text']}")
