"""Mixtral: like Llama, with routed experts in place of MLPs. Its files call these by other names."""

from tinker_local.backend.families.family import Experts, Family, LoraNames

EXPERTS = Experts(in_files=("w1", "w3", "w2"), block="block_sparse_moe")

FAMILY = Family(lora=LoraNames(experts=EXPERTS))
