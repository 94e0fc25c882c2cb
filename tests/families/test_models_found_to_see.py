"""Models that see and have no family here: what is found of them, and that what is found wrong is refused."""

import asyncio
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.cli.check_command import check
from tinker_local.backend.cli.models_command import models
from tinker_local.backend.families import FAMILIES, OTHER, family_of, seeing
from tinker_local.backend.families.family import ImageFeatures, Vision, text_position_ids
from tinker_local.backend.families.line_up import NOT_SERVED, OTHERS, SEEING
from tinker_local.backend.models.agreement import with_random_b
from tinker_local.backend.models.load_engines import check_model
from tinker_local.backend.process.messages import KeepImage, decode, encode
from tinker_local.backend.rendering.hf_images import HFProcessorImages
from tinker_local.backend.rendering.rendered_input import (
    ImagePlacement,
    ImagePositions,
    ImageTokens,
    RenderedImage,
    RenderedInput,
    SamplerImage,
    TrainerImage,
)
from tinker_local.backend.rendering.renderer import ImageReading, ModelRenderer
from tinker_local.backend.report.reference import compute, distances
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.training.model.load_model import config_of
from tinker_local.backend.training.run.packing import Item, pack
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import (
    AdamParams,
    EncodedTextChunk,
    ImageChunk,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    UnsupportedError,
)

from tests.e2e.test_models_that_see import GEMMA4, SERVED
from tests.families.starts import check_refused
from tests.families.test_experts import Merged
from tests.float64 import InFloat64

pytestmark = pytest.mark.more

FOUND = tuple(each for each in SERVED if each not in {*FAMILIES, *GEMMA4})
"""Architectures that are found."""

DECODERS = {"idefics3": "model.text_model", "smolvlm": "model.text_model"}
"""Paths of language models that are not `model.language_model`."""

WITH_EXPERTS = ("glm4v_moe", "internvl3_5_moe")
"""Architectures with routed experts."""

REFUSED = {
    "paligemma": r"a prompt of PaliGemma sees all of itself, the text after the image too .* and vLLM lets the",
    "llava_onevision": r"vLLM runs it as LlavaOnevisionForConditionalGeneration, which takes no adapters",
    "cohere2_vision": r"vLLM runs it as Cohere2VisionForConditionalGeneration, which takes no adapters",
    "llama4": r"Llama4ForConditionalGeneration has no parts `model` and `lm_head`",
}
"""Architectures, and why `check` says that they cannot be served."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("seeing")

    def make(architecture: str) -> Path:
        folder = root / architecture
        return folder if folder.exists() else make_tiny_seeing_model(folder, architecture)

    return make


def trainer_of(folder: Path, **settings: Any) -> HFTrainer:
    return HFTrainer(TrainerConfig(str(folder), name="tiny", **settings))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def vision_of(folder: Path) -> tuple[Any, Vision]:
    config = config_of(str(folder))
    vision = family_of(config.model_type, str(folder)).vision
    assert vision is not None
    return config, vision


def rendered(folder: Path, *parts: list[int] | tuple[int, int]) -> RenderedInput:
    """Texts as ids, and random pictures by their width and height, as the trainer's processor reads them."""
    config, vision = vision_of(folder)
    processor = vision.processor(str(folder), config)
    ids: list[np.ndarray] = []
    placed: list[ImagePlacement] = []
    for at, part in enumerate(parts):
        if isinstance(part, list):
            ids.append(np.array(part, np.int32))
            continue
        read = processor.process(picture(*part, seed=at))
        assert read.positions is not None
        image = RenderedImage(
            f"{at} {part}",
            read.num_tokens,
            read.pixel_values,
            read.grid_thw,
            positions=read.positions,
            further=read.further,
        )
        placed.append(ImagePlacement(sum(map(len, ids)), image))
        ids.append(read.positions.ids)
    return RenderedInput(np.concatenate(ids), tuple(placed))


def datum(given: RenderedInput) -> TrainDatum:
    """Learns its next text tokens."""
    weights = np.ones(given.length, np.float32)
    for placed in given.images:
        weights[placed.offset : placed.offset + placed.image.num_tokens] = 0
    shown = RenderedInput(given.token_ids[:-1], given.images)
    return TrainDatum(shown, given.token_ids[1:].astype(np.int64), {"weights": weights[1:]})


def learnt(folder: Path) -> list[TrainDatum]:
    """Texts and pictures."""
    return [
        datum(rendered(folder, [*range(30, 41)], (120, 60), [*range(50, 67)])),
        datum(rendered(folder, [*range(30, 41)], (120, 60), [*range(50, 60), 20, 21])),  # begins alike, picture and all
        datum(rendered(folder, [*range(70, 80)])),
        datum(rendered(folder, (60, 100), [30, 41, 52], (64, 64), [*range(90, 99)])),
    ]


