"""vLLM as its users run it: its `LLM` class with vLLM's own defaults, and a LoRA adapter of random values."""

import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.scale import Scale, TextShape
from harness.timing import device


def write_random_adapter(out: Path, shape: TextShape, rank: int) -> Path:
    """An adapter on all projections of a Qwen3 decoder."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (shape.hidden, queries),
        "self_attn.k_proj": (shape.hidden, keys),
        "self_attn.v_proj": (shape.hidden, keys),
        "self_attn.o_proj": (queries, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.intermediate),
        "mlp.up_proj": (shape.hidden, shape.intermediate),
        "mlp.down_proj": (shape.intermediate, shape.hidden),
    }
    layers = [f"base_model.model.model.layers.{layer}" for layer in range(shape.layers)]
    return write_adapter(out, {f"{layer}.{name}": size for layer in layers for name, size in sizes.items()}, rank)


def write_adapter(out: Path, sizes: Mapping[str, Sequence[int]], rank: int) -> Path:
    """An adapter of random values in PEFT's layout, float32; `sizes`: width in and width out by module."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {}
    for path, (width_in, width_out) in sizes.items():
        tensors[f"{path}.lora_A.weight"] = 0.01 * rng.standard_normal((rank, width_in), np.float32)
        tensors[f"{path}.lora_B.weight"] = 0.01 * rng.standard_normal((width_out, rank), np.float32)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "target_modules": sorted({path.rsplit(".", 1)[1] for path in sizes}),
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


class VLLMAlone:
    """vLLM's `LLM` on the model in `folder`, with the KV cache that our server gets in the same run.

    On a GPU every other setting is vLLM's default: an engine process, compiled code, CUDA graphs, sequences and tokens
    per step. On a CPU, where only the code is tried, nothing is compiled and the engine runs in this process.
    Create it before anything else imports vLLM. `share`: of the GPU's memory, which has to be free.
    """

    def __init__(self, scale: Scale, folder: Path, adapter: Path, share: float | None = None) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        settings: dict[str, Any] = {}
        if device() == "cuda":
            # A forked process could not use the GPU once this one has, which measures memory.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
            if importlib.util.find_spec("flashinfer") is None:  # else vLLM does not start
                os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
                settings["additional_config"] = {"gdn_prefill_backend": "triton"}  # else Qwen3.5 fails on Hopper
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
            settings = {"enforce_eager": True, "dtype": "float32"}
        if share is not None:
            settings["gpu_memory_utilization"] = share
        import vllm
        from vllm.lora.request import LoRARequest

        self._llm = vllm.LLM(
            str(folder),
            kv_cache_memory_bytes=scale.kv_cache_bytes,
            enable_lora=True,
            max_lora_rank=scale.rank,
            **settings,
        )
        self._lora = LoRARequest("adapter", 1, str(adapter))
        self._params = vllm.SamplingParams

    def settings(self) -> str:
        """What vLLM chose by default, in words."""
        config = self._llm.llm_engine.vllm_config
        scheduler, compilation = config.scheduler_config, config.compilation_config
        graphs = getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)
        return (
            f"vLLM's defaults: max_num_seqs {scheduler.max_num_seqs}, "
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens}, compilation mode {int(compilation.mode)} "
            f"({compilation.backend or 'default'}), CUDA graphs {graphs}"
        )

    def output_tokens_per_second(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Of requests that begin together, with the adapter and the logprob of each sampled token."""
        params = self._params(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False, lora_request=self._lora)
        seconds = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
