"""Several LoRA runs on one model as a PEFT user would train them: one adapter after another."""

import torch
from harness.scale import Scale
from harness.timing import device

from baselines.peft_model import adamw, cast_adapters, text_model, with_lora


class AdaptersLoop:
    """`scale.adapters` adapters on one model, each with its own optimizer and one sequence of `length` tokens."""

    def __init__(self, scale: Scale, length: int, *, bf16_adapters: bool) -> None:
        model = text_model(scale.text, "sdpa")
        self._wrapped = with_lora(model, scale.rank, within="layers", in_compute_dtype=False)
        self._names = ["default", *(f"run_{index}" for index in range(1, scale.adapters))]
        config = self._wrapped.peft_config["default"]
        for name in self._names[1:]:
            self._wrapped.add_adapter(name, config)
        for name, parameter in self._wrapped.named_parameters():
            parameter.requires_grad_("lora_" in name)
        if bf16_adapters:
            cast_adapters(self._wrapped)
        self._optimizers = {
            name: adamw([p for path, p in self._wrapped.named_parameters() if f".{name}." in path and "lora_" in path])
            for name in self._names
        }
        generator = torch.Generator().manual_seed(0)
        self._tokens = [
            torch.randint(0, scale.text.vocab, (1, length), generator=generator).to(device()) for _ in self._names
        ]

    def step(self) -> None:
        """One update of every run."""
        for name, tokens in zip(self._names, self._tokens, strict=True):
            self._wrapped.set_adapter(name)
            self._wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer = self._optimizers[name]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
