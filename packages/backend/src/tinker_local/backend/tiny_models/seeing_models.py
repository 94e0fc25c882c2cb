"""Tiny models of random weights of the architectures that see which transformers and vLLM both have.

What transformers 5.19 makes of P pictures in one prompt: which positions they have, the tensors that
`get_image_features` takes, and what its `pooler_output` is, features of the hidden size H for the positions of
`config.image_token_id`, in order.

- llava: as many positions for every picture. pixel_values [P, 3, S, S]. P of [n, H].
- llava_next, granite_vision: a thumbnail, then tiles without their padding, with a newline after each row.
  pixel_values [P, most tiles, 3, S, S], padded, and image_sizes [P, 2]. P of [n, H].
- granite4_vision: as granite_vision, but nothing replaces embeddings, which are 0: `deepstack_features` are the layers
  and what is added before each.
- llava_onevision: as llava_next, and batch_num_images [P].
- internvl, internvl3_5, internvl3_5_moe: a start, tiles and a thumbnail, an end. pixel_values [tiles of all, 3, S, S],
  which do not say whose they are. [tiles, n, H].
- pixtral, mistral3, ministral3: in a picture's shape, with a mark without features after each row and another one
  after the last. pixel_values [P, 3, most rows, most columns], padded, and image_sizes [P, 2]. P of [n, H].
- smolvlm, idefics3: each tile after marks of its row and column, then a thumbnail. pixel_values [1, tiles, 3, S, S]
  and pixel_attention_mask [1, tiles, S, S]. [tiles, n, H].
- qwen2_vl, glm4v, glm4v_moe, glm_ocr, exaone4_5: in a picture's shape, between two marks. pixel_values [patches of
  all, 1176] and image_grid_thw [P, 3]. P of [n, H].
- lfm2_vl: a start, then one in its shape, or tiles after their marks and a thumbnail, and an end. pixel_values
  [tiles, patches, 768], padded, pixel_attention_mask [tiles, patches] and spatial_shapes [tiles, 2]. As many as tiles
  of [n, H].
- paligemma: as many positions for every picture, before everything else. pixel_values [P, 3, S, S]. [P, n, H].
- gemma4, gemma4_dense, gemma4_moe: a start, in a picture's shape, an end. pixel_values [P, 630, 768], padded, and
  image_position_ids [P, 630, 2]. P of [n, H].
- cohere2_vision: a start, tiles and a thumbnail, each with a mark after it, an end. pixel_values [tiles of all, 3, S,
  S]. [tiles, n, H].
- llama4: a start, tiles with marks between them, a thumbnail, an end. pixel_values [tiles of all, 3, S, S] in
  bfloat16. Nothing but `last_hidden_state` [tiles, n, W], which the projector has yet to read.

Positions are 0, 1, 2, ... but for qwen2_vl, glm4v, glm4v_moe and glm_ocr, whose `get_rope_index` makes them of
image_grid_thw and mm_token_type_ids. A position sees what precedes it, but for two kinds: in gemma4_dense and
gemma4_moe a picture sees itself in layers with a window (mm_token_type_ids), and in paligemma a prompt sees all of
itself (token_type_ids).

Where transformers 5.19 and vLLM 0.32 differ (`benchmarks/architectures.py` compares them):

- granite_vision, cohere2_vision: transformers leaves out `logits_scaling` and `logit_scale` of the text, which the
  trainer adds (`Family.logits_left_out`).
- mistral3, ministral3: transformers takes no prompt whose pictures have one position in all.
- gemma4_dense: vLLM adds what an adapter of `k_proj` makes to keys alone, where keys are the values, too.
- lfm2_vl: vLLM ignores adapters of `conv.in_proj` and `conv.out_proj`, unless they are renamed, as the sampler has it.
- llava: for adapters on the tower, vLLM counts its positions without the class token.
- glm4v, glm_ocr: vLLM takes no adapters of `gate_proj` and `up_proj` of the tower.
- paligemma: vLLM puts a picture after the BOS of a prompt, and takes one at most.
- llama4: vLLM on a CPU fails at some pictures, whose patches it gives transposed to its matrix product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local.backend.tiny_models.make_models import claim_folder, instantiate, rename_tensors
from tinker_local.backend.tiny_models.marks import IMAGE_PAD, QWEN, VIDEO_PAD, VISION_END, VISION_START, Marks
from tinker_local.backend.tiny_models.seeing_marks import (
    COHERE2_VISION,
    GEMMA4,
    GLM4V,
    GRANITE_VISION,
    IDEFICS3,
    INTERNVL,
    LFM2_VL,
    LLAMA4,
    LLAVA_MISTRAL,
    LLAVA_ONEVISION,
    PALIGEMMA,
    PIXTRAL,
    SMOLVLM,
    VICUNA,
)
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.tiny_models.text_families import SLIDING_WINDOW, TEXT_FAMILIES, TextFamilyName, text_settings
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
    if kind.image_processor:
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
    config = _pixtral(marks) | {
        "spatial_merge_size": 2,
        "multimodal_projector_bias": False,
        "tie_word_embeddings": False,
    }
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


# Idefics 3 and SmolVLM: an image fills rows and columns of tiles, each after its mark, then a thumbnail.


def _idefics3(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": _text("llama", marks),
        "vision_config": _tower("idefics3_vision", image_size=56, patch_size=14),
        "image_token_id": marks.token_id("<image>"),
        "scale_factor": 2,
        "pad_token_id": marks.token_id(marks.pad),
        "tie_word_embeddings": False,
    }


def _smolvlm(marks: Marks) -> dict[str, Any]:
    config = _idefics3(marks)
    return config | {"vision_config": _tower("smolvlm_vision", image_size=56, patch_size=14)}


_IDEFICS_IMAGES = {
    "do_image_splitting": True,
    "do_pad": True,
    "do_resize": True,
    "max_image_size": {"longest_edge": 56},
    "resample": 1,
    "size": {"longest_edge": 4 * 56},
    **_PIXELS,
    **_SIGLIP,
}


def _qwen2_vl(marks: Marks) -> dict[str, Any]:
    text = _text("qwen2", marks, _WIDE)
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
    return {
        "text_config": {**text, "model_type": "qwen2_vl_text", "rope_parameters": rotary},
        "vision_config": {
            **{"depth": 2, "embed_dim": 64, "hidden_size": _WIDE.hidden_size, "mlp_ratio": 2, "num_heads": 2},
            **_MERGED,
        },
        "image_token_id": marks.token_id(IMAGE_PAD),
        "video_token_id": marks.token_id(VIDEO_PAD),
        "vision_start_token_id": marks.token_id(VISION_START),
        "vision_end_token_id": marks.token_id(VISION_END),
        "tie_word_embeddings": False,
    }


_MERGED = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _of_area(kind: str, **more: Any) -> dict[str, Any]:
    """Settings of processors that keep an image's shape within bounds of its area."""
    size = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}
    merged = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    return {"image_processor_type": kind, "do_resize": True, "size": size, **merged, **_PIXELS, **_CLIP, **more}


