"""Gemma 3 without vision (arXiv 2503.19786): most layers have a sliding window, with other rotary frequencies."""

from tinker_local.backend.families.gemma2 import capped_logits
from tinker_local.backend.families.interface import Family, VLLMHead

FAMILY = Family(logits=capped_logits, vllm_head=VLLMHead("gemma3", "Gemma3ForCausalLM"))
