"""Ernie 4.5 with experts: the first layers have MLPs, the others routed experts and one that all positions take. A bias
moves which experts are chosen, and not their scores."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead, unlike


def _unlike_vllm(config: Any) -> str:
    """vLLM has no bias of the output of attention."""
    return unlike(config, "Ernie4_5_MoeForCausalLM", use_bias=False)


FAMILY = Family(
    lora=LoraNames(experts=Experts(shared="shared_experts", peft_fuses=True)),
    vllm_head=VLLMHead(),
    unlike_vllm=_unlike_vllm,
)
