"""Model families, one module each, by `model_type` of their Hugging Face config; `other` is for all without one."""

from dataclasses import replace

from tinker_local.backend.families import (
    ernie4_5_moe,
    gemma2,
    gemma3,
    gemma3_text,
    gemma4,
    glm4_moe,
    gpt_oss,
    lfm2_moe,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    other,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    seeing,
)
from tinker_local.backend.families.family import Family
from tinker_local.backend.families.line_up import NOT_SERVED
from tinker_local.types import UnsupportedError

FAMILIES: dict[str, Family] = {
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma3.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "gemma4": gemma4.FAMILY,
    "gemma4_text": gemma4.TEXT,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "lfm2_moe": lfm2_moe.FAMILY,
    "llama": llama.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen2_vl": qwen2_vl.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl_moe.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_text": qwen3_5.TEXT,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
    "qwen3_5_moe_text": qwen3_5_moe.TEXT,
}
FAMILIES = {model_type: replace(family, model_type=model_type) for model_type, family in FAMILIES.items()}

OTHER = other.FAMILY
NO_FAMILY = (
    "model_type {!r} is supported for text alone, and this model has a part for images or sound that no class of "
    "transformers reads with text"
)
"""Why a model of `OTHER` with such a part is refused."""


def written_family(model_type: str, where: str) -> Family:
    """The family of a config's `model_type` that is written here, or `OTHER` for one without; UnsupportedError for what
    is known not to work. `where`: the model's name. Loads no torch."""
    if model_type in NOT_SERVED and model_type not in FAMILIES:
        raise UnsupportedError(f"{where}: model_type {model_type!r} is not supported: {NOT_SERVED[model_type]}")
    return FAMILIES.get(model_type, OTHER)


def family_of(model_type: str, where: str) -> Family:
    """The same, and one that is found in transformers' class for a model without a family that reads images. `where`: a
    folder or hub name, whose config is read for such a model, and where it says whether layers have experts."""
    family = written_family(model_type, where)
    if family is OTHER and seeing.sees(model_type, where):
        return seeing.seeing_family(model_type, where)
    return family if family.experts_of is None else replace(family, lora=family.experts_of(where))
