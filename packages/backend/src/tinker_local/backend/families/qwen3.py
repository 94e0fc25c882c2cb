"""Qwen3: text only, rotary positions counted from 0."""

from typing import Any

import numpy as np
from tinker_local.backend.families.interface import Family, Positions
from tinker_local.backend.rendering.interface import RenderedInput


def _position_ids(config: Any, input: RenderedInput) -> Positions:
    return np.arange(input.length, dtype=np.int64)[None]


FAMILY = Family(auto_class="AutoModelForCausalLM", decoder_path="model", position_ids=_position_ids)
