"""Which models fit which GPU, and with how long a context: the plan that `serve` makes, without the GPU."""

import functools
import math
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.models.gpu_plan import COUNTED_RANK, model_sizes, plan_gpu, step_sizes
from tinker_local.backend.options import MICRO_BATCH_TOKENS, BackendOptions

GIB = 2**30
CONTEXT = GIB // 2
"""What the CUDA context of the process that plans takes from a free GPU."""

ADAPTER_SLOTS = 4
IMAGE_CACHE = 2**30
"""The defaults of `EngineOptions`, which cannot be imported without vLLM."""

STEP = 1024
"""Positions, to whose multiples a context is rounded down."""

GPUS = {"L4": 22.0, "RTX 4090": 23.5, "A100 40GB": 39.4, "L40S": 44.4, "A100 80GB": 79.2, "H100": 79.2, "H200": 139.8}
"""GiB that CUDA says that they have."""

Shape = tuple[int, int, int, int, int, int, int, bool, int]
SHAPES: dict[str, tuple[str, Shape]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936, True, 40960)),
    "Qwen/Qwen3-1.7B": ("qwen3", (2048, 6144, 28, 16, 8, 128, 151936, True, 40960)),
    "Qwen/Qwen3-4B": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151936, True, 40960)),
    "Qwen/Qwen3-8B": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936, False, 40960)),
    "Qwen/Qwen3-14B": ("qwen3", (5120, 17408, 40, 40, 8, 128, 151936, False, 40960)),
    "Qwen/Qwen3-32B": ("qwen3", (5120, 25600, 64, 64, 8, 128, 151936, False, 40960)),
    "meta-llama/Llama-3.2-1B": ("llama", (2048, 8192, 16, 32, 8, 64, 128256, True, 131072)),
    "meta-llama/Llama-3.2-3B": ("llama", (3072, 8192, 28, 24, 8, 128, 128256, True, 131072)),
    "meta-llama/Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 8, 128, 128256, False, 131072)),
    "mistralai/Mistral-7B-v0.3": ("mistral", (4096, 14336, 32, 32, 8, 128, 32768, False, 32768)),
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen3_vl", (2560, 9728, 36, 32, 8, 128, 151936, True, 262144)),
    "Qwen/Qwen3-VL-8B-Instruct": ("qwen3_vl", (4096, 12288, 36, 32, 8, 128, 151936, False, 262144)),
}
"""Of well-known models, after their `model_type`: hidden, intermediate, layers, heads, KV heads, head size, vocabulary,
tied LM head, positions."""

TOWERS: dict[str, dict[str, int]] = {
    "Qwen/Qwen3-VL-4B-Instruct": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
    "Qwen/Qwen3-VL-8B-Instruct": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
}


@dataclass(frozen=True, slots=True)
class Fit:
    """`context`: the longest, in positions, 0 if not even `STEP` fits; `least`: why, in the planner's words."""

    context: int
    parameters: int
    least: str = ""


def known_config(name: str) -> Any:
    """The config of a model of `SHAPES`, of transformers."""
    import transformers

    kind, (hidden, intermediate, layers, heads, kv_heads, head, vocabulary, tied, positions) = SHAPES[name]
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }
    if name not in TOWERS:
        return transformers.AutoConfig.for_model(kind, **text)
    tower = TOWERS[name] | {"out_hidden_size": hidden}
    return transformers.AutoConfig.for_model(kind, text_config=text, vision_config=tower, tie_word_embeddings=tied)


class Fitting:
    """A model of `config` on GPUs of any size, in bfloat16, trainer and sampler on one; as `options` say."""

    def __init__(self, config: Any, options: BackendOptions | None = None) -> None:
        from tinker_local.backend.training.load_model import decoder_of_sizes

        self._options = options or BackendOptions()
        self._text = config.get_text_config()
        self._vision = hasattr(config, "vision_config")
        self._decoder, self._parameters = decoder_of_sizes(config, "bfloat16", self._options.decoder)
        self._sizes = model_sizes(self._text.to_dict(), self._parameters, 2)

    def on(self, gib: float, name: str = "") -> Fit:
        """On a free GPU of `gib` GiB."""
        longest = self._text.max_position_embeddings
        try:
            self._plan(gib, name, min(STEP, longest))
        except ValueError as error:
            return Fit(0, self._parameters, str(error))
        fits, too_long = 1, math.ceil(longest / STEP) + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            try:
                self._plan(gib, name, min(middle * STEP, longest))
                fits = middle
            except ValueError:
                too_long = middle
        return Fit(min(fits * STEP, longest), self._parameters)

    def _plan(self, gib: float, name: str, context: int) -> None:
        from tinker_local.backend.training.worker import CUDA_LOGITS

        options = self._options
        plan_gpu(
            self._sizes,
            functools.partial(self._decoder.memory, columns=min(options.max_rank, COUNTED_RANK)),
            free=int(options.gpu_memory_utilization * (gib * GIB - CONTEXT)),
            context=context,
            micro_batch_tokens=options.micro_batch_tokens or MICRO_BATCH_TOKENS,
            max_rank=options.max_rank,
            adapter_slots=ADAPTER_SLOTS,
            steps=step_sizes(int(gib * GIB), name),
            image_cache=IMAGE_CACHE if self._vision else 0,
            logits=CUDA_LOGITS * 2,
        )


def row(name: str) -> str:
    """Of the table of README, for one of `SHAPES`: the smallest of `GPUS`, the longest context on it and on an H200."""
    fitting = Fitting(known_config(name))
    for gpu, gib in GPUS.items():
        if here := fitting.on(gib, gpu).context:
            return f"| {name} | {gpu} | {here:,} | {fitting.on(GPUS['H200'], 'H200').context:,} |"
    return f"| {name} | several | | |"
