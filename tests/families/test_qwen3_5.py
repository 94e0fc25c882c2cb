"""Qwen3.5: gated attention and linear attention, with images; trainer, transformers and sampler agree in float32.

The tiny model has three layers of linear attention and one of softmax attention, as the published ones repeat.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.tiny_models.text_families import QWEN3_5_SHAPE
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import AdamParams, LoraConfig, SamplingParams
from transformers import AutoModelForImageTextToText

from tests.float64 import Exact, InFloat64
from tests.training.autograd_reference import assert_computes_like

pytestmark = pytest.mark.more

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "lm_head"),
)
"""What the hosted service trains."""

DECODERS = ("autograd", "written-out")
EFFECT = 0.01
"""Nats that an adapter changes: far more than rounding does."""

LENGTHS = (5, 140, 23)
"""Of data: the middle one has more positions than two chunks of the delta rule."""


SMALL_BLOCK = 128
"""Positions of a block of vLLM's cache, in which it keeps the states of linear attention."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights smaller than usual, which amplify rounding less."""
    shape = replace(QWEN3_5_SHAPE, weight_scale=0.6)
    return make_tiny_vl_model(tmp_path_factory.mktemp("qwen3_5") / "model", family="qwen3_5", text=shape)


@pytest.fixture(scope="module")
def trainers(folder: Path) -> Mapping[str, HFTrainer]:
    """By decoder, in float64; with two adapters of different ranks, whose B are not zero."""
    options: dict[str, Any] = {"name": "tiny", "device": "cpu", "dtype": "float64"}
    with InFloat64():
        found = {name: HFTrainer(TrainerConfig(str(folder), decoder=name, **options)) for name in DECODERS}
    for trainer in found.values():
        for seed, (name, rank) in enumerate({"a": 4, "b": 7}.items()):
            trainer.load_adapter(name, noisy(trainer, LoraConfig(rank=rank, seed=seed), seed))
    return found


@pytest.fixture(scope="module")
def trainer(folder: Path) -> HFTrainer:
    """In float32, as the sampler."""
    return HFTrainer(TrainerConfig(str(folder), name="tiny", device="cpu"))


@pytest.fixture(scope="module")
def exact(trainer: HFTrainer) -> Exact:
    return Exact(trainer)


def noisy(trainer: HFTrainer, config: LoraConfig, seed: int, only: tuple[str, ...] = TARGETS) -> AdapterState:
    """An adapter with random B of the targets `only`, and B = 0 in the others."""
    trainer.create_adapter("noisy", config)
    state = trainer.capture("noisy", optimizer=False)
    trainer.remove_adapter("noisy")
    rng = np.random.default_rng(seed)
    tensors = {name: np.array(value) for name, value in state.tensors.items()}
    for name, value in sorted(tensors.items()):  # decoders order them differently
        if "lora_B" in name and name.split(".")[-3] in only:
            value[:] = rng.normal(0, 0.03, value.shape)
    return replace(state, tensors=tensors)


