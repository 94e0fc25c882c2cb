"""Compares a trainer with transformers' own whole forward on prompts with pictures, before a model that its own
processor reads is served: what was found of its class (`families/seeing.py`) can be wrong.

The reference gets what the model's processor makes of texts and pictures, and makes masks and positions itself. The
trainer gets the same ids, the pictures one by one, and all prompts in one row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.families.family import ImageFeatures
from tinker_local.backend.rendering.decoding import ImageError
from tinker_local.backend.rendering.hf_images import HFProcessorImages
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput, TrainerImage
from tinker_local.backend.training.model.found_tower import FoundTower, alike
from tinker_local.types import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image
    from tinker_local.backend.training.model.load_model import LoadedModel

Logprobs = npt.NDArray[np.float32]
TrainerLogprobs = Callable[..., Logprobs]
"""`HFTrainer.logprobs`."""

SHAPES = {"square": (224, 224), "wide": (448, 128), "tall": (128, 448), "tiny": (20, 14)}
"""Width and height in pixels."""

MOST_POSITIONS = 2**14
"""Of all prompts together, of which both compute the logits: a second or two on a GPU."""

LARGEST = 1e-3
"""Nats by which a logprob may differ in 32 bits."""

DRAWS, TIMES, LEAST_16_BIT, LARGEST_16_BIT = 2, 4.0, 0.02, 0.5
"""In 16 bits: how often the trainer computes the prompts again with other rounding, how many times as much as that
moves logprobs on average they may differ on average, and the least and the largest such limit in nats."""


TOGETHER, TOGETHER_16_BIT = 1e-3, 0.1
"""By how much the features of a picture may differ in a batch, of what tells the two pictures of the batch apart."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """`what` it is, in words. `rendered`: as the trainer reads it; `arguments`: as transformers' forward does."""

    what: str
    rendered: RenderedInput
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Compared:
    """`prompts`: how many, `pictures`: of how many shapes. `largest`: the largest difference of a logprob in nats.
    `left_out`: other shapes, each with the reason. `too_small`: the most features of a picture that transformers' class
    fails on; 0 if it takes all. `together`: whether it computes those that are alike in one batch as it does alone."""

    prompts: int
    pictures: int
    largest: float
    left_out: tuple[str, ...]
    too_small: int
    together: bool

    def __str__(self) -> str:
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"compared with transformers' own forward on {self.prompts} prompts with pictures of {self.pictures} "
            f"shapes{without}: logprobs differ by {self.largest:.1g} nats at most; pictures of one size are computed "
            f"{'together' if self.together else 'one at a time, as its class does not compute them alike in a batch'}"
        )


@dataclass(slots=True, eq=False)
class _Pictures:
    """`read`: the pictures by shape, and as the trainer reads them. The others: of `Compared`."""

    read: "dict[str, tuple[Image, TrainerImage]]"
    left_out: list[str]
    too_small: int = 0
    together: bool = False


def check_pictures(loaded: "LoadedModel", logprobs: TrainerLogprobs, path: str) -> Compared:
    """UnsupportedError, with the position and the numbers, unless the trainer computes prompts with pictures as
    transformers' whole forward does. `path`: the model's folder or hub name."""
    prompts, pictures = _prompts(loaded, path)
    assert isinstance(loaded.tower, FoundTower), "of a model that its processor reads"
    loaded.tower.together = pictures.together
    theirs = [_whole_forward(loaded, each, path) for each in prompts]
    rendered = [each.rendered for each in prompts]
    found = logprobs(None, *rendered)
    ends = np.cumsum([each.length - 1 for each in rendered])[:-1]
    ours = np.split(found, ends)
    if loaded.dtype.itemsize >= 4:
        _check_largest(prompts, ours, theirs, path)
    else:
        draws = [np.split(logprobs(None, *rendered, nudge=1 + draw), ends) for draw in range(DRAWS)]
        _check_mean(prompts, ours, theirs, draws, path)
    largest = max(float(np.abs(a - b)[_text(each)].max()) for each, a, b in zip(rendered, ours, theirs, strict=True))
    return Compared(
        len(prompts),
        len(pictures.read),
        largest,
        tuple(pictures.left_out),
        pictures.too_small,
        pictures.together,
    )


