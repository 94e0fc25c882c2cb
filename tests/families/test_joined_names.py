"""Matrices that are joined have the same rows in vLLM: the table that says so, against vLLM's own modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.joined_names import BA, EXPERTS_DOWN, EXPERTS_GATE_UP, GATE_UP, OF_VLLM, QKV, QKVZ

SEEN = {
    "qwen2": {QKV.vllm, GATE_UP.vllm},
    "gemma3_text": {QKV.vllm, GATE_UP.vllm},
    "qwen3_5_text": {QKV.vllm, GATE_UP.vllm, QKVZ.vllm, BA.vllm},
    "qwen3_moe": {QKV.vllm, *OF_VLLM.values()},
    "gpt_oss": {QKV.vllm, *OF_VLLM.values()},
    "mixtral": {QKV.vllm, *OF_VLLM.values()},
    "minimax_m2": {QKV.vllm, *OF_VLLM.values()},
    "glm4_moe": {QKV.vllm, GATE_UP.vllm, *OF_VLLM.values()},
    "qwen3_next": {QKV.vllm, GATE_UP.vllm, QKVZ.vllm, BA.vllm, *OF_VLLM.values()},
}
"""What vLLM's layers have, by the family."""


@pytest.mark.more
@pytest.mark.parametrize("family", SEEN)
async def test_joined_matrices_have_the_rows_of_vllms(family: Any, tmp_path: Path) -> None:
    """vLLM packs matrices for a CPU's products, so their numbers are seen in what they make of random rows."""
    make_tiny_text_model(tmp_path / "model", family=family)
    config = TrainerConfig(str(tmp_path / "model"), name="tiny", dtype="float32", device="cpu", decoder="written-out")
    layers: Any = HFTrainer(config)._loaded.decoder.layers  # type: ignore[attr-defined]
    sampler = VLLMSampler(EngineOptions(config.model, max_rank=16, kv_cache_bytes=2**26), EngineThread())
    try:
        seen = set()
        for name, module in served_model(sampler._engine._engine).named_modules():
            if "layers." not in name:
                continue
            layer = layers[int(name.split("layers.")[1].split(".")[0])]
            joined = {
                QKV.vllm: lambda layer=layer: layer[0].qkv,
                QKVZ.vllm: lambda layer=layer: layer[0].qkvz,
                BA.vllm: lambda layer=layer: layer[0].ba,
                GATE_UP.vllm: lambda layer=layer: (getattr(layer[1], "shared", None) or layer[1]).gate_up,
            }
            last = name.rpartition(".")[2]
            if last in joined:
                matrix, theirs = joined[last](), getattr(module, "base_layer", module)
                x = torch.randn(5, matrix.inputs)
                with torch.no_grad():
                    found = theirs(x)[0] - theirs(torch.zeros_like(x))[0]  # without the bias
                torch.testing.assert_close(found, matrix.times(x))
                seen.add(last)
            elif hasattr(module, OF_VLLM[EXPERTS_DOWN]):
                stacks = layer[1].weights
                for ours, stack in ((EXPERTS_GATE_UP, stacks.gate_up), (EXPERTS_DOWN, stacks.down)):
                    assert torch.equal(getattr(module, OF_VLLM[ours]), stack.weight)
                    seen.add(OF_VLLM[ours])
        assert seen == SEEN[family]
    finally:
        await sampler.close()
