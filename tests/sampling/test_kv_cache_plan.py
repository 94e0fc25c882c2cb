"""What `gpu_plan.py` counts for a sequence in the KV cache is what vLLM counts, for layers of all kinds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.models import gpu_plan
from tinker_local.backend.models.gpu_plan import model_sizes
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.tiny_models.text_families import QWEN3_5_SHAPE
from tinker_local.backend.vllm_engine.build_engine import EngineOptions, build_engine
from tinker_local.backend.vllm_engine.compat_vllm import scheduler, version
from transformers import AutoConfig

POSITIONS = 40
CONTEXT = 1000

MODELS: dict[str, Any] = {
    "qwen3": lambda out: make_tiny_text_model(out, shape=TextShape(num_layers=3)),
    # Three layers with a window and two without: two blocks of two, of which one has room for a layer more.
    "gpt_oss": lambda out: make_tiny_text_model(out, family="gpt_oss", shape=TextShape(num_layers=5)),
    # Six layers of linear attention and two of softmax attention.
    "qwen3_5": lambda out: make_tiny_vl_model(out, family="qwen3_5", text=replace(QWEN3_5_SHAPE, num_layers=8)),
}


def bytes_by_vllm(config: Any, groups: Any) -> int:
    """What vLLM says that a sequence of the longest context takes."""
    if version() < (0, 33):
        from vllm.v1.core.kv_cache_utils import _max_memory_usage_bytes_from_groups

        return int(_max_memory_usage_bytes_from_groups(config, groups))
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.kv_cache_planning import _max_memory_usage_bytes_from_groups

    return int(_max_memory_usage_bytes_from_groups(get_kv_cache_config_builder(config), config, groups))


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_takes_what_vllm_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU blocks are larger than on a GPU."""
    folder = MODELS[name](tmp_path / "model")
    options = EngineOptions(
        str(folder),
        max_context_length=CONTEXT,
        kv_cache_bytes=2**24,
        max_rank=8,
        max_sequences=1,
        max_batched_tokens=POSITIONS,
    )
    engine = build_engine(options)
    cache, config = scheduler(engine).kv_cache_config, engine.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == POSITIONS
    page = cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    monkeypatch.setattr(gpu_plan, "_PAGE", config.cache_config.block_size)
    sizes = model_sizes(AutoConfig.from_pretrained(folder).get_text_config().to_dict(), parameters=1, itemsize=4)
    layers = max(len(group.layer_names) for group in cache.kv_cache_groups)
    assert sizes.block_bytes == page * layers
    assert cache.num_blocks == 2**24 // sizes.block_bytes
    theirs = bytes_by_vllm(config, cache.kv_cache_groups)
    assert sizes.sequence_bytes(CONTEXT, POSITIONS) == theirs + sizes.block_bytes, "one more block, which stays empty"
