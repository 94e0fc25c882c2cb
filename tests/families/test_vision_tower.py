"""LoRA on the vision tower (`train_vision`): trainer, transformers and sampler agree in float32, target by target."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.families import family_of
from tinker_local.backend.rendering.hf_images import HFImages
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.tiny_models.text_families import QWEN3_5_SHAPE
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_images import VLLMImages
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import AdamParams, InvalidRequestError, LoraConfig, SamplingParams
from transformers import AutoModelForImageTextToText

from tests.float64 import Exact, InFloat64
from tests.training.autograd_reference import gradients_like

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
SHAPES = {
    "qwen2_vl": TextShape(hidden_size=128),
    "qwen2_5_vl": TextShape(hidden_size=128),
    "qwen3_vl": TextShape(),
    "qwen3_5": replace(QWEN3_5_SHAPE, weight_scale=0.6),  # smaller weights amplify rounding less
}
EFFECT = 0.01
"""Nats that an adapter changes: far more than rounding does."""

TOWER = LoraConfig(rank=4, seed=1, train_vision=True)
Trainers = Callable[..., HFTrainer]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """A tiny model of a family, with two blocks and, in Qwen3-VL, DeepStack after the first."""

    @cache
    def make(family: Family) -> Path:
        return make_tiny_vl_model(tmp_path_factory.mktemp(family) / "model", family=family, text=SHAPES[family])

    return make


@pytest.fixture(scope="module")
def trainers(folders: Callable[[Family], Path]) -> Trainers:
    @cache
    def load(family: Family, decoder: Any = "auto", dtype: str = "float32") -> HFTrainer:
        with InFloat64() if dtype == "float64" else nullcontext():
            return HFTrainer(
                TrainerConfig(str(folders(family)), name="tiny", device="cpu", decoder=decoder, dtype=dtype)
            )

    return load


def noisy(trainer: HFTrainer, config: LoraConfig, seed: int, scale: float = 0.03, only: str = "") -> AdapterState:
    """An adapter with random B of the paths that contain `only`, and B = 0 in the others."""
    trainer.create_adapter("noisy", config)
    state = trainer.capture("noisy", optimizer=False)
    trainer.remove_adapter("noisy")
    rng = np.random.default_rng(seed)
    tensors = {name: np.array(value) for name, value in state.tensors.items()}
    for name, value in sorted(tensors.items()):
        if ".lora_B." in name and only in name:
            value[:] = rng.normal(0, scale, value.shape)
    return replace(state, tensors=tensors)


def text(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(20, 380, length).astype(np.int32)


def prompt(trainer: HFTrainer, seed: int, *images: RenderedImage) -> RenderedInput:
    """Text with `images` in it."""
    pad = trainer._loaded.model.config.image_token_id
    ids, placements = [text(seed, 4)], []
    for at, image in enumerate(images):
        placements.append(ImagePlacement(sum(map(len, ids)), image))
        ids += [np.full(image.num_tokens, pad, np.int32), text(seed + at + 1, 3)]
    return RenderedInput(np.concatenate([*ids, text(seed + 9, 5)]), tuple(placements))


def noise(trainer: HFTrainer, seed: int, rows: int, columns: int) -> RenderedImage:
    """Random pixels of an image of these merged rows and columns."""
    size = trainer._loaded.model.config.vision_config.patch_size
    pixels = np.random.default_rng(seed).standard_normal((4 * rows * columns, 3 * 2 * size**2)).astype(np.float32)
    return RenderedImage(f"{seed}", rows * columns, pixels, (1, 2 * rows, 2 * columns))


def datum(trainer: HFTrainer, input: RenderedInput, seed: int) -> TrainDatum:
    """Random weights on text."""
    weights = np.random.default_rng(seed).standard_normal(input.length).astype(np.float32)
    weights[input.token_ids == trainer._loaded.model.config.image_token_id] = 0
    return TrainDatum(input, np.roll(input.token_ids, -1).astype(np.int64), {"weights": weights})


def mixed_data(trainer: HFTrainer) -> Mapping[str, list[TrainDatum]]:
    """Of two adapters with towers and of one without, the same images for all; several images in a datum, the same
    image twice, and none."""
    shared, wide, small = noise(trainer, 1, 3, 4), noise(trainer, 2, 5, 3), noise(trainer, 3, 1, 2)
    inputs = {
        "a": [(shared, small), (), (shared,)],
        "b": [(shared, wide, shared), (small,)],
        "text alone": [(shared, small), ()],
    }
    return {
        name: [datum(trainer, prompt(trainer, 30 * at + n, *images), n) for n, images in enumerate(lists)]
        for at, (name, lists) in enumerate(inputs.items())
    }


def load_adapters(trainer: HFTrainer) -> None:
    trainer.load_adapter("a", noisy(trainer, TOWER, 1))
    trainer.load_adapter("b", noisy(trainer, LoraConfig(rank=7, seed=2, train_vision=True), 2))
    trainer.load_adapter("text alone", noisy(trainer, LoraConfig(rank=3, seed=3), 3))


@pytest.mark.rotated(2)
@pytest.mark.mutation(
    "towers-share-features",
    "_placements",
    "own = item.adapter_id if item.adapter_id in towers else None",
    "own = next((each.adapter_id for each in items if item.adapter_id in towers), None)",
    cases=("qwen3_vl-auto",),
)
@pytest.mark.mutation(
    "deepstack-without-gradient",
    "WrittenOutDecoder.forward",
    "row if row.grad_deepstack else None",
    "None",
    cases=("qwen3_vl-auto",),
)
@pytest.mark.mutation(
    "an-image-twice-counts-once",
    "own_gradients.summed",
    "gradients.new_zeros(count, gradients.shape[1]).index_add_(0, rows, gradients[of])",
    "gradients.new_zeros(count, gradients.shape[1]).index_copy_(0, rows, gradients[of])",
    cases=("qwen2_5_vl-auto",),
)
@pytest.mark.parametrize("decoder", ["auto", "autograd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_transformers(
    family: Family, decoder: str, trainers: Trainers, folders: Callable[[Family], Path]
) -> None:
    """Of all adapters, in the same rows."""
    trainer = trainers(family, decoder, "float64")
    load_adapters(trainer)
    with InFloat64():
        theirs = AutoModelForImageTextToText.from_pretrained(
            folders(family), dtype=torch.float64, attn_implementation="eager"
        )
    works = [TrainWork(name, data, "cross_entropy") for name, data in mixed_data(trainer).items()]
    for adapter, wanted in gradients_like(trainer, theirs, works):
        assert adapter.gradient is not None
        assert any("visual" in spec.name for spec in adapter.specs) == adapter.config.train_vision
        for spec in adapter.specs:
            norm = float(wanted[spec.name].norm())
            assert norm > 0, spec.name
            assert float((spec.view(adapter.gradient) - wanted[spec.name]).norm()) < 1e-9 * norm, spec.name


def test_without_train_vision_the_same_numbers_are_trained_as_with_it(trainers: Trainers) -> None:
    """A seed draws the same matrices of the decoder; the default trains no tower."""
    trainer = trainers("qwen3_vl")
    tensors = []
    for config in (LoraConfig(rank=4, seed=1), TOWER):
        trainer.create_adapter("new", config)
        tensors.append(dict(trainer.capture("new", optimizer=False).tensors))
        trainer.remove_adapter("new")
    plain, tower = tensors
    assert {name for name in tower if ".visual." not in name} == plain.keys()
    assert all(np.array_equal(plain[name], tower[name]) for name in plain)


def test_every_linear_module_of_the_tower_is_a_target(trainers: Trainers) -> None:
    for family in FAMILIES:
        trainer = trainers(family)
        tower = trainer._loaded.model.model.visual
        linear = {name for name, module in tower.named_modules() if isinstance(module, torch.nn.Linear)}
        assert trainer._loaded.tower is not None
        assert {target.path for target in trainer._loaded.tower.targets} == {f"model.visual.{name}" for name in linear}


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_multiplied_and_not_convolved(
    family: Family, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cuDNN, and on CPUs, a convolution is slow. Its numbers are compared with transformers' above."""
    trainer = trainers(family)
    monkeypatch.setattr(torch.nn.functional, "conv3d", None)
    assert trainer._loaded.tower is not None
    assert len(trainer._loaded.tower.encode([noise(trainer, 1, 2, 3)]).embeds) == 6


