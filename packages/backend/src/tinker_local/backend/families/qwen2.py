"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from tinker_local.backend.families.family import Family, VLLMHead

VLLM_HEAD = VLLMHead("qwen2", "Qwen2ForCausalLM")

FAMILY = Family(vllm_head=VLLM_HEAD, tool_parser="hermes")
