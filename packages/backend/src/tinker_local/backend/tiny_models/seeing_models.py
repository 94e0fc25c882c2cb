"""Tiny models of random weights of the architectures that see which transformers and vLLM both have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local.backend.tiny_models.make_models import claim_folder, instantiate, rename_tensors
from tinker_local.backend.tiny_models.marks import Marks
from tinker_local.backend.tiny_models.seeing_marks import INTERNVL, LLAVA_MISTRAL, PIXTRAL, VICUNA
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES, TextFamilyName, text_settings
from tinker_local.backend.tiny_models.tokenizer import write_json, write_tokenizer
from tinker_local.backend.tiny_models.weights import write_weights

# Colour statistics of the towers.
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_SIGLIP = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_PIXELS = {"do_convert_rgb": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}

_TOWER_INSIDE = {"vision_tower.": "vision_tower.vision_model."}
"""Of CLIP and SigLIP."""

_SHAPE = TextShape()
_WIDE = TextShape(hidden_size=128)
"""Of text models without a setting for the head size: attention is as wide as the hidden state."""


@dataclass(frozen=True, slots=True)
class Seeing:
    """An architecture.

    `model_class`: of transformers. `config`: what its config is made of, beyond the dtype. `image_processor`,
    `processor`, `video_processor`: what `preprocessor_config.json`, `processor_config.json` and
    `video_preprocessor_config.json` say. `renames`: parts of names of tensors, and what published files have there.
    """

    model_class: str
    marks: Marks
    config: Callable[[Marks], dict[str, Any]]
    image_processor: Mapping[str, Any]
    processor: Mapping[str, Any]
    video_processor: Mapping[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)


def make_tiny_seeing_model(out: Path, architecture: str, *, seed: int = 0) -> Path:
    """Write a model of random float32 weights of one of `SEEING`, with its processor and tokenizer, into the folder
    `out` and return it.

    Raises FileExistsError if `out` exists and is not an empty folder.
    """
    import transformers

    kind = SEEING[architecture]
    marks = kind.marks
    model_class = getattr(transformers, kind.model_class)
    model = instantiate(model_class, model_class.config_class(**kind.config(marks), dtype="float32"))
    claim_folder(out)
    write_tokenizer(out, marks, _SHAPE.max_position_embeddings)
    write_weights(model, out, seed, marks, text_scale=_SHAPE.weight_scale)
    if kind.renames:
        rename_tensors(out, kind.renames)
    name = {"processor_class": kind.processor["processor_class"]}
    write_json(out / "preprocessor_config.json", {**kind.image_processor, **name})
    write_json(out / "processor_config.json", dict(kind.processor))
    if kind.video_processor:
        write_json(out / "video_preprocessor_config.json", {**kind.video_processor, **name})
    return out


def _text(family: TextFamilyName, marks: Marks, shape: TextShape = _SHAPE, **more: Any) -> dict[str, Any]:
    """The config of a language model."""
    kind = TEXT_FAMILIES[family]
    return {
        "model_type": family,
        **text_settings(shape, marks),
        **kind.settings(shape),
        "tie_word_embeddings": False,
        **more,
    }


def _tower(model_type: str, **more: Any) -> dict[str, Any]:
    """The config of a vision tower, with two heads of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {"model_type": model_type, **sizes, **more}


# LLaVA: features of the last layer but one of CLIP, without the class token; an image of any shape is cropped to a
# square.


def _llava(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": _text("llama", marks),
        "vision_config": _tower(
            "clip_vision_model", num_hidden_layers=3, image_size=56, patch_size=14, projection_dim=64
        ),
        "image_token_index": marks.token_id("<image>"),
        "image_seq_length": 16,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _clip_processor(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "image_processor_type": kind,
        "crop_size": {"height": 56, "width": 56},
        "do_center_crop": True,
        "do_resize": True,
        "resample": 3,
        "size": {"shortest_edge": 56},
        **_PIXELS,
        **_CLIP,
        **more,
    }


_LLAVA_PROCESSOR = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}

# LLaVA-NeXT: a thumbnail, then tiles of the image, without what pads them, with a learnt newline after each row.

_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]


def _llava_next(marks: Marks) -> dict[str, Any]:
    config = _llava(marks) | {"image_grid_pinpoints": _PINPOINTS, "use_image_newline_parameter": True}
    return config | {"text_config": _text("mistral", marks, sliding_window=None)}


# InternVL 3: tiles and a thumbnail, each 256 positions as published and 4 here; 2x2 patches are one position.


def _internvl(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": _text("qwen2", marks, _WIDE),
        "vision_config": _tower("internvl_vision", image_size=[56, 56], patch_size=[14, 14], attention_bias=True),
        "image_token_id": marks.token_id("<IMG_CONTEXT>"),
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
    }


_GOT_OCR2 = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 12,
    "do_resize": True,
    "resample": 3,
    "size": {"height": 56, "width": 56},
    **_PIXELS,
    **_IMAGENET,
}


# Pixtral's tower reads an image in its own shape; a mark ends each row and another one the image. Mistral 3 merges 2x2
# patches.


def _pixtral(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": _text("mistral", marks, sliding_window=None),
        "vision_config": _tower(
            "pixtral",
            head_dim=32,
            image_size=256,
            patch_size=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "image_token_index": marks.token_id("[IMG]"),
        "image_seq_length": 1,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _mistral3(marks: Marks) -> dict[str, Any]:
    config = _pixtral(marks) | {"spatial_merge_size": 2, "multimodal_projector_bias": False}
    del config["image_seq_length"], config["vision_feature_select_strategy"]
    config["vision_config"] |= {"patch_size": 14}
    return config


def _pixtral_processor(patch: int) -> dict[str, Any]:
    return {
        "image_processor_type": "PixtralImageProcessor",
        "do_resize": True,
        "patch_size": {"height": patch, "width": patch},
        "resample": 3,
        "size": {"longest_edge": 256},
        **_PIXELS,
        **_CLIP,
    }


_PIXTRAL_PROCESSOR = {
    "processor_class": "PixtralProcessor",
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}

SEEING: dict[str, Seeing] = {
    "llava": Seeing(
        "LlavaForConditionalGeneration",
        VICUNA,
        _llava,
        _clip_processor("CLIPImageProcessor"),
        {"processor_class": "LlavaProcessor", **_LLAVA_PROCESSOR},
        renames=_TOWER_INSIDE,
    ),
    "llava_next": Seeing(
        "LlavaNextForConditionalGeneration",
        LLAVA_MISTRAL,
        _llava_next,
        _clip_processor("LlavaNextImageProcessor", image_grid_pinpoints=_PINPOINTS, do_pad=True),
        {"processor_class": "LlavaNextProcessor", **_LLAVA_PROCESSOR},
        renames=_TOWER_INSIDE,
    ),
    "internvl": Seeing(
        "InternVLForConditionalGeneration",
        INTERNVL,
        _internvl,
        _GOT_OCR2,
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 56, "width": 56}, **_IMAGENET},
    ),
    "mistral3": Seeing(
        "Mistral3ForConditionalGeneration",
        PIXTRAL,
        _mistral3,
        _pixtral_processor(14),
        {**_PIXTRAL_PROCESSOR, "patch_size": 14, "spatial_merge_size": 2},
    ),
    "pixtral": Seeing(
        "LlavaForConditionalGeneration",
        PIXTRAL,
        _pixtral,
        _pixtral_processor(16),
        {**_PIXTRAL_PROCESSOR, "patch_size": 16},
    ),
}
