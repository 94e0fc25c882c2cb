"""Tiny models of random weights of every architecture that transformers and vLLM both have.

Those with a recipe in `tiny_models` are made by it. The others are made of the default config of transformers' class,
with its fields shrunk by their names, so that a new version of transformers brings its architectures by itself.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "feed_forward_proj_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "block_ff_dim"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 80),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "block_dim", "mlp_intermediate_size"), 80),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim", "swa_head_dim", "attention_head_dim"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window"), 16),
    **{"vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16},
    **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16, "rope_head_dim": 16},
    **{"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "num_expert_group": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 24},
    **{"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_ssm": 256, "mamba_chunk_size": 16},
    **{"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "state_size": 16, "chunk_size": 16},
    **{"n_groups": 1, "mamba_n_groups": 1, "mamba_ngroups": 1, "time_step_rank": 8, "mamba_dt_rank": 8},
    **{"adapter_rank": 8, "rotary_dim": 16, "first_k_dense_replace": 1, "moe_layer_start_index": 1},
    **{"initializer_range": 0.1, "image_size": 56, "patch_size": 14, "out_hidden_size": 128, "projection_dim": 64},
    **{"encoder_hidden_size": 128, "num_dense_layers": 1},
    **{"original_max_position_embeddings": 64, "embedding_multiplier": 3.0, "attention_multiplier": 0.1},
    **{"residual_multiplier": 0.5, "logits_scaling": 2.0, "logit_scale": 0.5, "final_logit_softcapping": 4.0},
    **{"attn_logit_softcapping": 3.0, "zero_expert_num": 4, "query_pre_attn_scalar": 48},
}
"""What fields of configs become, by their names, where they have a number."""

NUMBERS = ("head_dim", "num_key_value_heads")
"""Fields that some classes cannot read where they are None."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
"""What configs call their number of layers."""

GRID = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "block_dim": 128, "conv_dim": 128}
OWN: Mapping[str, Mapping[str, Any]] = {
    "blip_2_qformer": {"intermediate_size": 3072},
    "cohere_compass": {"tie_word_embeddings": True},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    "emu3": {"vocabulary_map": {"<image>": 498, "<|extra_200|>": 499, "<|visual token 000000|>": 300}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": _ROPE | {"mrope_section": [6, 6, 4]},
    },
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0},
    "hunyuan_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [4, 4, 4, 4]}},
    "minicpm3": {"num_key_value_heads": 4, "qk_rope_head_dim": 32},
    "muse_glimmer": {"out_hidden_size": 512, "projector_hidden_size": 256},
    "muse_glimmer_vision": {"output_dim": 512, "adapter_dim": 256},
    "paddleocr_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [8, 4, 4]}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 8},
    "lfm2": _CONVOLUTIONS,
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "qwen4_exp_text": {
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "smollm3": {"no_rope_layers": [1, 0], "num_hidden_layers": 2},
}
"""Fields that the config of a `model_type` has otherwise, itself or inside another one."""


def both() -> tuple[dict[str, str], dict[str, str]]:
    """transformers' classes of language models, and of those that read images and text, that vLLM has too, by
    `model_type`."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm.model_executor.models.registry import ModelRegistry

    here = set(ModelRegistry.get_supported_archs())

    def shared(names: Mapping[str, Any]) -> dict[str, str]:
        listed = {kind: [found] if isinstance(found, str) else list(found) for kind, found in names.items()}
        return {kind: name for kind, classes in listed.items() for name in classes if name in here}

    sees = shared(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    reads = shared(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {kind: name for kind, name in reads.items() if kind not in sees}, sees


def rows() -> dict[str, dict[str, str]]:
    """What there is a row of, by its name: architectures of `both`, further recipes of `tiny_models`, and models that
    vLLM runs by transformers' own class and tests have seen agree. `model_type`, and whether it `sees` or `reads`."""
    from tinker_local.backend.families.line_up import OTHERS
    from tinker_local.backend.tiny_models.seeing_models import SEEING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    reads, sees = both()
    found = {kind: {"model_type": kind, "kind": "reads"} for kind in (*reads, *OTHERS)}
    found |= {kind: {"model_type": kind, "kind": "sees"} for kind in sees}
    kinds = {name.removesuffix("Config"): kind for kind, name in CONFIG_MAPPING_NAMES.items()}
    for name, recipe in SEEING.items():
        kind = kinds[recipe.model_class.removesuffix("ForConditionalGeneration")]
        found |= {_row_of(name, kind): {"model_type": kind, "kind": "sees"}}
    return found


