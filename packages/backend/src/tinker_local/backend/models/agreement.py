"""Compares trainer and sampler on fixed prompts: no weights are served that the two compute differently.

Both engines silently ignore what they do not know: fields of a config, or tensors of an adapter.
"""

import asyncio
import io
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.rendering.rendered_input import RenderedInput, Renderer
from tinker_local.backend.sampling.sampler import Sampler, SampleWork
from tinker_local.backend.training.trainer import Trainer
from tinker_local.types import EncodedTextChunk, ImageChunk, InvalidRequestError, ModelInput, SamplingParams

LENGTHS = (16, 40)
"""Positions of the text probes."""

BEYOND_WINDOW = 16
"""Positions by which the longest probe exceeds a model's sliding window."""

DRAWS = 4
"""How many times the trainer computes the probes again with other rounding (`nudge` of `Trainer.logprobs`)."""

TYPICAL, OF_ONE_PROBE, MEAN = 2.0, 3.0, 4.0
"""How many times as much as rounding alone moves logprobs the engines may differ: in the median over the positions of
all probes, in that over one probe, and in the mean over one probe, which a token of another expert can dominate.

Of 28 tiny models of all families in bfloat16 on CPUs, right ones, the medians over all are 0.5 to 1.2 times what
rounding alone moves them by, those over one probe up to 1.7 times, and means up to 2.1 times. An adapter that changes
logprobs by 0.1 nats in one engine alone makes 2.5 to 4.6, and mixing up rows and columns of images 10 to 18."""

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
    renderer: Renderer,
    vocab_size: int,
    limit: int,
    sliding_window: int | None,
    max_image_pixels: int,
    *,
    several: bool = False,
) -> Probes:
    """Text of several lengths, one longer than the window if there is one, and an image between two texts if the model
    takes images. `limit`: the most positions of a prompt. `max_image_pixels`: the renderer's. `several`: images of
    other shapes as well, and two in a prompt, for a model of which no test knows how it reads them; without those that
    an engine refuses, as it will in requests. Blocks."""

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
        if several:
            images += _more_images(renderer, text, limit, max_image_pixels)
    return Probes(tuple(texts + images), (texts[0], *images))


