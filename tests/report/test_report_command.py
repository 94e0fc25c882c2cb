"""`tinker-local report` on real engines: everything measured, and nothing of the user's on the page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tinker_local.backend.tiny_models import make_tiny_vl_model

pytestmark = pytest.mark.more

SECTIONS = (
    *("Machine", "Model and plan", "Start", "Agreement by target", "Agreement by position"),
    *("KL(sampler, trainer)", "Speed", "Memory as used", "Gradients"),
)


def test_a_page_of_a_model_that_sees_has_all_parts_and_no_names(tmp_path: Path) -> None:
    folder = tmp_path / "merger-plans"
    make_tiny_vl_model(folder)
    out = tmp_path / "page.md"
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "report", f"acme={folder}", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = out.read_text()
    assert re.findall("^## (.*)$", page, re.MULTILINE) == list(SECTIONS)
    for secret in ("merger", "acme", str(tmp_path), tmp_path.name, str(Path.home())):
        assert secret not in page
    rows = dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) >= {"train_attn", "train_mlp", "train_unembed", "text", "after an image", "1 to 31", "torch"}
    kinds = [cells for name, cells in rows.items() if "tensors)" in name]
    assert len(kinds) == 8
    assert all(float(cell) < 1e-3 for cells in kinds for cell in cells.split(" | "))
    tokens, v1, v2, largest = rows["after an image"].split(" | ")
    assert int(tokens) > 100
    assert abs(float(v1)) < 1e-4
    assert float(v2) < 1e-8
    assert float(largest) < 1e-3


def test_a_folder_that_does_not_exist_is_said_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "report", "acme=/does/not/exist"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "no folder /does/not/exist" in done.stderr
