"""Gemma 3 with images, whose positions see each other; trainer, transformers and sampler agree in float32.

The tiny model has a layer with a window of 16 positions, as many as an image has, and one without.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.rendering.renderer import ModelRenderer
from tinker_local.backend.rendering.text import ChatMessage
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import (
    AdamParams,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    SamplingParams,
    UnsupportedError,
)
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.float64 import Exact, InFloat64
from tests.rendering.conftest import Pictures
from tests.rendering.test_decoding import on_white
from tests.rendering.test_image_counts import SHAPES as EVERY_SHAPE
from tests.training.autograd_reference import assert_computes_like

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
EFFECT = 0.01
"""Nats that an adapter changes: far more than rounding does."""

SHAPES = ((64, 64), (97, 389), (320, 48))
"""Of pictures, in pixels: all become 16 positions."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vl_model(tmp_path_factory.mktemp("gemma3") / "model", family="gemma3")


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ModelRenderer:
    return load_renderer(str(folder))


@pytest.fixture(scope="module")
def images(renderer: ModelRenderer) -> Sequence[RenderedImage]:
    """Of `SHAPES`, as both engines read them."""
    pictures = Pictures()
    chunks = [pictures.chunk(pictures.noise(*shape, seed=seed)) for seed, shape in enumerate(SHAPES)]
    return [renderer.render(ModelInput(chunks=(chunk,)), "x").images[0].image for chunk in chunks]


@pytest.fixture(scope="module")
def trainer(folder: Path) -> HFTrainer:
    return HFTrainer(TrainerConfig(str(folder), name="tiny", device="cpu"))


@pytest.fixture(scope="module")
def exact(trainer: HFTrainer) -> Exact:
    return Exact(trainer)


def noisy(
    trainer: HFTrainer, config: LoraConfig, seed: int, scale: float, only: Sequence[str] = TARGETS
) -> AdapterState:
    """An adapter with random B of the targets `only`, and B = 0 in the others."""
    trainer.create_adapter("noisy", config)
    state = trainer.capture("noisy", optimizer=False)
    trainer.remove_adapter("noisy")
    rng = np.random.default_rng(seed)
    tensors = {name: np.array(value) for name, value in state.tensors.items()}
    for name, value in tensors.items():
        if "lora_B" in name and name.split(".")[-3] in only:
            value[:] = rng.normal(0, scale, value.shape)
    return replace(state, tensors=tensors)