SHAPES = {"tall": (80, IMAGE_HEIGHT), "square": (IMAGE_HEIGHT // 2, IMAGE_HEIGHT // 2), "tiny": (24, 18)}
"""Width and height in pixels of the other images."""


def _more_images(
    renderer: Renderer, text: Callable[[int, int], EncodedTextChunk], limit: int, max_pixels: int
) -> list[RenderedInput]:
    chunks: dict[str, ImageChunk] = {}
    for shape, (width, height) in SHAPES.items():
        if width * height > max_pixels:
            continue
        chunk = ImageChunk(data=_png(width, height, len(chunks)), format="png")
        with suppress(InvalidRequestError):
            read = renderer.render(ModelInput(chunks=(chunk,)), "probe")
            if read.images[0].image.num_features > 1:  # transformers' classes of Pixtral's tower fail on one
                chunks[shape] = chunk
    asked: list[tuple[EncodedTextChunk | ImageChunk, ...]] = [
        (*((text(3, 29),) if at % 2 else ()), chunk, text(12, 41)) for at, chunk in enumerate(chunks.values())
    ]
    if len(chunks) > 1:
        one, other, *_ = chunks.values()
        asked.append((text(5, 43), one, text(4, 47), other, text(9, 53)))
    found = [renderer.render(ModelInput(chunks=each), "probe") for each in asked]
    return [each for each in found if each.length <= limit]


def _image(max_pixels: int) -> bytes:
    """A PNG of random pixels, always the same."""
    height = min(IMAGE_HEIGHT, math.isqrt(max_pixels // 2))
    return _png(2 * height, height, 12)


def _png(width: int, height: int, seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.Generator(np.random.Philox(seed)).integers(0, 256, (height, width, 3), np.uint8)
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


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far rounding alone moves logprobs (nats): the largest `mean` over the positions of a probe, and the `typical`
    change, the median over the positions of all."""

    mean: float
    typical: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one replica of the sampler with the trainer. `worst`: where they differ most on average, by more than
    `mean_limit` if a part of the model is computed differently. `typical`: the median difference over the positions of
    all probes. `problem`: why they do not agree; None if they do."""

    worst: Agreement
    mean_limit: float
    typical: float
    typical_limit: float
    rounding: Rounding
    problem: str | None


def compare(
    probes: Sequence[RenderedInput], trainer: npt.NDArray[np.float32], sampler: npt.NDArray[np.float32]
) -> list[Agreement]:
    """How the logprobs of both differ on each probe. The pad ids that stand at an image's positions are not compared: a
    model gives them no meaningful logprob."""
    ends = np.cumsum([probe.length - 1 for probe in probes])[:-1]
    found = []
    for probe, ours, theirs in zip(probes, np.split(trainer, ends), np.split(sampler, ends), strict=True):
        is_text = _is_text(probe)
        differences = np.where(is_text, np.abs(ours - theirs), 0)
        worst = int(np.argmax(np.nan_to_num(differences, nan=np.inf)))
        mean = float(differences.sum() / is_text.sum())
        found.append(
            Agreement(mean, probe.length, bool(probe.images), worst + 1, float(ours[worst]), float(theirs[worst]))
        )
    return found


def _is_text(probe: RenderedInput) -> npt.NDArray[np.bool_]:
    """Which of the positions from 1 on are not an image's, [N - 1]."""
    is_text = np.ones(probe.length, np.bool_)
    for placement in probe.images:
        is_text[placement.offset : placement.offset + placement.image.num_tokens] = False
    return is_text[1:]


def worst(agreements: Sequence[Agreement]) -> Agreement:
    """Where the engines differ most on average; NaN differs most."""
    return max(agreements, key=lambda agreement: np.nan_to_num(agreement.difference, nan=np.inf))


def trainer_draws(
    trainer: Trainer, adapter_id: str | None, probes: Sequence[RenderedInput]
) -> list[npt.NDArray[np.float32]]:
    """The trainer's logprobs of `probes`, and `nudged_draws`."""
    return [trainer.logprobs(adapter_id, *probes), *nudged_draws(trainer, adapter_id, probes)]


def nudged_draws(
    trainer: Trainer, adapter_id: str | None, probes: Sequence[RenderedInput]
) -> list[npt.NDArray[np.float32]]:
    """The logprobs of the short `probes` with other rounding, `DRAWS` times. Long ones would take most of a start, and
    round alike."""
    short = _short(probes)
    return [trainer.logprobs(adapter_id, *short, nudge=1 + draw) for draw in range(DRAWS)]


def judge(
    probes: Sequence[RenderedInput],
    draws: Sequence[npt.NDArray[np.float32]],
    sampler: npt.NDArray[np.float32],
    least: float,
    tolerance: float,
) -> Comparison:
    """Whether the engines compute the same, rounding aside.

    `draws`: of `trainer_draws`. How much a model's logprobs move by rounding is measured rather than known, since it
    depends on its depth, its logits and its experts. `least`: a difference that is always normal; `tolerance`: the most
    that can be.
    """
    by_rounding = moved_by_rounding(probes, draws)
    mean_limit, typical_limit, one_limit = (
        min(tolerance, max(least, times * noise))
        for times, noise in (
            (MEAN, by_rounding.mean),
            (TYPICAL, by_rounding.typical),
            (OF_ONE_PROBE, by_rounding.typical),
        )
    )
    agreement = worst(compare(probes, draws[0], sampler))
    typical = float(np.median(_differences(probes, draws[0], sampler)))
    ends = np.cumsum([probe.length - 1 for probe in probes])[:-1]
    of_one = max(
        float(np.median(_differences([probe], ours, theirs)))
        for probe, ours, theirs in zip(probes, np.split(draws[0], ends), np.split(sampler, ends), strict=True)
    )
    problem = None
    if not agreement.difference <= mean_limit:
        problem = f"{agreement.difference:.3g} on average (at most {mean_limit:.3g} is normal)"
    elif not typical <= typical_limit:
        problem = f"{typical:.3g} or more at half of all positions (at most {typical_limit:.3g} is normal)"
    elif not of_one <= one_limit:
        problem = f"{of_one:.3g} or more at half of a prompt's positions (at most {one_limit:.3g} is normal)"
    if problem is not None:
        problem = f"{agreement}; they differ by {problem}"
    return Comparison(agreement, mean_limit, typical, typical_limit, by_rounding, problem)


def moved_by_rounding(probes: Sequence[RenderedInput], draws: Sequence[npt.NDArray[np.float32]]) -> Rounding:
    """What rounding alone moves the logprobs of the short `probes` by; `draws`: of `trainer_draws`."""
    is_long = ~np.concatenate([np.full(probe.length - 1, probe in _short(probes)) for probe in probes])
    base = draws[0][~is_long]
    moved = [compare(_short(probes), base, draw) for draw in draws[1:]]
    return Rounding(
        max(each.difference for draw in moved for each in draw),
        float(np.median(np.concatenate([_differences(_short(probes), base, draw) for draw in draws[1:]]))),
    )


def _short(probes: Sequence[RenderedInput]) -> list[RenderedInput]:
    return [probe for probe in probes if probe.images or probe.length <= max(LENGTHS)]


def _differences(
    probes: Sequence[RenderedInput], one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """At the positions of text of all `probes`; infinite for NaN."""
    is_text = np.concatenate([_is_text(probe) for probe in probes])
    found: npt.NDArray[np.float32] = np.nan_to_num(np.abs(one - other)[is_text], nan=np.inf)
    return found
