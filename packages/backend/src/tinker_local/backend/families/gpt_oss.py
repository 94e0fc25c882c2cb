"""gpt-oss: routed experts with biases and a clamped gate. Heads attend to sinks, and every other layer has a sliding
window (arXiv 2508.10925)."""

from tinker_local.backend.families.family import Experts, Family, LoraNames, VLLMHead

FAMILY = Family(
    lora=LoraNames(experts=Experts(transposed=True, interleaved=True, router="router")),
    vllm_head=VLLMHead("gpt_oss", "GptOssForCausalLM"),
    quantized="docs/supported.md has the lines that write published checkpoints, in MXFP4, as bfloat16",
    hosted_attention="attn",
)
