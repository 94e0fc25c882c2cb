"""Recipes for pictures on models that see and have no family here: the examples, and the cookbook's own classifier."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import numpy as np
import pytest
from PIL import Image
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model

from tests.conftest import Server, start_server
from tests.examples.test_examples_classifier import COLOURS, EXAMPLES, write_colours

pytestmark = [pytest.mark.more, pytest.mark.rotated(3)]

MODELS = ("llava", "internvl", "idefics3", "qwen2_vl", "mistral3")
"""Architectures: as many positions for every picture, tiles, tiles with marks, positions of two axes, rows."""


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_tiny_seeing_model(tmp_path_factory.mktemp("seeing") / request.param, request.param)
    options = ("--model", f"tiny/sees={folder}", "--dtype", "float32", "--max-rank", "32", "--kv-cache", "0.25")
    one = start_server(tmp_path_factory.mktemp("data"), *options)
    yield one
    assert one.stop() == 0


def done(server: Server, *command: str, folder: Path, seconds: float = 500) -> str:
    """What a program prints that finds `server` by its environment and runs in `folder`."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    environment |= {"TINKER_LOCAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    missed = "the mark was missed" in ended.stdout + ended.stderr  # in fewer steps than the example's own
    assert ended.returncode == 0 or missed, ended.stdout + ended.stderr
    return ended.stdout


def test_the_classifier_learns_colours(server: Server, tmp_path: Path) -> None:
    pictures = write_colours(tmp_path / "colours", 20)
    program = [str(EXAMPLES / "vlm_classifier.py"), "--model", "tiny/sees", "--base-url", server.url]
    settings = ["--steps", "30", "--rank", "16", "--batch-size", "16", "--learning-rate", "5e-3", "--clip", "1"]
    asked = ["--data", str(pictures), "--side", "64", "--question", "Which of {classes}?", "--out", "out"]
    done(server, *program, *settings, *asked, folder=tmp_path)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["accuracy"] >= 0.9
    assert report["blank_accuracy"] <= 0.5
    assert report["nll"] < 0.5 < report["base_nll"]


@pytest.mark.timeout(560)
def test_reward_rises_by_rl_on_pictures_in_two_turns(server: Server, tmp_path: Path) -> None:
    """And before training, sampler and trainer agree on what was sampled."""
    program = [str(EXAMPLES / "color_square.py"), "--model", "tiny/sees", "--base-url", server.url]
    printed = done(server, *program, "--steps", "12", "--groups", "12", "--out", "out", folder=tmp_path)
    returns = [float(value) for value in re.findall(r"return +(-?[0-9.]+) ", printed)]
    print("return by step", returns)
    assert np.mean(returns[-3:]) > np.mean(returns[:3]) + 0.15, printed
    (kl,) = re.findall(r"KL.*: ([0-9.e+-]+)", printed)
    assert float(kl) < 1e-6


def test_the_cookbooks_classifier_runs_unmodified_and_learns(server: Server, tmp_path: Path) -> None:
    """With its renderer of Qwen3-VL, as it has none for these, and the positions of the model's own processor."""
    write_caltech(tmp_path / "dpdl-benchmark" / "caltech101")
    recipe = ["-m", "tinker_local.client", "-m", "tinker_cookbook.recipes.vlm_classifier.train"]
    settings = {"model_name": "tiny/sees", "renderer_name": "qwen3_vl_instruct", "run_sampling_evaluator": False}
    settings |= {"base_url": server.url, "experiment_dir": str(tmp_path / "log"), "lora_rank": 8, "batch_size": 8}
    settings |= {"max_steps": 12, "eval_every": 6, "learning_rate": 5e-3}
    done(server, *recipe, *(f"{name}={value}" for name, value in settings.items()), folder=tmp_path)
    (file,) = (tmp_path / "log").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    print("nll by step", losses)
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) / 2


def write_caltech(folder: Path) -> None:
    """A data set of the recipe's form, of rectangles on noise."""
    for split, count in (("train", 128), ("test", 8)):
        rng = np.random.default_rng(count)
        labels = rng.integers(0, len(COLOURS), count).tolist()
        pictures = []
        for label in labels:
            pixels = rng.integers(96, 160, (48, 64, 1), dtype=np.uint8).repeat(3, 2)
            pixels[6:42, 8:56] = [*COLOURS.values()][label]
            pictures.append(Image.fromarray(pixels))
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*COLOURS])})
        made = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
