"""Qwen3-MoE trains and samples with adapters of the hosted layout, in which experts share a factor."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import AdapterVersion, SampleWork
from tinker_local.backend.storage.adapter_files import write_adapter
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.trainer import AdapterState, TrainDatum, TrainWork
from tinker_local.backend.training.worker import HFTrainer
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import AdamParams, InvalidRequestError, LoraConfig, SamplingParams

FAMILIES = ("qwen3_moe", "qwen3_vl_moe")
DECODERS = ("autograd", "written-out")
ATTENTION = {"train_mlp": False, "train_unembed": False}
ADAPTERS = {
    "everything": LoraConfig(rank=4, seed=1),
    "experts": LoraConfig(rank=13, seed=2, train_attn=False, train_unembed=False),
    "attention": LoraConfig(rank=1, seed=3, **ATTENTION),
}
LENGTHS = (5, 31, 18)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "experts.w1", "experts.w2", "experts.w3", "lm_head")

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny model of a family, made once. Its LM head is not the embedding, which adapters leave alone."""

    @cache
    def made(family: str) -> Path:
        make: Any = make_tiny_vl_model if "_vl" in family else make_tiny_text_model
        path: Path = make(tmp_path_factory.mktemp(family) / "model", family=family, tie_word_embeddings=False)
        return path

    return made


