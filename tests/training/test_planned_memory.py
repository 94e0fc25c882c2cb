"""The memory that a decoder takes is known before its model is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tinker_local.backend.spare_memory import (
    give_back_at_rest,
    give_back_if_short,
    leave_spare_memory,
    take_all_memory_again,
)
from tinker_local.backend.training.model.load_model import decoder_of_sizes
from tinker_local.backend.training.run.recompute_policy import free_bytes

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "qwen3",
    "qwen3_untied",
    "qwen2_5_vl",
    "qwen3_vl",
)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("decoder", ["auto", "autograd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_without_values_tells_the_memory_of_the_loaded_one(
    family: str, decoder: Any, trainer: Any, model_path: Callable[[str], Path]
) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = trainer(family, decoder=decoder, dtype=dtype)._loaded
        config = transformers.AutoConfig.from_pretrained(model_path(family))
        planned, parameters = decoder_of_sizes(config, dtype, decoder)
        assert type(planned) is type(loaded.decoder)
        assert planned.memory(100, 16) == loaded.decoder.memory(100, 16)
        assert parameters == sum(parameter.numel() for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("kind", "fields", "plain"),
    [
        ("Granite", {"residual_multiplier": 0.5}, {}),
        ("Granite", {"embedding_multiplier": 3.0}, {}),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
    ],
)
def test_a_plan_knows_layers_that_are_not_written_out_by_the_config_alone(
    kind: str, fields: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    """There are no values that could be compared with transformers'. `plain`: fields of layers that are."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    for own, decoder in ((fields, "AutogradDecoder"), (plain, "WrittenOutDecoder")):
        getattr(transformers, f"{kind}Config")(**sizes, **own).save_pretrained(tmp_path)
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        assert type(decoder_of_sizes(config, "float32", "auto")[0]).__name__ == decoder


def test_activations_keep_to_the_share_of_the_device_that_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 bytes 70 are free, this process has 20 and caches 4 of them."""
    numbers = {"mem_get_info": (70, 100), "memory_allocated": 16, "memory_reserved": 20}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for share, expected in ((1.0, 74), (0.5, 34), (0.1, -6)):

        def allowed(device: int | None, share: float = share) -> float:
            assert device is None or isinstance(device, int)  # torch 2.11 takes no device without a number
            return share

        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", allowed)
        assert free_bytes(torch.device("cuda")) == expected
        assert free_bytes(torch.device("cuda", 1)) == expected


def test_a_trainer_leaves_memory_to_others_and_what_it_has_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card of 80 GiB, by the numbers that CUDA would give."""
    gib, limits = 2**30, [1.0]
    numbers: dict[str, Any] = {}
    for name in ("mem_get_info", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: numbers[name])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: limits[-1])

    def set_limit(share: float, device: int | None) -> None:
        assert device is None or isinstance(device, int)  # torch 2.13 takes no device without a number
        limits.append(share)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_limit)

    def give_back() -> None:
        free, total = numbers["mem_get_info"]
        cached = numbers["memory_reserved"] - numbers["memory_allocated"]
        numbers.update(mem_get_info=(free + cached, total), memory_reserved=numbers["memory_allocated"])

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    device = torch.device("cuda")

    def limit(free: float, reserved: float, allocated: float) -> float:
        numbers.update(mem_get_info=(int(free * gib), 80 * gib), memory_allocated=int(allocated * gib))
        numbers["memory_reserved"] = int(reserved * gib)
        leave_spare_memory(device, gib)
        return limits[-1] * 80

    assert limit(free=30, reserved=20, allocated=16) == pytest.approx(49)
    assert limit(free=1.5, reserved=48.5, allocated=16) == pytest.approx(49)
    # Another program has taken a gibibyte: what was cached goes back first.
    assert limit(free=0.5, reserved=48.5, allocated=16) == pytest.approx(48)
    assert limit(free=0.5, reserved=48.5, allocated=48.5) == pytest.approx(48.5)
    assert limit(free=60, reserved=16, allocated=16) == pytest.approx(75)  # and has ended
    take_all_memory_again(device)
    assert limits[-1] == 1.0
    assert limit(free=60, reserved=16, allocated=16) == pytest.approx(75)
    limits.append(0.25)  # an operator's own limit
    take_all_memory_again(device)
    assert limits[-1] == 0.25
    assert limit(free=60, reserved=16, allocated=16) == pytest.approx(20)
    numbers.update(mem_get_info=(gib, 80 * gib), memory_reserved=3 * gib, memory_allocated=2 * gib)
    give_back_if_short(device, gib)
    assert numbers["mem_get_info"][0] == gib
    give_back_if_short(device, gib + 1)
    assert numbers["mem_get_info"][0] == 2 * gib
    leave_spare_memory(torch.device("cpu"), gib)

    # The trainer leaves a gibibyte free: what a sampler at rest has cached is the trainer's.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    numbers.update(mem_get_info=(3 * gib, 80 * gib), memory_reserved=4 * gib, memory_allocated=2 * gib)
    give_back_at_rest(gib)
    assert numbers["mem_get_info"][0] == 3 * gib
    numbers.update(mem_get_info=(3 * gib - 1, 80 * gib))
    give_back_at_rest(gib)
    assert numbers["mem_get_info"][0] == 5 * gib - 1
