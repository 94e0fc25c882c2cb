"""Gemma 2 (arXiv 2408.00118): every other layer has a sliding window; attention scores and logits have soft caps."""

from typing import Any

from tinker_local.backend.families.family import Family, LogitRule, VLLMHead


def capped_logits(config: Any) -> LogitRule:
    """`final_logit_softcapping`, which may be None."""
    return LogitRule(softcap=config.final_logit_softcapping)


FAMILY = Family(logits=capped_logits, vllm_head=VLLMHead("gemma2", "Gemma2ForCausalLM", embedding="model.embed_tokens"))