def _videos(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in settings.items() if name != "image_processor_type"}
    return {"video_processor_type": kind, **rest}


# GLM-4.1V: learnt positions of a grid of 8x8 are scaled to an image's; half of each head has rotary positions.


def _glm4v(marks: Marks) -> dict[str, Any]:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    return {
        "text_config": {
            **text_settings(_WIDE, marks),
            "model_type": "glm4v_text",
            "rope_parameters": rotary,
            "attention_bias": True,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 96,
            "out_hidden_size": _WIDE.hidden_size,
            "image_size": 112,
            **_MERGED,
        },
        **{f"{name}_token_id": marks.token_id(f"<|{name}|>") for name in ("image", "video")},
        **{
            f"{kind}_{place}_token_id": marks.token_id(f"<|{mark}_of_{kind}|>")
            for kind in ("image", "video")
            for place, mark in {"start": "begin", "end": "end"}.items()
        },
        "tie_word_embeddings": False,
    }


# LFM2-VL: SigLIP 2 reads an image in its own shape, a large one as tiles and a thumbnail; layers of its text are
# convolutions or attention.


def _lfm2_vl(marks: Marks) -> dict[str, Any]:
    text = text_settings(_WIDE, marks)
    del text["rms_norm_eps"]
    return {
        "text_config": {
            **text,
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "conv_dim": _WIDE.hidden_size,  # this and the next are read by vLLM alone
            "block_dim": _WIDE.hidden_size,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
        "vision_config": _tower("siglip2_vision_model", num_patches=64, patch_size=16, vision_use_head=False),
        "image_token_id": marks.token_id("<image>"),
        "downsample_factor": 2,
        "projector_hidden_size": 96,
        "projector_use_layernorm": True,
    }


_LFM2_IMAGES = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 4,
    "use_thumbnail": True,
    "min_image_tokens": 1,
    "max_image_tokens": 4,
    "encoder_patch_size": 16,
    "tile_size": 64,
    "max_pixels_tolerance": 2.0,
    "do_pad": True,
    "do_resize": True,
    "resample": 2,
    "return_row_col_info": True,
    "size": {"height": 64, "width": 64},
    **_PIXELS,
    **_SIGLIP,
}


