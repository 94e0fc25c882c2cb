"""One copy of the frozen base: vLLM's engine reads the trainer's memory, and computes what it would with its own."""

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import OneCopy
from tinker_local.backend.options import DecoderChoice
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import served_model
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.shared_weights import _Emptied
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.backend.weights.lent_weights import LentWeights
from tinker_local.types import SamplingParams

_TOWER = tuple(f"vision_model.encoder.layers.{layer}.self_attn.qkv_proj.weight" for layer in (0, 1))
OWN: Mapping[str, tuple[str, ...]] = defaultdict(
    tuple,
    gpt_oss=("routed_experts.w13_weight", "routed_experts.w2_weight"),
    gemma3=_TOWER,
    apart=("qkv_proj.weight", "gate_up_proj.weight"),
)
"""How names of matrices end that stay vLLM's: experts that it transposes, and what it joins that the trainer has apart,
in a tower or with the autograd decoder."""

SEEING = ("qwen3_vl", "gemma3")


def write_model(family: Any, folder: Path) -> str:
    """With six layers, so that there are more matrices than a coincidence of addresses spares."""
    if family in SEEING:
        return str(make_tiny_vl_model(folder, family=family))
    return str(make_tiny_text_model(folder, family=family, shape=TextShape(num_layers=6)))


def trainer_of(model: str, decoder: DecoderChoice = "auto") -> HFTrainer:
    return HFTrainer(TrainerConfig(model, name="tiny", dtype="float32", device="cpu", decoder=decoder))


def sampler_of(model: str, lent: LentWeights | None) -> VLLMSampler:
    return VLLMSampler(
        EngineOptions(model, dtype="float32", max_rank=16, kv_cache_bytes=2**26, lent=lent), EngineThread()
    )


async def logprobs(sampler: VLLMSampler) -> Any:
    tokens = np.arange(5, 60, dtype=np.int32)
    work = SampleWork(
        RenderedInput(tokens), None, SamplingParams(max_tokens=8, temperature=0.0, stop=()), prompt_logprobs=True
    )
    return (await sampler.sample(work)).prompt_logprobs


