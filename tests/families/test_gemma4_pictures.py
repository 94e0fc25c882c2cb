"""Pictures in Gemma 4, tiny models of both kinds: the trainer against transformers' whole forward in float64."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tinker_local.backend import BackendOptions
from tinker_local.backend.models.load_engines import check_model
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.training.model.load_model import load_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import UnsupportedError

from tests.families.test_models_found_to_see import learnt
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
        config["vision_config"]["default_output_length"] = window  # vLLM reads it, and the trainer does not
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
    assert ours.trains.endswith("pictures of one size are computed together")
    works = []
    for place, rank in enumerate((4, 1)):
        add_adapter(ours, f"{place}", rank=rank, seed=place)
        works.append(TrainWork(f"{place}", learnt(folder), "cross_entropy"))
    assert_computes_like(ours, theirs, works)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "wide pictures": (
        "gemma4_dense",
        {"sliding_window": 32},
        r"images have up to 70 positions \(default_output_length\), more than the sliding_window of 32",
    ),
    "all forward": (
        "gemma4_dense",
        {"use_bidirectional_attention": "all", "sliding_window": 190},
        "use_bidirectional_attention is 'all'",
    ),
    "few embeddings": ("gemma4", {"vocab_size": 1024}, r"vocab_size_per_layer_input is \d+ and vocab_size 1024"),
    "padding": ("gemma4", {"pad_token_id": 1}, "pad_token_id is 1: layers read its embeddings at positions of images"),
}
"""Fields of text configs with which models are refused, and why."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_computes_otherwise_is_refused_by_the_config(
    case: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, fields, why = REFUSED[case]
    shutil.copytree(folders(architecture), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    config["text_config"] |= fields
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("tinker_local.backend.training.model.load_model.check_weights", lambda *_: None)
    with pytest.raises(UnsupportedError, match=why):
        check_model(str(tmp_path / "model"), BackendOptions())


def test_shards_are_refused(folders: Any) -> None:
    folder = str(folders("gemma4_dense"))
    with pytest.raises(UnsupportedError, match=r"read keys and values of each other.* divided over 2 ranks"):
        load_model(TrainerConfig(folder, name="tiny", device="cpu", shards=2))