def _row_of(recipe: str, kind: str) -> str:
    return kind if recipe == kind else f"{kind}.{recipe}"


def make(name: str, out: Path) -> Path:
    """Write a model of the row `name` into the folder `out`. Raises whatever its classes do."""
    from typing import get_args

    from tinker_local.backend.tiny_models.make_models import (
        VisionFamilyName,
        make_tiny_text_model,
        make_tiny_vl_model,
    )
    from tinker_local.backend.tiny_models.seeing_models import SEEING, make_tiny_seeing_model
    from tinker_local.backend.tiny_models.text_families import TextFamilyName

    if name in get_args(TextFamilyName):
        return make_tiny_text_model(out, family=name)  # type: ignore[arg-type]
    if name in get_args(VisionFamilyName):
        return make_tiny_vl_model(out, family=name)  # type: ignore[arg-type]
    if (recipe := name.rpartition(".")[2]) in SEEING and rows()[name]["kind"] == "sees":
        return make_tiny_seeing_model(out, recipe)
    return _make_in_general(name, out)


def _make_in_general(kind: str, out: Path) -> Path:
    import torch
    import transformers
    from tinker_local.backend.tiny_models.make_models import claim_folder, instantiate
    from tinker_local.backend.tiny_models.marks import QWEN
    from tinker_local.backend.tiny_models.tokenizer import write_tokenizer
    from tinker_local.backend.tiny_models.weights import write_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    reads, sees = both()
    marks = _marks().get(kind, QWEN)
    claim_folder(out)
    write_tokenizer(out, marks, 256)
    tokens = {}
    if kind in sees:
        with suppress(Exception):  # of any type: the server will say that it has no processor, if it comes that far
            tokens = _write_processor(kind, out)
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**shrunk(config_class().to_dict(), OWN.get(kind, {}), tokens))
    config.dtype = torch.float32  # with its name, some classes cannot be made
    name = {**reads, **sees}.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model = instantiate(getattr(transformers, name), config)
    write_weights(model, out, 0, marks, text_scale=1.0)
    return out


def _marks() -> dict[str, Any]:
    """Of tokenizers of models that see, by `model_type`, where Qwen's are not theirs."""
    from tinker_local.backend.tiny_models import seeing_marks
    from tinker_local.backend.tiny_models.marks import IMAGE_PAD, QWEN, VISION_END, VISION_START

    named = (("image_token", IMAGE_PAD), ("image_start_token", VISION_START), ("image_end_token", VISION_END))
    reserved = [name for name, _ in seeing_marks.LLAMA4.added if "reserved" in name]
    videos = dict(zip(reserved, ("<|video|>", "<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>"), strict=False))
    compass = {
        f"<|{name}|>": f"<|{name.upper()}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    return {
        "cohere_compass": _renamed(QWEN, compass),
        "hunyuan_vl": replace(QWEN, named=named),
        "llava_next_video": seeing_marks.LLAVA_ONEVISION,
        "muse_glimmer": _renamed(seeing_marks.LLAMA4, videos),
        "paddleocr_vl": replace(QWEN, named=named),
        "qianfan_ocr": seeing_marks.INTERNVL,
    }


def _renamed(marks: Any, names: Mapping[str, str]) -> Any:
    """`marks` with other names of tokens."""
    template = marks.chat_template
    for name, other in names.items():
        template = template.replace(name, other)
    added = tuple((names.get(token, token), special) for token, special in marks.added)
    return replace(marks, chat_template=template, added=added)


_TOWER = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "llava_next_video": _TOWER,
    "qianfan_ocr": {"image_seq_length": 4},
}
"""What the processor of a `model_type` says otherwise than by default."""


