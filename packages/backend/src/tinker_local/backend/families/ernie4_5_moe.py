"""Ernie 4.5 with experts: the first layers have MLPs, the others routed experts and one that all positions take. A bias
moves which experts are chosen, and not their scores."""

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead

FAMILY = Family(lora=LoraNames(experts=Experts(shared="shared_experts", peft_fuses=True)), vllm_head=VLLMHead())
