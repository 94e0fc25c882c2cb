"""How much memory the autograd decoder and the vision tower have in use at most: counted on tensors without values, in
the shapes of 8B."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, groups_of, layout
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.decoder import PackedRow
from tinker_local.backend.training.model.decoders.autograd import AutogradDecoder
from tinker_local.backend.training.model.load_model import decoder_of_sizes, tower_of_sizes
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.model.vision_tower import VisionTower, _Run
from tinker_local.backend.training.run.recompute_policy import Keep
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


def test_the_plan_has_room_for_the_backward_of_a_block_of_a_vision_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shapes of Qwen3-VL-8B; and not twice as much."""

    class LikeKernels(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(query, key, value)
            return torch.empty_like(query).transpose(1, 2)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    def attend(module: Any, query: Any, key: Any, value: Any, **_: Any) -> tuple[torch.Tensor, None]:
        return LikeKernels.apply(query, key, value), None

    monkeypatch.setattr(f"{PACKAGE}.kernels.compat_torch.mm_into_float32", lambda a, b, out: None)
    vision = {"depth": 2, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 64}
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}, tie_word_embeddings=True
    )
    tower = tower_of_sizes(config, "bfloat16")
    assert isinstance(tower, VisionTower)
    lora = LoraConfig(rank=32, train_vision=True)
    specs = layout(tower.targets, lora)
    adapter = Adapter(lora, specs, torch.zeros(specs[-1].stop, device=META))
    slices = [AdapterSlice(adapter, 0, TOKENS)]
    batch = LoraBatch(groups_of(tower.targets), slices, torch.bfloat16, torch.float32, gradient=True)
    transformers.AttentionInterface.register("like_kernels_of_flash", attend)
    tower._tower.config._attn_implementation = "like_kernels_of_flash"
    x = torch.zeros(TOKENS, 1152, dtype=torch.bfloat16, device=META, requires_grad=True)
    angles = torch.zeros(TOKENS, 72, device=META)
    weights = [*tower._tower.parameters(), *batch._a.values(), *batch._b.values()]
    bounds = torch.zeros(2, dtype=torch.int32, device=META)
    live = Live([*weights, *batch._grad_a.values(), *batch._grad_b.values(), x])
    with live, tower._running(_Run(batch, TOKENS)):
        output = tower._tower.blocks[0](x, cu_seqlens=bounds, position_embeddings=(angles, angles), max_seqlen=TOKENS)
        output.sum().backward()
    planned = tower.sizes(2).backward * TOKENS // 4
    assert planned / 2 < live.peak < planned
    assert tower.sizes(2).kept == 4 * 2 * 1152 * 2


def test_the_backward_of_a_checkpointed_layer_has_gate_and_up_in_memory_and_no_third_of_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def like_kernels(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    monkeypatch.setattr(f"{PACKAGE}.model.decoders.packed_attention.attend_backward", like_kernels)
    monkeypatch.setattr(f"{PACKAGE}.kernels.compat_torch.mm_into_float32", lambda a, b, out: None)
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
