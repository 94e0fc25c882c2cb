"""Qwen2-VL: as Qwen2.5-VL (arXiv 2409.12191). Every block of its tower attends over the whole image."""

from tinker_local.backend.families.family import Family
from tinker_local.backend.families.qwen2 import VLLM_HEAD
from tinker_local.backend.families.qwen_vision import VISION, mrope_position_ids, without_sections

FAMILY = Family(
    auto_class="AutoModelForImageTextToText",
    decoder_path="model.language_model",
    position_ids=mrope_position_ids,
    vision=VISION,
    vllm_head=VLLM_HEAD,
    unlike_vllm=without_sections,
    tool_parser="hermes",
)