def text(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(20, 380, length).astype(np.int32)


def datum(seed: int, length: int) -> TrainDatum:
    ids = text(seed, length + 1)
    weights = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    return TrainDatum(RenderedInput(ids[:-1]), ids[1:].astype(np.int64), {"weights": weights})


def test_adapters_have_the_tensors_of_the_hosted_service(trainers: Mapping[str, HFTrainer]) -> None:
    """Of the hosted layout: separate q, k and v of linear attention; the gate's rows belong to `q_proj`."""
    for trainer in trainers.values():
        tensors = trainer.export("a").tensors
        shapes = {name.removeprefix("base_model.model.model."): value.shape for name, value in tensors.items()}
        linear, attention = "layers.0.linear_attn", "layers.3.self_attn"
        assert shapes[f"{linear}.in_proj_q.lora_A.weight"] == (4, 64)
        rows = {name: shapes[f"{linear}.in_proj_{name}.lora_B.weight"][0] for name in "qkvz"}
        assert rows == {"q": 48, "k": 48, "v": 96, "z": 96}
        assert shapes[f"{linear}.out_proj.lora_A.weight"] == (4, 96)
        assert shapes[f"{attention}.q_proj.lora_B.weight"] == (2 * 4 * 32, 4)
        projections = {name.rsplit(".", 3)[-3] for name in shapes}
        assert projections == {*TARGETS, "unembed_tokens"} - {"lm_head"}


def assert_agrees_with_transformers(trainer: HFTrainer, folder: Path, data: Mapping[str, list[TrainDatum]]) -> None:
    with InFloat64():
        theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    works = [TrainWork(name, of_run, "cross_entropy") for name, of_run in data.items()]
    for name in ("a", "b"):
        trainer.discard_gradients(name)
    assert_computes_like(trainer, theirs, works)


@pytest.mark.parametrize("decoder", DECODERS)
def test_packed_runs_agree_with_transformers_on_each_sequence_alone(
    decoder: str, trainers: Mapping[str, HFTrainer], folder: Path
) -> None:
    """Logprobs and all gradients, of several adapters in the same rows."""
    data = {name: [datum(10 * at + seed, n) for seed, n in enumerate(LENGTHS)] for at, name in enumerate("ab")}
    assert_agrees_with_transformers(trainers[decoder], folder, data)


@pytest.mark.parametrize("keep", Keep, ids=lambda keep: keep.name)
def test_written_out_layers_have_the_same_gradients_whatever_is_kept(
    keep: Keep, trainers: Mapping[str, HFTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the autograd decoder."""
    work = TrainWork("a", [datum(seed, n) for seed, n in enumerate(LENGTHS)], "cross_entropy")
    found = {}
    for name, trainer in trainers.items():
        if name == "written-out":
            monkeypatch.setattr(trainer._runner, "_policy", lambda *_: [keep] * 4)
        trainer.discard_gradients("a")
        with InFloat64():
            trainer.forward_backward([work])
        adapter = trainer._adapters["a"]
        assert adapter.gradient is not None
        found[name] = {spec.name: spec.view(adapter.gradient).clone() for spec in adapter.specs}
    assert found["written-out"].keys() == found["autograd"].keys()
    for name, theirs in found["autograd"].items():
        scale = float(theirs.abs().max())
        ours = found["written-out"][name]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9 * scale, msg=name)


def sampled(folder: Path, asked: list[SampleWork], **options: Any) -> list[Any]:
    """What a sampler of the model answers, all at once."""

    async def ask() -> list[Any]:
        given = {"max_rank": 8, "kv_cache_bytes": 2**26, "max_context_length": 1024, **options}
        sampler = VLLMSampler(EngineOptions(str(folder), **given), EngineThread())
        try:
            return list(await asyncio.gather(*map(sampler.sample, asked)))
        finally:
            await sampler.close()

    return asyncio.run(ask())


def continued(work: SampleWork, output: Any) -> tuple[RenderedInput, np.ndarray[Any, Any]]:
    """The prompt with what was sampled, and the sampler's logprobs of it all."""
    (sequence,) = output.sequences
    ids = np.concatenate([work.prompt.token_ids, sequence.tokens.astype(np.int32)])
    return replace(work.prompt, token_ids=ids), np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])


def test_each_target_alone_reaches_the_sampler(trainer: HFTrainer, exact: Exact, folder: Path, tmp_path: Path) -> None:
    """An adapter that changes one projection alone, one after the other, and one after training; all in the same steps,
    beside the base model."""
    for seed, target in enumerate(TARGETS):
        trainer.load_adapter(target, noisy(trainer, LoraConfig(rank=8, seed=seed), seed, (target,)))
    trainer.create_adapter("trained", LoraConfig(rank=8, seed=3))
    for _ in range(3):
        trainer.forward_backward([TrainWork("trained", [datum(9, 30)], "cross_entropy")])
        trainer.optim_step("trained", AdamParams(learning_rate=0.01))
    names = (None, *TARGETS, "trained")
    for adapter in names[1:]:
        (tmp_path / str(adapter)).mkdir()
        write_adapter(tmp_path / str(adapter), trainer.capture(str(adapter), optimizer=False))
    asked = [
        SampleWork(
            RenderedInput(text(5, 40)),
            None if name is None else AdapterVersion(name, tmp_path / name),
            SamplingParams(max_tokens=12, seed=seed, stop=[]),
            prompt_logprobs=True,
        )
        for seed, name in enumerate(names)
    ]
    for name, work, output in zip(names, asked, sampled(folder, asked), strict=True):
        whole, theirs = continued(work, output)
        ours = trainer.logprobs(name, whole)
        exact.assert_near(name, [whole], ours, theirs)
        effect = np.abs(ours - trainer.logprobs(None, whole)).max()
        assert name is None or effect > EFFECT, name


def test_long_prompts_in_parts_and_from_the_cache_have_the_same_logprobs(
    trainer: HFTrainer, exact: Exact, folder: Path
) -> None:
    """A step takes a part of a prompt; a second request begins with the state that the first left in the cache."""
    prompt = RenderedInput(text(8, 3 * SMALL_BLOCK + 40))

    async def ask() -> list[Any]:
        options = EngineOptions(
            str(folder),
            max_rank=8,
            kv_cache_bytes=2**26,
            max_context_length=1024,
            max_sequences=4,
            max_batched_tokens=256,
        )
        sampler = VLLMSampler(options, EngineThread())
        params = SamplingParams(max_tokens=8, seed=1, stop=[])
        try:
            first = await sampler.sample(SampleWork(prompt, None, params, prompt_logprobs=True))
            again = await sampler.sample(
                SampleWork(prompt, None, params, prompt_logprobs=True, prompt_logprobs_last_n=20)
            )
            return [first, again]
        finally:
            await sampler.close()

    first, again = asyncio.run(ask())
    whole, theirs = continued(SampleWork(prompt, None, SamplingParams(max_tokens=8)), first)
    exact.assert_near(None, [whole], theirs, trainer.logprobs(None, whole))
    assert list(again.sequences[0].tokens) == list(first.sequences[0].tokens)
    end = np.concatenate([again.prompt_logprobs[-20:], again.sequences[0].logprobs])
    exact.assert_near(None, [whole], end, at=slice(-len(end), None))
    assert again.prompt_cache_hit_tokens >= SMALL_BLOCK


def with_images(seed: int, sizes: list[tuple[int, int]], pad: int) -> RenderedInput:
    """Random pixels of images of these merged rows and columns, with text before, between and after."""
    rng = np.random.default_rng(seed)
    ids, placements = [text(seed, 4)], []
    for at, (rows, columns) in enumerate(sizes):
        pixels = rng.standard_normal((4 * rows * columns, 3 * 2 * 16 * 16)).astype(np.float32)
        image = RenderedImage(f"{seed}/{at}", rows * columns, pixels, (1, 2 * rows, 2 * columns))
        placements.append(ImagePlacement(sum(map(len, ids)), image))
        ids += [np.full(image.num_tokens, pad, np.int32), text(seed + at, 3)]
    return RenderedInput(np.concatenate(ids), tuple(placements))


@pytest.mark.parametrize("decoder", DECODERS)
def test_images_have_the_positions_and_features_that_transformers_gives_them(
    decoder: str, trainers: Mapping[str, HFTrainer], folder: Path
) -> None:
    """25 shapes, one to three images in a sequence, with gradients."""
    pad: int = trainers[decoder]._loaded.model.config.image_token_id
    shapes = [(rows, columns) for rows in range(1, 6) for columns in range(1, 6)]
    groups = [shapes[:1], shapes[1:3], shapes[3:6], *(shapes[at : at + 3] for at in range(6, 24, 3)), shapes[24:]]
    data = []
    for seed, sizes in enumerate(groups):
        made = with_images(seed, sizes, pad)
        targets = np.roll(made.token_ids, -1).astype(np.int64)
        weights = np.where(made.token_ids == pad, 0, 1).astype(np.float32)
        data.append(TrainDatum(made, targets, {"weights": weights}))
    assert_agrees_with_transformers(trainers[decoder], folder, {"a": data})


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_positions_of_text_alone_have_three_rows(model_type: str) -> None:
    """Before transformers 5.19 the text model's rotary module fails with one."""
    positions = FAMILIES[model_type].position_ids(None, RenderedInput(np.arange(5, dtype=np.int32)))
    np.testing.assert_array_equal(positions, [np.arange(5)] * 3)
