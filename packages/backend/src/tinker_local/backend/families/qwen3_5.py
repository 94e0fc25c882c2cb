"""Qwen3.5, 3.6 and 3.8, dense: three layers in four attend by a gated delta rule (arXiv 2412.06464), the fourth by
softmax attention with a gate on its output. Images as in Qwen3-VL, without DeepStack."""

from dataclasses import replace
from typing import Any

from tinker_local.backend.families.family import Family, LoraNames, SplitRows, VLLMHead
from tinker_local.backend.families.qwen_vision import VISION, mrope_position_ids, without_sections


def _rows_of_qkv(delta_net: Any) -> tuple[int, int, int]:
    return delta_net.key_dim, delta_net.key_dim, delta_net.value_dim


_QKV = SplitRows(("in_proj_q", "in_proj_k", "in_proj_v"), _rows_of_qkv)

TEXT = Family(
    lora=LoraNames(
        attn=("q_proj", "k_proj", "v_proj", "o_proj", *_QKV.projections, "in_proj_z", "out_proj"),
        split={"in_proj_qkv": _QKV},
    ),
    position_ids=mrope_position_ids,  # before transformers 5.19 the text model alone takes no others either
    vllm_head=VLLMHead("qwen3_5", "Qwen3_5ForCausalLMBase", declared_by="0.32"),
    tool_parser="qwen3_coder",
)

FAMILY = replace(
    TEXT,
    auto_class="AutoModelForImageTextToText",
    decoder_path="model.language_model",
    vision=VISION,
    unlike_vllm=without_sections,
)
