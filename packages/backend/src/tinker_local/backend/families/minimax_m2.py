"""MiniMax-M2: routed experts, whose scores are sigmoids, and norms of the queries and keys of all heads. A bias moves
which experts are chosen, and not their scores; its files call these modules by other names."""

from dataclasses import replace
from typing import Any

from tinker_local.backend.families import mixtral
from tinker_local.backend.families.family import Family, LoraNames, VLLMHead, unlike

EXPERTS = replace(mixtral.EXPERTS, bias="e_score_correction_bias")


def _unlike_vllm(config: Any) -> str:
    """transformers' class reads neither of the first two, and computes so."""
    if why := unlike(config, "transformers' MiniMaxM2ForCausalLM", use_routing_bias=True, scoring_func="sigmoid"):
        return why
    return unlike(config, "MiniMaxM2ForCausalLM", tie_word_embeddings=False)


FAMILY = Family(lora=LoraNames(experts=EXPERTS), vllm_head=VLLMHead(), unlike_vllm=_unlike_vllm)
