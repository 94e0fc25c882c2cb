"""The examples run, as a user runs them, against the tiny models, and reach what they promise."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tinker_local.backend.cli.tiny_model import tiny_model

from tests.conftest import Server, start_server

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


KINDS = ("qwen3_moe", "gpt_oss", "llama", "gemma3_text")


@pytest.fixture(scope="module")
def families_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny model of each of `KINDS`, made as users make them."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        CliRunner().invoke(tiny_model, ["--kind", kind, "--out", str(folder / kind)], catch_exceptions=False)
    models = [part for kind in KINDS for part in ("--model", f"tiny/{kind}={folder / kind}")]
    server = start_server(folder / "data", "--kv-cache", "0.25", *models)
    yield server
    server.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_supervised_loop_teaches_any_family_in_its_chat_format(families_server: Server, kind: str) -> None:
    printed = run("sl_loop.py", "--base-url", families_server.url, "--model", f"tiny/{kind}")
    assert "before training 0 of 6 right" in printed
    assert "\n6 of 6 right" in printed
    first, *_, last = (float(loss) for loss in re.findall(r"nll per answer ([0-9.]+)", printed))
    assert last < first / 10


@pytest.mark.rotated(2)
def test_demo_takes_another_family(tmp_path: Path) -> None:
    """A few steps only: what each family reaches with all of them is in the README."""
    few = ("--epochs", "0.2", "--min-accuracy", "0", "--max-blank-accuracy", "1", "--eval-images", "20")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / "demo.py"), "--kind", "qwen3_5", *few],
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "runs" / "demo" / "report.json").read_text())
    assert report["nll"] < report["base_nll"] / 4, done.stdout + done.stderr
    config = json.loads((tmp_path / "models" / "demo-qwen3_5" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"


def test_in_process_example_needs_no_server(tiny_models: dict[str, Path]) -> None:
    assert "loss" in run("in_process.py", "--model", f"tiny/text={tiny_models['tiny/text']}")


def test_an_example_saves_as_it_goes_and_goes_on_from_there(real_server: Any) -> None:
    arguments = ("--base-url", real_server.url, "--model", "tiny/text", "--steps", "30")
    printed = run("sl_loop.py", *arguments, "--save-every", "20")
    (path,) = re.findall(r"step 20: saved (tinker://\S+/weights/sl-loop-000020)", printed)
    again = run("sl_loop.py", *arguments, "--resume", path)
    assert re.findall(r"^step +(\d+)", again, re.MULTILINE) == ["20", "25", "29"]
    last = [line for line in printed.splitlines() if line.startswith("step  29")]
    assert last == [line for line in again.splitlines() if line.startswith("step  29")]
    assert re.search(r"saved as tinker://\S+/weights/sl-loop and tinker://\S+/sampler_weights/sl-loop", again)


def test_a_step_without_gradient_is_saved_too(real_server: Any) -> None:
    """With one answer to each prompt there is nothing to compare, so no step of rl_loop.py has a gradient."""
    arguments = ["--base-url", real_server.url, "--model", "tiny/text", "--group-size", "1", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / "rl_loop.py"), *arguments, "--save-every", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert re.findall(r"^step (\d+): saved", done.stdout, re.MULTILINE) == ["1", "2"], done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["sl_loop.py", "rl_loop.py", "red_square.py", "color_square.py", "grid_walk.py", "vlm_classifier.py"]
)
def test_a_missing_server_is_a_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / name), "--model", "m", "--base-url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no tinker-local server answers at http://127.0.0.1:1")
    assert done.stderr.count("\n") == 1


def test_what_random_weights_say_is_not_called_done(real_server: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / "sl_loop.py"), "--model", "tiny/text", "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TINKER_BASE_URL": real_server.url},
    )
    assert done.returncode == 1
    assert "random weights: too few steps" in done.stderr