def _write_processor(kind: str, out: Path) -> dict[str, int]:
    """The processor of transformers' classes by default, with pictures as small as the towers of `SIZES`; returns ids
    of its tokens, by the fields of configs. Nothing for a model without one."""
    import transformers
    from tinker_local.backend.tiny_models.tokenizer import write_json
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    if kind not in PROCESSOR_MAPPING_NAMES:
        return {}
    named = {"processor_class": PROCESSOR_MAPPING_NAMES[kind]}
    files = {
        "preprocessor_config": IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_preprocessor_config": VIDEO_PROCESSOR_MAPPING_NAMES,
    }
    for file, names in files.items():
        classes = names.get(kind) or {}
        if found := classes.get("torchvision") or classes.get("pil"):
            settings = getattr(transformers, found)().to_dict()
            settings = {
                name: value for name, value in settings.items() if isinstance(value, int | float | str | list | dict)
            }
            settings |= {"patch_size": 14} if isinstance(settings.get("patch_size"), int) else {}
            for name in ("size", "crop_size"):
                if {*(settings.get(name) or {})} in ({"height", "width"}, {"shortest_edge"}):
                    settings[name] = dict.fromkeys(settings[name], 56)
            if "image_grid_pinpoints" in settings:
                settings["image_grid_pinpoints"] = GRID
            write_json(out / f"{file}.json", settings | named)
    write_json(out / "processor_config.json", {**PROCESSORS.get(kind, {}), **named})
    processor = transformers.AutoProcessor.from_pretrained(out)
    ids = {
        name.replace("_id", end): getattr(processor, name, None) for name in PROCESSOR_IDS for end in ("_id", "_index")
    }
    return {name: value for name, value in ids.items() if isinstance(value, int)}


PROCESSOR_IDS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_start_token_id",
    "image_end_token_id",
)
"""What processors call tokens as configs do."""


def _kept_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Of a config's layers the first of each kind, at least two."""
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == layers]
    kinds: dict[str, int] = {}
    for at in range(layers):
        kinds.setdefault(repr([each[at] for each in lists]), at)
    kept = sorted(kinds.values())[:4]
    return kept if len(kept) > 1 else list(range(min(2, layers)))


def _token_of(name: str) -> int:
    """The id of a special token, by the name of its field in a config."""
    from tinker_local.backend.tiny_models.marks import IMAGE_PAD, QWEN, VIDEO_PAD, VISION_END, VISION_START

    if "eos" in name:
        return QWEN.token_id(QWEN.stops[0])
    if "pad" in name or "bos" in name:
        return QWEN.token_id(QWEN.pad)
    if "video" in name:
        return QWEN.token_id(VIDEO_PAD)
    if "start" in name or "boi" in name or "begin" in name:
        return QWEN.token_id(VISION_START)
    if "end" in name or "eoi" in name:
        return QWEN.token_id(VISION_END)
    return QWEN.token_id(IMAGE_PAD if "image" in name else "<|vision_pad|>")


def shrunk(config: Mapping[str, Any], more: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """`config` with smaller numbers, and those of configs in it. `more`: fields that it has otherwise. `tokens`: ids
    that the model's processor has."""
    found = {name: value for name, value in config.items() if name not in UNSAID}
    layers = next((found[name] for name in LAYERS if isinstance(found.get(name), int)), 0)
    kept = _kept_layers(found, layers) if layers else []
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "per_layer_config" and isinstance(value, dict):
            found[name] = {at: value[was] for at, was in enumerate(kept) if was in value}
        elif isinstance(value, dict) and (name.endswith("_config") or name.startswith("rope")):
            found[name] = shrunk(value, OWN.get(str(value.get("model_type")), {}), tokens)
        elif isinstance(value, list) and len(value) == layers and layers:
            found[name] = [value[at] for at in kept]
        elif name == "image_grid_pinpoints":
            found[name] = GRID
        elif name.endswith(("token_id", "token_index")):
            found[name] = tokens.get(name, _token_of(name))
        elif name in LAYERS and number:
            found[name] = len(kept)
        elif name == "mrope_section":
            found[name] = [8, 4, 4] if found.get("partial_rotary_factor", 1.0) == 1.0 else [4, 2, 2]
        elif name in SIZES and (number or (value is None and name in NUMBERS)):
            found[name] = SIZES[name]
    return {**found, **more}


UNSAID = (
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "architectures",
    "transformers_version",
)
"""Fields of every config that some classes do not take."""