@torch.no_grad()
def _together(
    loaded: "LoadedModel", reader: HFProcessorImages, read: "Mapping[str, tuple[Image, TrainerImage]]"
) -> bool:
    """Whether transformers' class computes of two pictures of one size in a batch what it computes of each alone: by
    less than what tells both apart."""
    vision = loaded.family.vision
    assert vision is not None, "a model that reads images"
    for shape, (picture, image) in read.items():
        pair = [_image(shape, image), _image(f"{shape} inverted", reader.process(_inverted(picture)))]
        if len(alike(pair, 2**62)) != 1:
            return False
        try:
            alone = [_levels(vision.encode_images(loaded.model, [image])) for image in pair]
            both = _levels(vision.encode_images(loaded.model, pair)).chunk(2)
        except Exception:  # of any type: transformers' own code fails on the batch, as each alone it has computed
            return False
        apart = (alone[0] - alone[1]).float().norm()
        allowed = TOGETHER if loaded.dtype.itemsize >= 4 else TOGETHER_16_BIT
        if any(not (a - b).float().norm() <= allowed * apart for a, b in zip(alone, both, strict=True)):
            return False
    return True


def _levels(features: ImageFeatures) -> torch.Tensor:
    """All `features` of each position, [P, levels, H]."""
    return torch.stack([features.embeds, *features.deepstack], 1)


def _inverted(picture: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.invert(picture)


def _check_largest(prompts: Sequence[_Prompt], ours: Sequence[Logprobs], theirs: Sequence[Logprobs], path: str) -> None:
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        apart = np.where(_text(prompt.rendered), np.nan_to_num(np.abs(own - other), nan=np.inf), 0)
        if apart.max() > LARGEST:
            raise _refusal(path, prompt, own, other, int(np.argmax(apart > LARGEST)), f"{LARGEST:.1g}")


def _check_mean(
    prompts: Sequence[_Prompt],
    ours: Sequence[Logprobs],
    theirs: Sequence[Logprobs],
    draws: Sequence[Sequence[Logprobs]],
    path: str,
) -> None:
    for at, (prompt, own, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        keep = _text(prompt.rendered)
        moved = max(float(np.abs(draw[at] - own)[keep].mean()) for draw in draws)
        limit = min(LARGEST_16_BIT, max(LEAST_16_BIT, TIMES * moved))
        apart = np.where(keep, np.nan_to_num(np.abs(own - other), nan=np.inf), 0)
        if not apart.sum() / keep.sum() <= limit:
            raise _refusal(path, prompt, own, other, int(np.argmax(apart > limit)), f"{limit:.2g} on average")


def _refusal(path: str, prompt: _Prompt, ours: Logprobs, theirs: Logprobs, at: int, allowed: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: with {prompt.what} the trainer computes another model than transformers: the logprob at position "
        f"{at + 1} of {prompt.rendered.length} is {ours[at]:.5g} in the trainer and {theirs[at]:.5g} in transformers; "
        f"allowed is a difference of {allowed}"
    )


def _text(prompt: RenderedInput) -> npt.NDArray[np.bool_]:
    """Which of the N - 1 next tokens are text: a model gives those of an image no meaningful logprob."""
    is_text = np.ones(prompt.length, np.bool_)
    for placed in prompt.images:
        is_text[placed.offset : placed.offset + placed.image.num_tokens] = False
    return is_text[1:]


@torch.no_grad()
def _whole_forward(loaded: "LoadedModel", prompt: _Prompt, path: str) -> Logprobs:
    """The logprob of each next token of `prompt`, float32 [N - 1], as transformers' class computes it."""
    given = {
        name: value.to(loaded.device) if isinstance(value, torch.Tensor) else value
        for name, value in prompt.arguments.items()
    }
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            given[name] = value.to(loaded.dtype)
    try:
        logits = loaded.model(**given, use_cache=False).logits[0, :-1]
    except Exception as error:  # of any type: transformers' own code fails
        first = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"{path}: transformers' own forward fails on {prompt.what} ({type(error).__name__}: {first})"
        ) from error
    ids = given["input_ids"][0, 1:, None]
    found = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).gather(1, ids)[:, 0]
    logprobs: Logprobs = found.float().cpu().numpy()
    return logprobs


def _pictures(loaded: "LoadedModel", reader: HFProcessorImages, path: str) -> _Pictures:
    """Those that the processor reads, that fit, and of which transformers' class computes features."""
    vision = loaded.family.vision
    assert vision is not None, "a model that reads images"
    room = _room(loaded)
    found = _Pictures({}, [])
    for shape, (width, height) in SHAPES.items():
        picture = _picture(width, height)
        try:
            read = reader.process(picture)
        except ImageError as error:  # as every request with such a picture will be told
            found.left_out.append(f"{shape} ones, which its processor refuses ({error})")
            continue
        if read.num_tokens > room:
            found.left_out.append(f"{shape} ones, which take {read.num_tokens} positions")
            continue
        image = _image(shape, read)
        try:
            with torch.no_grad():
                vision.encode_images(loaded.model, [image])
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from error
        except Exception as error:  # of any type: transformers' own code fails
            first = str(error).partition("\n")[0]
            found.left_out.append(f"{shape} ones, on which transformers fails ({type(error).__name__}: {first})")
            found.too_small = max(found.too_small, image.num_features)
            continue
        found.read[shape] = picture, read
    if {"square", "wide", "tall"}.isdisjoint(found.read):
        raise UnsupportedError(
            f"{path}: its images cannot be compared with transformers' own forward: {'; '.join(found.left_out)}"
        )
    if any(image.num_features <= found.too_small for image in (_image("", read) for _, read in found.read.values())):
        raise UnsupportedError(f"{path}: transformers does not compute its images: {'; '.join(found.left_out)}")
    found.together = _together(loaded, reader, found.read)
    return found


