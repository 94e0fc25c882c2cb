"""Trainer and sampler with experts of 8 or 4 bits: one copy of the codes, and adapters on experts, beside a dense model
of what the codes stand for."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.families import FAMILIES as FAMILY_OF
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.memory_holder import MemoryHolder
from tinker_local.types import AdamParams, SamplingParams

from tests.dense_twin import write_twin
from tests.families.test_experts import data, filled, new_trainer, tokens, write
from tests.float64 import Exact
from tests.interpreter import run_interpreted
from tests.sampling import packed_experts_cases
from tests.sampling.test_shared_weights import lent_to
from tests.training.gemma4_models import make_gemma4

TARGETS = ("experts.w1", "experts.w2", "experts.w3")
CODES = (torch.int8, torch.uint8)


def model_of(family: Any, folder: Path) -> Path:
    """With experts whose rows 32 divides."""
    if family == "gemma4_text":
        return make_gemma4(folder, "experts")
    shape = TextShape(intermediate_size=256, num_layers=4 if "5" in family else 2)
    if FAMILY_OF[family].vision is not None:
        return make_tiny_vl_model(folder, family=family, text=shape, tie_word_embeddings=False)
    return make_tiny_text_model(folder, family=family, shape=shape, tie_word_embeddings=False)


def check_one_copy(sampler: VLLMSampler, trainer: Any) -> None:
    """That vLLM's codes are the trainer's memory, of all that has codes there, experts too."""
    model: Any = served_model(sampler._engine._engine)
    memory = {piece.untyped_storage().data_ptr() for piece in lent_to(sampler).pieces}
    served = {name: each for name, each in model.named_parameters() if each.dtype in CODES}
    assert {name.rpartition(".")[2] for name in served} == {"qweight", "w13_weight", "w2_weight"}
    assert all(each.untyped_storage().data_ptr() in memory for each in served.values())
    trained = [each for each in trainer._loaded.model.parameters() if each.dtype in CODES]
    twice = [place.tensor(lent_to(sampler).pieces) for place in lent_to(sampler).again.values()]
    trained += [each for each in twice if each.dtype in CODES]
    assert sum(each.nbytes for each in served.values()) == sum(each.nbytes for each in trained)
    lent_to(sampler).verify()


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *(("qwen3_moe", "int8"), ("qwen3_moe", "int4"), ("gpt_oss", "int8")),
        *(("qwen3_5_moe_text", "int4"), ("qwen3_vl_moe", "int8")),
        ("gemma4_text", "int4"),
    ],
)
def test_both_engines_compute_with_what_the_codes_of_experts_stand_for(
    family: str, precision: str, tmp_path: Path
) -> None:
    """The base, adapters of each projection of experts alone, and one before and after training, in the same steps."""
    folder = model_of(family, tmp_path / "model")
    holder = MemoryHolder()
    trainer = new_trainer(folder, weights=precision, shared_weights=holder.address)
    full = trainer.capture("everything", optimizer=False)
    versions: dict[str, AdapterVersion | None] = {"base": None}
    for target in TARGETS:
        trainer.load_adapter(target, filled(full, target, 0.3))
        versions[target] = write(tmp_path / target, trainer.capture(target, optimizer=False))
    versions["everything"] = write(tmp_path / "new", full)
    trainer.load_adapter("trained", full)
    trainer.forward_backward([TrainWork("trained", data(5), "cross_entropy")])
    trainer.optim_step("trained", AdamParams(learning_rate=0.02))
    versions["trained"] = write(tmp_path / "trained", trainer.capture("trained", optimizer=False))
    prompts = [RenderedInput(tokens(seed, 21)) for seed in range(len(versions))]
    engine = EngineOptions(
        str(folder),
        dtype="float32",
        max_rank=16,
        kv_cache_bytes=2**26,
        adapters_per_step=4,
        shared_weights=holder.address,
        weights=precision,
    )

    async def sample() -> Sequence[Any]:
        sampler = VLLMSampler(engine, EngineThread())

        def asked(seed: int, version: AdapterVersion | None) -> SampleWork:
            params = SamplingParams(max_tokens=6, seed=seed, stop=[])
            return SampleWork(prompts[seed], version, params, prompt_logprobs=True)

        try:
            check_one_copy(sampler, trainer)
            works = [asked(seed, version) for seed, version in enumerate(versions.values())]
            return await asyncio.gather(*(sampler.sample(work) for work in works))
        finally:
            await sampler.close()

    try:
        outputs = asyncio.run(sample())
        exact = Exact(trainer, str(write_twin(folder, precision, tmp_path / "twin")))
        for name, prompt, output in zip(versions, prompts, outputs, strict=True):
            (sequence,) = output.sequences
            whole = replace(prompt, token_ids=np.concatenate([prompt.token_ids, sequence.tokens.astype(np.int32)]))
            sampled = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
            adapter = None if name == "base" else name
            ours = trainer.logprobs(adapter, whole)
            exact.assert_near(adapter, [whole], ours, sampled)
            if name != "base":
                effect = float(np.abs(ours - trainer.logprobs(None, whole)).max())
                assert effect > 0.02, f"{name} changes logprobs by {effect:.2g}"
    finally:
        trainer.close()
        holder.close()


@pytest.mark.more
def test_experts_of_vllm_with_packed_stacks_equal_plain_torch_in_the_interpreter() -> None:
    run_interpreted(Path(packed_experts_cases.__file__))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_experts_of_vllm_with_packed_stacks_equal_plain_torch_on_a_gpu() -> None:
    """Eagerly and in CUDA graphs: decoding, and more tokens than fit into one block of each expert."""
    packed_experts_cases.check_all("cuda", ((1, 8, 16, 2048, 768), (33, 8, 16, 2048, 768), (300, 4, 8, 256, 96)))
