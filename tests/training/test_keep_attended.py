"""What attention put out is kept where computing it again costs most: of long sequences, when not all fits."""

from typing import Any

import pytest
import torch
from tinker_local.backend.training.model.attention import attend
from tinker_local.backend.training.model.decoders.written_out import attention_block
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.run.block_memory import worth_keeping
from tinker_local.backend.training.run.recompute_policy import ActivationMemory, Keep, LayerMemory
from tinker_local.backend.training.trainer import TrainWork

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5_text"])
def test_kept_attention_is_not_computed_again_and_gradients_are_the_same(
    family: str,
    trainer: Any,
    make: Any,
    add_adapter: Any,
    gradients: Any,
    assert_close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counted(*given: Any) -> Any:
        calls.append(1)
        return attend(*given)

    monkeypatch.setattr(attention_block, "attend", counted)
    ours = trainer(family, decoder="written-out", dtype="float32")
    add_adapter(ours, "a")
    layers = ours._loaded.decoder.layers
    attending = sum(isinstance(block, attention_block.AttentionBlock) for layer in layers for block in layer)
    data, seen = [make.datum(9), make.datum(30)], {}
    for keep in Keep:
        monkeypatch.setattr(ours._runner, "_policy", lambda *_, keep=keep: [keep] * len(layers))
        calls.clear()
        ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        seen[keep] = gradients(ours, "a")
        ours.discard_gradients("a")
        assert len(calls) == (2 if keep is Keep.INPUT else 1) * attending, keep
    for found in seen.values():
        assert_close(found, seen[Keep.ALL], 1e-6)


def test_what_is_kept_of_attention_takes_the_memory_that_is_planned(trainer: Any) -> None:
    decoder = trainer("qwen3", decoder="written-out", dtype="float32")._loaded.decoder
    block, tokens = decoder.layers[0][0], 24
    planned = decoder.memory(tokens, 16, keys=1000).layers[0]
    attended = torch.zeros(tokens, block.heads, block.head_size)
    logsumexp = torch.zeros(block.heads, tokens)
    assert planned.attended == attended.nbytes + logsumexp.nbytes
    assert planned.attended < planned.lean
    assert [layer.attended for layer in decoder.memory(tokens, 16).layers] == [0] * len(decoder.layers)
    assert decoder.memory(tokens, 16, keys=1000).everything == decoder.memory(tokens, 16).everything


def test_long_rows_keep_attention_first_then_the_rest_then_all() -> None:
    memory = ActivationMemory(100, [LayerMemory(10, 20, 4), LayerMemory(10, 20, 4)])
    kept = {free: memory.policy(100 + free) for free in (3, 4, 8, 13, 14, 20, 39, 40, 60)}
    assert kept == {
        3: [Keep.INPUT, Keep.INPUT],
        4: [Keep.ATTENDED, Keep.INPUT],
        8: [Keep.ATTENDED, Keep.ATTENDED],
        13: [Keep.ATTENDED, Keep.ATTENDED],
        14: [Keep.LEAN, Keep.ATTENDED],
        20: [Keep.LEAN, Keep.LEAN],
        39: [Keep.LEAN, Keep.LEAN],
        40: [Keep.ALL, Keep.LEAN],
        60: [Keep.ALL, Keep.ALL],
    }


def test_layers_whose_windows_are_short_keep_no_attention_alone() -> None:
    """Linear attention and windows cost little to compute again, whatever the sequence's length."""
    memory = ActivationMemory(0, [LayerMemory(10, 20, 0), LayerMemory(10, 20, 4)])
    assert memory.policy(4) == [Keep.INPUT, Keep.ATTENDED]
    assert memory.policy(14) == [Keep.LEAN, Keep.ATTENDED]
    assert worth_keeping(16384, None, 4096)
    assert not worth_keeping(16384, 1024, 4096)
    assert worth_keeping(16384, 4096, 4096)
    assert not worth_keeping(500, None, 4096)


def test_positions_see_what_precedes_them_in_their_sequences() -> None:
    assert Segments((4, 1), CPU).keys_seen == (1 + 2 + 3 + 4 + 1) / 5
    assert Segments((4, 2), CPU, parents=(NO_PARENT, 0)).keys_seen == (1 + 2 + 3 + 4 + 5 + 6) / 6


def test_a_row_of_one_long_sequence_keeps_attention_where_the_same_tokens_in_short_ones_do_not(
    trainer: Any, make: Any, add_adapter: Any
) -> None:
    """The model's hidden size is 64, so a position has to see more than 32."""
    memory = trainer("qwen3", decoder="written-out")._loaded.decoder.memory(128, 16, keys=64)
    attended = sum(layer.attended for layer in memory.layers)
    budget = memory.always + attended + memory.layers[0].attended // 2
    assert budget - memory.always < memory.layers[0].lean
    for lengths, expected in (([128], {Keep.ATTENDED}), ([16] * 8, {Keep.INPUT})):
        ours = trainer("qwen3", decoder="written-out", activation_memory_bytes=budget)
        add_adapter(ours, "a", rank=16)
        plans: list[Any] = []
        original = ours._runner._policy

        def record(*given: Any, plans: Any = plans, original: Any = original) -> Any:
            plans.append(original(*given))
            return plans[-1]

        ours._runner._policy = record
        ours.forward_backward([TrainWork("a", [make.datum(length) for length in lengths], "cross_entropy")])
        assert set(plans[0]) == expected
        ours.close()
