"""One shape of `general_road.py`, as lines: `python -m measurements.seeing_ways SCALE SHAPE FOLDER LAYERS
[autograd]`."""

import io
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import timing, workloads
from harness.lines import Line, failed
from harness.scale import SCALES, Scale
from harness.seeing_shapes import SEEING_SHAPES, SeeingShape

from measurements.images import vision_of, with_new_image
from measurements.training import AUTOGRAD, collect, make_trainer, train_step, work

if TYPE_CHECKING:
    from baselines.padded_loop import PaddedLoop, PictureExample

EXAMPLES = {"full": 32, "tiny": 8}
"""In a step, each with one picture."""
TEXT = {"full": (128, 256), "tiny": (16, 32)}
"""Fewest and most tokens of text in an example, of which the last half is the answer."""
BATCH = 8
"""Examples in a batch of the loop, halved while memory does not suffice."""
TINY_PIXELS = 8
"""How many times as large pictures are at full scale."""
FLOAT32_APART = 1e-3
"""Nats by which the mean losses of loop and trainer may differ where neither rounds to 16 bits."""


def write_model(scale: Scale, shape: SeeingShape, layers: int, out: Path) -> None:
    """Write a model of `shape` with the first `layers` layers (0: all), at tiny scale its architecture's tiny one, with
    its processor into `out`."""
    import transformers
    from random_model import random_model
    from tinker_local.backend.tiny_models.seeing_models import SEEING, make_tiny_seeing_model

    make_tiny_seeing_model(out, shape.architecture)
    if scale.name == "tiny":
        return
    for old in out.glob("*.safetensors"):
        old.unlink()
    config = full_config(shape, json.loads((out / "config.json").read_text()), layers)
    for name, settings in shape.files.items():
        (out / name).write_text(json.dumps(changed(json.loads((out / name).read_text()), settings)))
    model_class: Any = getattr(transformers, SEEING[shape.architecture].model_class)
    random_model(model_class, model_class.config_class(**config)).save_pretrained(out, max_shard_size="4GB")


