"""OLMoE: routed experts, whose scores are shares of all experts, and norms of the queries and keys of all heads."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead, unlike


def _unlike_vllm(config: Any) -> str:
    fixed = {"norm_topk_prob": False, "clip_qkv": None, "attention_bias": False, "rms_norm_eps": 1e-5}
    return unlike(config, "OlmoeForCausalLM", **fixed, tie_word_embeddings=False)


FAMILY = Family(lora=LoraNames(experts=Experts()), vllm_head=VLLMHead(), unlike_vllm=_unlike_vllm)
