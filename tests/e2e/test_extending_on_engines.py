"""docs/extending.md is true on real engines: its family trains and samples, with its loss and its optimizer."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.tiny_models.marks import QWEN, VOCAB_SIZE
from tinker_local.backend.tiny_models.tokenizer import write_tokenizer
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.types import (
    CreateModelRequest,
    Datum,
    LoraConfig,
    ModelInput,
    OptimizerConfig,
    OptimStepRequest,
    SamplingParams,
)

pytestmark = pytest.mark.more

PROMPT = [40, 41, 42, 43]


@pytest.fixture
def tiny_granite(tmp_path: Path) -> Path:
    """Each of Granite's multipliers far enough from 1 to matter."""
    config = transformers.GraniteConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        embedding_multiplier=3.0,
        attention_multiplier=0.1,
        residual_multiplier=0.7,
        logits_scaling=2.0,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=QWEN.token_id(QWEN.pad),
        eos_token_id=QWEN.token_id(QWEN.stops[0]),
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    write_tokenizer(tmp_path / "granite", QWEN, 256)
    return tmp_path / "granite"


def datum(tokens: list[int], advantage: float) -> Datum:
    advantages = np.where(np.arange(1, len(tokens)) < len(PROMPT), 0.0, advantage).astype(np.float32)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "advantages": advantages},
    )


def test_the_family_loss_and_optimizer_of_the_guide_train_and_sample(
    start_in_process: Any,
    guide: Callable[[str], ModuleType],
    tiny_granite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "granite", guide("families/granite.py").FAMILY)
    monkeypatch.setitem(LOSSES, "reinforce", guide("training/losses/reinforce.py").REINFORCE)
    monkeypatch.setitem(OPTIMIZERS, "sgd", guide("training/optimizers/sgd.py").SGD)
    options = BackendOptions(
        data_dir=tmp_path / "data", dtype="float32", kv_cache_bytes=2**26, max_rank=8, trainer="inline"
    )
    driver = start_in_process(InProcessBackend([ModelSource("tiny/granite", str(tiny_granite))], options))
    created = CreateModelRequest(
        session_id=driver.session,
        model_seq_id=0,
        base_model="tiny/granite",
        lora_config=LoraConfig(rank=4, seed=0),
        optimizer_config=OptimizerConfig(type="sgd"),
    )
    model = driver.result(driver.backend.runs.create(created))["model_id"]
    prompt, settings = ModelInput.from_ints(PROMPT), SamplingParams(max_tokens=6, seed=1)
    [(first, sampled, _)] = driver.sample(driver.base_sampler("tiny/granite"), prompt, 1, settings)
    data = [datum([*PROMPT, *first], 1.0)]

    before, loss = driver.gradient(model, data, "reinforce")
    np.testing.assert_allclose(before[0][len(PROMPT) - 1 :], sampled, atol=1e-4)
    assert loss == pytest.approx(-sum(sampled), abs=1e-3)
    for _ in range(5):
        step = {"type": "sgd", "learning_rate": 0.01}
        request = OptimStepRequest(model_id=model, seq_id=driver.next(model), optimizer_params=step)
        driver.result(driver.backend.training.optim_step(request))
        after, latest = driver.gradient(model, data, "reinforce")
    assert latest < loss - 0.1

    scores = driver.score(driver.sampler(model), ModelInput.from_ints([*PROMPT, *first]))
    np.testing.assert_allclose(scores[1:], after[0], atol=1e-4)