# PaliGemma: every position of the prompt sees all of it.


def _paligemma(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": {
            **text_settings(_SHAPE, marks),
            "model_type": "gemma",
            "head_dim": _SHAPE.head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": _tower("siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False),
        "image_token_index": marks.token_id("<image>"),
        "vocab_size": marks.vocab_size,
        "projection_dim": _SHAPE.hidden_size,
        "hidden_size": _SHAPE.hidden_size,
        "tie_word_embeddings": True,
    }


# Gemma 4. The small ones have embeddings of each layer and layers that use the keys and values of earlier ones; the
# large ones have values that are the keys, in layers without a window, and positions of an image that see each other.


def _gemma4(marks: Marks, text: Mapping[str, Any], **vision: Any) -> dict[str, Any]:
    return {
        "text_config": {
            **text_settings(_SHAPE, marks),
            "model_type": "gemma4_text",
            # As in published files: pictures have its embeddings of each layer in transformers, and those of 0 in vLLM.
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": 96,  # more than an image has, as published
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
            "final_logit_softcapping": 4.0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": marks.vocab_size,
            "tie_word_embeddings": True,
            **text,
        },
        "vision_config": _tower(
            "gemma4_vision",
            num_key_value_heads=2,
            head_dim=32,
            patch_size=16,
            pooling_kernel_size=3,
            default_output_length=70,  # which vLLM reads
            position_embedding_size=256,
            rope_parameters={"rope_type": "axial", "rope_theta": 100.0},
            **vision,
        ),
        "audio_config": None,
        "image_token_id": marks.token_id("<|image|>"),
        "video_token_id": marks.token_id("<|video|>"),
        "audio_token_id": marks.token_id("<|audio|>"),
        "boi_token_id": marks.token_id("<|image>"),
        "eoi_token_id": marks.token_id("<image|>"),
        "boa_token_id": marks.token_id("<|audio>"),
        "eoa_token_index": marks.token_id("<audio|>"),
        "tie_word_embeddings": True,
    }


def _gemma4_small(marks: Marks) -> dict[str, Any]:
    text = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    return _gemma4(marks, text, use_clipped_linears=True)


_GEMMA4_LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}


def _gemma4_dense(marks: Marks) -> dict[str, Any]:
    return _gemma4(marks, _GEMMA4_LARGE, standardize=True)


def _gemma4_moe(marks: Marks) -> dict[str, Any]:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}
    return _gemma4(marks, _GEMMA4_LARGE | experts, standardize=True)


_GEMMA4_IMAGES = {
    "do_resize": True,
    "do_convert_rgb": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "resample": 3,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 70,
}
"""70 positions are the fewest that the processor knows."""

_GEMMA4_PROCESSOR = {
    "processor_class": "Gemma4Processor",
    "image_seq_length": 70,
    "audio_seq_length": 750,
    "audio_ms_per_token": 40,
    "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **_GEMMA4_IMAGES},
    "video_processor": {"video_processor_type": "Gemma4VideoProcessor", **_GEMMA4_IMAGES},
}


def _gemma4_of(config: Callable[[Marks], dict[str, Any]]) -> Seeing:
    return Seeing("Gemma4ForConditionalGeneration", GEMMA4, config, {}, _GEMMA4_PROCESSOR)


# LLaVA-OneVision: as LLaVA-NeXT, with SigLIP and features that are scaled down where there are too many.


