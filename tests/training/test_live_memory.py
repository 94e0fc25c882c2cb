"""How much memory the autograd decoder has in use at most: counted on tensors without values, in the shapes of 8B."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from tinker_local.backend.training.attention import Segments
from tinker_local.backend.training.decoder import PackedRow
from tinker_local.backend.training.decoders.autograd import AutogradDecoder
from tinker_local.backend.training.load_model import decoder_of_sizes
from tinker_local.backend.training.lora import Adapter, AdapterSlice, groups_of, layout
from tinker_local.backend.training.lora_batch import LoraBatch
from tinker_local.backend.training.recompute_policy import Keep
from tinker_local.types import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, HIDDEN, WIDE, LAYERS = 16384, 4096, 12288, 2
META = torch.device("meta")
PACKAGE = "tinker_local.backend.training"


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make, from their first tensor to their last; not those `known`."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for key in [key for key, (storage, _) in self._storages.items() if storage.expired()]:
            del self._storages[key]
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata not in self._known:
                storage = output.untyped_storage()
                self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return outputs


@pytest.mark.mutation(
    "whole-product-of-a-gated-mlp",
    "training/decoders/gated_mlp.py",
    "        part = slice(start, start + _ROWS)\n        yield",
    "        part = slice(start, start + len(flat[0]))\n        if start:\n            break\n        yield",
)
def test_the_backward_of_a_checkpointed_layer_has_gate_and_up_in_memory_and_no_third_of_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def like_kernels(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    monkeypatch.setattr(f"{PACKAGE}.decoders.packed_attention.attend_backward", like_kernels)
    monkeypatch.setattr(f"{PACKAGE}.compat_torch.mm_into_float32", lambda a, b, out: None)
    config = transformers.Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1000,
    )
    decoder, _ = decoder_of_sizes(config, "bfloat16", "autograd")
    assert isinstance(decoder, AutogradDecoder)
    lora = LoraConfig(rank=32)
    specs = layout(decoder.targets, lora)
    adapter = Adapter(lora, specs, torch.zeros(specs[-1].stop, device=META))
    slices = [AdapterSlice(adapter, 0, TOKENS)]
    batch = LoraBatch(groups_of(decoder.targets), slices, torch.bfloat16, torch.float32, gradient=True)
    embeds = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=META)
    row = PackedRow(embeds, torch.arange(TOKENS, device=META)[None], Segments((TOKENS,), META))
    weights = [*decoder._modules.parameters(), *batch._a.values(), *batch._b.values()]
    with Live([*weights, *batch._grad_a.values(), *batch._grad_b.values()]) as live:
        done = decoder.forward(row, batch, [Keep.INPUT] * LAYERS)
        done.backward(torch.zeros_like(embeds))
    # Gate and up; as wide as the hidden state: layers' inputs, what attention and norms keep, and gradients; and less
    # than a quarter of a third [T, I] for some rows of the product, its gradient and the activation.
    assert live.peak < TOKENS * 2 * (2.25 * WIDE + (LAYERS + 10) * HIDDEN)
    assert live.peak < decoder.memory(TOKENS, 32).always
