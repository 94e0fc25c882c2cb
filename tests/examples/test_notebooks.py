"""The notebooks run from the first cell to the last, as programs, with a few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.more

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def run(server: Any, name: str, steps: int) -> str:
    """What a notebook prints; fails with the cell that fails."""
    command = [sys.executable, "-W", "ignore", str(NOTEBOOKS / f"{name}.py")]
    done = subprocess.run(
        [*command, "--model", "tiny/vision", "--steps", str(steps)],
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TINKER_BASE_URL": server.url},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "called from async context" not in done.stderr
    return done.stdout


def test_the_notebook_of_pictures_trains_and_answers(real_server: Any) -> None:
    printed = run(real_server, "fine_tune_on_pictures", 12)
    found = re.search(r"loss ([0-9.]+) -> ([0-9.]+) nats per answer; \d+% of 40 held-out signs", printed)
    assert found is not None, printed
    assert float(found[2]) < float(found[1]) / 2


def test_the_notebook_of_rl_samples_and_steps(real_server: Any) -> None:
    """After the supervised steps, which are always the same, the returns are about those of chance."""
    printed = run(real_server, "rl_with_images", 2)
    found = re.fullmatch(r"mean return ([0-9.]+) -> ([0-9.]+)", printed.strip())
    assert found is not None, printed
    assert 0.05 < float(found[1]) < 0.6


def test_every_notebook_is_tested_and_listed() -> None:
    names = {path.stem for path in NOTEBOOKS.glob("*.py")}
    assert names == {"fine_tune_on_pictures", "rl_with_images"}
    page = (NOTEBOOKS.parents[1] / "docs" / "examples.md").read_text()
    assert all(f"notebooks/{name}.py" in page for name in names)
