"""On a GPU, in bfloat16: an adapter on each target alone changes the sampler's logprobs as it changes the trainer's."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_experts_alike, make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import LoraConfig, SamplingParams

from tests.families.test_experts import filled, pad_of, tokens, with_pictures, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SERVED = [name for name in FAMILIES if name not in ("qwen3_5_text", "qwen3_5_moe_text")]  # as with images
LENGTH = 60


@pytest.mark.parametrize(
    ("family", "train_vision"),
    [
        *((family, False) for family in SERVED),
        *((family, True) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")),
    ],
)
def test_each_target_alone_changes_both_engines_alike(family: Any, train_vision: bool, tmp_path: Path) -> None:
    """Of the decoder; with `train_vision`, of the vision tower.

    Rounding may send a token to another expert, so the mean over positions counts, not the largest difference, beside
    what the trainer itself loses by rounding. In Qwen3.5-MoE that alone makes 0.2 nats, so its experts are nearly alike
    there (their adapters are not). Some targets
    change less than bfloat16 rounds (the keys of Qwen3.5, which are normed), but do so in the same direction in both
    engines: `slope` is the sampler's change along the trainer's, 0 for a target that the sampler ignores.
    """
    make: Any = make_tiny_text_model if FAMILIES[family].vision is None else make_tiny_vl_model
    tied = family in ("gemma2", "lfm2_moe")  # of which vLLM has no others
    folder = make(tmp_path / "model", family=family, tie_word_embeddings=tied)
    if family == "qwen3_5_moe":
        make_experts_alike(folder)
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype="bfloat16"))
    trainer.create_adapter("everything", LoraConfig(rank=4, seed=1, train_vision=train_vision))
    full = trainer.capture("everything", optimizer=False)
    module = re.compile(r"(visual\..+)\.lora_B\." if train_vision else r"(\w+)\.lora_B\.")
    targets = sorted({match[1] for name in full.tensors if (match := module.search(name))})
    versions: dict[str, AdapterVersion | None] = {"base": None}
    for target in targets:
        trainer.load_adapter(target, filled(full, target, 0.2))
        versions[target] = write(tmp_path / target, trainer.capture(target, optimizer=False))
    prompts = [RenderedInput(tokens(seed, LENGTH)) for seed in range(3)]
    if (pad := pad_of(trainer)) is not None:
        prompts[not train_vision :] = with_pictures(folder, prompts[not train_vision :])

    async def scored() -> list[list[npt.NDArray[np.float32]]]:
        options = EngineOptions(
            str(folder),
            dtype="bfloat16",
            max_rank=16,
            kv_cache_bytes=2**28,
            adapters_per_step=4,
            enforce_eager=True,
            train_vision=train_vision,
        )
        sampler = VLLMSampler(options, EngineThread())

        async def of(version: AdapterVersion | None) -> list[npt.NDArray[np.float32]]:
            params = SamplingParams(max_tokens=1, seed=0, stop=[])
            works = [SampleWork(prompt, version, params, prompt_logprobs=True) for prompt in prompts]
            outputs = await asyncio.gather(*(sampler.sample(work) for work in works))
            return [np.asarray(output.prompt_logprobs, np.float32)[1:] for output in outputs]

        try:
            return [await of(version) for version in versions.values()]
        finally:
            await sampler.close()

    def of_trainer(name: str | None) -> Sequence[npt.NDArray[np.float32]]:
        return [trainer.logprobs(name, prompt) for prompt in prompts]

    is_text = np.concatenate([prompt.token_ids[1:] != pad for prompt in prompts])
    sampled = dict(zip(versions, (np.concatenate(found)[is_text] for found in asyncio.run(scored())), strict=True))
    ours = {name: np.concatenate(of_trainer(None if name == "base" else name))[is_text] for name in versions}
    rows = []
    for name in versions:
        gap = float(np.abs(sampled[name] - ours[name]).mean())
        wanted, found = ours[name] - ours["base"], sampled[name] - sampled["base"]
        effect, slope = float(np.abs(wanted).mean()), float(found @ wanted / max(wanted @ wanted, 1e-9))
        rows.append((name, gap, effect, slope))
        print(f"{family} {name}: gap {gap:.3f}; effect {effect:.2f}, slope {slope:.2f}")
    (_, noise, _, _), *targeted = rows
    trainer.close()
    exact = HFTrainer(TrainerConfig(str(folder), name="exact", dtype="float32"))
    rounding = float(
        np.abs(np.concatenate([exact.logprobs(None, each) for each in prompts])[is_text] - ours["base"]).mean()
    )
    exact.close()
    print(f"{family}: the engines differ by {noise:.3f}; the trainer is {rounding:.3f} from float32")
    assert noise < max(0.1, 2 * rounding), (noise, rounding)  # each engine rounds for itself
    for name, gap, effect, slope in targeted:
        assert gap < max(effect / 4, 1.5 * noise), (name, gap, effect, noise)
        assert 0.5 < slope < 1.5, (name, slope)
