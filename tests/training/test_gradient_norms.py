"""The gradient's norm before clipping, of the whole adapter and, if enabled, of each module."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.fakes import FakeModel, FakeTrainer
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.types import AdamParams, LoraConfig

CLIPPED = AdamParams(grad_clip_norm=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_module_reports_the_norm_of_its_own_gradient(
    dtype: Any, trainer: Any, add_adapter: Any, make: Any, gradients: Any
) -> None:
    ours = trainer("qwen3", dtype=dtype, module_gradient_norms=True)
    add_adapter(ours, "a", train_unembed=False)
    ours.forward_backward([make.work("a", [9, 4, 20])])
    squares: defaultdict[str, float] = defaultdict(float)
    for name, gradient in gradients(ours, "a").items():
        path = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        squares[f"grad_norm/{path}"] += float((gradient.astype(np.float64) ** 2).sum())
    metrics = ours.optim_step("a", CLIPPED)
    assert "grad_norm/model.layers.1.mlp.down_proj" in metrics
    total = metrics.pop("grad_norm")
    assert metrics == {name: pytest.approx(math.sqrt(square), rel=1e-9) for name, square in squares.items()}
    assert total == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-9)
    assert total > CLIPPED.grad_clip_norm


def test_module_norms_are_reported_only_if_enabled(trainer: Any, add_adapter: Any, make: Any) -> None:
    ours = trainer("qwen3")
    add_adapter(ours, "a")
    ours.forward_backward([make.work("a", [9])])
    assert ours.optim_step("a", CLIPPED).keys() == {"grad_norm"}


def test_the_fake_trainer_reports_modules_too() -> None:
    fake = FakeTrainer(FakeModel(), module_gradient_norms=True)
    fake.create_adapter("a", LoraConfig(rank=4, seed=1))
    inputs = RenderedInput(np.arange(5, dtype=np.int32))
    fake.forward_backward(
        [TrainWork("a", [TrainDatum(inputs, np.arange(1, 6), {"weights": np.ones(5, np.float32)})], "cross_entropy")]
    )
    metrics = fake.optim_step("a", CLIPPED)
    total = metrics.pop("grad_norm")
    assert len(metrics) > 1
    assert math.hypot(*metrics.values()) == pytest.approx(total)
