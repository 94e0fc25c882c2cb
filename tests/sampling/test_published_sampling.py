"""Trainer and sampler with a published checkpoint in fewer bits: one copy of what the files have, and the numbers that
another writer says they are."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.memory_holder import MemoryHolder
from tinker_local.backend.weights.published import WEIGHTS

from tests.families.test_other_families import tiny
from tests.published_checkpoints import Method, awq, compressed, fp8, gptq, publish, scheme
from tests.sampling.test_packed_sampling import expected_logprobs, packed_modules, sampled_by, trained_by
from tests.sampling.test_shared_weights import GEMMA4, SEEING, lent_to, logprobs, write_model

SEES = (*SEEING, *GEMMA4)
WIDE = TextShape(hidden_size=192, intermediate_size=320, num_heads=6)
"""Blocks of 128 do not divide it, neither its rows nor its columns."""
ALSO_WIDE = TextShape(hidden_size=256, intermediate_size=384)

CASES: dict[str, tuple[Callable[[], Method], Any, TextShape]] = {
    "gptq-4-32": (lambda: gptq(4, 32), "qwen3_vl", TextShape()),
    "fp8-blocks": (lambda: fp8((128, 128)), "qwen3", WIDE),
    "gptq-4-128": (lambda: gptq(4, 128), "llama", ALSO_WIDE),
    "gptq-8-64": (lambda: gptq(8, 64, v2=True), "qwen3", WIDE),
    "gptq-4-rows": (lambda: gptq(4, -1), "phi3", TextShape()),
    "fp8-tensor": (lambda: fp8(None), "gemma3", TextShape()),
    "fp8-rows": (lambda: fp8(None, rows=True), "qwen3", TextShape()),
}
CASES |= {
    "fp8-blocks-linear": (lambda: fp8((128, 128)), "qwen3_5_text", TextShape()),
    "gptq-8-linear": (lambda: gptq(8, 32, order=True), "qwen3_5_text", TextShape()),
    "awq": (lambda: awq(32), "qwen2_5_vl", TextShape()),
    "awq-128": (lambda: awq(128), "qwen3", ALSO_WIDE),
    "gptq-4-zeros": (lambda: gptq(4, 32, zeros=True), "qwen3", TextShape()),
    "gptq-8-zeros": (lambda: gptq(8, 64, v2=True, zeros=True), "gemma3", TextShape()),
}
CASES |= {
    "w4a16": (lambda: compressed(scheme("group", 4, group_size=32)), "qwen3_vl", TextShape()),
    "w4a16-zeros": (lambda: compressed(scheme("group", 4, group_size=64, symmetric=False)), "qwen3", WIDE),
    "w8a16-rows": (lambda: compressed(scheme("channel", 8), scales=torch.float16), "llama", TextShape()),
    "w8a16-rows-zeros": (lambda: compressed(scheme("channel", 8, symmetric=False)), "qwen3", TextShape()),
    "w8a16-order": (
        lambda: compressed(scheme("group", 8, group_size=32, actorder="group"), order=True),
        "gemma3",
        TextShape(),
    ),
    "float-rows": (lambda: compressed(scheme("channel", 8, type="float"), pack=False), "qwen3", TextShape()),
    "float-tensor": (lambda: compressed(scheme("tensor", 8, type="float"), pack=False), "llama", TextShape()),
    "gptq-order": (lambda: gptq(4, 32, order=True), "qwen3", TextShape()),
    "gptq-order-zeros": (lambda: gptq(8, 64, order=True, v2=True, zeros=True), "qwen3_vl", TextShape()),
}
CASES |= {
    "w4a16-keys-as-values": (lambda: compressed(scheme("group", 4, group_size=32)), "gemma4_text", TextShape()),
    "gptq-order-keys-as-values": (lambda: gptq(4, 32, order=True), "gemma4_text", TextShape()),
    "fp8-keys-as-values": (lambda: fp8(None, rows=True), "gemma4_dense", TextShape()),
    "awq-shared-keys": (lambda: awq(32), "gemma4", TextShape()),
}
QUICK = ("gptq-4-32", "fp8-blocks", "awq", "w4a16-zeros", "gptq-order")


def write_dense(family: Any, folder: Path, shape: TextShape) -> Path:
    if family == "phi3":
        return tiny(family, folder)
    if family in SEEING:
        return make_tiny_vl_model(folder, family=family)
    if family == "qwen3_5_text" or family in GEMMA4:
        return Path(write_model(family, folder))
    return make_tiny_text_model(folder, family=family, shape=shape)


def with_bias_of_zeros(file: Path, size: int) -> None:
    """Where the model has none, as AutoGPTQ writes it."""
    tensors = load_file(file)
    name = next((name for name in tensors if "mlp.up_proj.qweight" in name), None)
    if name is not None:
        bias = {name.replace("qweight", "bias"): torch.zeros(size).half()}
        save_file(tensors | bias, file, {"format": "pt"})


@pytest.fixture
def holder() -> Iterator[MemoryHolder]:
    made = MemoryHolder()
    yield made
    made.close()


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.more) for case in CASES if case not in QUICK)]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.more)])
async def test_both_engines_compute_with_the_numbers_of_the_files(
    case: str, dtype: Any, holder: MemoryHolder, tmp_path: Path
) -> None:
    """One projection stays as it is."""
    make, family, shape = CASES[case]
    kept = r"layers\.1\.mlp\.down_proj"
    folder, dense = publish(write_dense(family, tmp_path / "model", shape), tmp_path, make(), kept)
    with_bias_of_zeros(Path(folder) / "model.safetensors", shape.intermediate_size)
    trainer = HFTrainer(
        TrainerConfig(folder, name="tiny", dtype=dtype, device="cpu", weights=WEIGHTS, shared_weights=holder.address)
    )
    sampler = VLLMSampler(
        EngineOptions(
            folder, dtype=dtype, max_rank=16, kv_cache_bytes=2**26, shared_weights=holder.address, weights=WEIGHTS
        ),
        EngineThread(),
    )
    try:
        modules = packed_modules(trainer)
        assert modules
        assert not any("layers.1.mlp.down_proj" in path for path in modules)
        numbers = numbers_of(dense, family)
        assert all(torch.equal(each.weight, numbers[path].to(each.weight.dtype)) for path, each in modules.items())
        memory = {piece.untyped_storage().data_ptr() for piece in lent_to(sampler).pieces}
        model: Any = served_model(sampler._engine._engine)
        kinds = (torch.int8, torch.uint8, torch.float8_e4m3fn)
        served = [each for each in model.parameters() if each.dtype in kinds]
        in_trainer = [each.qweight.nbytes for each in modules.values()]
        again = [place.tensor(lent_to(sampler).pieces) for place in lent_to(sampler).again.values()]
        in_trainer += [each.nbytes for each in again if each.dtype in kinds]
        assert sum(each.nbytes for each in served) == sum(in_trainer)
        assert all(each.untyped_storage().data_ptr() in memory for each in served)
        found = sampled_by(model)
        assert found.keys() == trained_by(modules).keys()
        for path, each in trained_by(modules).items():
            assert torch.equal(found[path].to(each.dtype), each), path
        lent_to(sampler).verify()
        if dtype == "float32":
            expected = expected_logprobs(dense, family in SEES, {}, torch.float64)
            rounded = expected_logprobs(dense, family in SEES, {}, torch.float32)
            allowed = max(1e-4, 4 * float(np.abs(rounded - expected).max()))  # as transformers' own float32
            np.testing.assert_allclose((await logprobs(sampler))[-len(expected) :], expected, atol=allowed, rtol=0)
    finally:
        await sampler.close()
        trainer.close()


def numbers_of(dense: str, family: Any) -> dict[str, torch.Tensor]:
    """The matrices of transformers' model of the folder that is not packed."""
    import transformers

    auto: Any = transformers.AutoModelForImageTextToText if family in SEES else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(dense, dtype=torch.float32)
    return {path: each.weight for path, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
