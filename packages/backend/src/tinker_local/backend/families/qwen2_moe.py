"""Qwen1.5-MoE and Qwen2-MoE: queries, keys and values have biases; routed experts in place of MLPs, and one that all
positions take. `gate_proj`, `up_proj` and `down_proj` are of that shared expert; the router and its gate are frozen."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead, unlike

EXPERTS = Experts(shared="shared_expert", shared_gate="shared_expert_gate")


def _unlike_vllm(config: Any) -> str:
    return unlike(config, "Qwen2MoeForCausalLM", qkv_bias=True, use_sliding_window=False)


FAMILY = Family(lora=LoraNames(experts=EXPERTS), vllm_head=VLLMHead(), unlike_vllm=_unlike_vllm, tool_parser="hermes")