@pytest.mark.parametrize("architecture", [each for each in FOUND if each not in WITH_EXPERTS])
def test_gradients_of_adapters_on_rows_with_pictures_are_transformers(architecture: str, folders: Any) -> None:
    """All in one row, against transformers' whole forward and autograd, one after the other, in float64."""
    folder = folders(architecture)
    assert family_of(config_of(str(folder)).model_type, str(folder)).decoder_path == DECODERS.get(
        architecture, "model.language_model"
    )
    trainer = trainer_of(folder, dtype="float64")
    trainer.create_adapter("fresh", LoraConfig(rank=2, seed=1))
    state = with_random_b(trainer.capture("fresh", optimizer=False))
    data = learnt(folder)
    trainer.load_adapter("a", state)
    (result,) = trainer.forward_backward([TrainWork("a", data, "cross_entropy")])
    assert not isinstance(result, Exception)
    trainer.optim_step("a", AdamParams(learning_rate=0.0, beta1=0.0))
    moments = trainer.capture("a", optimizer=True).optimizer
    assert moments is not None
    ours = {name: np.array(moments[f"exp_avg.{name}"]) for name in state.tensors}
    theirs = compute(str(folder), torch.float64, "cpu", state, data)
    logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
    assert np.abs(logprobs - theirs.logprobs).max() < 1e-5
    for each in distances(ours, theirs.gradients):
        assert each.relative < 1e-5, each
    assert any(np.abs(gradient).max() > 1e-3 for gradient in ours.values())


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_gradients_of_experts_on_rows_with_pictures_are_transformers(
    architecture: str, decoder: Any, folders: Any
) -> None:
    """The same with adapters added to transformers' weights, experts among them."""
    folder = folders(architecture)
    data = learnt(folder)
    with InFloat64():
        trainer = trainer_of(folder, dtype="float64", decoder=decoder)
        trainer.create_adapter("fresh", LoraConfig(rank=2, seed=1))
        trainer.load_adapter("a", with_random_b(trainer.capture("fresh", optimizer=False)))
        (result,) = trainer.forward_backward([TrainWork("a", data, "cross_entropy")])
        assert not isinstance(result, Exception)
        adapter = trainer._adapters["a"]
        merged = Merged(trainer)
        for each, output in zip(data, result.outputs, strict=True):
            rows = merged.logprobs("a", each.input)
            logprobs = rows.gather(1, torch.from_numpy(each.target_tokens)[:, None])[:, 0]
            (-(torch.from_numpy(each.loss_inputs["weights"]) * logprobs).sum()).backward()
            assert np.abs(output["logprobs"] - logprobs.detach().numpy()).max() < 1e-5
    assert adapter.gradient is not None
    for spec in adapter.specs:
        theirs, ours = merged.leaves["a"][spec.name].grad, spec.view(adapter.gradient)
        assert float((ours - theirs).norm()) < 1e-5 * float(theirs.norm()), spec.name


@pytest.mark.parametrize("architecture", ["idefics3", "mistral3", "granite_vision", "lfm2_vl", *WITH_EXPERTS])
def test_a_packed_base_is_one_copy_for_both_engines(architecture: str, folders: Any, tmp_path: Path) -> None:
    """vLLM names the layers of Idefics 3 otherwise, and Pixtral's tower makes tables where it finds its weights."""
    said: list[str] = []
    options = BackendOptions(
        data_dir=tmp_path,
        dtype="float32",
        kv_cache_bytes=2**26,
        max_rank=8,
        base_precision="int8",
        trainer="inline",
        sampler="inline",
    )

    async def start() -> None:
        source = ModelSource("tiny/sees", str(folders(architecture)))
        async with InProcessBackend([source], options, progress=said.append):
            pass

    asyncio.run(start())
    agreed = re.search(r"agree to (\S+) nats", said[-1])
    assert agreed is not None
    assert float(agreed[1]) < 1e-4


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_served_is_refused_with_its_reason_before_weights_are_loaded(
    architecture: str, folders: Any, tmp_path: Path
) -> None:
    told = CliRunner().invoke(check, [f"m={folders(architecture)}", "--data-dir", str(tmp_path)]).output
    (problem,) = (line for line in told.splitlines() if line.startswith("PROBLEM") and "model m" in line)
    assert re.search(REFUSED[architecture], problem), problem


