"""One micro-batch on the model: forward, losses, backward. Changes neither adapters nor gradients, so it may fail.

Legend: T positions, H hidden size, M targets (positions times candidates); arrays [M] are on the host.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tinker_local.backend.rendering.interface import RenderedImage
from tinker_local.backend.training import lora
from tinker_local.backend.training.attention import Segments
from tinker_local.backend.training.embedding import decoder_inputs
from tinker_local.backend.training.families.interface import ImageFeatures
from tinker_local.backend.training.image_features import ImageFeatureCache
from tinker_local.backend.training.interface import TrainWork
from tinker_local.backend.training.lm_head import LmHead
from tinker_local.backend.training.loading import LoadedModel
from tinker_local.backend.training.lora import Adapter, AdapterSlice, AdapterSlices, LoraLayers, TensorSpec
from tinker_local.backend.training.losses import loss_and_derivative
from tinker_local.backend.training.packing import Packed
from tinker_local.types import ApiError, InvalidRequestError

Gradient = tuple[Adapter, TensorSpec, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """`logprobs`, `losses` and `derivative` (of the loss by the logprobs) of each target, [M]. `errors` by work; the
    derivative of a work that failed is 0. `gradients`: each matrix that plays a part, once."""

    logprobs: torch.Tensor
    losses: torch.Tensor
    derivative: torch.Tensor
    errors: Mapping[int, ApiError]
    gradients: Sequence[Gradient]


class MicroBatchRunner:
    """Runs micro-batches on `loaded`. `float_dtype`: of logprobs, losses and adapters."""

    def __init__(
        self, loaded: LoadedModel, logit_chunk_elements: int, image_cache_bytes: int, float_dtype: torch.dtype
    ) -> None:
        self.targets = lora.find_targets(loaded.model, loaded.family.decoder_path)
        self._loaded = loaded
        self._float = float_dtype
        self._lora = LoraLayers(self.targets)
        self._images = ImageFeatureCache(partial(_encode_images, loaded), image_cache_bytes)
        self._head = LmHead(loaded.model.lm_head, self._lora, loaded.vocab_size, logit_chunk_elements, float_dtype)

    @property
    def images_encoded(self) -> int:
        """How many images went through the vision tower so far."""
        return self._images.images_encoded

    def run(
        self, packed: Packed, adapters: Mapping[str, Adapter], works: Mapping[int, TrainWork], *, gradient: bool
    ) -> Computed:
        """Losses of the `works` in `packed`, and with `gradient` those of all adapters in it."""
        slices = _slices(packed, adapters)

        # 1. Tokens and images to hidden states [T, H], with a graph back to the adapters in the decoder.
        with torch.set_grad_enabled(gradient):
            hidden = self._decode(packed, slices)

        # 2. Logprobs of the targets, without a graph.
        logprobs = self._head.logprobs(hidden.detach(), packed.target_rows, packed.target_ids, slices)

        # 3. Losses of each work, and their derivative by the logprobs; a work that is not finite drops out.
        losses, derivative, errors = self._losses(packed, works, logprobs)

        # 4. Back through the LM head, then through the decoder.
        gradients: list[Gradient] = []
        if gradient and derivative.any():
            gradients = self._backward(hidden, packed, derivative, slices)
        return Computed(logprobs, losses, derivative, errors, gradients)

    def logprobs(self, packed: Packed, adapters: Mapping[str, Adapter]) -> torch.Tensor:
        """Logprobs of the targets [M] alone."""
        slices = _slices(packed, adapters)
        with torch.no_grad():
            hidden = self._decode(packed, slices)
        return self._head.logprobs(hidden, packed.target_rows, packed.target_ids, slices)

    def close(self) -> None:
        """Take the adapters' hooks off the model."""
        self._lora.remove()

    def _decode(self, packed: Packed, slices: AdapterSlices) -> torch.Tensor:
        """Hidden states behind the last norm, [T, H]."""
        arguments = decoder_inputs(self._loaded, self._images, packed)
        segments = Segments(packed.lengths, self._loaded.device)
        with self._lora.assigned(slices):
            output = self._loaded.decoder(**arguments, segments=segments, use_cache=False)
        return output.last_hidden_state[0]

    def _losses(
        self, packed: Packed, works: Mapping[int, TrainWork], logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, ApiError]]:
        losses, derivative = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        errors: dict[int, ApiError] = {}
        for at, span in spans(packed):
            work = works[at]
            inputs = self._loss_inputs(packed, at)
            losses[span], by_logprob = loss_and_derivative(work.loss_fn, logprobs[span], inputs, work.loss_config)
            finite = torch.isfinite(logprobs[span]) & torch.isfinite(losses[span]) & torch.isfinite(by_logprob)
            if finite.all():
                derivative[span] = by_logprob
            else:
                errors[at] = _not_finite(packed, span.start + int((~finite).nonzero()[0]), logprobs, losses)
        return losses, derivative, errors

    def _loss_inputs(self, packed: Packed, work: int) -> dict[str, torch.Tensor]:
        """The loss inputs of one work's data, flat, one behind the other."""
        data = [item.datum for item in packed.items if item.work == work]
        return {
            name: torch.from_numpy(np.concatenate([datum.loss_inputs[name].reshape(-1) for datum in data])).to(
                self._float
            )
            for name in data[0].loss_inputs
        }

    def _backward(
        self, hidden: torch.Tensor, packed: Packed, derivative: torch.Tensor, slices: AdapterSlices
    ) -> list[Gradient]:
        in_head, in_decoder = slices.parameters(lm_head=True), slices.parameters(lm_head=False)
        by_hidden, found = self._head.backward(
            hidden.detach(), packed.target_rows, packed.target_ids, derivative, slices, _leaves(in_head)
        )
        if in_decoder:
            with self._lora.assigned(slices):  # layers may be computed again
                found += torch.autograd.grad(hidden, _leaves(in_decoder), by_hidden, allow_unused=True)
        return [
            (adapter, spec, gradient)
            for (adapter, spec), gradient in zip([*in_head, *in_decoder], found, strict=True)
            if gradient is not None
        ]