def _room(loaded: "LoadedModel") -> int:
    """The most positions of a picture that is compared."""
    return min(loaded.max_positions, MOST_POSITIONS // 8) - 4 * len(_WORDS)


def _image(shape: str, read: TrainerImage) -> RenderedImage:
    return RenderedImage(
        f"{shape} picture that is compared",
        read.num_tokens,
        read.pixel_values,
        read.grid_thw,
        positions=read.positions,
        further=read.further,
    )


def _prompts(loaded: "LoadedModel", path: str) -> tuple[list[_Prompt], _Pictures]:
    """What is compared."""
    vision = loaded.family.vision
    assert vision is not None, "a model that reads images"
    reader = vision.processor(path, loaded.model.config)
    assert isinstance(reader, HFProcessorImages), "of a model without a family"
    read = _pictures(loaded, reader, path)
    pictures = read.read
    first, middle, last = _WORDS, _WORDS[::-1], _WORDS[1:]
    asked: list[tuple[str, list[str]]] = [
        ("text", [" ".join((*first, *middle))]),
        *((f"a {shape} picture between texts", [" ".join(first), shape, " ".join(middle)]) for shape in pictures),
    ]
    shape, *others = sorted(pictures, key=lambda each: -pictures[each][1].num_tokens)
    other = others[-1] if others else shape
    asked.append((f"a {shape} picture at the start", [shape, " ".join(first)]))
    asked.append((f"a {other} picture at the end", [" ".join(first), other]))
    if sum(pictures[each][1].num_tokens for each in (shape, other)) <= _room(loaded):
        parts = [" ".join(first), shape, " ".join(last), other, " ".join(middle)]
        asked.append((f"a {shape} and a {other} picture", parts))
        if vision.touching:
            asked.append((f"a {other} picture and a {shape} one that touch", [other, shape, " ".join(first)]))
    found = [_rendered(reader, what, parts, pictures, path) for what, parts in asked]
    return found, read


_WORDS = ("two", "red", "boats", "on", "a", "lake", "at", "noon", "and", "one", "green", "hill")


def _rendered(
    reader: HFProcessorImages,
    what: str,
    parts: Sequence[str],
    pictures: "dict[str, tuple[Image, TrainerImage]]",
    path: str,
) -> _Prompt:
    """`parts`: texts, and the shapes of pictures."""
    shown = [part for part in parts if part in pictures]
    text = "".join(reader.token if part in pictures else part for part in parts)
    batch = reader.whole(text, [pictures[shape][0] for shape in shown])
    ids = batch["input_ids"][0].numpy().astype(np.int32)
    placed, done = [], 0
    for shape in shown:
        read = pictures[shape][1]
        assert read.positions is not None, "of a processor that makes its positions"
        at = _place(ids, read.positions.ids, done)
        if at is None:
            raise UnsupportedError(
                f"{path}: with {what} the model's processor writes other tokens for the {shape} picture than for the "
                f"picture alone, which are {read.num_tokens}"
            )
        placed.append(ImagePlacement(at, _image(shape, read)))
        done = at + read.num_tokens
    return _Prompt(what, RenderedInput(ids, tuple(placed)), dict(batch))


def _place(ids: npt.NDArray[np.int32], inside: npt.NDArray[np.int32], start: int) -> int | None:
    """Where `inside` is in `ids` from `start` on."""
    for at in range(start, len(ids) - len(inside) + 1):
        if ids[at] == inside[0] and np.array_equal(ids[at : at + len(inside)], inside):
            return at
    return None


def _picture(width: int, height: int) -> "Image":
    """Smooth colours, so that towers do not take neighbouring patches for noise, and no row or column like another."""
    from PIL.Image import fromarray

    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = np.stack([np.sin(7 * x + 3 * y), np.cos(5 * y - 2 * x), np.sin(11 * x * y + 1)], axis=-1)
    return fromarray((127.5 * (1 + waves)).astype(np.uint8))
