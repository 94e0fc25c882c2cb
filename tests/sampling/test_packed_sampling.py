"""Trainer and sampler with a base of 8 or 4 bits: one copy of the codes, and the numbers of transformers' own modules
with what the codes stand for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.joined_names import JOINED
from tinker_local.backend.weights.memory_holder import MemoryHolder
from tinker_local.backend.weights.packed import PackedLinear
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.families.test_other_families import tiny
from tests.sampling.test_shared_weights import GEMMA4, SEEING, WITH_KEYS_AS_VALUES, lent_to, logprobs, write_model

OTHERS = ("phi3", "starcoder2")
"""Without a family: one has joined projections, the other an MLP whose names are not known."""
TOKENS = np.arange(5, 60)


@pytest.fixture
def holder() -> Iterator[MemoryHolder]:
    made = MemoryHolder()
    yield made
    made.close()


def packed_modules(trainer: HFTrainer) -> dict[str, PackedLinear]:
    model = trainer._loaded.model
    return {path: each for path, each in model.named_modules() if isinstance(each, PackedLinear)}


def in_layers(path: str) -> str:
    """The end of a module's path, from its layer on."""
    return path[path.index("layers.") :].removesuffix(".base_layer")


def trained_by(modules: dict[str, PackedLinear]) -> dict[str, torch.Tensor]:
    """The matrices of the trainer, [out, in], joined as vLLM joins them: keys that are values, too, twice. Layers that
    read keys of others have queries alone, which nothing joins."""
    weights = {in_layers(path): module.weight for path, module in modules.items()}
    for joined in JOINED:
        for path in [path for path in weights if path.endswith(f".{joined.parts[0]}")]:
            layer = path.removesuffix(joined.parts[0])
            parts = [weights.pop(layer + part) for part in joined.parts if layer + part in weights]
            if len(parts) == 1:
                weights[path] = parts[0]
            else:
                parts += parts[-1:] * (len(joined.parts) - len(parts))
                weights[layer + joined.vllm] = torch.cat(parts)
    return weights


def sampled_by(model: Any) -> dict[str, torch.Tensor]:
    """What vLLM multiplies by, [out, in], as it multiplies the identity."""
    packed = {path: each for path, each in model.named_modules() if hasattr(each, "qweight")}
    return {
        in_layers(path): each.quant_method.apply(each, torch.eye(each.input_size)).T
        for path, each in packed.items()
        if "base_layer" in path or not hasattr(each, "base_layer")
    }


def expected_logprobs(folder: str, seeing: bool, weights: dict[str, torch.Tensor], dtype: Any) -> Any:
    """Of transformers' model in `dtype` with `weights` in place of those of its modules."""
    auto: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for path, weight in weights.items():
            model.get_submodule(path).weight.copy_(weight)
        logits = model(torch.from_numpy(TOKENS)[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(TOKENS[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("qwen3_vl", "int4"),
        *(
            pytest.param(family, precision, marks=pytest.mark.more)
            for family, precision in {
                **{"qwen3": "int4", "gemma3": "int8", "qwen3_5_text": "int8", "llama": "int8"},
                **{
                    "gemma4": "int4",
                    "gemma4_text": "int4",
                    "gemma4_dense": "int8",
                    "shared keys that are values": "int4",
                },
                **dict.fromkeys(OTHERS, "int4"),
            }.items()
        ),
    ],
)
async def test_both_engines_compute_with_what_the_codes_stand_for(
    family: Any, precision: str, holder: MemoryHolder, tmp_path: Path
) -> None:
    folder = str(tiny(family, tmp_path / "model")) if family in OTHERS else write_model(family, tmp_path / "model")
    config = TrainerConfig(folder, name="tiny", dtype="float32", device="cpu", weights=precision)
    trainer = HFTrainer(replace(config, shared_weights=holder.address))
    engine = EngineOptions(
        folder, dtype="float32", max_rank=16, kv_cache_bytes=2**26, shared_weights=holder.address, weights=precision
    )
    sampler = VLLMSampler(engine, EngineThread())
    try:
        modules = packed_modules(trainer)
        weights = {path: module.weight.double() for path, module in modules.items()}
        sees = family in (*SEEING, *GEMMA4)
        expected = expected_logprobs(folder, sees, weights, torch.float64)
        rounded = expected_logprobs(folder, sees, weights, torch.float32)
        allowed = max(1e-4, 4 * float(np.abs(rounded - expected).max()))  # as transformers' own float32
        found = await logprobs(sampler)
        np.testing.assert_allclose(found[-len(expected) :], expected, atol=allowed, rtol=0)
        memory = {piece.untyped_storage().data_ptr() for piece in lent_to(sampler).pieces}
        model: Any = served_model(sampler._engine._engine)
        served = {name: each for name, each in model.named_parameters() if each.dtype in (torch.int8, torch.uint8)}
        twice = [place for name, place in lent_to(sampler).again.items() if name.endswith("qweight")]
        assert bool(twice) == (family in WITH_KEYS_AS_VALUES)
        in_trainer = [each.qweight.nbytes for each in modules.values()]
        in_trainer += [each.tensor(lent_to(sampler).pieces).nbytes for each in twice]
        assert sum(each.nbytes for each in served.values()) == sum(in_trainer)
        assert all(each.untyped_storage().data_ptr() in memory for each in served.values())
        assert sampled_by(model).keys() == trained_by(modules).keys()
        assert all(torch.equal(each, trained_by(modules)[path]) for path, each in sampled_by(model).items())
        lent_to(sampler).verify()
    finally:
        await sampler.close()
        trainer.close()
