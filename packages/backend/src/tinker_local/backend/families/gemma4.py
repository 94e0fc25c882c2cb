"""Gemma 4: layers with a window and layers without have heads of other sizes.

In large models, layers without a window use their keys as values, and in layers with a window each position of an image
sees all of the image. In small models (E2B, E4B) the last layers read keys and values of earlier layers, and all layers
read a second embedding.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tinker_local.backend.families.family import Experts, Family, ImageFeatures, LoraNames, Vision, VLLMHead
from tinker_local.backend.families.gemma2 import capped_logits
from tinker_local.backend.rendering.rendered_input import ImageTokens, RenderedImage
from tinker_local.backend.weight_files import folder_on_disk
from tinker_local.types import UnsupportedError

PATCH_PLACES = "image_position_ids"
"""What processors and transformers call the row and column of each patch, [images, patches, 2]; -1 where none is."""


def _lora_of(where: str) -> LoraNames:
    """With experts, if the layers of the model at `where` have some beside their MLPs. Their router is frozen."""
    if (folder := folder_on_disk(where)) is None or not (folder / "config.json").is_file():
        return LoraNames()
    config = json.loads((folder / "config.json").read_bytes())
    text = config.get("text_config", config)
    return LoraNames(experts=Experts(peft_fuses=True)) if text.get("enable_moe_block") else LoraNames()


def _unlike_vllm(config: Any) -> str:
    text = config.get_text_config()
    if text.use_bidirectional_attention == "all":
        return "use_bidirectional_attention is 'all', and the trainer computes texts that see what is before them"
    if not text.hidden_size_per_layer_input:
        return ""
    if text.vocab_size_per_layer_input < text.vocab_size:
        return (
            f"vocab_size_per_layer_input is {text.vocab_size_per_layer_input} and vocab_size {text.vocab_size}: vLLM "
            "reads token 0 in place of those beyond, and transformers fails"
        )
    if text is not config and text.pad_token_id != 0:
        return (
            f"pad_token_id is {text.pad_token_id}: layers read its embeddings at positions of images in transformers, "
            "and those of token 0 in vLLM"
        )
    return ""


USUAL_POSITIONS = 280
"""The most of an image, unless `default_output_length` says otherwise."""


def _image_tokens(config: Any) -> ImageTokens:
    """The processor makes of one token the positions of an image and what is around them."""
    positions = getattr(config.vision_config, "default_output_length", None) or USUAL_POSITIONS
    window = config.get_text_config().sliding_window
    if _sees_whole_images(config) and window is not None and positions > window:
        raise UnsupportedError(
            f"{config.name_or_path}: images have up to {positions} positions (default_output_length), more than the "
            f"sliding_window of {window}: on CPUs vLLM lets a position of such an image see no further forward than "
            "the window, and the model was made to see all of it"
        )
    return ImageTokens(None, config.image_token_id, None)


def _sees_whole_images(config: Any) -> bool:
    """In layers with a window (`AttentionRule.whole_images`)."""
    return bool(config.get_text_config().use_bidirectional_attention == "vision")


def _arguments(images: Sequence[RenderedImage], is_image: Any) -> dict[str, Any]:
    import torch

    pixels = np.concatenate([image.pixel_values for image in images])
    places = np.concatenate([image.further[PATCH_PLACES] for image in images])
    return {
        "pixel_values": torch.from_numpy(pixels).to(is_image.device),
        PATCH_PLACES: torch.from_numpy(places).to(is_image.device),
        "mm_token_type_ids": is_image,
    }


def _encode_images(model: Any, images: Sequence[RenderedImage]) -> ImageFeatures:
    """Features of `images`, which are alike (`FoundTower`), without the places that their processor fills up."""
    import torch

    place = model.get_input_embeddings().weight.device
    places = torch.from_numpy(images[0].further[PATCH_PLACES])
    taken = (places[0] >= 0).all(-1)
    pixels = torch.from_numpy(np.concatenate([image.pixel_values for image in images]))[:, taken].to(place)
    places = places[:, taken].expand(len(images), -1, -1).to(place)
    output = model.model.get_image_features(pixels, places, return_dict=True)
    return ImageFeatures(torch.cat(output.pooler_output))


TEXT = Family(
    logits=capped_logits,
    vllm_head=VLLMHead("gemma4", "Gemma4ForCausalLM"),
    unlike_vllm=_unlike_vllm,
    experts_of=_lora_of,
    undivided="layers of Gemma 4 read keys and values of each other, and have numbers beside their matrices",
)
FAMILY = replace(
    TEXT,
    auto_class="AutoModelForImageTextToText",
    decoder_path="model.language_model",
    vision=Vision(
        tower="model.vision_tower",
        vllm_tower="vision_tower",
        tokens=_image_tokens,
        read_image=None,
        encode_images=_encode_images,
        arguments=_arguments,
        whole_images=True,
        whole_in=_sees_whole_images,
        frozen="its tower is computed by transformers' class without adapters",
    ),
    vllm_head=VLLMHead("gemma4_mm", "Gemma4ForConditionalGeneration"),
)
