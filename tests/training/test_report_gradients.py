"""A report finds a trainer whose gradients are not those of transformers, and says so of one whose gradients are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.report.measure import _gradients
from tinker_local.backend.report.reference import Computed, compute, distances
from tinker_local.backend.training.model.load_model import DTYPES
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum
from tinker_local.backend.training.trainer_config import TrainerConfig


def computed(folder: Path, add_adapter: Any, data: Sequence[TrainDatum]) -> tuple[AdapterState, Computed]:
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype="float32", device="cpu"))
    experts = trainer._loaded.family.lora.experts is not None
    state = add_adapter(trainer, "a", rank=2, train_mlp=not experts)
    return state, _gradients(trainer, state, data)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen2_5_vl", "qwen3_moe", "qwen3_5_text", "gemma3_text"])
def test_right_gradients_are_near(family: str, model_path: Any, make: Any, add_adapter: Any) -> None:
    data = [make.datum(11), make.datum(9)]
    if "vl" in family:
        data.append(make.datum(30, [(3, (4, 6)), (12, (4, 4))]))
    state, ours = computed(model_path(family), add_adapter, data)
    exact = compute(str(model_path(family)), DTYPES["float64"], "cpu", state, data)
    theirs = compute(str(model_path(family)), DTYPES["float32"], "cpu", state, data)
    apart = distances(ours.gradients, exact.gradients)
    assert sum(each.tensors for each in apart) == len(state.tensors)
    floor = max(each.relative for each in distances(theirs.gradients, exact.gradients))
    assert max(each.relative for each in apart) <= 20 * floor, (apart, floor)


def test_a_wrong_gradient_is_seen_in_its_kind_alone(model_path: Any, make: Any, add_adapter: Any) -> None:
    data = [make.datum(11)]
    state, ours = computed(model_path("qwen3"), add_adapter, data)
    exact = compute(str(model_path("qwen3")), DTYPES["float64"], "cpu", state, data)
    wrong = {name: array * (1.1 if ".k_proj." in name else 1) for name, array in ours.gradients.items()}
    found = {each.kind: each.relative for each in distances(wrong, exact.gradients)}
    assert found.pop("k_proj") == pytest.approx(0.1, rel=1e-3)
    assert max(found.values()) < 1e-4


def test_an_adapter_that_transformers_has_no_module_for_is_refused(
    model_path: Any, make: Any, add_adapter: Any
) -> None:
    state, _ = computed(model_path("qwen3"), add_adapter, [make.datum(5)])
    odd = {name.replace("q_proj", "odd_proj"): np.asarray(array) for name, array in state.tensors.items()}
    with pytest.raises(ValueError, match=r"tensors of the adapter have no module in transformers: .*odd_proj"):
        compute(str(model_path("qwen3")), DTYPES["float32"], "cpu", replace(state, tensors=odd), [make.datum(5)])
