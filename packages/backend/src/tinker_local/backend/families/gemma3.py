"""Gemma 3 with images (arXiv 2503.19786): every image has the same number of positions, which see each other."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker_local.backend.families.family import Family, ImageFeatures, Vision, VLLMHead
from tinker_local.backend.families.gemma2 import capped_logits
from tinker_local.backend.rendering.decoding import ImageError
from tinker_local.backend.rendering.rendered_input import ImageTokens, RenderedImage, TrainerImage
from tinker_local.types import UnsupportedError


def _image_tokens(config: Any) -> ImageTokens:
    positions, window = config.mm_tokens_per_image, config.text_config.sliding_window
    if window is not None and positions > window:
        raise UnsupportedError(
            f"gemma3: mm_tokens_per_image is {positions}, more than the sliding_window of {window}: vLLM lets the "
            "positions of such an image see only those before them, and the model was made to see all of it"
        )
    return ImageTokens(config.boi_token_id, config.image_token_id, config.eoi_token_id, around="\n\n")


def _read_image(processor: Any, batch: Any) -> TrainerImage:
    """The only image of `batch`, a square [1, 3, S, S]. Its grid is that of its positions."""
    if processor.do_pan_and_scan:
        raise ImageError(
            "the model's preprocessor_config.json has do_pan_and_scan, which cuts an image into several; only whole "
            "images are supported, set it to false"
        )
    side = math.isqrt(processor.image_seq_length)
    return TrainerImage(batch["pixel_values"].numpy(), (1, side, side), side * side)


def _encode_images(model: Any, images: Sequence[RenderedImage]) -> ImageFeatures:
    """Run the vision tower and the projector once over `images`; returns features in their order."""
    import torch

    device = model.get_input_embeddings().weight.device
    pixels = torch.from_numpy(np.concatenate([image.pixel_values for image in images])).to(device)
    output = model.model.get_image_features(pixels, return_dict=True)
    return ImageFeatures(embeds=output.pooler_output.flatten(0, 1))


def _arguments(images: Sequence[RenderedImage], is_image: Any) -> dict[str, Any]:
    import torch

    pixels = torch.from_numpy(np.concatenate([image.pixel_values for image in images]))
    return {"pixel_values": pixels.to(is_image.device), "token_type_ids": is_image}


FAMILY = Family(
    auto_class="AutoModelForImageTextToText",
    decoder_path="model.language_model",
    vision=Vision(
        tower="model.vision_tower",
        vllm_tower="vision_tower",
        tokens=_image_tokens,
        read_image=_read_image,
        encode_images=_encode_images,
        arguments=_arguments,
        whole_images=True,
        frozen="vLLM and transformers name its modules differently, and vLLM would ignore adapters of them",
    ),
    logits=capped_logits,
    vllm_head=VLLMHead("gemma3_mm", "Gemma3ForConditionalGeneration"),
)
