"""Compares trainer and sampler on fixed prompts: no weights are served that the two compute differently.

Both engines silently ignore what they do not know: fields of a config, or tensors of an adapter.
"""

import asyncio
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import RenderedInput, Renderer
from tinker_local.backend.sampling.sampler import AdapterVersion, Sampler, SampleWork
from tinker_local.backend.training.trainer import AdapterState
from tinker_local.types import EncodedTextChunk, ImageChunk, ModelInput, SamplingParams

LENGTHS = (16, 40)
"""Positions of the text probes."""

BEYOND_WINDOW = 16
"""Positions by which the longest probe exceeds a model's sliding window."""

ROUNDING = 0.1
"""Nats that every probe may differ by in 16 bits; they differ by 0.01 to 0.03 in tiny models."""

SPREAD = 4.0
"""How many times as much as another a probe may differ because of rounding. In tiny models in bfloat16, an image
differs up to 2.1 times as much as text if the engines agree; 10 to 18 times if one mixes up its rows and columns."""

IMAGE_HEIGHT = 224
"""In pixels. The image is twice as wide, so that rows and columns cannot be mixed up."""


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """Prompts to compare trainer and sampler on; the trainer computes all of one kind in one row.

    `base`: for a base model, at its start. `adapter`: for every published version of an adapter.
    """

    base: tuple[RenderedInput, ...]
    adapter: tuple[RenderedInput, ...]


def make_probes(
    renderer: Renderer, vocab_size: int, limit: int, sliding_window: int | None, max_image_pixels: int
) -> Probes:
    """Text of several lengths, one longer than the window if there is one, and an image between two texts if the model
    takes images. `limit`: the most positions of a prompt. `max_image_pixels`: the renderer's. Blocks."""

    def text(length: int, first: int = 11) -> EncodedTextChunk:
        ids = (np.arange(length, dtype=np.int64) * 7919 + first) % vocab_size
        return EncodedTextChunk(tokens=ids.astype(np.int32))

    windows = [] if sliding_window is None else [sliding_window + BEYOND_WINDOW]
    lengths = sorted({min(length, limit) for length in (*LENGTHS, *windows)})
    texts = [renderer.render(ModelInput(chunks=(text(length),)), "probe") for length in lengths]
    images = []
    if renderer.takes_images:
        chunks = (text(6, 23), ImageChunk(data=_image(max_image_pixels), format="png"), text(18, 37))
        rendered = renderer.render(ModelInput(chunks=chunks), "probe")
        images = [rendered] if rendered.length <= limit else []
    return Probes(tuple(texts + images), (texts[0], *images))


def _image(max_pixels: int) -> bytes:
    """A PNG of random pixels, always the same."""
    from PIL import Image

    height = min(IMAGE_HEIGHT, math.isqrt(max_pixels // 2))
    pixels = np.random.Generator(np.random.Philox(12)).integers(0, 256, (height, 2 * height, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


async def sampler_logprobs(
    sampler: Sampler, version: AdapterVersion | None, probes: Sequence[RenderedInput], replicas: int
) -> Sequence[npt.NDArray[np.float32]]:
    """As `Trainer.logprobs` of `probes`, from each of the sampler's `replicas`."""
    params = SamplingParams(max_tokens=1, temperature=0.0)

    async def of_replica(replica: int) -> npt.NDArray[np.float32]:
        works = [SampleWork(probe, version, params, prompt_logprobs=True, replica=replica) for probe in probes]
        outputs = await asyncio.gather(*(sampler.sample(work) for work in works))
        found = [output.prompt_logprobs for output in outputs]
        return np.concatenate([logprobs[1:] for logprobs in found if logprobs is not None])

    return await asyncio.gather(*(of_replica(replica) for replica in range(replicas)))


def with_random_b(state: AdapterState) -> AdapterState:
    """`state` with random B, of which the output of each module changes by far more than rounding in 16 bits."""
    random = np.random.Generator(np.random.Philox(13))
    tensors = {
        name: np.asarray(matrix, np.float32)
        if ".lora_A." in name
        else (3e-2 * random.standard_normal(matrix.shape)).astype(np.float32)
        for name, matrix in state.tensors.items()
    }
    return replace(state, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of the probe with the largest mean difference of logprobs: that `difference` (nats), the probe's length and
    whether it has an image, and the `position` where the engines differ most, with the logprobs of both."""

    difference: float
    length: int
    has_image: bool
    position: int
    trainer: float
    sampler: float

    def __str__(self) -> str:
        kind = "positions with an image" if self.has_image else "positions of text"
        return (
            f"the logprob at position {self.position} of {self.length} {kind} is {self.trainer:.5g} in the trainer and "
            f"{self.sampler:.5g} in the sampler"
        )


def compare(
    probes: Sequence[RenderedInput], trainer: npt.NDArray[np.float32], sampler: npt.NDArray[np.float32]
) -> list[Agreement]:
    """How the logprobs of both differ on each probe. The pad ids that stand at an image's positions are not compared: a
    model gives them no meaningful logprob."""
    ends = np.cumsum([probe.length - 1 for probe in probes])[:-1]
    found = []
    for probe, ours, theirs in zip(probes, np.split(trainer, ends), np.split(sampler, ends), strict=True):
        is_text = np.ones(probe.length, np.bool_)
        for placement in probe.images:
            is_text[placement.offset : placement.offset + placement.image.num_tokens] = False
        differences = np.where(is_text[1:], np.abs(ours - theirs), 0)
        worst = int(np.argmax(np.nan_to_num(differences, nan=np.inf)))
        mean = float(differences.sum() / is_text[1:].sum())
        found.append(
            Agreement(mean, probe.length, bool(probe.images), worst + 1, float(ours[worst]), float(theirs[worst]))
        )
    return found


def worst(agreements: Sequence[Agreement]) -> Agreement:
    """Where the engines differ most on average; NaN differs most."""
    return max(agreements, key=lambda agreement: np.nan_to_num(agreement.difference, nan=np.inf))


def rounding_limit(agreements: Sequence[Agreement], tolerance: float) -> float:
    """The mean difference (nats) up to which the probes of a base model may differ because of rounding.

    At most `tolerance`, for the rounding of a model is not known beforehand. But the probe on which the engines differ
    least shows it: rounding is alike on all of them, while a part of the model that the engines compute differently
    (positions of images, a window) shows on some alone.
    """
    least = min(agreement.difference for agreement in agreements)
    return min(tolerance, max(ROUNDING, SPREAD * least))