def test_a_text_model_has_no_tower_to_train(tmp_path: Path) -> None:
    trainer = HFTrainer(TrainerConfig(str(make_tiny_text_model(tmp_path / "m")), name="tiny/text", device="cpu"))
    with pytest.raises(InvalidRequestError, match="tiny/text reads text only"):
        trainer.create_adapter("a", TOWER)


def test_training_lowers_the_loss_and_goes_on_from_a_state_to_the_bit(trainers: Trainers) -> None:
    """The optimizer's state has the tower, too; features of the adapter before a step are not used after it."""
    trainer = trainers("qwen3_vl")
    data = [datum(trainer, prompt(trainer, 3, noise(trainer, 4, 2, 3)), 5)]
    data = [replace(each, loss_inputs={"weights": np.abs(each.loss_inputs["weights"])}) for each in data]

    def step(name: str) -> float:
        (result,) = trainer.forward_backward([TrainWork(name, data, "cross_entropy")])
        assert isinstance(result, TrainResult)
        trainer.optim_step(name, AdamParams(learning_rate=0.01))
        return result.metrics["loss:sum"]

    trainer.create_adapter("run", replace_head(TOWER))
    losses = [step("run") for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    trainer.load_adapter("resumed", trainer.capture("run", optimizer=True))
    assert [step("run") for _ in range(3)] == [step("resumed") for _ in range(3)]
    of_tower = [
        np.any(value) for name, value in trainer.capture("run", optimizer=False).tensors.items() if "visual" in name
    ]
    assert all(of_tower)


def replace_head(config: LoraConfig) -> LoraConfig:
    """Without the decoder, so that its gradient alone passes through."""
    return config.model_copy(update={"train_attn": False, "train_mlp": False})


# The sampler ----------------------------------------------------------------------------------------------------------


def picture(trainer: HFTrainer, folder: Path, seed: int, width: int, height: int) -> RenderedImage:
    """Random pixels, as both engines read them."""
    from PIL.Image import fromarray

    image = fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
    config = trainer._loaded.model.config
    vision = family_of(config.model_type, str(folder)).vision
    assert vision is not None
    ours = HFImages(str(folder), vision.read_image).process(image)
    theirs = VLLMImages(str(folder), "float32", vision.tokens(config)).process(image)
    return RenderedImage(f"{seed}", ours.num_tokens, ours.pixel_values, ours.grid_thw, theirs.item, theirs.num_bytes)


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES)
def test_each_target_alone_reaches_the_sampler(
    family: Family, trainers: Trainers, folders: Callable[[Family], Path], tmp_path: Path
) -> None:
    """An adapter that changes one projection of the tower alone, one after the other, and one after training; all in
    the same steps, beside the base model and an adapter without a tower."""
    trainer, folder = trainers(family), folders(family)
    assert trainer._loaded.tower is not None
    given = prompt(trainer, 5, picture(trainer, folder, 1, 96, 160), picture(trainer, folder, 2, 64, 64))
    names = [target.path for target in trainer._loaded.tower.targets]
    for seed, path in enumerate(names):
        trainer.load_adapter(path, noisy(trainer, TOWER, seed, 0.3, f"{path}.lora"))
    trainer.load_adapter("text alone", noisy(trainer, LoraConfig(rank=3, seed=3), 3))
    trainer.create_adapter("trained", TOWER)
    for _ in range(3):
        trainer.forward_backward([TrainWork("trained", [datum(trainer, given, 7)], "cross_entropy")])
        trainer.optim_step("trained", AdamParams(learning_rate=0.01))
    adapters = [None, *names, "text alone", "trained"]
    works = []
    for seed, name in enumerate(adapters):
        version = None if name is None else AdapterVersion(name, tmp_path / name)
        if version is not None:
            version.path.mkdir()
            write_adapter(version.path, trainer.capture(version.name, optimizer=False))
        works.append(SampleWork(given, version, SamplingParams(max_tokens=6, seed=seed, stop=[]), prompt_logprobs=True))
    sampler = sampler_of(folder)
    outputs = asyncio.run(all_of(sampler, works, close=True))
    is_text = given.token_ids[1:] != trainer._loaded.model.config.image_token_id
    exact, compared = Exact(trainer), np.append(is_text, np.ones(6, np.bool_))
    for name, output in zip(adapters, outputs, strict=True):
        (sequence,) = output.sequences
        whole = replace(given, token_ids=np.concatenate([given.token_ids, sequence.tokens]).astype(np.int32))
        ours, base = (trainer.logprobs(adapter, whole) for adapter in (name, None))
        theirs = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
        exact.assert_near(name, [whole], ours[compared], theirs[compared], at=compared)
        assert name is None or np.abs(ours - base)[compared].max() > EFFECT, name


