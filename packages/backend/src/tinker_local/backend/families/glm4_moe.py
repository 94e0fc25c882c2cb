"""GLM 4.5 to 4.7: the first layers have MLPs, the others routed experts and one that all positions take. Scores are
sigmoids; a bias moves which experts are chosen, some groups of them first, and not their scores."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead, unlike


def _unlike_vllm(config: Any) -> str:
    return unlike(config, "Glm4MoeForCausalLM", tie_word_embeddings=False)


FAMILY = Family(
    lora=LoraNames(experts=Experts(shared="shared_experts", peft_fuses=True)),
    vllm_head=VLLMHead(),
    unlike_vllm=_unlike_vllm,
)