def test_a_check_says_how_images_are_read(folders: Any, tmp_path: Path) -> None:
    told = CliRunner().invoke(check, [f"m={folders('llava')}", "--data-dir", str(tmp_path)]).output
    assert (
        "reads images by transformers' class, from model.vision_tower by way of model.multi_modal_projector into "
        "model.language_model; its tower stays frozen: vLLM counts the positions of such a tower without its "
        "class token"
    ) in told
    told = CliRunner().invoke(check, [f"m={folders('idefics3')}", "--data-dir", str(tmp_path)]).output
    assert "by way of model.connector into model.text_model; --train-vision lets clients train its tower" in told


@pytest.mark.parametrize(
    ("architecture", "field"), [("granite_vision", "logits_scaling 2.0"), ("cohere2_vision", "logit_scale 0.5")]
)
def test_logits_have_what_transformers_class_leaves_out(
    architecture: str, field: str, folders: Any, tmp_path: Path
) -> None:
    folder = folders(architecture)
    trainer, data = trainer_of(folder), learnt(folder)[2]
    assert (
        f"logits with {field}, which transformers' {type(trainer._loaded.model).__name__} leaves out" in trainer.trains
    )
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        logits = theirs(input_ids=torch.from_numpy(data.input.token_ids.astype(np.int64))[None]).logits[0]
    wanted = (logits / 2).log_softmax(-1)[:-1].gather(1, torch.from_numpy(data.target_tokens)[:-1, None])[:, 0]
    assert np.abs(trainer.logprobs(None, data.input) - wanted.numpy()).max() < 1e-4
    if architecture not in REFUSED:
        told = CliRunner().invoke(check, [f"m={folder}", "--data-dir", str(tmp_path)]).output
        assert f"its logits have {field}, which transformers' class leaves out" in told


def rolled(features: ImageFeatures) -> ImageFeatures:
    """Each position has those of the one before."""
    levels = tuple(level.roll(1, 0) for level in features.deepstack)
    return replace(features, embeds=features.embeds.roll(1, 0), deepstack=levels)