def _llava_onevision(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": _text("qwen2", marks, _WIDE),
        "vision_config": _tower("siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False),
        "image_token_index": marks.token_id("<image>"),
        "video_token_index": marks.token_id("<video>"),
        "image_grid_pinpoints": _GRID,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
    }


_GRID = [[56 * row, 56 * column] for row in range(1, 7) for column in range(1, 7)]
_ONEVISION_IMAGES = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "do_pad": True,
    "do_resize": True,
    "image_grid_pinpoints": _GRID,
    "resample": 3,
    "size": {"height": 56, "width": 56},
    **_PIXELS,
    **_SIGLIP,
}


# Command A Vision: tiles and a thumbnail, a mark after each.


def _cohere2_vision(marks: Marks) -> dict[str, Any]:
    text = text_settings(_SHAPE, marks)
    del text["rms_norm_eps"]
    return {
        "text_config": {
            **text,
            "model_type": "cohere2",
            "head_dim": _SHAPE.head_dim,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.5,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
            "tie_word_embeddings": True,
        },
        "vision_config": _tower("siglip_vision_model", image_size=64, patch_size=16, vision_use_head=False),
        "image_token_id": marks.token_id("<|IMG_PATCH|>"),
        "downsample_factor": 2,
        "alignment_intermediate_size": 96,
        "tie_word_embeddings": True,
    }


_COHERE2_IMAGES = {
    "image_processor_type": "Cohere2VisionImageProcessorFast",
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 12,
    "do_resize": True,
    "patch_size": 2,  # of positions of a tile per side
    "resample": 3,
    "size": {"height": 64, "width": 64},
    **_PIXELS,
    **_SIGLIP,
}


# Granite Vision 3: LLaVA-NeXT with SigLIP, whose features of several layers lie side by side, and Granite's text.


def _granite_vision(marks: Marks) -> dict[str, Any]:
    return {
        "text_config": {
            **text_settings(_WIDE, marks),
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
            "tie_word_embeddings": True,
        },
        "vision_config": _tower(
            "siglip_vision_model", num_hidden_layers=4, image_size=56, patch_size=14, vision_use_head=False
        ),
        "image_token_index": marks.token_id("<image>"),
        "image_grid_pinpoints": _PINPOINTS,
        "image_seq_length": 16,
        "use_image_newline_parameter": True,
        "vision_feature_layer": [-4, -3, -2, -1],
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    }


_GRANITE_PROCESSOR = {
    "processor_class": "LlavaNextProcessor",
    "image_token": "<image>",
    "num_additional_image_tokens": 0,
    "patch_size": 14,
    "vision_feature_select_strategy": "full",
}


# Granite 4 Vision: features of several layers of the tower and of four parts of the last one go, each by way of a
# projector, into several layers of the text, whose positions for images have no embeddings.


def _granite4_vision(marks: Marks) -> dict[str, Any]:
    config = _granite_vision(marks)
    return {
        "text_config": config["text_config"] | {"model_type": "granite4_vision_text", "num_hidden_layers": 6},
        "vision_config": config["vision_config"],
        **{name: config[name] for name in ("image_token_index", "image_grid_pinpoints", "tie_word_embeddings")},
        "image_seq_length": 4,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-3, 0], [-2, 4]],
        "spatial_vision_layer": -1,
        "spatial_target_layers": [1, 2, 3, 5],
    }


def _glm4v_moe(marks: Marks) -> dict[str, Any]:
    """Experts chosen within groups, after one layer without."""
    config = _glm4v(marks)
    experts = {
        "model_type": "glm4v_moe_text",
        "head_dim": _WIDE.head_dim,  # this and the next are read by vLLM alone
        "use_qk_norm": False,
        "moe_intermediate_size": 96,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    }
    return config | {"text_config": config["text_config"] | experts}


def _glm_ocr(marks: Marks) -> dict[str, Any]:
    """Every position of a head turns, and the tower has norms of queries and keys."""
    config = _glm4v(marks)
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [4, 6, 6]}
    text = config["text_config"] | {"model_type": "glm_ocr_text", "rope_parameters": rotary, "attention_bias": False}
    text["intermediate_size"] = 3 * text["hidden_size"]  # vLLM's projector has it, too, and transformers' three times
    vision = config["vision_config"] | {"attention_bias": True}
    return config | {"text_config": text, "vision_config": vision}