def not_packed(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's function that packs the matrix of `layer` for a CPU, as there is none on a GPU."""
    layer.cpu_linear = torch.nn.functional.linear


def matrices(sampler: VLLMSampler) -> dict[str, torch.Tensor]:
    """Of vLLM's model, without adapters, by the names that they have without these."""
    engine: Any = sampler._engine._engine
    named = served_model(engine).named_parameters()
    return {name.replace("base_layer.", ""): each for name, each in named if each.dim() >= 2 and "lora" not in name}


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "decoder", "packed"),
    [
        *(
            (family, "auto", False)
            for family in ("qwen3", "qwen3_vl", "qwen3_moe", "gpt_oss", "qwen3_5_text", "gemma3")
        ),
        ("qwen3", "autograd", False),
        *((family, "auto", True) for family in ("qwen3", "gpt_oss")),
    ],
)
async def test_vllm_reads_the_trainers_matrices(
    family: str, decoder: Any, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(family, tmp_path / "model")
    if not packed:
        monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", not_packed)
    alone = sampler_of(model, None)
    try:
        expected = await logprobs(alone)
        numbers = {name: each.clone() for name, each in matrices(alone).items()}
    finally:
        await alone.close()
    trainer = trainer_of(model, decoder)
    lent = trainer.lend()
    sampler = sampler_of(model, lent)
    try:
        np.testing.assert_array_equal(await logprobs(sampler), expected)
        found = matrices(sampler)
        assert found.keys() == numbers.keys()
        assert [name for name, each in found.items() if not torch.equal(each, numbers[name])] == []
        loaded: Any = trainer._loaded.model
        memory = {each.untyped_storage().data_ptr() for each in loaded.parameters()}
        own = {name for name, each in found.items() if each.untyped_storage().data_ptr() not in memory}
        shared, whole = sampler.shared_bytes
        assert 0 < shared <= whole
        if not packed:
            expected_own = OWN["apart" if decoder == "autograd" else family]
            assert own == {name for name in found if name.endswith(expected_own)}
            assert bool(own) == bool(expected_own)
            in_trainer = {(each.data_ptr(), each.nbytes) for name, each in found.items() if name not in own}
            assert shared == sum(size for _, size in in_trainer)
        lent.verify()
    finally:
        await sampler.close()


async def test_a_write_into_lent_weights_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines would compute with it, so that comparing them shows nothing."""
    model = write_model("qwen3", tmp_path / "model")
    lent = trainer_of(model).lend()

    def writes(layer: Any, remove_weight: bool) -> None:
        not_packed(layer, remove_weight)
        layer.weight.data[0, 0] += 1e-3

    monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", writes)
    with pytest.raises(RuntimeError, match=r"the frozen weights have changed in memory: \S+ and 24 more"):
        sampler_of(model, lent)


async def test_a_model_that_cannot_share_gets_a_copy_and_says_why(tmp_path: Path) -> None:
    """A matrix that vLLM's loading leaves as it was made, which is lost by then."""
    model = write_model("qwen3", tmp_path / "model")
    trainer = trainer_of(model)
    lent = trainer.lend()
    missing = {name: tensor for name, tensor in lent.tensors.items() if "o_proj" not in name}
    without = LentWeights(missing, lent.lent & missing.keys())
    trainer.lend = lambda: without  # type: ignore[method-assign]
    told: list[str] = []
    engine = EngineOptions(model, dtype="float32", max_rank=16, kv_cache_bytes=2**26)
    one = OneCopy(lambda: trainer, engine, told.append)
    one.trainer()
    sampler = one.sampler()
    try:
        assert sampler.shared_bytes == (0, 0)
        assert told == [
            f"{model}: trainer and sampler have a copy of the weights each: ValueError: vLLM loads nothing into "
            "model.layers.0.self_attn.o_proj.weight"
        ]
        assert len(await logprobs(sampler)) == 55
    finally:
        await sampler.close()


@pytest.mark.more
@pytest.mark.parametrize("shared", ["auto", "off"])
async def test_a_server_shares_what_it_is_asked_to(shared: Any, tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path / "model")
    said: list[str] = []
    options = BackendOptions(
        data_dir=tmp_path / "data", kv_cache_bytes=2**26, max_rank=8, sampler_sleeps=False, shared_weights=shared
    )
    backend = InProcessBackend([ModelSource("tiny", model)], options, progress=said.append)
    await backend.start()
    await backend.close()
    assert any("trainer and sampler agree to" in line for line in said)
    reads = [line for line in said if "the sampler reads" in line]
    assert len(reads) == (1 if shared == "auto" else 0)


async def test_a_matrix_that_transformers_has_changed_comes_from_the_file(tmp_path: Path) -> None:
    """So that trainer and sampler still read the files each for themselves, and comparing them says something."""
    model = write_model("qwen3", tmp_path / "model")
    trainer = trainer_of(model)
    name = "model.layers.3.mlp.down_proj.weight"
    right = trainer.lend().tensors[name].clone()
    trainer._loaded.model.get_parameter(name).data[5, 7] += 1.0
    lent = trainer.lend()
    assert name not in lent.lent
    assert len(lent.lent) == len(lent.tensors) - 6 * 4 - 2  # vectors, and this one
    assert torch.equal(lent.tensors[name], right)


def test_a_reordered_matrix_is_not_the_same() -> None:
    rows = torch.arange(12.0).view(3, 4)
    lent = LentWeights({"rows": rows}, {"rows"})
    rows.copy_(rows.flip(0))
    with pytest.raises(RuntimeError, match=r"changed in memory: rows$"):
        lent.verify()


def test_modules_of_other_threads_keep_their_memory() -> None:
    """torch's hook for parameters is one for the process."""
    with _Emptied().matrices():
        mine = torch.nn.Linear(2, 2)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(torch.nn.Linear, 2, 2).result()
    assert mine.weight.is_meta
    assert not other.weight.is_meta
