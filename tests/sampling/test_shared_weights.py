"""One copy of the frozen base: vLLM's engine reads the trainer's memory, and computes what it would with its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.models.load_engines import OneCopy
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.lent_weights import LentWeights
from tinker_local.types import SamplingParams

OWN = {
    "gpt_oss": ("routed_experts.w13_weight", "routed_experts.w2_weight"),
    "gemma3": ("vision_model.encoder.layers.0.self_attn.qkv_proj.weight",),
}
"""How names of matrices end that stay vLLM's: experts that it transposes, and what it joins in a tower that
transformers has apart."""

SEEING = ("qwen3_vl", "gemma3")


def write_model(family: Any, folder: Path) -> str:
    make: Any = make_tiny_vl_model if family in SEEING else make_tiny_text_model
    return str(make(folder, family=family))


def trainer_of(model: str) -> HFTrainer:
    return HFTrainer(TrainerConfig(model, name="tiny", dtype="float32", device="cpu"))


def sampler_of(model: str, lent: LentWeights | None) -> VLLMSampler:
    return VLLMSampler(
        EngineOptions(model, dtype="float32", max_rank=16, kv_cache_bytes=2**26, lent=lent), EngineThread()
    )


async def logprobs(sampler: VLLMSampler) -> Any:
    tokens = np.arange(5, 60, dtype=np.int32)
    work = SampleWork(
        RenderedInput(tokens), None, SamplingParams(max_tokens=8, temperature=0.0, stop=()), prompt_logprobs=True
    )
    return (await sampler.sample(work)).prompt_logprobs


def not_packed(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's function that packs the matrix of `layer` for a CPU, as there is none on a GPU."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.mark.more
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_moe", "gpt_oss", "qwen3_5_text", "gemma3"])
async def test_vllm_reads_the_trainers_matrices(
    family: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(family, tmp_path / "model")
    if not packed:
        monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", not_packed)
    alone = sampler_of(model, None)
    try:
        expected = await logprobs(alone)
    finally:
        await alone.close()
    trainer = trainer_of(model)
    lent = trainer.lend()
    sampler = sampler_of(model, lent)
    try:
        np.testing.assert_array_equal(await logprobs(sampler), expected)
        engine: Any = sampler._engine._engine
        memory = {tensor.untyped_storage().data_ptr() for tensor in lent.tensors.values()}
        own = [
            name
            for name, parameter in served_model(engine).named_parameters()
            if parameter.dim() >= 2 and "lora" not in name and parameter.untyped_storage().data_ptr() not in memory
        ]
        shared, whole = sampler.shared_bytes
        assert 0 < shared <= whole
        if not packed:
            assert all(name.replace("layers.1.", "layers.0.").endswith(OWN.get(family, ())) for name in own), own
            assert len(own) == 2 * len(OWN.get(family, ()))
            assert not own or shared < whole
        lent.verify()
    finally:
        await sampler.close()


async def test_a_write_into_lent_weights_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines would compute with it, so that comparing them shows nothing."""
    model = write_model("qwen3", tmp_path / "model")
    lent = trainer_of(model).lend()

    def writes(layer: Any, remove_weight: bool) -> None:
        not_packed(layer, remove_weight)
        layer.weight.data[0, 0] += 1e-3

    monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", writes)
    with pytest.raises(RuntimeError, match=r"the frozen weights have changed in memory: \S+ and 9 more"):
        sampler_of(model, lent)


async def test_a_model_that_cannot_share_gets_a_copy_and_says_why(tmp_path: Path) -> None:
    """A matrix that vLLM's loading leaves as it was made, which is lost by then."""
    model = write_model("qwen3", tmp_path / "model")
    trainer = trainer_of(model)
    lent = trainer.lend()
    missing = LentWeights({name: tensor for name, tensor in lent.tensors.items() if "o_proj" not in name})
    trainer.lend = lambda: missing  # type: ignore[method-assign]
    told: list[str] = []
    engine = EngineOptions(model, dtype="float32", max_rank=16, kv_cache_bytes=2**26)
    one = OneCopy(lambda: trainer, engine, told.append)
    one.trainer()
    sampler = one.sampler()
    try:
        assert sampler.shared_bytes == (0, 0)
        assert told == [
            f"{model}: trainer and sampler have a copy of the weights each: vLLM loads nothing into "
            "model.layers.0.self_attn.o_proj.weight"
        ]
        assert len(await logprobs(sampler)) == 55
    finally:
        await sampler.close()
