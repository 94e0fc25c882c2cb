"""Gemma 3 without vision (arXiv 2503.19786): most layers have a sliding window, with other rotary frequencies."""

from tinker_local.backend.families.family import Family, VLLMHead
from tinker_local.backend.families.gemma2 import capped_logits

FAMILY = Family(
    logits=capped_logits,
    vllm_head=VLLMHead("gemma3", "Gemma3ForCausalLM"),
    unused_tokens=("<image_soft_token>",),  # google/gemma-3-1b-it shares the tokenizer of those with vision
)