def _exaone4_5(marks: Marks) -> dict[str, Any]:
    """Qwen2.5-VL's tower with fewer keys than queries, and layers without positions in the text."""
    return {
        "text_config": {
            **text_settings(_SHAPE, marks),
            "model_type": "exaone4",
            "head_dim": _SHAPE.head_dim,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
        "vision_config": {
            **{"model_type": "exaone4_5_vision", "depth": 2, "hidden_size": 64, "intermediate_size": 128},
            **{"num_heads": 2, "num_key_value_heads": 1, "out_hidden_size": _SHAPE.hidden_size},
            **{"window_size": 56, "fullatt_block_indexes": [1], **_MERGED},
        },
        "image_token_id": marks.token_id(IMAGE_PAD),
        "video_token_id": marks.token_id(VIDEO_PAD),
        "vision_start_token_id": marks.token_id(VISION_START),
        "vision_end_token_id": marks.token_id(VISION_END),
        "tie_word_embeddings": False,
    }


def _internvl3_5(marks: Marks) -> dict[str, Any]:
    return _internvl(marks) | {"text_config": _text("qwen3", marks)}


def _internvl3_5_moe(marks: Marks) -> dict[str, Any]:
    return _internvl(marks) | {"text_config": _text("qwen3_moe", marks, moe_intermediate_size=96)}


def _ministral3(marks: Marks) -> dict[str, Any]:
    """Ministral 3: queries grow beyond the positions that it was trained on first."""
    rotary = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    text = {
        **_text("mistral", marks, sliding_window=None),
        "model_type": "ministral3",
        "rope_parameters": rotary,
        "max_position_embeddings": 512,
    }
    return _mistral3(marks) | {"text_config": text}


def _llama4(marks: Marks) -> dict[str, Any]:
    """Experts in every layer, of which one is chosen; the second layer has no positions."""
    return {
        "text_config": {
            **text_settings(_SHAPE, marks),
            "model_type": "llama4_text",
            "head_dim": _SHAPE.head_dim,
            "intermediate_size": 48,
            "intermediate_size_mlp": _SHAPE.intermediate_size,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 0],
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 64,
            "attention_chunk_size": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        "vision_config": {
            # The projector reads four patches at once, whose width has this name.
            **_tower("llama4_vision_model", image_size=56, patch_size=14, intermediate_size=4 * 64),
            **{"pixel_shuffle_ratio": 0.5, "projector_input_dim": 64, "projector_output_dim": 64},
            **{"vision_output_dim": 64, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}},
        },
        "image_token_index": marks.token_id("<|patch|>"),
        "boi_token_index": marks.token_id("<|image_start|>"),
        "eoi_token_index": marks.token_id("<|image_end|>"),
    }


