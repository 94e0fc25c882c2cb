"""Training steps through the API: in process, and with the SDK over HTTP."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from harness import workloads
from harness.lines import Line
from harness.scale import Scale
from harness.timing import DeviceMemory

from measurements.hosting import Host
from measurements.ways import Way, results, step

IMAGE_SIDE_PER_TOKEN = 32
"""Pixels: patches of 16, merged 2 x 2."""


async def text(host: Host) -> None:
    """A step of a few thousand tokens, in process and with the SDK."""
    await text_step(host.way, host.scale)
    await host.in_sdk_process("steps.text")


async def images(host: Host) -> None:
    """A step with new images in its body, in process and with the SDK."""
    await images_step(host.way, host.scale)
    await host.in_sdk_process("images.api")


async def text_step(way: Way, scale: Scale) -> None:
    """Prints `steps.text_…`."""
    repeats = 2 + 3 * scale.repeats
    seconds, peak = await median_step(way, scale, lambda number: text_data(scale, seed=100 + number), repeats)
    rate = scale.step_tokens / seconds
    Line(f"steps.text_{way.name}", rate, "tokens/s", seconds, peak, f"{scale.step_tokens} tokens").emit()


async def images_step(way: Way, scale: Scale) -> None:
    """Prints `images.in_process` or `images.sdk`, and the same with `_ahead`: each step is sent before the previous
    result arrives, as the SDK advises, so that its images are decoded while the trainer works."""
    first = 0 if way.name == "in_process" else 10**6  # images that are in no cache of the other way

    def batch(number: int) -> list[object]:
        return [image_datum(scale, first + scale.images * number + index) for index in range(scale.images)]

    repeats = 1 + scale.repeats
    seconds, peak = await median_step(way, scale, batch, repeats)
    note = f"{scale.images} new images of {scale.image_side} x {scale.image_side}"
    Line(f"images.{way.name}", scale.images / seconds, "images/s", seconds, peak, note).emit()
    seconds, peak = await seconds_ahead(way, scale, lambda number: batch(1000 + number), repeats)
    note = f"{note}, each step sent before the last one's result"
    Line(f"images.{way.name}_ahead", scale.images / seconds, "images/s", seconds, peak, note).emit()


async def median_step(
    way: Way, scale: Scale, batch: Callable[[int], Sequence[object]], repeats: int
) -> tuple[float, float | None]:
    """Median seconds of a step and peak memory of the device; each step has a new batch, made before it starts."""
    run = await way.create(scale.rank)
    found = []
    with DeviceMemory() as memory:
        for number in range(scale.warmup + repeats):
            data = way.prepared(batch(number))  # type: ignore[arg-type]
            start = time.perf_counter()
            await step(way, run, data)
            found.append(time.perf_counter() - start)
    return statistics.median(found[scale.warmup :]), memory.peak_gib


async def seconds_ahead(
    way: Way, scale: Scale, batch: Callable[[int], Sequence[object]], repeats: int
) -> tuple[float, float | None]:
    """Seconds per step, with two steps under way at any time, and peak memory of the device."""
    run = await way.create(scale.rank)
    batches = [way.prepared(batch(number)) for number in range(scale.warmup + repeats)]  # type: ignore[arg-type]
    for data in batches[: scale.warmup]:
        await step(way, run, data)
    with DeviceMemory() as memory:
        start = time.perf_counter()
        before: Sequence[Awaitable[object]] = ()
        for data in batches[scale.warmup :]:
            sent = await way.send(run, data)
            await results(before)
            before = sent
        await results(before)
        seconds = time.perf_counter() - start
    return seconds / repeats, memory.peak_gib


def text_data(scale: Scale, seed: int) -> list[object]:
    """Datums of `scale.step_length` tokens that predict the next one."""
    lengths = [scale.step_length + 1] * scale.step_sequences
    return [text_datum(tokens) for tokens in workloads.sequences(scale, lengths, seed)]


def text_datum(tokens: workloads.Int64Array) -> Any:
    """A datum in which each token but the last predicts the next one."""
    from tinker_local.types import Datum, ModelInput

    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)},
    )


def image_datum(scale: Scale, number: int) -> object:
    """One image and `scale.image_text` tokens of text; only text tokens are predicted."""
    from tinker_local.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

    count = (scale.image_side // IMAGE_SIDE_PER_TOKEN) ** 2
    image = ImageChunk(data=workloads.picture(scale.image_side, number), format="jpeg", expected_tokens=count)
    text = np.random.default_rng(number).integers(0, 400, scale.image_text + 1)
    targets = np.concatenate([np.zeros(count, np.int64), text[1:]])
    weights = np.concatenate([np.zeros(count, np.float32), np.ones(scale.image_text, np.float32)])
    return Datum(
        model_input=ModelInput(chunks=(image, EncodedTextChunk(tokens=text[:-1].tolist()))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
