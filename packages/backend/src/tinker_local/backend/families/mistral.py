"""Mistral: the first models have a sliding window in every layer."""

from tinker_local.backend.families.family import Family, VLLMHead

FAMILY = Family(vllm_head=VLLMHead("mistral", "MistralForCausalLM"), tool_parser="mistral")
