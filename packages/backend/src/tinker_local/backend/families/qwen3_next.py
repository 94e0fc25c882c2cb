"""Qwen3-Next: layers as in Qwen3.5 with experts, for text alone. Linear attention has the rows of queries, keys, values
and gates in one matrix, key head by key head, which adapters train as one."""

from dataclasses import replace

from tinker_local.backend.families.family import Family, LoraNames, VLLMHead
from tinker_local.backend.families.qwen2_moe import EXPERTS

_EXPERTS = replace(EXPERTS, peft_fuses=True)

FAMILY = Family(
    lora=LoraNames(attn=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj"), experts=_EXPERTS),
    vllm_head=VLLMHead(),
    tool_parser="hermes",
)