def _encode_images(loaded: LoadedModel, images: Sequence[RenderedImage]) -> ImageFeatures:
    assert loaded.family.encode_images is not None, "images for a text model are refused before they are packed"
    return loaded.family.encode_images(loaded.model, images)


def spans(packed: Packed) -> list[tuple[int, slice]]:
    """The works of a micro-batch, each with where its targets are (its items are neighbours)."""
    found = []
    for at, group in itertools.groupby(range(len(packed.items)), key=lambda place: packed.items[place].work):
        places = list(group)
        found.append((at, slice(packed.targets_of(places[0]).start, packed.targets_of(places[-1]).stop)))
    return found


def _slices(packed: Packed, adapters: Mapping[str, Adapter]) -> AdapterSlices:
    """Rows by adapter (an adapter's items are neighbours)."""
    slices: list[AdapterSlice] = []
    for adapter_id, group in itertools.groupby(packed.items, key=lambda item: item.adapter_id):
        start = slices[-1].stop if slices else 0
        stop = start + sum(item.length for item in group)
        slices.append(AdapterSlice(None if adapter_id is None else adapters[adapter_id], start, stop))
    return AdapterSlices(tuple(slices))


def _leaves(parameters: Sequence[tuple[Adapter, TensorSpec]]) -> list[torch.Tensor]:
    return [adapter.parameters[spec.path, spec.factor] for adapter, spec in parameters]


def _not_finite(packed: Packed, target: int, logprobs: torch.Tensor, losses: torch.Tensor) -> InvalidRequestError:
    """The error for the first target that is not finite."""
    place = int(np.searchsorted(packed.target_starts, target, side="right")) - 1
    position = int(packed.target_rows[target]) - packed.starts[place]
    return InvalidRequestError(
        f"data[{packed.items[place].index}]: the loss is not finite at position {position}: "
        f"logprob {float(logprobs[target])}, loss {float(losses[target])}"
    )
