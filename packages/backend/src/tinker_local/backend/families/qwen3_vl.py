"""Qwen3-VL: like Qwen2.5-VL, and DeepStack adds features of earlier vision layers after the first decoder layers (arXiv
2406.04334)."""

from tinker_local.backend.families.family import Family
from tinker_local.backend.families.qwen_vision import VISION, mrope_position_ids, without_sections

FAMILY = Family(
    auto_class="AutoModelForImageTextToText",
    decoder_path="model.language_model",
    position_ids=mrope_position_ids,
    vision=VISION,
    unlike_vllm=without_sections,
    tool_parser="hermes",
)
