"""Towers of models that see and have no family here: pictures that are alike go through them at once, and adapters
train them where vLLM takes them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.families import seeing
from tinker_local.backend.families.family import ImageFeatures
from tinker_local.backend.rendering.rendered_input import ImagePositions, RenderedImage
from tinker_local.backend.report.reference import compute, distances
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.training.model.found_tower import FoundTower, alike
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.types import AdamParams, InvalidRequestError, LoraConfig

from tests.families.test_models_found_to_see import datum, rendered, trainer_of

ALIKE = (
    *("llava", "llava_next", "internvl", "mistral3", "pixtral", "idefics3", "smolvlm", "glm4v", "exaone4_5"),
    "granite4_vision",
)
"""Architectures whose pictures of one size are computed together, each in another way or from other tensors."""

TRAINED = ("llava_next", "pixtral", "idefics3", "smolvlm", "exaone4_5", "lfm2_vl")
"""Architectures whose towers adapters train."""

PATCHES = {"llava_next": 1, "pixtral": 1, "idefics3": 4, "exaone4_5": 4}
"""For a position of a square picture, but for marks of rows."""

TOWER = LoraConfig(rank=4, seed=1, train_vision=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("towers")

    def make(architecture: str) -> Path:
        folder = root / architecture
        return folder if folder.exists() else make_tiny_seeing_model(folder, architecture)

    return make


def tower_of(trainer: HFTrainer) -> FoundTower:
    tower = trainer._loaded.tower
    assert isinstance(tower, FoundTower)
    return tower


def batches_seen(tower: FoundTower, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each run of the class has, from now on."""
    seen: list[int] = []
    encode = tower._vision.encode_images

    def counted(model: Any, images: Any) -> Any:
        seen.append(len(images))
        return encode(model, images)

    monkeypatch.setattr(tower, "_vision", replace(tower._vision, encode_images=counted))
    return seen