def changed(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with those that are `given`, also inside the settings of a part."""
    inside = {
        name: changed(settings[name], value)
        for name, value in given.items()
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping)
    }
    return {**settings, **given, **inside}


def full_config(shape: SeeingShape, tiny: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config of `shape` with the first `layers` layers (0: all). `tiny`: that of its architecture's tiny model."""
    of_type = {"dtype": "bfloat16"}
    text = tiny["text_config"] | shape.text | of_type
    for each in ("layer_types", "per_layer_config"):  # of as many layers as the tiny model has
        text.pop(each, None)
    if layers:
        of_all = layers / text["num_hidden_layers"]
        text["num_hidden_layers"] = layers
        if shared := text.get("num_kv_shared_layers"):
            text["num_kv_shared_layers"] = int(shared * of_all)
    parts = {"text_config": text, "vision_config": tiny["vision_config"] | shape.vision | of_type}
    return {**tiny, **shape.whole, **of_type, **parts}


def examples(scale: Scale, shape: SeeingShape, token: str) -> "list[PictureExample]":
    """The same for loop and trainer. `token`: what stands for a picture in a text. A picture in four has each of the
    shape's sizes, in no order."""
    from baselines.padded_loop import PictureExample
    from PIL import Image
    from tinker_local.backend.tiny_models.tokenizer import COLOUR_WORDS, DIGIT_WORDS

    rng, count = np.random.default_rng(5), EXAMPLES[scale.name]
    words = (*COLOUR_WORDS, *DIGIT_WORDS)  # one token each
    sizes = list(itertools.islice(itertools.cycle(shape.pictures), count))
    data = []
    for number, at in enumerate(rng.permutation(count)):
        width, height = (pixels // (TINY_PIXELS if scale.name == "tiny" else 1) for pixels in sizes[at])
        length = int(rng.integers(*TEXT[scale.name], endpoint=True))
        said = [words[word] for word in rng.integers(0, len(words), length)]
        question = " ".join(said[: length // 4]), " ".join(said[length // 4 :])
        picture = Image.open(io.BytesIO(workloads.picture(width, number, height))).convert("RGB")
        data.append(PictureExample(token.join(question), picture, length // 2))
    return data


def rendered(folder: Path, shown: "Sequence[PictureExample]") -> list[Any]:
    """`shown` as the project's renderer gives it to the trainer."""
    from tinker_local.backend.rendering.hf_images import processor_of
    from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
    from tinker_local.backend.training.trainer import TrainDatum

    vision, config = vision_of(folder)
    reader, whole, pad = vision.processor(str(folder), config), processor_of(str(folder)), vision.tokens(config).pad
    data = []
    for number, example in enumerate(shown):
        read = reader.process(example.picture)
        ids = whole(text=example.text, images=[example.picture], return_tensors="pt")["input_ids"][0].numpy()
        inside = np.full(read.num_tokens, pad) if read.positions is None else read.positions.ids
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(inside))
        at = int((windows == inside).all(axis=1).argmax())
        image = RenderedImage(
            str(number),
            read.num_tokens,
            read.pixel_values,
            read.grid_thw,
            positions=read.positions,
            further=read.further,
        )
        weights = np.zeros(len(ids), np.float32)
        weights[-example.answer - 1 : -1] = 1
        given = RenderedInput(ids.astype(np.int32), (ImagePlacement(at, image),))
        data.append(TrainDatum(given, np.roll(ids, -1).astype(np.int64), {"weights": weights}))
    return data


def measure(scale: Scale, name: str, folder: Path, note: str, *, autograd: bool) -> None:
    """Prints the lines of loop and trainer, and how far their first losses are apart. `autograd`: also those of a
    trainer with the autograd decoder."""
    from tinker_local.backend.rendering.hf_images import processor_of

    token = str(getattr(processor_of(str(folder)), "image_token"))  # noqa: B009
    shown = examples(scale, SEEING_SHAPES[name], token)
    data = rendered(folder, shown)
    tokens = sum(datum.input.length for datum in data)
    note = f"{note}, {len(data)} pictures, {tokens} tokens"
    losses: dict[str, float] = {}
    steps: dict[str, Callable[[], float]] = {
        "ours": lambda: ours(scale, f"{name}.ours", folder, data, note),
        "padded_recompute": lambda: loop(scale, name, folder, shown, data, note),
    }
    if autograd:
        steps["autograd"] = lambda: ours(scale, f"{name}.autograd", folder, data, note, **AUTOGRAD)
    for line, step in steps.items():
        try:
            losses[line] = step()
        except Exception as error:
            traceback.print_exc()
            failed(f"{name}.{line}", error).emit()
        collect()
    theirs = losses.pop("padded_recompute", None)
    for line, own in losses.items():
        if theirs is not None:
            apart_line(f"{name}.{line}_apart", own, theirs).emit()


def apart_line(name: str, own: float, theirs: float) -> Line:
    """How far two mean losses of the same data are apart; an error where rounding cannot be the reason."""
    words = f"mean losses of {own:.5f} and {theirs:.5f}"
    fault = "" if timing.device() == "cuda" or abs(own - theirs) <= FLOAT32_APART else f"{words} nats"
    return Line(name, abs(own - theirs), "nats", note=words, error=fault)


def largest_head(folder: Path) -> int:
    """The size of the largest attention heads of the language model in `folder`."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    sizes = [int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])]
    sizes += [layer["head_dim"] for layer in text.get("per_layer_config", {}).values()]
    return max(sizes)


def loop(
    scale: Scale, name: str, folder: Path, shown: "Sequence[PictureExample]", data: Sequence[Any], note: str
) -> float:
    """Prints the padded loop with the fastest attention that works; returns its first loss."""
    from baselines.padded_loop import attentions

    for attention in attentions(largest_head(folder)):
        try:
            return _loop(scale, name, folder, shown, data, note, attention)
        except Exception as error:  # of any type: another attention may work
            traceback.print_exc()
            failed(f"{name}.loop_by_{attention}", error).emit()
        collect()
    raise RuntimeError("no attention works")


def _loop(
    scale: Scale,
    name: str,
    folder: Path,
    shown: "Sequence[PictureExample]",
    data: Sequence[Any],
    note: str,
    attention: str,
) -> float:
    from baselines.padded_loop import PaddedLoop

    start = time.perf_counter()
    made = PaddedLoop(scale, folder, shown, attention)
    print(f"the loop's model is loaded after {time.perf_counter() - start:.1f} s")
    first = first_step(made)
    for ids, datum in zip(made.tokens, data, strict=True):
        if not np.array_equal(ids.numpy(), datum.input.token_ids):
            raise ValueError("loop and trainer have other tokens")
    seconds = timing.median_seconds(made.step, scale, warmup=1)
    tokens = sum(map(len, made.tokens))
    words = f"{attention}, batches of {made.batch}, {made.padding:.0%} of positions are padding, adapters in bfloat16"
    Line(
        f"{name}.padded_recompute", tokens / seconds, "tokens/s", seconds, timing.peak_gib(), f"{note}, {words}"
    ).emit()
    return first


def first_step(loop: "PaddedLoop") -> float:
    """The loss of the first step, with the largest batches that fit in memory."""
    import torch

    batch = BATCH
    while True:
        loop.take_batches_of(batch)
        try:
            return float(loop.step())
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        loop.forget()
        collect()
        batch //= 2


def ours(scale: Scale, line: str, folder: Path, data: Sequence[Any], note: str, **options: Any) -> float:
    """Prints the trainer with `options` and else its defaults, on pictures that are new in each step as `line`, and on
    the same ones as `line`_cached; returns its first loss."""
    from tinker_local.types import LoraConfig

    start = time.perf_counter()
    trainer = make_trainer(scale, folder, **options)
    print(f"the trainer is ready after {time.perf_counter() - start:.1f} s: {trainer.trains}")
    trainer.create_adapter("a", LoraConfig(rank=scale.rank, train_unembed=False))
    tokens, numbers = sum(datum.input.length for datum in data), itertools.count()
    (result,) = trainer.forward_backward([work("a", data)])
    if isinstance(result, Exception):
        raise result
    trainer.discard_gradients("a")
    predicted = sum(float(datum.loss_inputs["weights"].sum()) for datum in data)
    first = float(result.metrics["loss:sum"]) / predicted
    decoder = trainer.trains.partition(";")[0]

    def new_pictures() -> None:
        train_step(trainer, [work("a", [with_new_image(datum, next(numbers)) for datum in data])])

    for name, step, words in (
        (line, new_pictures, "new pictures in each step"),
        (f"{line}_cached", lambda: train_step(trainer, [work("a", data)]), "the same pictures in each step"),
    ):
        seconds = timing.median_seconds(step, scale, warmup=1)
        before = trainer.images_encoded
        step()
        words = f"{decoder}, {words}, {trainer.images_encoded - before} encoded in one, float32 masters"
        Line(name, tokens / seconds, "tokens/s", seconds, timing.peak_gib(), f"{note}, {words}").emit()
    trainer.close()
    return first


def main(arguments: list[str]) -> None:
    scale, name, folder, layers = SCALES[arguments[0]], arguments[1], Path(arguments[2]) / "model", int(arguments[3])
    shape, words = SEEING_SHAPES[name], arguments[4:]
    start = time.perf_counter()
    write_model(scale, shape, layers, folder)
    collect()
    print(f"the model is written after {time.perf_counter() - start:.1f} s")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    whole = shape.text["num_hidden_layers"] if scale.name == "full" else text["num_hidden_layers"]
    measure(scale, name, folder, f"{text['num_hidden_layers']} of {whole} layers", autograd="autograd" in words)
    sys.stdout.flush()
    os._exit(0)  # threads may hang a process that ends; all lines are printed by now


if __name__ == "__main__":
    main(sys.argv[1:])