_LLAMA4_IMAGES = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "do_resize": True,
    "max_patches": 16,
    "resample": 2,
    "resize_to_max_canvas": False,
    "size": {"height": 56, "width": 56},
    **_PIXELS,
    **_SIGLIP,
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
    "smolvlm": Seeing(
        "SmolVLMForConditionalGeneration",
        SMOLVLM,
        _smolvlm,
        {"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS_IMAGES},
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        {"video_processor_type": "SmolVLMVideoProcessor", **_IDEFICS_IMAGES},
    ),
    "idefics3": Seeing(
        "Idefics3ForConditionalGeneration",
        IDEFICS3,
        _idefics3,
        {"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS_IMAGES},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "qwen2_vl": Seeing(
        "Qwen2VLForConditionalGeneration",
        QWEN,
        _qwen2_vl,
        _of_area("Qwen2VLImageProcessor"),
        {"processor_class": "Qwen2VLProcessor"},
        _videos("Qwen2VLVideoProcessor", _of_area("")),
    ),
    "glm4v": Seeing(
        "Glm4vForConditionalGeneration",
        GLM4V,
        _glm4v,
        _of_area("Glm4vImageProcessor"),
        {"processor_class": "Glm4vProcessor"},
        _videos("Glm4vVideoProcessor", _of_area("")),
    ),
    "lfm2_vl": Seeing(
        "Lfm2VlForConditionalGeneration",
        LFM2_VL,
        _lfm2_vl,
        _LFM2_IMAGES,
        {"processor_class": "Lfm2VlProcessor"},
        renames=_TOWER_INSIDE,
    ),
    "paligemma": Seeing(
        "PaliGemmaForConditionalGeneration",
        PALIGEMMA,
        _paligemma,
        {
            "image_processor_type": "SiglipImageProcessor",
            "do_resize": True,
            "image_seq_length": 16,
            "resample": 3,
            "size": {"height": 56, "width": 56},
            **_PIXELS,
            **_SIGLIP,
        },
        {"processor_class": "PaliGemmaProcessor"},
        renames=_TOWER_INSIDE,
    ),
    "gemma4": _gemma4_of(_gemma4_small),
    "gemma4_dense": _gemma4_of(_gemma4_dense),
    "gemma4_moe": _gemma4_of(_gemma4_moe),
    "llava_onevision": Seeing(
        "LlavaOnevisionForConditionalGeneration",
        LLAVA_ONEVISION,
        _llava_onevision,
        _ONEVISION_IMAGES,
        {
            "processor_class": "LlavaOnevisionProcessor",
            "image_token": "<image>",
            "num_image_tokens": 16,
            "video_token": "<video>",
            "vision_aspect_ratio": "anyres_max_9",
            "vision_feature_select_strategy": "full",
        },
        _videos("LlavaOnevisionVideoProcessor", _ONEVISION_IMAGES),
        renames=_TOWER_INSIDE,
    ),
    "cohere2_vision": Seeing(
        "Cohere2VisionForConditionalGeneration",
        COHERE2_VISION,
        _cohere2_vision,
        _COHERE2_IMAGES,
        {"processor_class": "Cohere2VisionProcessor"},
        renames=_TOWER_INSIDE,
    ),
    "granite_vision": Seeing(
        "LlavaNextForConditionalGeneration",
        GRANITE_VISION,
        _granite_vision,
        _clip_processor("LlavaNextImageProcessor", image_grid_pinpoints=_PINPOINTS, do_pad=True) | _SIGLIP,
        _GRANITE_PROCESSOR,
        renames=_TOWER_INSIDE,
    ),
    "granite4_vision": Seeing(
        "Granite4VisionForConditionalGeneration",
        GRANITE_VISION,
        _granite4_vision,
        _clip_processor("LlavaNextImageProcessor", image_grid_pinpoints=_PINPOINTS, do_pad=True) | _SIGLIP,
        _GRANITE_PROCESSOR | {"processor_class": "Granite4VisionProcessor", "downsample_rate": "1/2"},
        renames=_TOWER_INSIDE,
    ),
    "glm4v_moe": Seeing(
        "Glm4vMoeForConditionalGeneration",
        GLM4V,
        _glm4v_moe,
        _of_area("Glm4vImageProcessor"),
        {"processor_class": "Glm4vProcessor"},
        _videos("Glm4vVideoProcessor", _of_area("")),
    ),
    "glm_ocr": Seeing(
        "GlmOcrForConditionalGeneration",
        GLM4V,
        _glm_ocr,
        _of_area("Glm46VImageProcessor"),
        {"processor_class": "Glm46VProcessor"},
        _videos("Glm46VVideoProcessor", _of_area("")),
    ),
    "exaone4_5": Seeing(
        "Exaone4_5_ForConditionalGeneration",
        QWEN,
        _exaone4_5,
        _of_area("Qwen2VLImageProcessor"),
        {"processor_class": "Exaone4_5_Processor"},
        _videos("Qwen2VLVideoProcessor", _of_area("")),
    ),
    "internvl3_5": Seeing(
        "InternVLForConditionalGeneration",
        INTERNVL,
        _internvl3_5,
        _GOT_OCR2,
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 56, "width": 56}, **_IMAGENET},
    ),
    "internvl3_5_moe": Seeing(
        "InternVLForConditionalGeneration",
        INTERNVL,
        _internvl3_5_moe,
        _GOT_OCR2,
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 56, "width": 56}, **_IMAGENET},
    ),
    "ministral3": Seeing(
        "Mistral3ForConditionalGeneration",
        PIXTRAL,
        _ministral3,
        _pixtral_processor(14),
        {**_PIXTRAL_PROCESSOR, "patch_size": 14, "spatial_merge_size": 2},
    ),
    "llama4": Seeing(
        "Llama4ForConditionalGeneration",
        LLAMA4,
        _llama4,
        _LLAMA4_IMAGES,
        {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
    ),
}
