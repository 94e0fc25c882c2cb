"""A Hugging Face model of random weights with PEFT's LoRA on all linear projections of its decoder."""

from typing import Any

import torch
from harness.scale import TextShape
from harness.timing import device
from random_model import text_config

PROJECTIONS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


def compute_dtype() -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device() == "cuda" else torch.float32


def text_model(shape: TextShape, attention: str) -> Any:
    """Qwen3 with weights as transformers initialises them, on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**text_config(shape), tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(compute_dtype())
    try:
        with torch.device(device()):
            return AutoModelForCausalLM.from_config(config, dtype=compute_dtype(), attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)


def with_lora(model: Any, rank: int, *, within: str, in_compute_dtype: bool, projections: str = PROJECTIONS) -> Any:
    """`model` wrapped by PEFT in train mode, with one adapter on the projections whose path contains `within`.

    PEFT keeps adapters in float32; `in_compute_dtype` casts them to the model's type instead, which few people do.
    """
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    wrapped = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=32, target_modules=rf".*{within}.*\.({projections})", lora_dropout=0.0)
    )
    if in_compute_dtype:
        cast_adapters(wrapped)
    return wrapped.train()


def cast_adapters(wrapped: Any) -> None:
    """Adapters in the type in which the model computes: no float32 masters."""
    for parameter in trained(wrapped):
        parameter.data = parameter.data.to(compute_dtype())


def trained(wrapped: Any) -> list[torch.nn.Parameter]:
    """The parameters that an optimizer gets."""
    return [parameter for parameter in wrapped.parameters() if parameter.requires_grad]


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The fused AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)
