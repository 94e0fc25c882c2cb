"""Rotary frequencies that depend on length ("longrope", as in Phi-3) are those of the context, not of a row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.tiny_models.make_models import make_tiny_text_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import LoraConfig

from tests.float64 import InFloat64
from tests.training.conftest import SMALL

ORIGINAL = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that was extended from `ORIGINAL` positions."""
    found = make_tiny_text_model(tmp_path_factory.mktemp("longrope") / "model", family="llama", shape=SMALL)
    file = found / "config.json"
    config = json.loads(file.read_text())
    half = config["head_dim"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.5] * half,
        "long_factor": [9.0] * half,
    }
    file.write_text(json.dumps(config))
    return found


def trainer_of(folder: Path, decoder: Any, context: int | None, dtype: str) -> Any:
    options: Any = {"dtype": dtype, "device": "cpu", "decoder": decoder}
    return HFTrainer(TrainerConfig(str(folder), name="longrope", max_context_length=context, **options))


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_a_sequence_packed_beside_one_beyond_the_original_length_equals_it_alone(
    decoder: str, folder: Path, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    ours = trainer_of(folder, decoder, None, "float64")
    add_adapter(ours, "a")
    data = [make.datum(length) for length in (40, 7, 1, 23)]
    (packed,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
    together = gradients(ours, "a")
    ours.discard_gradients("a")
    for datum, output in zip(data, packed.outputs, strict=True):
        (alone,) = ours.forward_backward([TrainWork("a", [datum], "cross_entropy")])
        np.testing.assert_allclose(output["logprobs"], alone.outputs[0]["logprobs"], rtol=1e-6, atol=1e-6)
    assert_close(together, gradients(ours, "a"), 1e-6)


@pytest.mark.parametrize(("context", "length"), [(None, 40), (ORIGINAL, 12)])
@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_frequencies_are_those_of_the_longest_sequence_that_the_context_allows(
    decoder: str, context: int | None, length: int, folder: Path, make: Any
) -> None:
    """For a sequence of that kind transformers chooses the same."""
    datum = make.datum(length)
    with InFloat64(), torch.no_grad():
        ours = trainer_of(folder, decoder, context, "float64")
        ours.create_adapter("a", LoraConfig(rank=2))
        (result,) = ours.forward_backward([TrainWork("a", [datum], "cross_entropy", backward=False)])
        options = {"attn_implementation": "eager", "dtype": torch.float64}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        ids = torch.from_numpy(datum.input.token_ids.astype(np.int64))[None]
        rows = theirs(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    wanted = rows.gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]
    np.testing.assert_allclose(result.outputs[0]["logprobs"], wanted, rtol=1e-7, atol=1e-7)
