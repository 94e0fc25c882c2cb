"""Qwen3-VL: as Qwen2.5-VL, and DeepStack adds features of earlier vision layers behind the first decoder layers
(arXiv 2406.04334)."""

from typing import TYPE_CHECKING, Any

from tinker_local.backend.training.families.interface import Family, ImageFeatures
from tinker_local.backend.training.families.qwen_vision import encode_images, mrope_position_ids

if TYPE_CHECKING:
    import torch


def _decoder_arguments(features: ImageFeatures, is_image: "torch.Tensor") -> dict[str, Any]:
    return {"visual_pos_masks": is_image[None], "deepstack_visual_embeds": list(features.deepstack)}


FAMILY = Family(
    auto_class="AutoModelForImageTextToText",
    decoder_path="model.language_model",
    position_ids=mrope_position_ids,
    encode_images=encode_images,
    decoder_arguments=_decoder_arguments,
)