def sampler_of(folder: Path, **options: Any) -> VLLMSampler:
    given = {"max_rank": 8, "kv_cache_bytes": 2**26, "max_context_length": 1024, "train_vision": True, **options}
    return VLLMSampler(EngineOptions(str(folder), **given), EngineThread())


async def all_of(sampler: VLLMSampler, works: list[SampleWork], *, close: bool = False) -> list[Any]:
    """What a sampler answers, all at once."""
    try:
        return list(await asyncio.gather(*map(sampler.sample, works)))
    finally:
        if close:
            await sampler.close()


@pytest.mark.more
@pytest.mark.mutation(
    "features-of-another-tower",
    "VLLMSampler._sample.make",
    "prompt, work.version.name) if own else prompt",
    "prompt, '') if own else prompt",
)
def test_the_sampler_keeps_features_of_adapters_apart_and_shares_the_others(
    trainers: Trainers, folders: Callable[[Family], Path], tmp_path: Path
) -> None:
    """One request after the other for the same image: each tower encodes it once, and adapters without a tower use the
    base model's features."""
    trainer, folder = trainers("qwen3_vl"), folders("qwen3_vl")
    load_adapters(trainer)
    given = prompt(trainer, 5, picture(trainer, folder, 1, 96, 160))
    versions: dict[str | None, AdapterVersion | None] = {None: None}
    for name in ("text alone", "a", "b"):
        (tmp_path / name).mkdir()
        write_adapter(tmp_path / name, trainer.capture(name, optimizer=False))
        versions[name] = AdapterVersion(name, tmp_path / name)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    is_text = given.token_ids[1:] != trainer._loaded.model.config.image_token_id
    exact = Exact(trainer)

    async def one_after_the_other() -> list[int]:
        sampler, encoded = sampler_of(folder), []
        try:
            for _ in range(2):
                for name, version in versions.items():
                    output = await sampler.sample(SampleWork(given, version, params, prompt_logprobs=True))
                    assert output.prompt_logprobs is not None
                    exact.assert_near(name, [given], output.prompt_logprobs[1:][is_text], at=is_text)
                    encoded.append(sampler.images_encoded)
        finally:
            await sampler.close()
        return encoded

    assert asyncio.run(one_after_the_other()) == [1, 1, 2, 3, 3, 3, 3, 3]


def test_a_sampler_without_the_option_refuses_a_tower_and_names_it(
    trainers: Trainers, folders: Callable[[Family], Path], tmp_path: Path
) -> None:
    trainer = trainers("qwen3_vl")
    trainer.load_adapter("a", noisy(trainer, TOWER, 1))
    write_adapter(tmp_path, trainer.capture("a", optimizer=False))

    async def load() -> None:
        sampler = sampler_of(folders("qwen3_vl"), train_vision=False)
        try:
            with pytest.raises(InvalidRequestError, match="--train-vision"):
                await sampler.load_version(AdapterVersion("a", tmp_path))
        finally:
            await sampler.close()

    asyncio.run(load())
