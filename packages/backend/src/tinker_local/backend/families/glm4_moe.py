"""GLM 4.5 to 4.7: the first layers have MLPs, the others routed experts and one that all positions take. Scores are
sigmoids; a bias moves which experts are chosen, some groups of them first, and not their scores."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead, unlike


def _unlike_vllm(config: Any) -> str:
    return unlike(config, "Glm4MoeForCausalLM", tie_word_embeddings=False)


EXPERTS = Experts(shared="shared_experts", peft_fuses=True)
"""Those of GLM 4.5V as well."""

FAMILY = Family(
    lora=LoraNames(experts=EXPERTS),
    vllm_head=VLLMHead(),
    unlike_vllm=_unlike_vllm,
)
