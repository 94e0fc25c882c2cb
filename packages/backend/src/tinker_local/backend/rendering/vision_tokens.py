"""The tokens around and in place of an image; the one module here that knows families of models."""

from dataclasses import dataclass
from typing import Any

QWEN_VL = ("qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Ids that mark an image: `start`, then one `pad` per position, then `end`."""

    start: int
    pad: int
    end: int


def vision_tokens(config: Any) -> VisionTokens | None:
    """Those of a HF model configuration, None for a text model; ValueError for a family that is not known."""
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type not in QWEN_VL:
        raise ValueError(f"images of model_type {config.model_type!r} are not supported, only {', '.join(QWEN_VL)}")
    return VisionTokens(config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)
