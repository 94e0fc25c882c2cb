"""On real weights and real text, logprobs and gradients are those of transformers and PEFT in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from transformers import AutoTokenizer

from tests.float64 import assert_as_near
from tests.training.test_lora_equals_peft import values_of_peft

pytestmark = pytest.mark.more

TEXT = Path(__file__).parents[2] / "README.md"


def test_gradients_on_real_text_are_as_near_to_float64_as_pefts(
    small_model: Path, add_adapter: Any, gradients: Any, tmp_path: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(small_model)
    ids = np.array(tokenizer.encode(TEXT.read_text())[:161], np.int32)
    data = [
        TrainDatum(RenderedInput(part[:-1]), part[1:].astype(np.int64), {"weights": np.ones(len(part) - 1, np.float32)})
        for part in (ids[:97], ids[96:])
    ]
    ours = HFTrainer(TrainerConfig(str(small_model), name="small", dtype="float32", device="cpu"))
    state = add_adapter(ours, "a", rank=8, train_unembed=False)
    (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
    assert isinstance(result, TrainResult)
    found = gradients(ours, "a")
    exact, of_gradients = values_of_peft(small_model, state, "float64", data, tmp_path / "float64")
    theirs, their_gradients = values_of_peft(small_model, state, "float32", data, tmp_path / "float32")
    logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
    assert_as_near({"logprobs": logprobs}, {"logprobs": theirs}, {"logprobs": exact})
    assert_as_near(found, their_gradients, of_gradients)
