"""Writes checkpoints of random weights that transformers and vLLM load like any other: no network, a few seconds.

torch and transformers are imported when a model is made, not before.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tinker_local.backend.tiny_models.marks import (
    GEMMA3,
    IMAGE_END,
    IMAGE_PAD,
    IMAGE_SOFT,
    IMAGE_START,
    QWEN,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)
from tinker_local.backend.tiny_models.processors import (
    GEMMA3_PATCH_SIZE,
    GEMMA3_PATCHES,
    GEMMA3_POOLING,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_VL,
    TEMPORAL_PATCH_SIZE,
    ProcessorSettings,
    write_gemma3_processor,
    write_processors,
)
from tinker_local.backend.tiny_models.shapes import TextShape, VisionShape
from tinker_local.backend.tiny_models.text_families import (
    QWEN3_5_SHAPE,
    TEXT_FAMILIES,
    TextFamilyName,
    expert_settings,
    gemma3_settings,
    qwen3_5_moe_settings,
    qwen3_5_settings,
    text_settings,
)
from tinker_local.backend.tiny_models.tokenizer import write_tokenizer
from tinker_local.backend.tiny_models.weights import write_weights

VisionFamilyName = Literal["qwen3_vl", "qwen3_vl_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "gemma3"]

_ROPE_THETA = 1e6

_WITHOUT_HEAD_SIZE: Mapping[str, str] = {
    "qwen2": "Qwen2.5",
    "olmoe": "OLMoE",
    "qwen2_moe": "Qwen2-MoE",
    "ernie4_5_moe": "Ernie 4.5",
    "lfm2_moe": "LFM2",
}
"""Families whose attention is as wide as the hidden state."""


def make_tiny_text_model(
    out: Path,
    *,
    seed: int = 0,
    family: TextFamilyName = "qwen3",
    tie_word_embeddings: bool | None = None,
    shape: TextShape | None = None,
) -> Path:
    """Write a language model of random float32 weights into the folder `out` and return it.

    `tie_word_embeddings` None: as the family's small models do. The same arguments give the same bytes. Raises
    FileExistsError if `out` exists and is not an empty folder, and ValueError for a shape that the family cannot have.
    """
    import transformers

    kind = TEXT_FAMILIES[family]
    shapes = {
        "qwen2": TextShape(hidden_size=128),
        "olmoe": TextShape(hidden_size=128),
        "qwen2_moe": TextShape(hidden_size=128),
        "ernie4_5_moe": TextShape(hidden_size=128),
        "lfm2_moe": TextShape(hidden_size=128, num_layers=3),
        "qwen3_5_text": QWEN3_5_SHAPE,
        "qwen3_5_moe_text": QWEN3_5_SHAPE,
        "qwen3_next": QWEN3_5_SHAPE,
    }
    shape = shape or shapes.get(family, TextShape())
    if family in _WITHOUT_HEAD_SIZE:
        _check_attention_width(_WITHOUT_HEAD_SIZE[family], shape)
    model_class = getattr(transformers, kind.model_class)
    config = model_class.config_class(
        **{**text_settings(shape, kind.marks), **kind.settings(shape)},
        tie_word_embeddings=kind.tied if tie_word_embeddings is None else tie_word_embeddings,
    )
    claim_folder(out)
    write_tokenizer(out, kind.marks, shape.max_position_embeddings)
    write_weights(instantiate(model_class, config), out, seed, kind.marks, text_scale=shape.weight_scale)
    return out


def make_tiny_vl_model(
    out: Path,
    *,
    seed: int = 0,
    family: VisionFamilyName = "qwen3_vl",
    tie_word_embeddings: bool = True,
    text: TextShape | None = None,
    vision: VisionShape | None = None,
) -> Path:
    """Write a vision-language model of random float32 weights into the folder `out` and return it.

    The same arguments give the same bytes. Raises FileExistsError if `out` exists and is not an empty folder, and
    ValueError for a shape that the family cannot have.
    """
    vision = vision or VisionShape()
    if family == "gemma3":
        return _write_gemma3(out, seed, text or TextShape(), vision, tie_word_embeddings)
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        text, settings = text or TextShape(), QWEN3_VL
        model = _qwen3_vl(text, vision, settings, tie_word_embeddings, experts=family == "qwen3_vl_moe")
    elif family in ("qwen3_5", "qwen3_5_moe"):
        text, settings = text or QWEN3_5_SHAPE, QWEN3_VL  # the tower and its processor are Qwen3-VL's
        model = _qwen3_5(text, vision, settings, tie_word_embeddings, experts=family == "qwen3_5_moe")
    else:
        # These have no setting for the head size: attention is as wide as the hidden state.
        make, settings = (_qwen2_vl, QWEN2_VL) if family == "qwen2_vl" else (_qwen2_5_vl, QWEN2_5_VL)
        text = text or TextShape(hidden_size=128)
        model = make(text, vision, settings, tie_word_embeddings)
    claim_folder(out)
    write_tokenizer(out, QWEN, text.max_position_embeddings)
    as_held = family == "qwen3_5_moe"  # as its published checkpoints are
    scales = {"text_scale": text.weight_scale, "vision_scale": vision.weight_scale}
    write_weights(model, out, seed, QWEN, **scales, as_held=as_held)
    write_processors(out, settings, vision)
    if family == "qwen3_vl_moe":
        _transpose_experts(out)
    return out


def _write_gemma3(out: Path, seed: int, text: TextShape, vision: VisionShape, tie_word_embeddings: bool) -> Path:
    """Images of any shape become squares of the same number of positions."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    patch_size = vision.patch_size or GEMMA3_PATCH_SIZE
    config = Gemma3Config(
        text_config={
            **text_settings(text, GEMMA3),
            **gemma3_settings(text),
            "tie_word_embeddings": tie_word_embeddings,
        },
        vision_config={
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "patch_size": patch_size,
            "image_size": GEMMA3_PATCHES * patch_size,
            "vision_use_head": False,
        },
        mm_tokens_per_image=(GEMMA3_PATCHES // GEMMA3_POOLING) ** 2,
        boi_token_index=GEMMA3.token_id(IMAGE_START),
        eoi_token_index=GEMMA3.token_id(IMAGE_END),
        image_token_index=GEMMA3.token_id(IMAGE_SOFT),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    model = instantiate(Gemma3ForConditionalGeneration, config)
    claim_folder(out)
    write_tokenizer(out, GEMMA3, text.max_position_embeddings)
    write_weights(model, out, seed, GEMMA3, text_scale=text.weight_scale, vision_scale=vision.weight_scale)
    write_gemma3_processor(out, vision)
    rename_tensors(out, {"vision_tower.": "vision_tower.vision_model."})
    return out


def rename_tensors(out: Path, parts: Mapping[str, str]) -> None:
    """Name tensors as the family's checkpoints do and vLLM expects. `parts`: of names, and what takes their place."""
    from safetensors.torch import load_file, save_file

    (file,) = out.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        for part, other in parts.items():
            name = name.replace(part, other)
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def _transpose_experts(out: Path) -> None:
    """Store the matrices of experts as the family's checkpoints do and vLLM expects, which transformers saves as it has
    them in memory."""
    from safetensors.torch import load_file, save_file

    (file,) = out.glob("*.safetensors")
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def make_experts_alike(folder: Path) -> None:
    """Rewrite a model whose experts are in one tensor [experts, ...]: each keeps a tenth of what sets it apart, so that
    a token which rounding sends to another expert changes little."""
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if ".experts." in name and weight.ndim == 3:
            common = weight.mean(0, keepdim=True)
            weights[name] = common * (weight.std() / common.std()) + 0.1 * (weight - common)
    save_file(weights, file, metadata={"format": "pt"})


def claim_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already; give a new or empty folder for the model")
    out.mkdir(parents=True, exist_ok=True)


def _check_attention_width(family: str, shape: TextShape) -> None:
    attention_width = shape.num_heads * shape.head_dim
    if shape.hidden_size != attention_width:
        raise ValueError(f"{family} needs hidden_size = num_heads x head_dim: {shape.hidden_size} != {attention_width}")


def instantiate(model_class: Any, config: Any) -> Any:
    """A model on the CPU; the caller's random state stays as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        return model_class(config)


def _vision_settings(text: TextShape, vision: VisionShape, settings: ProcessorSettings) -> dict[str, Any]:
    return {
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size or settings.patch_size,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "spatial_merge_size": vision.merge_size,
        "out_hidden_size": text.hidden_size,
    }


def _image_token_ids() -> dict[str, int]:
    return {
        "image_token_id": QWEN.token_id(IMAGE_PAD),
        "video_token_id": QWEN.token_id(VIDEO_PAD),
        "vision_start_token_id": QWEN.token_id(VISION_START),
        "vision_end_token_id": QWEN.token_id(VISION_END),
    }


def _rope_parameters(head_dim: int) -> dict[str, Any]:
    """Of the head_dim / 2 rotary frequencies height and width get a third each, time the rest."""
    spatial = head_dim // 6
    return {
        "rope_type": "default",
        "rope_theta": _ROPE_THETA,
        "mrope_section": [head_dim // 2 - 2 * spatial, spatial, spatial],
    }


def _qwen3_vl(
    text: TextShape, vision: VisionShape, settings: ProcessorSettings, tie_word_embeddings: bool, experts: bool
) -> Any:
    import transformers

    config_class = transformers.Qwen3VLMoeConfig if experts else transformers.Qwen3VLConfig
    model_class: Any = (
        transformers.Qwen3VLMoeForConditionalGeneration if experts else transformers.Qwen3VLForConditionalGeneration
    )
    config = config_class(
        text_config={
            **text_settings(text, QWEN),
            # vLLM reads from the text config whether the head of this family is the embedding.
            **({**expert_settings(text), "tie_word_embeddings": tie_word_embeddings} if experts else {}),
            "head_dim": text.head_dim,
            "rope_parameters": {**_rope_parameters(text.head_dim), "mrope_interleaved": True},
        },
        vision_config={
            **_vision_settings(text, vision, settings),
            "num_position_embeddings": vision.position_grid**2,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
        },
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **_image_token_ids(),
    )
    return instantiate(model_class, config)


def _qwen3_5(
    text: TextShape, vision: VisionShape, settings: ProcessorSettings, tie_word_embeddings: bool, experts: bool
) -> Any:
    import transformers

    config_class: Any = transformers.Qwen3_5MoeConfig if experts else transformers.Qwen3_5Config
    model_class: Any = (
        transformers.Qwen3_5MoeForConditionalGeneration if experts else transformers.Qwen3_5ForConditionalGeneration
    )
    # The text model reads both of these from its own config, whatever the whole config says.
    own = {
        "tie_word_embeddings": tie_word_embeddings,
        **(qwen3_5_moe_settings(text) if experts else qwen3_5_settings(text)),
    }
    config = config_class(
        text_config={**text_settings(text, QWEN), **own},
        vision_config={
            **_vision_settings(text, vision, settings),
            "num_position_embeddings": vision.position_grid**2,
        },
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **_image_token_ids(),
    )
    return instantiate(model_class, config)


def _qwen2_5_vl(text: TextShape, vision: VisionShape, settings: ProcessorSettings, tie_word_embeddings: bool) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    _check_attention_width("Qwen2.5-VL", text)
    config = Qwen2_5_VLConfig(
        text_config={**text_settings(text, QWEN), "rope_parameters": _rope_parameters(text.head_dim)},
        vision_config={
            **_vision_settings(text, vision, settings),
            # Windows of 4 x 4 patches in every layer but the last, so that both kinds of attention are there.
            "window_size": 4 * (vision.patch_size or settings.patch_size),
            "fullatt_block_indexes": [vision.num_layers - 1],
        },
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **_image_token_ids(),
    )
    return instantiate(Qwen2_5_VLForConditionalGeneration, config)


def _qwen2_vl(text: TextShape, vision: VisionShape, settings: ProcessorSettings, tie_word_embeddings: bool) -> Any:
    """The config of its tower calls the hidden size of the text so, and its own `embed_dim`."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    _check_attention_width("Qwen2-VL", text)
    tower, ratio = _vision_settings(text, vision, settings), vision.intermediate_size // vision.hidden_size
    del tower["intermediate_size"], tower["out_hidden_size"]
    config = Qwen2VLConfig(
        text_config={**text_settings(text, QWEN), "rope_parameters": _rope_parameters(text.head_dim)},
        vision_config={**tower, "embed_dim": vision.hidden_size, "mlp_ratio": ratio, "hidden_size": text.hidden_size},
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **_image_token_ids(),
    )
    return instantiate(Qwen2VLForConditionalGeneration, config)
