"""LFM2 with experts: short convolutions in place of attention in most layers; the first layers have MLPs, the others
routed experts. Scores are sigmoids; a bias moves which experts are chosen, and not their scores. Matrices of experts
are called as those of the MLPs."""

from typing import Any

from tinker_local.backend.families.family import Experts, Family, LoraNames, unlike

_EXPERTS = Experts(
    in_files=("w1", "w3", "w2"), module="feed_forward", block="feed_forward", router="gate", bias="expert_bias"
)


def _unlike_vllm(config: Any) -> str:
    """vLLM's class takes the embedding for the head whatever the config says, and knows one size of heads."""
    size = config.hidden_size // config.num_attention_heads
    own = {} if getattr(config, "head_dim", None) is None else {"head_dim": size}
    return unlike(config, "Lfm2MoeForCausalLM", tie_word_embeddings=True, **own)


FAMILY = Family(
    lora=LoraNames(
        attn=("q_proj", "k_proj", "v_proj", "in_proj", "out_proj"), mlp=("w1", "w3", "w2"), experts=_EXPERTS
    ),
    unlike_vllm=_unlike_vllm,
)
