"""A packed LoRA loop by hand over Hugging Face's model of any of the families that are measured."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.scale import Scale
from harness.timing import device

from baselines import loop_segments as segments
from baselines.peft_model import PROJECTIONS, compute_dtype, with_lora
from baselines.text_loop import TextLoop, Variant

LINEAR_ATTENTION = "in_proj_qkv|in_proj_z|out_proj"


class FamilyLoop(TextLoop):
    """The loops of `text.packed_bf16` and `text.packed_bf16_recompute`, for the model in `folder`."""

    def __init__(self, scale: Scale, folder: Path, sequences: Sequence[Any], *, recompute: bool) -> None:
        from transformers import AutoModelForCausalLM

        segments.register()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=compute_dtype(), attn_implementation=segments.NAME, device_map=device()
        )
        kind = model.config.model_type
        projections = f"{PROJECTIONS}|{LINEAR_ATTENTION}" if kind.startswith("qwen3_5") else PROJECTIONS
        wrapped = with_lora(model, scale.rank, within="layers", in_compute_dtype=True, projections=projections)
        self.note = "adapters in bfloat16"
        if kind.startswith("qwen3_5") and device() == "cuda":
            self.note += ", fla's kernels"
            use_kernels()
        self._adopt(scale, Variant(bf16_adapters=True, recompute=recompute), sequences, model, wrapped)


def use_kernels() -> None:
    """Have transformers' linear attention compute by fla's kernels, which know where segments begin."""
    modeling: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def convolved(
        x: torch.Tensor, weight: torch.Tensor, bias: Any, *, activation: str, bounds: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        found: torch.Tensor = convolution(
            x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=bounds.long()
        )[0]
        return found.transpose(1, 2)

    def delta_rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, bounds: torch.Tensor, **_: Any) -> Any:
        return rule(q, k, v, g=g, beta=beta, cu_seqlens=bounds.long(), use_qk_l2norm_in_kernel=True)

    modeling.causal_conv1d_fn = convolved
    modeling.torch_chunk_gated_delta_rule = delta_rule
