"""Qwen3-VL-MoE: like Qwen3-VL, with the experts of Qwen3-MoE, whose matrices are transposed in files."""

from dataclasses import replace

from tinker_local.backend.families import qwen3_vl
from tinker_local.backend.families.family import Experts, LoraNames

FAMILY = replace(qwen3_vl.FAMILY, lora=LoraNames(experts=Experts(transposed=True)))