def text(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(20, 380, length).astype(np.int32)


def prompt(
    trainer: HFTrainer, seed: int, shown: Sequence[RenderedImage], first: int = 4, gap: int = 3
) -> RenderedInput:
    """`first` tokens, then each of `shown` and `gap` tokens, then 5 tokens."""
    pad = trainer._loaded.model.config.image_token_id
    ids, placements = [text(seed, first)], []
    for at, image in enumerate(shown):
        placements.append(ImagePlacement(sum(map(len, ids)), image))
        ids += [np.full(image.num_tokens, pad, np.int32), text(seed + at + 1, gap)]
    return RenderedInput(np.concatenate([*ids, text(seed + 9, 5)]), tuple(placements))


def continued(prompt: RenderedInput, lengths: Sequence[int]) -> list[RenderedInput]:
    """Samples of these `lengths` of one prompt."""
    return [RenderedInput(np.concatenate([prompt.token_ids, text(n, n)]), prompt.images) for n in lengths]


def datum(input: RenderedInput, seed: int) -> TrainDatum:
    """Random weights, also on images."""
    weights = np.random.default_rng(seed).standard_normal(input.length).astype(np.float32)
    return TrainDatum(input, np.roll(input.token_ids, -1).astype(np.int64), {"weights": weights})


@pytest.mark.mutation("images-seen-causally", "Segments.horizon", "found[start:stop] = found[stop - 1]", "pass")
@pytest.mark.parametrize("scores", [2**26, 1])
def test_packed_runs_agree_with_transformers_on_each_sequence_alone(
    folder: Path, images: Sequence[RenderedImage], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs and all gradients of several adapters in the same rows, with up to three images in a datum, first and
    last in it, the same image twice, and none; data of equal length share calls. `scores`: in memory at once."""
    with InFloat64():
        trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", device="cpu", dtype="float64"))
    monkeypatch.setattr("tinker_local.backend.training.model.attention.SCORES", scores)
    a, b, c = images
    inputs = {
        "a": [prompt(trainer, 1, [a, b]), prompt(trainer, 2, []), prompt(trainer, 3, [b, c]), prompt(trainer, 4, [a])],
        "b": [
            prompt(trainer, 5, [a, b, a], first=0),
            prompt(trainer, 6, [c], first=1),
            prompt(trainer, 7, [], first=40),
        ],
    }
    inputs["a"] += continued(prompt(trainer, 8, [a, c]), (3, 5, 5))  # what they share is in the row once
    inputs["b"].append(RenderedInput(inputs["a"][3].token_ids[:20], inputs["a"][3].images))  # ends with an image
    for name, rank in {"a": 4, "b": 7}.items():
        trainer.load_adapter(name, noisy(trainer, LoraConfig(rank=rank, seed=rank), rank, 0.03))
    with InFloat64():
        theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    works = [
        TrainWork(name, [datum(each, n) for n, each in enumerate(of)], "cross_entropy") for name, of in inputs.items()
    ]
    assert_computes_like(trainer, theirs, works)


def sampled(folder: Path, works: Sequence[SampleWork], **options: Any) -> list[Any]:
    """What a sampler answers, all at once."""
    given = {"max_rank": 8, "kv_cache_bytes": 2**26, "max_context_length": 1024, **options}

    async def all_of() -> list[Any]:
        sampler = VLLMSampler(EngineOptions(str(folder), **given), EngineThread())
        try:
            return list(await asyncio.gather(*map(sampler.sample, works)))
        finally:
            await sampler.close()

    return asyncio.run(all_of())


def assert_agree(
    trainer: HFTrainer, exact: Exact, name: str | None, prompts: Sequence[RenderedInput], outputs: Sequence[Any]
) -> float:
    """Of prompts and samples, text and pads; returns how much the adapter changes."""
    whole, theirs = [], []
    for given, output in zip(prompts, outputs, strict=True):
        (sequence,) = output.sequences
        whole.append(replace(given, token_ids=np.concatenate([given.token_ids, sequence.tokens]).astype(np.int32)))
        theirs += [output.prompt_logprobs[1:], sequence.logprobs]
    ours, base = (trainer.logprobs(adapter, *whole) for adapter in (name, None))
    exact.assert_near(name, whole, ours, np.concatenate(theirs))
    return float(np.abs(ours - base).max())


@pytest.mark.more
def test_trainer_and_sampler_agree_with_each_target_alone(
    trainer: HFTrainer, exact: Exact, folder: Path, images: Sequence[RenderedImage], tmp_path: Path
) -> None:
    """Adapters that change one projection alone, one that was trained, and the base model, in the same steps; with one
    to three images at the start, in the middle, side by side and at the end."""
    a, b, c = images
    prompts = [
        prompt(trainer, 1, [a, b, c]),
        prompt(trainer, 2, [a], first=0),
        prompt(trainer, 3, [b, c], first=30, gap=0),
        prompt(trainer, 4, []),
        RenderedInput(prompt(trainer, 5, [c]).token_ids[:20], prompt(trainer, 5, [c]).images),
    ]
    prompts[3].token_ids[3:5] = prompts[0].token_ids[4]  # pads that came as text
    for seed, target in enumerate(TARGETS):
        trainer.load_adapter(target, noisy(trainer, LoraConfig(rank=4, seed=seed), seed, 0.1, (target,)))
    trainer.create_adapter("trained", LoraConfig(rank=8, seed=1))
    for _ in range(3):
        trainer.forward_backward([TrainWork("trained", [datum(prompts[0], 7)], "cross_entropy")])
        trainer.optim_step("trained", AdamParams(learning_rate=0.01))
    names = [None, *TARGETS, "trained"]
    works = []
    for name in names:
        version = None if name is None else AdapterVersion(name, tmp_path / name)
        if version is not None:
            version.path.mkdir()
            write_adapter(version.path, trainer.capture(version.name, optimizer=False))
        for seed, given in enumerate(prompts):
            params = SamplingParams(max_tokens=6, seed=seed, stop=[])
            works.append(SampleWork(given, version, params, prompt_logprobs=True))
    outputs = iter(sampled(folder, works))
    effects = {name: assert_agree(trainer, exact, name, prompts, [next(outputs) for _ in prompts]) for name in names}
    assert min(effect for name, effect in effects.items() if name is not None) > EFFECT, effects


@pytest.mark.more
def test_an_image_is_never_split_over_two_steps(
    trainer: HFTrainer, exact: Exact, folder: Path, images: Sequence[RenderedImage]
) -> None:
    """Steps of 40 positions, shared by prompts of several images that begin where steps end."""
    prompts = [prompt(trainer, 10 + n, [images[n % 3], images[(n + 1) % 3]], first=n, gap=n % 4) for n in range(12)]
    params = SamplingParams(max_tokens=4, seed=1, stop=[])
    works = [SampleWork(given, None, params, prompt_logprobs=True) for given in prompts]
    outputs = sampled(folder, works, max_sequences=16, max_batched_tokens=40)
    assert_agree(trainer, exact, None, prompts, outputs)


@pytest.mark.more
async def test_the_rest_of_an_image_whose_beginning_is_in_the_prefix_cache_sees_all_of_it(
    trainer: HFTrainer, exact: Exact, folder: Path, images: Sequence[RenderedImage]
) -> None:
    """Blocks of the cache end in the middle of the first image and before the second."""
    given = prompt(trainer, 40, images[:2], first=120)
    params = SamplingParams(max_tokens=6, seed=1, stop=[])
    options = EngineOptions(str(folder), max_rank=8, kv_cache_bytes=2**26, max_context_length=1024)
    sampler = VLLMSampler(options, EngineThread())
    try:
        outputs = [await sampler.sample(SampleWork(given, None, params)) for _ in range(2)]
    finally:
        await sampler.close()
    assert given.images[0].offset < outputs[1].prompt_cache_hit_tokens < given.images[0].offset + 16
    for output in outputs:
        (sequence,) = output.sequences
        whole = replace(given, token_ids=np.concatenate([given.token_ids, sequence.tokens]).astype(np.int32))
        exact.assert_near(None, [whole], sequence.logprobs, at=slice(-6, None))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_chat_with_images_has_the_ids_and_pixels_of_the_hf_processor(
    folder: Path, renderer: ModelRenderer, count: int
) -> None:
    """Two line breaks on both sides of an image, joined with those of the template; an image that a message merely
    writes is text."""
    pictures, processor = Pictures(), AutoProcessor.from_pretrained(folder)
    shown = [pictures.noise(*SHAPES[n], mode=mode, seed=n) for n, mode in enumerate(("RGB", "L", "RGBA")[:count])]
    parts: list[Any] = ["Look:", *map(pictures.chunk, shown[:2]), "and", *map(pictures.chunk, shown[2:]), "What?"]
    codec = HFText.load(str(folder), renderer.tokens)
    assert codec is not None
    rendered = renderer.render(codec.chat([ChatMessage("user", tuple(parts))], {}, go_on=False), "x")
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    rgb = [Image.fromarray(on_white(pictures.file(image))) for image in shown]
    hf = processor(text=[text], images=[rgb], add_special_tokens=False, return_tensors="np")
    assert rendered.token_ids.tolist() == hf["input_ids"][0].tolist()
    is_image = np.zeros(rendered.length, np.int64)
    for placed in rendered.images:
        is_image[placed.offset : placed.offset + placed.image.num_tokens] = 1
        vllm = placed.image.vllm_item.get_data()
        assert torch.equal(vllm["pixel_values"].float(), torch.from_numpy(placed.image.pixel_values))
    assert np.array_equal(is_image, hf["token_type_ids"][0])
    assert np.array_equal(np.concatenate([p.image.pixel_values for p in rendered.images]), hf["pixel_values"])
    written = codec.chat([ChatMessage("user", ("<start_of_image>",))], {}, go_on=False)
    assert renderer.tokens is not None
    assert renderer.tokens.start not in renderer.render(written, "x").token_ids


def test_images_of_any_shape_have_the_same_number_of_positions(folder: Path, renderer: ModelRenderer) -> None:
    """In vLLM, in the HF processor and for a client; another number is refused."""
    pictures, processor = Pictures(), AutoProcessor.from_pretrained(folder).image_processor
    for seed, (width, height) in enumerate(EVERY_SHAPE):
        image = pictures.noise(width, height, seed=seed)
        rendered = renderer.render(ModelInput(chunks=(pictures.chunk(image, expected_tokens=16),)), "x")
        assert rendered.length == 16
        hf = processor(images=[image], return_tensors="np")
        assert np.array_equal(rendered.images[0].image.pixel_values, hf["pixel_values"])
    with pytest.raises(InvalidRequestError, match="takes 16 tokens in vLLM and 16 in the HF processor"):
        renderer.render(ModelInput(chunks=(pictures.chunk(image, expected_tokens=15),)), "x")


def edited(folder: Path, out: Path, file: str, change: Callable[[Any], Any]) -> str:
    """A copy of the model in which `change` was made to the JSON of `file`."""
    out.mkdir()
    for each in folder.iterdir():
        (out / each.name).write_bytes(each.read_bytes())
    config = json.loads((folder / file).read_text())
    change(config)
    (out / file).write_text(json.dumps(config))
    return str(out)


def test_images_that_are_longer_than_the_window_are_refused(folder: Path, tmp_path: Path) -> None:
    """To vLLM they are causal. 16 positions fit into a window of 16."""
    path = edited(folder, tmp_path / "m", "config.json", lambda config: config["text_config"].update(sliding_window=15))
    with pytest.raises(UnsupportedError, match="mm_tokens_per_image is 16, more than the sliding_window of 15"):
        load_renderer(path)


def test_a_processor_that_cuts_images_into_several_is_refused(folder: Path, tmp_path: Path) -> None:
    cut = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    path = edited(folder, tmp_path / "m", "preprocessor_config.json", lambda config: config.update(cut))
    pictures = Pictures()
    with pytest.raises(InvalidRequestError, match="do_pan_and_scan, which cuts an image into several"):
        load_renderer(path).render(ModelInput(chunks=(pictures.chunk(pictures.noise(200, 60)),)), "x")


def test_its_vision_tower_cannot_be_trained(trainer: HFTrainer) -> None:
    with pytest.raises(
        InvalidRequestError, match="the vision tower of tiny stays as it is: vLLM and transformers name"
    ):
        trainer.create_adapter("tower", LoraConfig(rank=4, train_vision=True))


@pytest.mark.more
async def test_a_server_starts_and_trainer_and_sampler_agree(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    options = BackendOptions(
        data_dir=tmp_path, kv_cache_bytes=2**26, max_context_length=256, max_rank=8, train_vision=True
    )
    backend = InProcessBackend([ModelSource("tiny/gemma3", str(folder))], options, progress=said.append)
    await backend.start()
    assert backend.imports.most_bytes("tiny/gemma3") > 2**20  # although no adapter trains its tower
    await backend.close()
    agreed = re.search(r"trainer and sampler agree to (\S+) nats", said[-1])
    assert agreed is not None
    assert float(agreed[1]) < EFFECT / 100