@pytest.mark.parametrize("architecture", ["llava", "granite4_vision"])
def test_features_in_another_order_are_refused_with_the_position_and_the_numbers(
    architecture: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite 4 Vision has features in layers alone."""
    original = seeing._features
    monkeypatch.setattr(seeing, "_features", lambda *given: rolled(original(*given)))
    with pytest.raises(
        UnsupportedError,
        match=r"with a square picture between texts the trainer computes another model than transformers: the logprob "
        r"at position \d+ of \d+ is -\d.* in the trainer and -\d.* in transformers; allowed is a difference of 0.001",
    ):
        trainer_of(folders(architecture))


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_features_of_layers_are_added_before_the_first_and_after_any(decoder: Any, folders: Any) -> None:
    """As if they had been added to the embeddings, where both are."""
    trainer = trainer_of(folders("llava"), decoder=decoder, dtype="float64", image_cache_bytes=0)
    prompt = rendered(folders("llava"), [5, 6, 7], (64, 64), [8, 9])
    tower: Any = trainer._loaded.tower
    encode = tower._vision.encode_images

    def apart(model: Any, images: Any) -> ImageFeatures:
        embeds = encode(model, images).embeds
        return ImageFeatures(embeds - 0.25, (torch.full_like(embeds, 0.5), torch.full_like(embeds, 0.25)), (0, -1))

    def after_first(model: Any, images: Any) -> ImageFeatures:
        embeds = encode(model, images).embeds
        return ImageFeatures(embeds, (torch.full_like(embeds, 0.5),), (0,))

    found = []
    for each in (encode, apart, after_first):
        tower._vision = replace(tower._vision, encode_images=each)
        found.append(trainer.logprobs(None, prompt))
    np.testing.assert_allclose(found[1], found[2], atol=1e-10, rtol=0)
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_positions_as_of_text_are_refused_where_a_class_has_others(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_text(where: str, config: Any, input: RenderedInput) -> Any:
        return np.repeat(text_position_ids(config, input), 3, axis=0)

    monkeypatch.setattr(seeing, "_class_positions", as_text)
    seeing.seeing_family.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="picture between texts the trainer computes another model"):
            trainer_of(folders("glm4v"))
    finally:
        seeing.seeing_family.cache_clear()


def test_features_in_16_bits_that_are_too_large_are_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "compared with transformers' own forward on 9 prompts" in trainer_of(folders("llava"), dtype="bfloat16").trains
    )
    original = seeing._features
    monkeypatch.setattr(seeing, "_features", lambda *given: rolled(original(*given)))
    with pytest.raises(UnsupportedError, match=r"allowed is a difference of 0\.\d+ on average"):
        trainer_of(folders("llava"), dtype="bfloat16")


def test_a_class_that_gives_its_layers_more_than_embeddings_is_refused() -> None:
    embeds = torch.zeros(1, 2, 4)
    seeing.check_given(torch.nn.Module(), {"inputs_embeds": embeds, "attention_mask": None, "visual_pos_masks": None})
    with pytest.raises(UnsupportedError, match=r"gives its layers deepstack_visual_embeds beside embeddings"):
        seeing.check_given(torch.nn.Module(), {"inputs_embeds": embeds, "deepstack_visual_embeds": [embeds]})


def test_a_model_that_sees_is_found_by_its_config_alone(folders: Any, tmp_path: Path) -> None:
    """As `models` asks; `check` and `serve` say that its weights are missing."""
    folder = shutil.copytree(folders("llava"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    assert family_of("llava", str(folder)).vision is not None
    assert "fits    " in CliRunner().invoke(models, ["--gpu", "H200", str(folder)]).output
    assert f"{folder} has no weights" in CliRunner().invoke(check, [str(folder)]).output


@pytest.mark.parametrize(
    ("architecture", "section", "why"),
    [
        ("qwen2_5_vl", [6, 5, 6], r"is \[6, 5, 6\], 17 in all: heads of 32 numbers have 16 frequencies"),
        ("qwen3_vl", [6, 5], r"is \[6, 5\], not 3 counts: heads of 32 numbers have 16 frequencies"),
        ("glm4v", [3, 3, 3], r"is \[3, 3, 3\], 9 in all: heads of 32 numbers have 8 frequencies"),
        ("glm4v", "2,3,3", r"is '2,3,3', not 3 counts: heads of 32 numbers have 8 frequencies"),
        (
            "glm4v",
            None,
            r"is \[8, 12, 12\] by transformers' default, 32 in all: heads of 32 numbers have 8 frequencies",
        ),
    ],
)
def test_parts_of_rotary_positions_that_are_not_all_of_them_are_refused_with_the_numbers(
    architecture: Any, section: Any, why: str, tmp_path: Path
) -> None:
    if architecture == "glm4v":
        folder = make_tiny_seeing_model(tmp_path / "model", architecture)
    else:
        folder = make_tiny_vl_model(tmp_path / "model", family=architecture)
    config = json.loads((folder / "config.json").read_bytes())
    rope = config["text_config"]["rope_parameters"]
    rope["mrope_section"] = section
    if section is None:
        del rope["mrope_section"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"mrope_section of rope_parameters {why}"):
        check_model(str(folder), BackendOptions())
    assert re.search(f"mrope_section of rope_parameters {why}", CliRunner().invoke(check, [str(folder)]).output)


def test_parts_of_rotary_positions_that_are_all_of_them_by_default_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class without a family."""
    folder = make_tiny_seeing_model(tmp_path / "model", "glm4v")
    config = json.loads((folder / "config.json").read_bytes())
    del config["text_config"]["rope_parameters"]["mrope_section"]
    config["text_config"]["head_dim"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    why = "rope_parameters has no mrope_section; transformers takes [8, 12, 12] by default, and vLLM"
    check_refused(folder, tmp_path / "data", why, monkeypatch)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_config_that_leaves_the_parts_of_rotary_positions_to_a_default_is_refused(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has none, and would turn heads by the place in the prompt."""
    folder = make_tiny_vl_model(tmp_path / "model", family=family)
    config = json.loads((folder / "config.json").read_bytes())
    del config["text_config"]["rope_parameters"]["mrope_section"]
    (folder / "config.json").write_text(json.dumps(config))
    check_refused(folder, tmp_path / "data", "rope_parameters has no mrope_section", monkeypatch)


def test_layers_that_add_features_of_images_in_an_unknown_way_are_refused(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the config alone."""
    monkeypatch.setattr(seeing, "BY_LAYER", "another name")
    with pytest.raises(UnsupportedError, match=r"add features of images to what they give \(deepstack_features\)"):
        seeing.seeing_family.__wrapped__("granite4_vision", str(folders("granite4_vision")))


def test_pictures_that_touch_or_are_too_small_for_transformers_are_errors_of_the_request(folders: Any) -> None:
    trainer = trainer_of(folders("glm4v"))
    touching = rendered(folders("glm4v"), [5], (64, 64), (60, 90), [6, 7])
    with pytest.raises(InvalidRequestError, match="follows another one without a token between them"):
        trainer.logprobs(None, touching)
    small = rendered(folders("mistral3"), [5, 6], (20, 14), [7, 8])
    with pytest.raises(InvalidRequestError, match=r"the image at position 2 takes 1 positions, and .* none below 2"):
        trainer_of(folders("mistral3")).logprobs(None, small)


class Reading:
    """An image processor of either engine, which gives one image."""

    def __init__(self, image: Any) -> None:
        self.image = image

    def process(self, _: Any) -> Any:
        return self.image


def test_other_ids_or_features_in_one_engine_are_an_error_with_both() -> None:
    ids, holds = np.array([9, 9, 4, 9], np.int32), np.array([True, True, False, True])
    pixels = np.zeros((1, 3, 2, 2), np.float32)
    buffer = io.BytesIO()
    picture(4, 3).save(buffer, "PNG")
    given = ModelInput(chunks=(EncodedTextChunk(tokens=[1]), ImageChunk(data=buffer.getvalue(), format="png")))
    trainer = TrainerImage(pixels, (1, 1, 4), 4, ImagePositions(ids, holds))

    def render(other: ImagePositions) -> RenderedInput:
        sampler = SamplerImage(None, 0, len(other.ids), other)
        reading = ImageReading(ImageTokens(None, 9, None), Reading(trainer), Reading(sampler))
        return ModelRenderer(16, reading).render(given, "prompt")

    found = render(ImagePositions(ids.copy(), holds.copy()))
    assert found.token_ids.tolist() == [1, 9, 9, 4, 9]
    assert found.holds_features.tolist() == [False, True, True, False, True]
    with pytest.raises(InvalidRequestError, match="4x3 pixels takes 3 tokens in vLLM and 4 in the HF processor"):
        render(ImagePositions(ids[:3], holds[:3]))
    with pytest.raises(
        InvalidRequestError,
        match="position 2 of its 4 positions, 3 of them with features is token 5 without features in vLLM and token 4 "
        "without features in the HF processor",
    ):
        render(ImagePositions(np.array([9, 9, 5, 9], np.int32), holds))
    with pytest.raises(InvalidRequestError, match=r"position 2 of .* is token 4 with features in vLLM"):
        render(ImagePositions(ids, np.ones(4, np.bool_)))


def test_packing_places_features_where_images_hold_them_and_messages_keep_it() -> None:
    holds = np.array([False, True, True, False, True])
    ids = np.array([4, 9, 9, 4, 9], np.int32)
    pixels = np.zeros((1, 3, 2, 2), np.float32)
    further = {"image_sizes": np.array([[2, 2]])}
    image = RenderedImage("a", 5, pixels, (1, 1, 5), positions=ImagePositions(ids, holds), further=further)
    other = replace(image, content_hash="b")
    given = [
        RenderedInput(np.concatenate([[1], ids, [2]]).astype(np.int32), (ImagePlacement(1, image),)),
        RenderedInput(
            np.concatenate([ids, ids, [3]]).astype(np.int32), (ImagePlacement(0, other), ImagePlacement(5, image))
        ),
    ]
    packed = pack([Item(0, at, None, datum(each)) for at, each in enumerate(given)], 16)
    assert [each.content_hash for each in packed.images] == ["a", "b"]
    assert packed.image_rows.tolist() == [2, 3, 5, 7, 8, 10, 12, 13, 15]
    assert packed.feature_rows.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    sent = encode(KeepImage.of(image))
    memory = bytearray(sent.offsets[-1])
    for array, start in zip(sent.arrays, sent.offsets, strict=False):
        memory[start : start + array.nbytes] = array.tobytes()
    kept = decode(sent.head, memory, 0, {}).rendered()
    assert kept.feature_places.tolist() == [1, 2, 4]
    assert kept.further["image_sizes"].tolist() == [[2, 2]]
    assert kept.tensor_bytes == image.tensor_bytes == pixels.nbytes + further["image_sizes"].nbytes


def test_a_processor_whose_token_is_not_the_models_is_refused(folders: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"writes images as '<image>', token \d+, and its config has 7 for them"):
        HFProcessorImages(str(folders("llava")), 7)


def test_the_page_of_models_lists_them(folders: Any) -> None:
    kinds = {config_of(str(folders(architecture))).model_type for architecture in FOUND}
    assert sorted({*kinds, "smolvlm"}) == list(SEEING)
    assert not {*SEEING} & {*FAMILIES, *NOT_SERVED, *OTHERS}


def test_a_model_without_a_part_for_images_or_that_is_not_here_stays_one_of_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert family_of("llava", str(tmp_path)) is OTHER
    assert family_of("llava", "some/where-else") is OTHER
