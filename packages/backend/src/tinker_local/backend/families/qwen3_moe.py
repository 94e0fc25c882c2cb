"""Qwen3-MoE: like Qwen3, with routed experts in place of MLPs. The router is frozen."""

from tinker_local.backend.families.family import Experts, Family, LoraNames

FAMILY = Family(lora=LoraNames(experts=Experts(peft_fuses=True)))
