"""The oracle: transformers' own forward with autograd, with adapters as hooks on its modules, as PEFT computes them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from tinker_local.backend.families.family import Vision
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedInput
from tinker_local.backend.report.reference import arguments, hooked
from tinker_local.backend.training.lora.lora import Adapter
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainResult, TrainWork

from tests.float64 import InFloat64


def norms_in_float64(model: Any, within: str = "") -> None:
    """Make transformers compute RMS norms of float64 in float64."""

    def norm(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        (x,) = args
        gemma = "Gemma" in type(module).__name__
        epsilon = module.eps if gemma else module.variance_epsilon
        weight = getattr(module, "weight", 1)  # none in a norm of values
        return (1 + weight if gemma and not hasattr(module, "with_scale") else weight) * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        )

    for path, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and within in path:
            module.register_forward_hook(norm)


def attention_in_float64(model: Any) -> None:
    """Make a model of transformers attend by the formula, with soft caps, in the dtype of its activations:
    transformers' eager attention computes the softmax in float32, and its sdpa ignores soft caps."""

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, softcap: float | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = (scores + mask[..., : key.shape[2]]).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("by_the_formula", attend)
    transformers.AttentionMaskInterface.register("by_the_formula", transformers.masking_utils.eager_mask)
    model.config._attn_implementation = "by_the_formula"


class Hooked:
    """The adapters of `ours` as leaves, hooked into the modules of `theirs` one adapter at a time."""

    def __init__(self, ours: HFTrainer, theirs: Any) -> None:
        self._theirs = theirs
        self._vision = ours._loaded.family.vision
        self._split = ours._loaded.family.lora.split
        self.leaves: dict[str, dict[str, torch.Tensor]] = {}
        self._scale: dict[str, float] = {}
        for adapter_id, adapter in ours._adapters.items():
            self.leaves[adapter_id] = {s.name: s.view(adapter.weights).clone().requires_grad_() for s in adapter.specs}
            self._scale[adapter_id] = 32 / adapter.config.rank

    def on(self, adapter_id: str | None) -> AbstractContextManager[None]:
        if adapter_id is None:
            return nullcontext()
        return hooked(self._theirs, self.leaves[adapter_id], self._scale[adapter_id], self._split)

    def logprobs(self, adapter_id: str | None, input: RenderedInput) -> torch.Tensor:
        """log softmax of all logits, [N, vocabulary]."""
        with self.on(adapter_id):
            return self._theirs(**model_arguments(input, self._vision)).logits[0].log_softmax(-1)

    def gradients(self, adapter_id: str) -> dict[str, torch.Tensor]:
        return {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in self.leaves[adapter_id].items()}


def model_arguments(input: RenderedInput, vision: Vision | None) -> dict[str, Any]:
    """What transformers' models take."""
    found = arguments(input, vision)
    if input.images and vision is not None:
        placements = sorted(input.images, key=lambda placement: placement.offset)
        if any(first.offset + first.image.num_tokens == second.offset for first, second in pairwise(placements)):
            found["position_ids"] = positions(input, placements)  # transformers merges adjacent images
    return found


def positions(input: RenderedInput, placements: Sequence[ImagePlacement]) -> torch.Tensor:
    """Rotary positions for time, height and width, token by token, [3, 1, N]."""
    found: list[tuple[int, int, int]] = []
    images = {placement.offset: placement.image for placement in placements}
    following = 0
    while len(found) < input.length:
        if (image := images.get(len(found))) is None:
            found.append((following,) * 3)
            following += 1
        else:
            rows, columns = image.grid_thw[1] // 2, image.grid_thw[2] // 2
            found += [(following, following + row, following + c) for row in range(rows) for c in range(columns)]
            following += max(rows, columns)
    return torch.tensor(found).T[:, None]


def assert_computes_like(ours: HFTrainer, theirs: Any, works: Sequence[TrainWork]) -> None:
    """As `gradients_like`, and that the gradients are these."""
    for adapter, wanted in gradients_like(ours, theirs, works):
        for spec in adapter.specs:
            assert adapter.gradient is not None
            atol = 1e-9 * float(wanted[spec.name].abs().max())
            assert atol > 0, spec.name
            found = spec.view(adapter.gradient)
            torch.testing.assert_close(found, wanted[spec.name], rtol=0, atol=atol, msg=spec.name)


def gradients_like(
    ours: HFTrainer, theirs: Any, works: Sequence[TrainWork]
) -> Sequence[tuple[Adapter, Mapping[str, torch.Tensor]]]:
    """One forward and backward of `works`, one for each adapter, in float64: compares logprobs, which are reported in
    float32, with those of `theirs`, a model of transformers, and gives each adapter with the gradients that it should
    have. Both models are in float64."""
    hooked = Hooked(ours, theirs.eval().requires_grad_(False))
    with InFloat64():
        for work, result in zip(works, ours.forward_backward(works), strict=True):
            assert isinstance(result, TrainResult)
            for each, output in zip(work.data, result.outputs, strict=True):
                rows = hooked.logprobs(work.adapter_id, each.input)
                logprobs = rows.gather(1, torch.from_numpy(each.target_tokens)[:, None])[:, 0]
                np.testing.assert_allclose(output["logprobs"], logprobs.detach(), rtol=1e-7, atol=1e-7)
                (-(torch.from_numpy(each.loss_inputs["weights"]) * logprobs).sum()).backward()
    return [(ours._adapters[work.adapter_id], hooked.gradients(work.adapter_id)) for work in works]
