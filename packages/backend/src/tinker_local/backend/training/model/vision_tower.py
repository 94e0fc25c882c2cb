"""The vision tower with adapters on its projections: features of images, and gradients back to the adapters.

transformers' own modules and autograd compute it. Each block keeps only its input and computes the rest again in the
backward. Legend: P patches of all images, V image positions (merged patches), H hidden size of the decoder.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.families.family import ImageFeatures, Vision
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, Target, groups_of
from tinker_local.backend.training.lora.lora_batch import LoraBatch, whole
from tinker_local.backend.training.model.decoders.autograd import AdaptedLinear
from tinker_local.backend.training.run.block_memory import TowerSizes
from tinker_local.backend.weights.dense import dense
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The adapters of one pass, also needed by its backward; `patches`: P."""

    lora: LoraBatch
    patches: int


class VisionTower:
    """The tower that `vision` describes, of transformers' `model`. `images_encoded`: how many it has encoded."""

    def __init__(self, model: Any, vision: Vision) -> None:
        self._model, self._vision = model, vision
        self._tower = tower = model.get_submodule(vision.tower)
        self._by_module = {} if vision.frozen else tower_targets(tower, vision.tower)
        self._matrices = {linear: dense([linear]) for linear in self._by_module}
        self.targets = list(self._by_module.values())
        self._groups = groups_of(self.targets)
        self._run: _Run | None = None
        self.images_encoded = 0
        for module in tower.modules():
            if isinstance(module, torch.nn.Conv3d):
                assert (module.stride, module.padding, module.groups) == (module.kernel_size, (0, 0, 0), 1)
                module.forward = functools.partial(_whole_patches, module)
        for linear in self._by_module:
            linear.forward = functools.partial(self._linear, linear, linear.forward)
        for block in () if vision.frozen else tower.blocks:
            block.forward = functools.partial(self._block, block.forward)

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
    ) -> "TowerPass":
        """Features of images in order, each with its adapter; those of an adapter are adjacent. `dtype`, `grad_dtype`:
        of the adapters' matrices and of their gradients."""
        slices: list[AdapterSlice] = []
        for adapter, image in images:
            start = slices[-1].stop if slices else 0
            stop = start + len(image.pixel_values)
            if slices and slices[-1].adapter is adapter:
                start = slices.pop().start
            slices.append(AdapterSlice(adapter, start, stop))
        lora = LoraBatch(self._groups, slices, dtype, grad_dtype, gradient=gradient)
        run = _Run(lora, slices[-1].stop)
        with self._running(run), torch.set_grad_enabled(gradient):
            features = self._features([image for _, image in images])
        return TowerPass(functools.partial(self._running, run), lora, features)

    def sizes(self, itemsize: int) -> TowerSizes:
        """For the plan of a GPU's memory, with activations of `itemsize` bytes. A block's backward has about what
        autograd keeps of it, among that rotated queries and keys in float32, and its gradients."""
        blocks, merged = self._tower.blocks, self._tower.config.spatial_merge_size**2
        linear = [module for module in blocks[0].mlp.modules() if isinstance(module, torch.nn.Linear)]
        hidden, wide = linear[0].in_features, linear[0].out_features  # fields of configs have several names
        widths = sum(target.inputs + target.outputs for target in self.targets)
        backward = merged * (16 * hidden + 4 * wide) * itemsize
        return TowerSizes(widths, merged * len(blocks) * hidden * itemsize, backward)

    def _features(self, images: Sequence[RenderedImage]) -> ImageFeatures:
        self.images_encoded += len(images)
        return self._vision.encode_images(self._model, images)

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        assert self._run is None, "one pass at a time"
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _linear(self, linear: Any, original: Callable[..., Any], x: torch.Tensor) -> Any:
        run, target = self._run, self._by_module[linear]
        low_rank = None if run is None else run.lora.group(target.group, target.index)
        if run is None or low_rank is None:
            return original(x)
        patches = run.patches // len(x)  # a merger has one row for several patches
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # autograd skips what has no input to differentiate by
        return AdaptedLinear.apply(
            x, self._matrices[linear], linear.bias, low_rank.rows(slice(None, None, patches)), whole
        )

    def _block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._run is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@dataclass(slots=True, eq=False)
class TowerPass:
    """A forward pass. `running`: what computes it again runs in. `lora`: the adapters, with their gradients after
    `backward`. `features`: with the graph of autograd, if a gradient is to follow."""

    running: Callable[[], AbstractContextManager[None]]
    lora: LoraBatch
    features: ImageFeatures

    def backward(self, gradients: ImageFeatures) -> None:
        """Write the adapters' gradients to `lora` from those of `features`. Consumes this pass."""
        features = self.features
        del self.features
        with self.running():
            torch.autograd.backward([features.embeds, *features.deepstack], [gradients.embeds, *gradients.deepstack])


def _whole_patches(convolution: torch.nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """`convolution` of `patches` of the size of its kernel, as one matrix product.

    As a convolution, 1,024 patches in bfloat16 take 8 s on an H200 where torch has no cuDNN, and 0.2 ms as a product.
    On a CPU a product takes a third of the time.
    """
    product = torch.nn.functional.linear(patches.flatten(1), convolution.weight.flatten(1), convolution.bias)
    return product[:, :, None, None, None]


def tower_targets(tower: Any, path: str) -> dict[Any, Target]:
    """The targets of the Linear modules of `tower`, at `path` of the model, in its order. Modules of the same name and
    shape in all blocks form one group."""
    found: dict[Any, Target] = {}
    counts: dict[str, int] = {}
    for name, module in tower.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        suffix = name.split(".", 2)[-1] if name.startswith("blocks.") else name
        group = f"{path} {suffix} {module.out_features}x{module.in_features}"
        index = counts[group] = counts.get(group, -1) + 1
        found[module] = Target.of(f"{path}.{name}", group, index, module, "vision")
    return found