@pytest.mark.more
@pytest.mark.parametrize("architecture", ALIKE)
def test_pictures_alike_have_the_features_together_that_they_have_alone(
    architecture: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, in their order, whatever lies between them."""
    trainer = trainer_of(folders(architecture), dtype="float64")
    tower = tower_of(trainer)
    assert "pictures of one size are computed together" in trainer.trains
    sizes = [(120, 60), (64, 64), (120, 60), (60, 100), (120, 60), (60, 100)]
    images = [placed.image for placed in rendered(folders(architecture), *sizes).images]
    seen = batches_seen(tower, monkeypatch)
    together = [all_levels(each) for each in tower.encode(images).split([image.num_features for image in images])]
    assert sum(seen) == len(images)
    assert len(seen) == len({str(read_as(image)) for image in images}) < len(images)
    for image, features in zip(images, together, strict=True):
        alone = all_levels(tower.encode([image]))
        assert (features - alone).abs().max() < 1e-6 * alone.abs().max()
    assert (together[0] - together[2]).abs().max() > 1e-2  # another picture of that size


def all_levels(features: ImageFeatures) -> torch.Tensor:
    return torch.stack([features.embeds, *features.deepstack])


def read_as(image: RenderedImage) -> Any:
    """What is equal of pictures that are alike."""
    assert image.positions is not None
    further = {name: array.tolist() for name, array in image.further.items()}
    return image.pixel_values.shape, image.positions.ids.tolist(), sorted(further.items())


def test_batches_hold_what_is_alike_and_no_more_pixels_than_they_may() -> None:
    def image(height: int, ids: list[int], further: int = 0) -> RenderedImage:
        positions = ImagePositions(np.array(ids, np.int32), np.ones(len(ids), np.bool_))
        pixels = np.zeros((1, 3, height, 2), np.float32)
        return RenderedImage("", len(ids), pixels, (1, 1, 1), positions=positions, further={"x": np.array([further])})

    images = [image(2, [9]), image(4, [9]), image(2, [9]), image(2, [9], 1), image(2, [9, 9]), image(2, [9])]
    assert alike(images, 1000) == [[0, 2, 5], [1], [3], [4]]
    assert alike(images, 24) == [[0, 2], [1], [3], [4], [5]]
    assert alike(images, 1) == [[at] for at in range(6)]


@pytest.mark.more
def test_a_class_that_computes_a_batch_otherwise_gets_one_picture_at_a_time(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that takes the pictures of a batch in another order would, or fails on it."""
    original = seeing._features
    folder = folders("llava")
    images = [placed.image for placed in rendered(folder, (64, 64), (64, 64)).images]
    expected = tower_of(trainer_of(folder)).encode(images).embeds

    def turned(parts: Any, model: Any, images: Any) -> Any:
        found = original(parts, model, images)
        return replace(found, embeds=found.embeds.roll(len(found.embeds) // len(images), 0))

    def failing(parts: Any, model: Any, images: Any) -> Any:
        if len(images) > 1:
            raise RuntimeError("shapes")
        return original(parts, model, images)

    for otherwise in (turned, failing):
        monkeypatch.setattr(seeing, "_features", otherwise)
        for dtype in ("float32", "bfloat16"):
            trainer = trainer_of(folder, dtype=dtype)
            assert "one at a time, as its class does not compute them alike in a batch" in trainer.trains
            seen = batches_seen(tower_of(trainer), monkeypatch)
            found = tower_of(trainer).encode(images).embeds
            assert seen == [1, 1]
            assert (found - expected).abs().max() < (1e-4 if dtype == "float32" else 0.1) * expected.abs().max()


def adapter(trainer: HFTrainer, config: LoraConfig, seed: int) -> AdapterState:
    """With random B."""
    trainer.create_adapter("fresh", config)
    state = trainer.capture("fresh", optimizer=False)
    trainer.remove_adapter("fresh")
    rng = np.random.default_rng(seed)
    tensors = {name: np.array(value) for name, value in state.tensors.items()}
    for name, value in sorted(tensors.items()):
        if ".lora_B." in name:
            value[:] = rng.normal(0, 0.05, value.shape)
    return replace(state, tensors=tensors)


@pytest.mark.more
@pytest.mark.parametrize("architecture", TRAINED)
def test_gradients_of_towers_are_transformers(architecture: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two adapters with towers and one without, in one micro-batch with the same pictures, against transformers'
    whole forward and autograd on one after the other, in float64."""
    folder = folders(architecture)
    trainer = trainer_of(folder, dtype="float64")
    configs = {"a": TOWER, "b": LoraConfig(rank=7, seed=2, train_vision=True), "text": LoraConfig(rank=3, seed=3)}
    states = {name: adapter(trainer, config, at) for at, (name, config) in enumerate(configs.items())}
    sizes = ((120, 60), (64, 64), (120, 60))
    data = [
        datum(rendered(folder, [*range(30, 41)], sizes[0], [*range(50, 60)], sizes[1], [*range(60, 70)])),
        datum(rendered(folder, [*range(70, 80)], [81], sizes[2], [*range(90, 99)])),  # as large as the first
        datum(rendered(folder, [*range(70, 80)])),
    ]
    for name, state in states.items():
        trainer.load_adapter(name, state)
    seen = batches_seen(tower_of(trainer), monkeypatch)
    results = trainer.forward_backward([TrainWork(name, data, "cross_entropy") for name in states])
    assert max(seen) > 1
    for (name, state), result in zip(states.items(), results, strict=True):
        assert not isinstance(result, Exception)
        trainer.optim_step(name, AdamParams(learning_rate=0.0, beta1=0.0))
        moments = trainer.capture(name, optimizer=True).optimizer
        assert moments is not None
        ours = {tensor: np.array(moments[f"exp_avg.{tensor}"]) for tensor in state.tensors}
        theirs = compute(str(folder), torch.float64, "cpu", state, data)
        logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
        assert np.abs(logprobs - theirs.logprobs).max() < 1e-5
        for each in distances(ours, theirs.gradients):
            assert each.relative < 1e-5, (name, each)
        towers = [tensor for tensor in state.tensors if seeing_path(trainer, tensor)]
        assert bool(towers) == configs[name].train_vision
        assert all(np.abs(theirs.gradients[tensor]).max() > 1e-6 for tensor in towers)


def seeing_path(trainer: HFTrainer, tensor: str) -> bool:
    """Whether a tensor of an adapter is of the tower or the projector."""
    return trainer._loaded.family.in_tower(tensor.removeprefix("base_model.model."))


@pytest.mark.more
@pytest.mark.parametrize("architecture", TRAINED)
def test_gradients_do_not_depend_on_what_is_computed_again_or_together(architecture: str, folders: Any) -> None:
    """One picture at a time, and all that are alike at once."""
    folder = folders(architecture)
    trainer = trainer_of(folder, dtype="float64")
    state = adapter(trainer, TOWER, 5)
    data = [datum(rendered(folder, [*range(30, 41)], (90, 60), [*range(50, 60)], (90, 60), [41, 42]))]
    found = []
    for at, together in enumerate((True, False)):
        tower_of(trainer).together = together
        trainer.load_adapter(f"{at}", state)
        trainer.forward_backward([TrainWork(f"{at}", data, "cross_entropy")])
        trainer.optim_step(f"{at}", AdamParams(learning_rate=0.0, beta1=0.0))
        moments = trainer.capture(f"{at}", optimizer=True).optimizer
        assert moments is not None
        found.append({tensor: np.array(moments[f"exp_avg.{tensor}"]) for tensor in state.tensors})
    for each in distances(*found):
        assert each.relative < 1e-6, each


@pytest.mark.more
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("llava", "vLLM counts the positions of such a tower without its class token"),
        ("internvl", "vLLM's class of this architecture takes no adapters on its tower"),
        ("mistral3", "vLLM's class of this architecture takes no adapters on its tower"),
        ("glm4v", "vLLM takes no adapters on gate_proj and up_proj of towers of this kind"),
    ],
)
def test_a_tower_that_stays_as_it_is_is_refused_with_the_reason(architecture: str, reason: str, folders: Any) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        trainer_of(folders(architecture)).create_adapter("a", TOWER)


@pytest.mark.more
@pytest.mark.parametrize("architecture", PATCHES)
def test_the_plan_of_memory_counts_patches_for_each_position(architecture: str, folders: Any) -> None:
    tower = tower_of(trainer_of(folders(architecture)))
    patches = PATCHES[architecture]
    assert 0.9 * patches <= tower._patches_for_position() < 2 * patches
    sizes = tower.sizes(2)
    assert sizes.widths == sum(target.inputs + target.outputs for target in tower.targets)
    of_layers = 2 * 64 * patches * 2  # the inputs of two layers, of a hidden size of 64
    assert of_layers < sizes.kept
    assert sizes.backward >= 2 * patches * 2 * (8 * 64)
