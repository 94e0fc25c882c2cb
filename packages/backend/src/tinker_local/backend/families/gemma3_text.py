"""Gemma 3, text alone (arXiv 2503.19786): most layers have a sliding window; rotary positions differ by kind of
layer."""

from typing import Any

from tinker_local.backend.families.interface import Family, LogitRule, text_position_ids


def _logits(config: Any) -> LogitRule:
    return LogitRule(softcap=config.final_logit_softcapping)


FAMILY = Family(auto_class="AutoModelForCausalLM", decoder_path="model", position_ids=text_position_ids, logits=_logits)
