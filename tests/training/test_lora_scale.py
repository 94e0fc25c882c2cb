"""Promise 4: the LoRA scale is 32 / rank, as on the hosted service, and PEFT's files say so."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.float64 import Exact

ALPHA = 32
"""Repeated here, because a test that imports the constant would agree with any value."""


@pytest.mark.parametrize("rank", [1, 4, 32])
def test_an_adapter_is_the_base_plus_32_over_rank_times_b_a(
    rank: Any, trainer: Any, model_path: Any, make: Any, add_adapter: Any
) -> None:
    ours = trainer("qwen3_untied")
    state = add_adapter(ours, "a", rank=rank)
    assert state.peft_config()["lora_alpha"] == ALPHA
    assert state.peft_config()["r"] == rank
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path("qwen3_untied"), dtype=torch.float32).eval()
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in [name for name in state.tensors if "lora_A" in name]:
            a, b = (torch.from_numpy(state.tensors[key]) for key in (name, name.replace("lora_A", "lora_B")))
            modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")].weight += (
                ALPHA / rank * b @ a
            )
        rendered = make.input(20)
        token_ids = torch.from_numpy(rendered.token_ids.astype(np.int64))
        expected = model(input_ids=token_ids[None]).logits[0].log_softmax(-1)[torch.arange(19), token_ids[1:]]
    Exact(ours).assert_near("a", [rendered], ours.logprobs("a", rendered), expected.numpy())
    assert np.abs(ours.logprobs(None, rendered) - expected.numpy()).max() > 1e-2