def tokens(seed: int, length: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(20, 380, length).astype(np.int32)


def data(seed: int) -> list[TrainDatum]:
    found = []
    for index, length in enumerate(LENGTHS):
        ids = tokens(10 * seed + index, length + 1)
        weights = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
        found.append(TrainDatum(RenderedInput(ids[:-1]), ids[1:].astype(np.int64), {"weights": weights}))
    return found


def new_trainer(folder: Path, **options: Any) -> HFTrainer:
    """In float32 on the CPU, with `ADAPTERS` whose B is not 0."""
    trainer = HFTrainer(str(folder), name="tiny", dtype="float32", device="cpu", **options)
    for name, config in ADAPTERS.items():
        trainer.create_adapter(name, config)
        trainer.load_adapter(name, filled(trainer.capture(name, optimizer=False), ""))
    return trainer


def filled(state: AdapterState, target: str, size: float = 0.03) -> AdapterState:
    """`state` with a random B of the modules whose names contain `target`, and without that of others."""
    tensors = {name: np.array(array) for name, array in state.tensors.items()}
    for seed, (name, array) in enumerate(tensors.items()):
        if ".lora_B." in name:
            noise = np.random.default_rng(seed).standard_normal(array.shape)
            array[...] = size * noise if target in name else 0
    return replace(state, tensors=tensors)


class Merged:
    """transformers' model with the adapters of a trainer added to its weights, as leaves with gradients."""

    def __init__(self, trainer: HFTrainer) -> None:
        path = trainer._loaded.model.name_or_path
        self.model = (
            getattr(transformers, trainer._loaded.family.auto_class)
            .from_pretrained(path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
            .eval()
        )
        self.model.requires_grad_(False)
        self.leaves = {
            name: {spec.name: spec.view(adapter.weights).clone().requires_grad_() for spec in adapter.specs}
            for name, adapter in trainer._adapters.items()
        }

    def logprobs(self, name: str, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """[N, V]."""
        weights = {key: parameter.clone() for key, parameter in self.model.named_parameters()}
        for key, b in self.leaves[name].items():
            if ".lora_B." not in key:
                continue
            path = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            change = 32 / b.shape[-1] * b @ self.leaves[name][key.replace("lora_B", "lora_A")]
            module, _, last = path.rpartition(".")
            half = change.shape[-2]
            if last == "w1":
                weights[f"{module}.gate_up_proj"][:, :half] += change
            elif last == "w3":
                weights[f"{module}.gate_up_proj"][:, half:] += change
            elif last == "w2":
                weights[f"{module}.down_proj"] += change
            else:
                weights[f"{path}.weight"] += change
        given = {"input_ids": torch.from_numpy(ids.astype(np.int64))[None], "use_cache": False}
        return torch.func.functional_call(self.model, weights, (), given).logits[0].log_softmax(-1)


@pytest.mark.mutation(
    "scores-of-experts-detached", "decoders/packed_experts.py", "return grad_x, grad_scores,", "return grad_x, None,"
)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_adapters_in_one_row_equal_transformers_with_each_merged(
    family: str, decoder: Any, folder: Folder
) -> None:
    """Logprobs to 1e-5; gradients of every matrix relative to the largest of its kind, also through the router."""
    trainer = new_trainer(folder(family), decoder=decoder)
    theirs = Merged(trainer)
    works = [TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
    for work, result in zip(works, trainer.forward_backward(works), strict=True):
        for datum, output in zip(work.data, result.outputs, strict=True):  # type: ignore[union-attr]
            rows = theirs.logprobs(work.adapter_id, datum.input.token_ids)
            wanted = rows.gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]
            np.testing.assert_allclose(output["logprobs"], wanted.detach(), atol=2e-5, rtol=0)
            (-(torch.from_numpy(datum.loss_inputs["weights"]) * wanted).sum()).backward()
    for name, adapter in trainer._adapters.items():
        assert adapter.gradient is not None
        for spec in adapter.specs:
            grad = theirs.leaves[name][spec.name].grad
            assert grad is not None
            scale = float(grad.abs().max())
            assert scale > 0, spec.name
            difference = float((spec.view(adapter.gradient) - grad).abs().max())
            assert difference <= 1e-5 * scale + 1e-6, f"{name} {spec.name}: {difference:.2g} of {scale:.2g}"


@pytest.mark.parametrize("decoder", DECODERS)
def test_recomputed_layers_with_experts_have_the_same_gradients(decoder: Any, folder: Folder) -> None:
    seen = []
    for kept in (0, None):
        trainer = new_trainer(folder("qwen3_moe"), decoder=decoder, activation_memory_bytes=kept)
        trainer.forward_backward([TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)])
        seen.append({name: adapter.gradient for name, adapter in trainer._adapters.items()})
    for name, gradient in seen[0].items():
        torch.testing.assert_close(gradient, seen[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_bfloat16_model_with_experts_trains(decoder: Any, folder: Folder) -> None:
    """Where gradients are float32 and activations are not."""
    trainer = HFTrainer(str(folder("qwen3_moe")), name="tiny", dtype="bfloat16", device="cpu", decoder=decoder)
    trainer.create_adapter("a", ADAPTERS["everything"])
    losses = []
    for _ in range(4):
        (result,) = trainer.forward_backward([TrainWork("a", data(6), "cross_entropy")])
        losses.append(result.metrics["loss:sum"])  # type: ignore[union-attr]
        trainer.optim_step("a", AdamParams(learning_rate=0.01))
    assert losses[-1] < losses[0]


def test_the_files_have_the_hosted_names_and_shapes_and_training_goes_on_from_them(folder: Folder) -> None:
    """And the router has no adapter."""
    trainer = new_trainer(folder("qwen3_moe"))
    config = trainer._loaded.model.config
    count, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    exported = trainer.export("everything")
    shapes = {name: array.shape for name, array in exported.tensors.items() if "layers.1.mlp" in name}
    start = "base_model.model.model.layers.1.mlp.experts"
    assert shapes == {
        f"{start}.w1.lora_A.weight": (1, 4, hidden),
        f"{start}.w1.lora_B.weight": (count, width, 4),
        f"{start}.w3.lora_A.weight": (1, 4, hidden),
        f"{start}.w3.lora_B.weight": (count, width, 4),
        f"{start}.w2.lora_A.weight": (count, 4, width),
        f"{start}.w2.lora_B.weight": (1, hidden, 4),
    }
    trainer.forward_backward([TrainWork("everything", data(3), "cross_entropy")])
    trainer.optim_step("everything", AdamParams(learning_rate=1e-3))
    trainer.load_adapter("again", trainer.capture("everything", optimizer=True))
    for name in ("everything", "again"):
        trainer.forward_backward([TrainWork(name, data(4), "cross_entropy")])
        trainer.optim_step(name, AdamParams(learning_rate=1e-3))
    assert torch.equal(trainer._adapters["again"].weights, trainer._adapters["everything"].weights)


def write(path: Path, state: AdapterState) -> AdapterVersion:
    path.mkdir()
    write_adapter(path, state)
    return AdapterVersion(str(path), path)


@pytest.mark.mutation(
    "experts-without-adapters-in-vllm",
    "vllm_experts.py",
    "enable_moe_shared_loras = True",
    "enable_moe_shared_loras = False",
)
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_vl_moe", marks=pytest.mark.more)])
def test_each_target_alone_reaches_the_sampler(family: str, folder: Folder, tmp_path: Path) -> None:
    """Sampled and prompt logprobs of the base, of each target alone, and of adapters before and after training, all in
    the same steps. An adapter that names the router is refused, since vLLM ignores it."""
    trainer = new_trainer(folder(family))
    full, decoder = trainer.capture("everything", optimizer=False), trainer._loaded.family.decoder_path
    versions: dict[str, AdapterVersion | None] = {"base": None}
    for target in TARGETS:
        trainer.load_adapter(target, filled(full, target, 0.3))
        versions[target] = write(tmp_path / target, trainer.capture(target, optimizer=False))
    for name in ADAPTERS:
        versions[name] = write(tmp_path / f"{name}-new", trainer.capture(name, optimizer=False))
        copy = f"{name} trained"
        trainer.load_adapter(copy, trainer.capture(name, optimizer=False))
        trainer.forward_backward([TrainWork(copy, data(5), "cross_entropy")])
        trainer.optim_step(copy, AdamParams(learning_rate=0.02))
        versions[copy] = write(tmp_path / copy, trainer.capture(copy, optimizer=False))
    router = dict(full.tensors)
    for factor, shape in (("A", (4, 64)), ("B", (8, 4))):
        router[f"base_model.model.{decoder}.layers.0.mlp.gate.lora_{factor}.weight"] = np.ones(shape, np.float32)
    with_router = write(tmp_path / "router", replace(full, tensors=router))

    async def sample() -> tuple[Mapping[str, Any], BaseException]:
        sampler = VLLMSampler(
            EngineOptions(str(folder(family)), max_rank=16, kv_cache_bytes=2**26, adapters_per_step=4), EngineThread()
        )

        def asked(seed: int, version: AdapterVersion | None) -> SampleWork:
            prompt, params = RenderedInput(tokens(seed, 21)), SamplingParams(max_tokens=6, seed=seed, stop=[])
            return SampleWork(prompt, version, params, prompt_logprobs=True)

        try:
            outputs = await asyncio.gather(
                *(sampler.sample(asked(seed, version)) for seed, version in enumerate(versions.values()))
            )
            with pytest.raises(InvalidRequestError) as refusal:
                await sampler.sample(asked(0, with_router))
            return dict(zip(versions, outputs, strict=True)), refusal.value
        finally:
            await sampler.close()

    outputs, refusal = asyncio.run(sample())
    assert "vLLM does not use the tensors of" in str(refusal)
    assert "model.layers.0.mlp.gate" in str(refusal)
    for seed, (name, output) in enumerate(outputs.items()):
        (sequence,) = output.sequences
        whole = RenderedInput(np.concatenate([tokens(seed, 21), sequence.tokens.astype(np.int32)]))
        sampled = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
        ours = trainer.logprobs(None if name == "base" else name, whole)
        np.testing.assert_allclose(sampled, ours, atol=1e-4, rtol=0, err_msg=name)
        if name != "base":
            effect = float(np.abs(ours - trainer.logprobs(None, whole)).max())
            assert effect > 0.02, f"{name} changes logprobs by {effect:.2g}"
