"""OLMoE: routed experts, whose scores are shares of all experts, and norms of the queries and keys of all heads."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead


def _unlike_vllm(config: Any) -> str:
    """vLLM's class reads none of these."""
    wanted = {"norm_topk_prob": False, "clip_qkv": None, "attention_bias": False, "rms_norm_eps": 1e-5}
    for name, value in (wanted | {"tie_word_embeddings": False}).items():
        if (found := getattr(config, name)) != value:
            return f"{name} is {found}, and vLLM's OlmoeForCausalLM computes as if it were {value}"
    return ""


FAMILY = Family(lora=LoraNames(experts=Experts()), vllm_head=VLLMHead(), unlike_vllm=_unlike_vllm)
