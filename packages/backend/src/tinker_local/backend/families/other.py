"""Any other text model of transformers whose decoder is at `model` and has `layers`: adapters train every Linear module
of a layer. A server that starts with one compares an adapter, too: vLLM may lack some of these modules."""

from tinker_local.backend.families.family import Family, LoraNames, VLLMHead

FAMILY = Family(
    lora=LoraNames(attn=(), mlp=(), every_linear=True),
    logits=None,
    vllm_head=VLLMHead(embedding="model.embed_tokens"),
)
