"""vLLM by itself: its `LLM` class on dummy weights, with a LoRA adapter of random values."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.scale import Scale, TextShape
from harness.timing import device


def write_random_adapter(out: Path, shape: TextShape, rank: int) -> Path:
    """An adapter on all projections of the decoder, in PEFT's layout, float32."""
    from safetensors.numpy import save_file

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
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(shape.layers):
        for module, (width_in, width_out) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{module}"
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
        "target_modules": sorted(module.split(".")[1] for module in sizes),
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


class VLLMAlone:
    """An engine with `scale.kv_cache_bytes` of KV cache. Call before anything else imports vLLM."""

    def __init__(self, scale: Scale, folder: Path, adapter: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        on_gpu = device() == "cuda"
        if not on_gpu:
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        import vllm
        from vllm.lora.request import LoRARequest

        settings: dict[str, Any] = {"enforce_eager": True}
        if on_gpu:
            settings = {"compilation_config": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"}}
        self._llm = vllm.LLM(
            str(folder),
            dtype="bfloat16" if on_gpu else "float32",
            load_format="dummy",
            max_model_len=min(4096, scale.text.positions),
            max_num_seqs=256,
            kv_cache_memory_bytes=scale.kv_cache_bytes,
            enable_lora=True,
            max_lora_rank=scale.rank,
            max_loras=2,
            enable_prefix_caching=False,
            **settings,
        )
        self._lora = LoRARequest("adapter", 1, str(adapter))
        self._params = vllm.SamplingParams
        self._scale = scale

    def output_tokens_per_second(self, *, lora: bool, logprobs: bool, seed: int) -> float:
        """Of `scale.requests` requests that begin together."""
        scale = self._scale
        rng = np.random.default_rng(seed)
        prompts = [
            {"prompt_token_ids": rng.integers(0, scale.text.vocab, scale.prompt_tokens).tolist()}
            for _ in range(scale.requests)
        ]
        params = self._params(
            max_tokens=scale.output_tokens, ignore_eos=True, temperature=1.0, logprobs=0 if logprobs else None
        )
        request = self._lora if lora else None
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        seconds = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    def warm_up(self) -> None:
        """One short round with the adapter."""
        params = self._params(max_tokens=8, ignore_eos=True, logprobs=0)
        prompts = [{"prompt_token_ids": [1, 2, 3, 4]} for _ in range(min(64, self._scale.requests))]
        self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._lora)
