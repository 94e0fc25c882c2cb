"""Qwen3.5 and 3.6 with experts: the layers of Qwen3.5, with routed experts in place of MLPs, and one that all positions
take. `gate_proj`, `up_proj` and `down_proj` are of that shared expert; the router and its gate are frozen."""

from dataclasses import replace

from tinker_local.backend.families import qwen3_5
from tinker_local.backend.families.qwen2_moe import EXPERTS

_LORA = replace(qwen3_5.TEXT.lora, experts=EXPERTS)

TEXT = replace(qwen3_5.TEXT, lora=_LORA)
FAMILY = replace(qwen3_5.FAMILY, lora=_LORA)
