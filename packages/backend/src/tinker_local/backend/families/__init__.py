"""The supported model families, one module each, by `model_type` of their Hugging Face config."""

from tinker_local.backend.families import (
    gemma2,
    gemma3_text,
    llama,
    mistral,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from tinker_local.backend.families.family import Family
from tinker_local.backend.families.line_up import NOT_SERVED
from tinker_local.types import UnsupportedError

FAMILIES: dict[str, Family] = {
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl_moe.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_text": qwen3_5.TEXT,
}


def family_of(model_type: str, where: str) -> Family:
    """The family of a config's `model_type`; UnsupportedError lists the supported ones. `where`: the model's name."""
    if model_type not in FAMILIES:
        why = f" ({NOT_SERVED[model_type]})" if model_type in NOT_SERVED else ""
        raise UnsupportedError(
            f"{where}: model_type {model_type!r} is not supported{why}; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
