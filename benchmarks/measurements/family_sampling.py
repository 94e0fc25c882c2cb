"""Sampling from one shape of `families.py`: `python -m measurements.family_sampling SCALE SHAPE FOLDER alone|ours`.

The first of the two writes the model into FOLDER, the other finds it there. Both have an adapter of rank 32 of random
values on all projections of the decoder, and the same requests as `sampling.alone` and `sampling.sampler` of engine.py.
"""

import asyncio
import dataclasses
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from harness import timing
from harness.lines import Unavailable, failed
from harness.model_shapes import SHAPES, Shape
from harness.scale import SCALES, Scale

from measurements import sampling
from measurements.training import collect

PREFIX = "base_model.model.model.language_model."


def write_model(scale: Scale, shape: Shape, out: Path) -> None:
    """Write Qwen3.5 with its tower (vLLM 0.26 has no class without): at full scale, `shape` with a tiny tower."""
    import transformers
    from random_model import random_model
    from tinker_local.backend.tiny_models import make_tiny_vl_model

    if shape.family != "qwen3_5_text":
        raise Unavailable(f"sampling is measured for Qwen3.5, not {shape.family}")
    make_tiny_vl_model(out, family="qwen3_5", tie_word_embeddings=False)
    if scale.name == "full":
        for old in out.glob("*.safetensors"):
            old.unlink()
        config = json.loads((out / "config.json").read_text()) | {"dtype": "bfloat16"}
        config["text_config"] |= shape.settings
        config["vision_config"]["out_hidden_size"] = shape.settings["hidden_size"]
        model_class = transformers.Qwen3_5ForConditionalGeneration
        model = random_model(model_class, model_class.config_class(**config))
        model.save_pretrained(out, max_shard_size="4GB")


def modules(config: Mapping[str, Any], *, split: bool) -> Iterator[tuple[str, int, int]]:
    """Name below a layer's path, width in and width out of each projection, layer by layer. `split`: the rows for
    queries, keys and values of linear attention have an adapter each, as the hosted service and our sampler have it;
    vLLM knows one for all of them."""
    hidden, head = config["hidden_size"], config["head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    apart = [("in_proj_q", keys), ("in_proj_k", keys), ("in_proj_v", values)]
    linear = [
        *(
            (f"linear_attn.{name}", hidden, rows)
            for name, rows in (apart if split else [("in_proj_qkv", 2 * keys + values)])
        ),
        ("linear_attn.in_proj_z", hidden, values),
        ("linear_attn.out_proj", values, hidden),
    ]
    kv, queries = config["num_key_value_heads"] * head, config["num_attention_heads"] * head
    full = [
        ("self_attn.q_proj", hidden, 2 * queries),
        ("self_attn.k_proj", hidden, kv),
        ("self_attn.v_proj", hidden, kv),
        ("self_attn.o_proj", queries, hidden),
    ]
    width = config["intermediate_size"]
    mlp = [("mlp.gate_proj", hidden, width), ("mlp.up_proj", hidden, width), ("mlp.down_proj", width, hidden)]
    for layer, kind in enumerate(config["layer_types"]):
        for name, inner, outer in (full if kind == "full_attention" else linear) + mlp:
            yield f"layers.{layer}.{name}", inner, outer


def alone(scale: Scale, name: str, folder: Path, text: Mapping[str, Any]) -> None:
    """Prints `NAME.sampling_alone`: vLLM as its users run it."""
    from baselines.vllm_alone import write_adapter

    if timing.device() == "cpu":
        raise Unavailable("vLLM on CPUs has no linear attention for heads of this size")
    sizes = {PREFIX + path: widths for path, *widths in modules(text, split=False)}
    sampling.alone_with(scale, folder, write_adapter(folder / "alone", sizes, scale.rank), f"{name}.sampling_alone")


def ours(scale: Scale, name: str, folder: Path, text: Mapping[str, Any]) -> None:
    """Prints `NAME.sampling_ours`: our sampler with the steps that a server takes on this GPU, without a trainer beside
    it."""
    import torch
    from baselines.vllm_alone import write_adapter
    from tinker_local.backend.adapters.adapter import AdapterVersion
    from tinker_local.backend.models.gpu_plan import USUAL, StepSize
    from tinker_local.backend.vllm_engine.build_engine import EngineOptions
    from tinker_local.backend.vllm_engine.engine_thread import EngineThread
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

    sizes = {PREFIX + path: widths for path, *widths in modules(text, split=True)}
    version = AdapterVersion("bench-random", write_adapter(folder / "ours", sizes, scale.rank))
    dtype: Any = "float32"
    step = StepSize()
    if timing.device() == "cuda":
        dtype = "bfloat16"
        step = USUAL.steps(torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0))[0]
    options = EngineOptions(
        str(folder),
        dtype=dtype,
        max_rank=scale.rank,
        kv_cache_bytes=scale.kv_cache_bytes,
        max_sequences=step.sequences,
        max_batched_tokens=step.positions,
    )

    async def run() -> None:
        sampler = VLLMSampler(options, EngineThread())
        try:
            await sampler.load_version(version)
            await sampling.with_version(f"{name}.sampling_ours", scale, sampler, version)
        finally:
            await sampler.close()

    asyncio.run(run())


def main(arguments: list[str]) -> None:
    scale, name, folder, who = SCALES[arguments[0]], arguments[1], Path(arguments[2]) / "sampled", arguments[3]
    try:
        if not folder.exists():
            write_model(scale, SHAPES[name], folder)
            collect()  # vLLM's own process needs that memory
        text = json.loads((folder / "config.json").read_text())["text_config"]
        scale = dataclasses.replace(scale, text=dataclasses.replace(scale.text, vocab=text["vocab_size"]))
        {"alone": alone, "ours": ours}[who](scale, name, folder, text)
    except Exception as error:
        traceback.print_exc()
        failed(f"{name}.sampling_{who}", error).emit()


if __name__ == "__main__":
    np.random.seed(0)
    main(sys.argv[1:])
