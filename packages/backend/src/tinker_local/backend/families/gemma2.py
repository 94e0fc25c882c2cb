"""Gemma 2 (arXiv 2408.00118): every other layer has a sliding window; attention scores and logits have soft caps."""

from typing import Any

from tinker_local.backend.families.interface import Family, LogitRule, text_position_ids


def _logits(config: Any) -> LogitRule:
    return LogitRule(softcap=config.final_logit_softcapping)


FAMILY = Family(auto_class="AutoModelForCausalLM", decoder_path="model", position_ids=text_position_ids, logits=_logits)
