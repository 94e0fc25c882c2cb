"""Pictures in Gemma 4, tiny models of both kinds: the trainer against transformers' whole forward in float64."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig

from tests.families.test_models_found_to_see import datum, rendered
from tests.training.autograd_reference import assert_computes_like, attention_in_float64, norms_in_float64
from tests.training.conftest import add_adapter  # noqa: F401

pytestmark = pytest.mark.more

WINDOW = 24
"""Positions, fewer than a picture has."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("gemma4")

    def make(architecture: str, window: int | None = None) -> Path:
        folder = root / architecture
        if not folder.exists():
            make_tiny_seeing_model(folder, architecture)
        if window is None:
            return folder
        narrow = root / f"{architecture}_{window}"
        shutil.copytree(folder, narrow, dirs_exist_ok=True)
        config = json.loads((narrow / "config.json").read_bytes())
        config["text_config"]["sliding_window"] = window
        (narrow / "config.json").write_text(json.dumps(config))
        return narrow

    return make


@pytest.mark.parametrize(
    ("architecture", "window", "decoder"),
    [
        ("gemma4_dense", None, "written-out"),
        ("gemma4_dense", WINDOW, "written-out"),
        ("gemma4", None, "written-out"),
        ("gemma4_dense", WINDOW, "autograd"),
    ],
)
def test_adapters_on_rows_with_pictures_equal_transformers_with_each_alone(
    architecture: str,
    window: int | None,
    decoder: Any,
    folders: Any,
    add_adapter: Any,  # noqa: F811
) -> None:
    """Logprobs, and gradients of all matrices to 1e-9. Pictures are between texts, at the start, two in a prompt."""
    folder = folders(architecture, window)
    ours = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype="float64", device="cpu", decoder=decoder))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    for model in (ours._loaded.model, theirs):
        norms_in_float64(model)
    attention_in_float64(theirs)
    given = [
        rendered(folder, [*range(30, 41)], (120, 60), [*range(50, 67)]),
        rendered(folder, [*range(30, 41)], (120, 60), [*range(50, 60), 20, 21]),  # begins alike, picture and all
        rendered(folder, [*range(70, 80)]),
        rendered(folder, (60, 100), [30, 41, 52], (64, 64), [*range(90, 99)]),
    ]
    works = []
    for place, rank in enumerate((4, 1)):
        add_adapter(ours, f"{place}", rank=rank, seed=place)
        works.append(TrainWork(f"{place}", [datum(each) for each in given], "cross_entropy"))
    assert_computes_like(ours, theirs, works)
