"""Model names that programs ask for by default, with their architectures: those of the Tinker cookbook's model table.

A family that lands needs no change here. `docs/models.md` is made of this by `scripts/models_page.py`.
"""

from collections.abc import Mapping, Sequence

LINE_UP: Mapping[str, Sequence[str]] = {
    "llama": (
        "meta-llama/Llama-3.2-1B",
        "meta-llama/Llama-3.2-3B",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    "qwen3": ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    "qwen3_moe": (
        "Qwen/Qwen3-30B-A3B-Base",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
    ),
    "qwen3_vl_moe": ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-235B-A22B-Instruct"),
    "qwen3_5": (
        "Qwen/Qwen3.5-4B",
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-9B-Base",
        "Qwen/Qwen3.5-27B",
        "Qwen/Qwen3.6-27B",
        "Qwen/Qwen3.8-27B",
    ),
    "qwen3_5_moe": (
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-35B-A3B-Base",
        "Qwen/Qwen3.6-35B-A3B",
        "Qwen/Qwen3.5-397B-A17B",
    ),
    "gpt_oss": ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "deepseek_v3": ("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base"),
    "deepseek_v4": ("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash-1017"),
    "kimi_k2": ("moonshotai/Kimi-K2-Thinking",),
    "kimi_k25": ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6", "moonshotai/Kimi-K3.1-Pro"),
    "glm_moe_dsa": ("zai-org/GLM-5.3", "zai-org/GLM-5.3-Flash"),
    "nemotron_h": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    ),
    "inkling": ("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small", "thinkingmachines/Inkling-2-Small"),
}
"""Names by the `model_type` of their configs. Those of DeepSeek V4.1, GLM 5.3, Kimi K3.1 and
Inkling are guesses, which only group names."""

NOT_SERVED: Mapping[str, str] = {
    "deepseek_v3": "the trainer does not compute attention over a compressed latent; 671 billion parameters take more "
    "than eight H200s in bfloat16",
    "deepseek_v4": "the trainer does not compute attention over a compressed latent; 552 billion parameters take eight "
    "H200s without any room to train",
    "kimi_k2": "the trainer does not compute attention over a compressed latent; 1,000 billion parameters take more "
    "than eight H200s",
    "kimi_k25": "the trainer does not compute attention over a compressed latent; 1,000 billion parameters and more "
    "take more than eight H200s",
    "glm_moe_dsa": "the trainer does not compute attention that chooses positions by an index",
    "nemotron_h": "the trainer does not compute Mamba-2 layers, which keep a state along the sequence",
    "inkling": "the trainer does not compute its layers; 276 billion parameters are the least",
}
"""Why an architecture without a family is refused."""

OTHERS: Sequence[str] = (
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "exaone4",
    "gemma",
    "glm",
    "glm4",
    "granite",
    "granite_swa",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "jais2",
    "lfm2",
    "ministral",
    "ministral3",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "persimmon",
    "phi",
    "phi3",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
)
"""Architectures without a family that the tests have seen agree in trainer and sampler, with adapters."""

SEEING: Sequence[str] = (
    "exaone4_5",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "granite4_vision",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "mistral3",
    "smolvlm",
)
"""The same of those that read images."""

SEEING_BY_AUTOGRAD: Sequence[str] = ("exaone4_5", "granite4_vision", "lfm2_vl")
"""Of these, those whose layers are not written out."""
