"""Language layers of models that see and have no family: which decoder trains them, and what both decoders compute."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.families.line_up import SEEING_BY_AUTOGRAD
from tinker_local.backend.models.agreement import with_random_b
from tinker_local.backend.options import DecoderName
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import LoraConfig
from transformers import AutoModelForImageTextToText

from tests.families.test_models_found_to_see import FOUND, WITH_EXPERTS, rendered
from tests.float64 import InFloat64
from tests.training.autograd_reference import assert_computes_like

pytestmark = pytest.mark.more

BY_AUTOGRAD = (*SEEING_BY_AUTOGRAD, "granite_vision")
"""Architectures with a part of a layer that is not written out."""
COMPARED_HERE = [each for each in FOUND if each not in (*BY_AUTOGRAD, *WITH_EXPERTS)]
"""Those that transformers with hooks on linear modules can be compared with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("layers")

    def make(architecture: str) -> Path:
        found = root / architecture
        return found if found.exists() else make_tiny_seeing_model(found, architecture)

    return make


def weighted(given: RenderedInput, seed: int) -> TrainDatum:
    """Random weights on what follows text."""
    weights = np.random.default_rng(seed).standard_normal(given.length).astype(np.float32)
    weights[given.holds_features] = 0
    return TrainDatum(given, np.roll(given.token_ids, -1).astype(np.int64), {"weights": weights})


def data(folder: Path) -> Sequence[TrainDatum]:
    """Two that begin alike, picture and all, one without a picture, and one with two pictures of which the first is at
    its start."""
    inputs = [
        rendered(folder, [*range(30, 41)], (120, 60), [*range(50, 67)]),
        rendered(folder, [*range(30, 41)], (120, 60), [*range(50, 60), 20, 21]),
        rendered(folder, [*range(70, 80)]),
        rendered(folder, (60, 100), [30, 41, 52], (64, 64), [*range(90, 99)]),
    ]
    return [weighted(each, seed) for seed, each in enumerate(inputs)]


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
@pytest.mark.parametrize("architecture", COMPARED_HERE)
def test_layers_that_are_written_out_compute_what_transformers_does_in_float64(
    architecture: str, decoder: DecoderName, folder: Any
) -> None:
    """Logprobs, and the gradient of each matrix of two adapters in the same rows, to 1e-9."""
    path = folder(architecture)
    with InFloat64():
        ours = HFTrainer(TrainerConfig(str(path), name="tiny", dtype="float64", decoder=decoder, device="cpu"))
        theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    assert ours.trains.startswith(f"trained by the {decoder} decoder; ")
    for name, rank in (("a", 3), ("b", 5)):
        ours.create_adapter("fresh", LoraConfig(rank=rank, seed=rank))
        ours.load_adapter(name, with_random_b(ours.capture("fresh", optimizer=False)))
        ours.remove_adapter("fresh")
    assert_computes_like(ours, theirs, [TrainWork(name, list(data(path)), "cross_entropy") for name in "ab"])


@pytest.mark.parametrize("architecture", FOUND)
def test_a_start_says_which_decoder_trains_and_takes_the_written_out_one_where_it_can(
    architecture: str, folder: Any
) -> None:
    decoder = "autograd" if architecture in BY_AUTOGRAD else "written-out"
    ours = HFTrainer(TrainerConfig(str(folder(architecture)), name="tiny", device="cpu"))
    assert ours.trains.startswith(f"trained by the {decoder} decoder; ")
