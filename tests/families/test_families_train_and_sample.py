"""Llama 3, Mistral, Qwen2.5, Gemma 2 and Gemma 3 train and sample, and what they write loads elsewhere."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import peft
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.patches import apply_to_process
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import AdamParams, LoraConfig, SamplingParams
from transformers import AutoModelForCausalLM

from tests.float64 import Exact

pytestmark = pytest.mark.more

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gemma3_text", "gemma4_text")
ON_GPU = torch.cuda.is_available()
TOLERANCE = 0.5
"""Nats between trainer and sampler on a GPU, where both compute in bfloat16. In float32, `Exact` knows it."""

ADAPTERS = {
    "everything": LoraConfig(rank=8, seed=1),
    "attention": LoraConfig(rank=2, seed=2, train_mlp=False, train_unembed=False),
    "mlp": LoraConfig(rank=4, seed=3, train_attn=False, train_unembed=False),
    "head": LoraConfig(rank=3, seed=4, train_attn=False, train_mlp=False),
}
LENGTHS = (5, 40, 23)
"""Of prompts and data; the sliding windows are 16 positions long."""


def tokens(seed: int, length: int) -> npt.NDArray[np.int32]:
    """Ordinary token ids."""
    return np.random.default_rng(seed).integers(20, 380, length).astype(np.int32)


def data(seed: int) -> list[TrainDatum]:
    found = []
    for index, length in enumerate(LENGTHS):
        ids = tokens(10 * seed + index, length + 1)
        weights = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
        found.append(TrainDatum(RenderedInput(ids[:-1]), ids[1:].astype(np.int64), {"weights": weights}))
    return found


def written(folder: Path, state: AdapterState) -> None:
    """The files of a checkpoint."""
    folder.mkdir()
    write_adapter(folder, state)


@dataclass
class Trained:
    """A tiny model of `family` and a trainer of it with the trained `ADAPTERS`."""

    family: str
    folder: Path
    trainer: HFTrainer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trained]:
    """Each family, its adapters trained in the same steps, in shared rows."""
    found = {}
    for family in FAMILIES:
        folder = make_tiny_text_model(tmp_path_factory.mktemp(family) / "model", family=family)
        trainer = HFTrainer(TrainerConfig(str(folder), name="tiny"))
        for name, config in ADAPTERS.items():
            trainer.create_adapter(name, config)
        for _ in range(3):
            trainer.forward_backward(
                [TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
            )
            for name in ADAPTERS:
                trainer.optim_step(name, AdamParams(learning_rate=0.02))
        found[family] = Trained(family, folder, trainer)
    return found


@pytest.fixture(scope="module")
def thread() -> EngineThread:
    return EngineThread()


@pytest.mark.rotated(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_sampler_agree(
    models: Mapping[str, Trained], family: str, thread: EngineThread, tmp_path: Path
) -> None:
    """On the base and on adapters of different ranks, in the same steps; prompts and what is sampled are longer than
    the window."""
    trainer = models[family].trainer
    for adapter in ADAPTERS:
        written(tmp_path / adapter, trainer.capture(adapter, optimizer=False))
    asked = [(name, seed, length) for name in (None, *ADAPTERS) for seed, length in enumerate(LENGTHS)]

    async def sample() -> list[Any]:
        sampler = VLLMSampler(EngineOptions(str(models[family].folder), max_rank=8, kv_cache_bytes=2**26), thread)
        try:
            return await asyncio.gather(
                *(
                    sampler.sample(
                        SampleWork(
                            RenderedInput(tokens(seed, length)),
                            None if name is None else AdapterVersion(f"{family}/{name}", tmp_path / name),
                            SamplingParams(max_tokens=24, seed=seed, stop=[]),
                            prompt_logprobs=True,
                        )
                    )
                    for name, seed, length in asked
                )
            )
        finally:
            await sampler.close()

    whole: defaultdict[str | None, list[RenderedInput]] = defaultdict(list)
    sampled: defaultdict[str | None, list[Any]] = defaultdict(list)
    for (name, seed, length), output in zip(asked, asyncio.run(sample()), strict=True):
        (sequence,) = output.sequences
        whole[name].append(RenderedInput(np.concatenate([tokens(seed, length), sequence.tokens.astype(np.int32)])))
        sampled[name] += [output.prompt_logprobs[1:], sequence.logprobs]
    exact = None if ON_GPU else Exact(trainer)
    for name, inputs in whole.items():
        ours, theirs = trainer.logprobs(name, *inputs), np.concatenate(sampled[name])
        if exact is None:
            np.testing.assert_allclose(theirs, ours, atol=TOLERANCE, rtol=0, err_msg=str(name))
        else:
            exact.assert_near(name, inputs, ours, theirs)
        effect = np.abs(ours - trainer.logprobs(None, *inputs)).max()
        assert name is None or effect > (2 * TOLERANCE if ON_GPU else 0.2), f"{name} changes logprobs by {effect:.2g}"


def test_gemma_3s_vocabulary_takes_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_to_process()
    from vllm.lora.layers import LogitsProcessorWithLoRA, logits_processor

    # Otherwise it asks the group of processes, which the first engine makes.
    monkeypatch.setattr(logits_processor, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(logits_processor, "get_tensor_model_parallel_rank", lambda: 0)
    processor = torch.nn.Module()
    processor.vocab_size = 262_144
    head = LogitsProcessorWithLoRA(processor, 8, torch.float32, torch.device("cpu"), None)
    head.create_lora_weights(1, SimpleNamespace(max_lora_rank=2, lora_dtype=torch.float32))
    assert head.lora_b_stacked.shape == (1, 1, 262_144, 2)
    assert type(processor.vocab_size) is int


def peft_logprobs(model: Any, datum: TrainDatum) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(datum.input.token_ids.astype(np.int64))[None], use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]


def peft_model(folder: Path, adapter: Path, **options: Any) -> Any:
    """With eager attention, the only one of transformers' that has soft caps."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return peft.PeftModel.from_pretrained(base, str(adapter), **options).eval()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_checkpoint_and_the_export(models: Mapping[str, Trained], family: str, tmp_path: Path) -> None:
    """The export has the names of the hosted service, where a tied head is called `model.unembed_tokens`."""
    trainer = models[family].trainer
    written(tmp_path / "checkpoint", trainer.capture("everything", optimizer=True))
    written(tmp_path / "export", trainer.export("everything"))
    inputs = [
        RenderedInput(np.append(datum.input.token_ids, datum.target_tokens[-1:].astype(np.int32))) for datum in data(7)
    ]
    exact, ours = None if ON_GPU else Exact(trainer), trainer.logprobs("everything", *inputs)
    for kind, options in {"checkpoint": {}, "export": {"key_mapping": {r"^model\.unembed_tokens": "lm_head"}}}.items():
        model = peft_model(models[family].folder, tmp_path / kind, **options)
        with torch.no_grad():
            theirs = torch.cat([peft_logprobs(model, datum) for datum in data(7)]).numpy()
        if exact is None:
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0, err_msg=kind)
        else:
            exact.assert_near("everything", inputs, ours, theirs)
