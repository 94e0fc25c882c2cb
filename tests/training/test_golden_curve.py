"""The losses of a short training run equal stored ones: however a step is computed, its result stays the same.

This same run computed the stored numbers in float64. Nothing rewrites them automatically. If you change them, you
change what training means; say why.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import AdamParams, LoraConfig

from tests.float64 import InFloat64

STORED = Path(__file__).with_name("golden_curve.json")
STEPS = 12


@pytest.fixture
def golden_model(tmp_path: Path, model_path: Any) -> Any:
    """The tiny Qwen3-VL, whose weights depend only on their names, not on the order in which they are drawn."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_path("qwen3_vl"), dtype=torch.float32)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim > 1:
            rng = np.random.default_rng(list(name.encode()))
            drawn = rng.standard_normal(parameter.shape) * 0.25
            parameter.data.copy_(torch.from_numpy(drawn.astype(np.float32)))
    model.save_pretrained(tmp_path / "golden")
    return tmp_path / "golden"


def curve(trainer: Any, make: Any) -> Any:
    """The losses of two adapters with different ranks and loss functions, trained together on text and images."""
    trainer.create_adapter("a", LoraConfig(rank=8, seed=1))
    trainer.create_adapter("b", LoraConfig(rank=4, seed=2, train_mlp=False))
    data = [make.datum(17), make.datum(30, [(3, (4, 6)), (12, (4, 4))]), make.datum(9, [(0, (2, 4))])]
    policy = [make.datum(n, loss_fn="importance_sampling") for n in (12, 25)]
    for datum in policy:
        datum.loss_inputs["logprobs"][:] = -5
    adam = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
    losses = []
    for _ in range(STEPS):
        works = [
            TrainWork("a", data, "cross_entropy", loss_of("cross_entropy").complete_settings({})),
            TrainWork("b", policy, "importance_sampling", loss_of("importance_sampling").complete_settings({})),
        ]
        results = trainer.forward_backward(works)
        losses.append([result.metrics["loss:sum"] for result in results])
        for name in "ab":
            trainer.optim_step(name, adam)
    return np.array(losses)


def test_the_loss_curve_equals_the_stored_one(golden_model: Any, make: Any) -> None:
    with InFloat64():
        losses = curve(HFTrainer(TrainerConfig(str(golden_model), name="golden", dtype="float64", device="cpu")), make)
    stored = np.array(json.loads(STORED.read_text()))
    assert abs(stored[-1, 0] - stored[0, 0]) > 1, "a flat curve proves nothing"
    np.testing.assert_allclose(losses, stored, rtol=1e-6, atol=1e-6)
