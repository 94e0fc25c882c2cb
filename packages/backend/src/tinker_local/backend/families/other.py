"""Any other text model of transformers whose decoder is at `model` and has `layers`: adapters train every Linear module
of a layer. A server that starts with one compares an adapter, too: vLLM may lack some of these modules."""

from typing import Any

from tinker_local.backend.families.family import Family, LogitRule, LoraNames, VLLMHead


def logits_of_config(config: Any) -> LogitRule:
    """By the fields that configs of transformers have for it: x `logit_scale` / `logits_scaling`, then the cap
    `final_logit_softcapping`."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return LogitRule(scale, getattr(config, "final_logit_softcapping", None))


FAMILY = Family(
    lora=LoraNames(attn=(), mlp=(), every_linear=True),
    logits=logits_of_config,
    vllm_head=VLLMHead(embedding="model.embed_tokens"),
)
