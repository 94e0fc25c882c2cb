"""One optimizer step on 64 examples of one image and some text each."""

import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import timing, workloads
from harness.lines import Line, failed
from harness.scale import Scale

from measurements.training import make_trainer, train_step, work


def vision_of(folder: Path) -> tuple[Any, Any]:
    """How the family of the model in `folder` reads images, and the model's config."""
    from tinker_local.backend.families import family_of
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    return family_of(config.model_type, str(folder)).vision, config


def rendered(scale: Scale, folder: Path) -> list[Any]:
    """`scale.images` different images, processed as the project's renderer does."""
    from PIL import Image
    from tinker_local.backend.rendering.hf_images import HFImages
    from tinker_local.backend.rendering.rendered_input import RenderedImage

    processor = HFImages(str(folder), vision_of(folder)[0].read_image)
    images = []
    for index in range(scale.images):
        file = workloads.picture(scale.image_side, seed=index)
        image = processor.process(Image.open(io.BytesIO(file)).convert("RGB"))
        images.append(RenderedImage(str(index), image.num_tokens, image.pixel_values, image.grid_thw))
    return images


def examples(scale: Scale, folder: Path) -> list[Any]:
    """Rendered data: vision start, the image, vision end, text; weights are 1 where a text token is predicted."""
    from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedInput
    from tinker_local.backend.training.trainer import TrainDatum

    vision, config = vision_of(folder)
    marks = vision.tokens(config)
    rng = np.random.default_rng(3)
    data = []
    for image in rendered(scale, folder):
        # Below the special tokens, which text never contains.
        text = rng.integers(0, min(marks.start, marks.pad, marks.end) - 8, scale.image_text)
        tokens = np.concatenate([[marks.start], np.full(image.num_tokens, marks.pad), [marks.end], text])
        weights = np.zeros(len(tokens), np.float32)
        weights[image.num_tokens + 1 : -1] = 1  # vision end predicts the first text token, the last predicts nothing
        given = RenderedInput(tokens.astype(np.int32), (ImagePlacement(1, image),))
        data.append(TrainDatum(given, np.roll(tokens, -1), {"weights": weights}))
    return data


def baseline(scale: Scale, models: Path, *, recompute: bool = False) -> None:
    """The hand-written loop on the same pixels and tokens."""
    import torch
    from baselines.image_loop import ImageExample, ImageLoop

    folder = models / "vl"
    data = [
        ImageExample(
            tokens=torch.from_numpy(datum.input.token_ids.astype(np.int64)),
            labels=torch.from_numpy(np.where(datum.loss_inputs["weights"] > 0, datum.target_tokens, -100)),
            pixels=torch.from_numpy(datum.input.images[0].image.pixel_values),
            grid=datum.input.images[0].image.grid_thw,
        )
        for datum in examples(scale, folder)
    ]
    loop = ImageLoop(scale, folder, data, recompute=recompute)
    seconds = timing.median_seconds(loop.step, scale, warmup=1)
    name = "images.packed_bf16_recompute" if recompute else "images.packed_bf16"
    Line(name, len(data) / seconds, "images/s", seconds, timing.peak_gib(), _positions(data)).emit()


def _positions(data: list[Any]) -> str:
    tokens = sum(len(item.tokens) if hasattr(item, "tokens") else item.input.length for item in data)
    return f"{len(data)} images, {tokens} positions"


def ours(scale: Scale, models: Path) -> None:
    """New images in each step, as in every new batch; then the same images in every step."""
    from tinker_local.types import LoraConfig

    folder = models / "vl"
    trainer = make_trainer(scale, folder)
    trainer.create_adapter("no_head", LoraConfig(rank=scale.rank, train_unembed=False))
    data = examples(scale, folder)
    step_number = itertools.count()

    def fresh_step() -> None:
        train_step(trainer, [work("no_head", [with_new_image(datum, next(step_number)) for datum in data])])

    for name, step, note in (
        ("images.ours", fresh_step, "new images each step"),
        ("images.ours_cached", lambda: train_step(trainer, [work("no_head", data)]), "the same images each step"),
    ):
        try:
            seconds = timing.median_seconds(step, scale)
            note = f"{note}, {_positions(data)}"
            Line(name, len(data) / seconds, "images/s", seconds, timing.peak_gib(), note).emit()
        except Exception as error:
            failed(name, error).emit()


def with_new_image(datum: Any, number: int) -> Any:
    """The same pixels under another content hash, so that no cached feature fits."""
    (placement,) = datum.input.images
    image = replace(placement.image, content_hash=f"fresh {number}")
    return replace(datum, input=replace(datum.input, images=(replace(placement, image=image),)))
