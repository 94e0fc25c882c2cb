"""Llama 3: text only."""

from tinker_local.backend.families.interface import Family, text_position_ids

FAMILY = Family(auto_class="AutoModelForCausalLM", decoder_path="model", position_ids=text_position_ids)
