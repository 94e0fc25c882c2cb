"""What transformers' class computes of images, where a model's own processor reads them: features, with adapters on the
projections of its tower and of what is between that and the language model, and gradients back to the adapters.

The class's own code runs up to the language model (`families/seeing.py`), for pictures that are alike at once if it
computes them so (`together`). Layers keep only their input, and are computed again in the backward.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tinker_local.backend.families.family import ImageFeatures, Vision
from tinker_local.backend.rendering.hf_images import HFProcessorImages
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, Target, groups_of
from tinker_local.backend.training.lora.lora_batch import LoraBatch, LowRank, project, project_backward, whole
from tinker_local.backend.training.model.vision_tower import TowerPass
from tinker_local.backend.training.run.block_memory import TowerSizes
from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

PIXELS_AT_ONCE = 2**24
"""Numbers of pixels that a tower reads at once, of which activations are a multiple: 28,500 patches of 14 x 14, as many
as a micro-batch of 7,000 positions has where four are one position."""

_SIDE = 448
"""Of the picture whose patches are counted."""


class FoundTower:
    """What `vision` describes, of transformers' `model`. `images_encoded`: how many it has encoded. `together`: whether
    pictures that are alike go through it at once, which `check_pictures` finds out."""

    def __init__(self, model: Any, vision: Vision) -> None:
        self._model, self._vision = model, vision
        self._by_module = {} if vision.frozen else found_targets(model, vision)
        self._matrices = {linear: dense([linear]) for linear in self._by_module}
        self.targets = list(self._by_module.values())
        self._groups = groups_of(self.targets)
        self._lora: LoraBatch | None = None
        self._place = 0
        self.images_encoded = 0
        self.together = False
        for linear in self._by_module:
            linear.forward = functools.partial(self._linear, linear, linear.forward)
        for layer in () if vision.frozen else _layers(model, vision):
            layer.forward = functools.partial(self._layer, layer.forward)

    def encode(self, images: Sequence[RenderedImage]) -> ImageFeatures:
        """Features of `images` in order, without adapters."""
        with torch.no_grad():
            return self._features(images)

    def forward(
        self,
        images: Sequence[tuple[Adapter, RenderedImage]],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        *,
        gradient: bool,
    ) -> TowerPass:
        """Features of images in order, each with its adapter; those of an adapter are adjacent. `dtype`, `grad_dtype`:
        of the adapters' matrices and of their gradients."""
        adapters = list({id(adapter): adapter for adapter, _ in images}.values())
        slices = [AdapterSlice(adapter, place, place + 1) for place, adapter in enumerate(adapters)]
        lora = LoraBatch(self._groups, slices, dtype, grad_dtype, gradient=gradient)
        found = []
        with self._running(lora), torch.set_grad_enabled(gradient):
            for place, adapter in enumerate(adapters):
                with self._of(place):
                    found.append(self._features([image for own, image in images if own is adapter]))
            features = ImageFeatures.joined(found)
        return TowerPass(functools.partial(self._running, lora), lora, features)

    def sizes(self, itemsize: int) -> TowerSizes:
        """For the plan of a GPU's memory, with activations of `itemsize` bytes, as many patches for a position as a
        square picture has. A layer's backward has about what autograd keeps of it, and its gradients."""
        layers = _layers(self._model, self._vision)
        inside = {module for layer in layers for module in layer.modules()}
        widths = [[_width(each) for each in layer.modules() if each in self._by_module] for layer in layers]
        inputs = [next(each.in_features for each in layer.modules() if each in self._by_module) for layer in layers]
        beside = sum(_width(each) for each in self._by_module if each not in inside)
        patches = math.ceil(self._patches_for_position()) * itemsize
        widest = max((sum(each) for each in widths), default=0)
        return TowerSizes(sum(map(_width, self._by_module)), patches * (sum(inputs) + beside), patches * 2 * widest)

    def _patches_for_position(self) -> float:
        """Of a square picture."""
        from PIL import Image

        config = self._model.config
        reader = self._vision.processor(config.name_or_path, config)
        assert isinstance(reader, HFProcessorImages), "of a model that its processor reads"
        read = reader.process(Image.new("RGB", (_SIDE, _SIDE)))
        assert read.positions is not None, "of a processor that makes its positions"
        given = config.vision_config.patch_size
        sides = given if isinstance(given, (list, tuple)) else (given, given)
        of_patch = 3 * math.prod(sides) * getattr(config.vision_config, "temporal_patch_size", 1)
        return float(read.pixel_values.size / of_patch / read.positions.holds_features.sum())

    def _features(self, images: Sequence[RenderedImage]) -> ImageFeatures:
        self.images_encoded += len(images)
        found: dict[int, ImageFeatures] = {}
        for batch in alike(images, PIXELS_AT_ONCE) if self.together else [[at] for at in range(len(images))]:
            features = self._vision.encode_images(self._model, [images[at] for at in batch])
            found |= zip(batch, features.split([len(features.embeds) // len(batch)] * len(batch)), strict=True)
        return ImageFeatures.joined([found[at] for at in range(len(images))])

    @contextmanager
    def _running(self, lora: LoraBatch) -> Iterator[None]:
        assert self._lora is None, "one pass at a time"
        self._lora = lora
        try:
            yield
        finally:
            self._lora = None

    @contextmanager
    def _of(self, place: int) -> Iterator[None]:
        """What runs is of images of the adapter at `place` in the batch."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def _linear(self, linear: Any, original: Callable[..., Any], x: torch.Tensor) -> Any:
        target = self._by_module[linear]
        low_rank = None if self._lora is None else self._lora.group(target.group, target.index)
        if low_rank is None:
            return original(x)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # autograd skips what has no input to differentiate by
        # All rows are of one adapter, whose row of the mask is repeated.
        own = low_rank.rows(slice(self._place, self._place + 1))
        return _AddingLinear.apply(x, self._matrices[linear], linear.bias, own)

    def _layer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._lora is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        place = self._place

        def of_place(*args: Any, **kwargs: Any) -> Any:
            with self._of(place):
                return original(*args, **kwargs)

        return checkpoint(of_place, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _AddingLinear(torch.autograd.Function):
    """x W^T + bias + low rank. The backward adds the adapters' gradients to those in `LowRank`, outside autograd: a
    module runs once for each batch of pictures."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrix: FrozenMatrix, bias: torch.Tensor | None, low_rank: LowRank
    ) -> torch.Tensor:
        rows = x.detach().flatten(0, -2)
        h, output = project(rows, matrix, bias, low_rank, whole)
        ctx.save_for_backward(rows, h)
        ctx.matrix, ctx.low_rank = matrix, low_rank
        return output.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        low_rank: LowRank = ctx.low_rank
        assert low_rank.grad_a is not None, "a backward follows a pass with gradients"
        rows, h = ctx.saved_tensors
        new = replace(
            low_rank,
            grad_a=torch.empty_like(low_rank.grad_a),
            grad_b=tuple(torch.empty_like(each) for each in low_rank.grad_b),
        )
        grad_rows = project_backward(grad.flatten(0, -2), rows, ctx.matrix, new, h, whole)
        low_rank.grad_a.add_(new.grad_a)
        for total, part in zip(low_rank.grad_b, new.grad_b, strict=True):
            total.add_(part)
        return grad_rows.unflatten(0, grad.shape[:-1]), None, None, None


def found_targets(model: Any, vision: Vision) -> dict[Any, Target]:
    """The targets of the Linear modules of the tower and of what is between it and the language model, in the model's
    order. Modules of one name, but for numbers, and one shape form a group."""
    found: dict[Any, Target] = {}
    counts: dict[str, int] = {}
    for path, module in model.named_modules():
        if type(module) is not torch.nn.Linear or not vision.trains(path):
            continue
        group = f"{re.sub(r'[.][0-9]+(?=[.])', '', path)} {module.out_features}x{module.in_features}"
        index = counts[group] = counts.get(group, -1) + 1
        found[module] = Target.of(path, group, index, module, "vision")
    return found


def alike(images: Sequence[RenderedImage], most: int) -> list[list[int]]:
    """The places of `images` that can be computed at once, with `most` numbers of pixels in each batch but for a single
    image: those with the same positions, and the same tensors beside the pixels."""
    batches: list[list[int]] = []
    open_batches: dict[Any, list[int]] = {}
    for at, image in enumerate(images):
        key = (
            image.pixel_values.shape,
            None if image.positions is None else image.positions.ids.tobytes(),
            tuple((name, array.shape, array.tobytes()) for name, array in sorted(image.further.items())),
        )
        batch = open_batches.get(key)
        if batch is None or (len(batch) + 1) * image.pixel_values.size > most:
            batch = open_batches[key] = []
            batches.append(batch)
        batch.append(at)
    return batches


def _layers(model: Any, vision: Vision) -> list[Any]:
    """Those that transformers' users recompute: the outermost with a module that adapters train."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) and vision.trains(f"{path}.")
        if is_layer and not any(f"{path}.".startswith(f"{outer}.") for outer in found):
            found[path] = module
    return list(found.values())


def _width(linear: Any) -> int:
    return int(linear.in_features + linear.out_features)
