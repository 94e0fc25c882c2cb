"""All layers, forward and backward, by hand. Legend: T tokens, H hidden size, V image positions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tinker_local.backend.training.attention import Segments
from tinker_local.backend.training.decoder.kernels import Kernels
from tinker_local.backend.training.decoder.layer import Layer, LayerActivations, RowContext
from tinker_local.backend.training.decoder.lora_batch import LoraBatch
from tinker_local.backend.training.decoder.recomputation import Keep, drop
from tinker_local.backend.training.decoder.weights import DecoderWeights

DECODER_GROUPS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInputs:
    """One packed row. `embeds` [T, H] (it becomes the first layer's input and is not changed), `position_ids` [1, T] or
    [3, 1, T] as the family's rotary module takes them, `segments` the data's lengths. `deepstack`: what is added to the
    hidden states at `image_rows` [V] behind the first layers, [V, H] each."""

    embeds: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    image_rows: torch.Tensor | None = None
    deepstack: Sequence[torch.Tensor] = ()


@dataclass(slots=True, eq=False)
class DecoderPass:
    """A forward and what its backward needs. `hidden` [T, H]: behind the last norm, `last` before it."""

    hidden: torch.Tensor
    last: torch.Tensor
    context: RowContext
    lora: LoraBatch
    kept: list[LayerActivations] = field(default_factory=list)


class Decoder:
    """Runs `weights` with `kernels`. Keeps nothing between calls."""

    def __init__(self, weights: DecoderWeights, kernels: Kernels) -> None:
        self.weights = weights
        self.kernels = kernels

    def forward(self, inputs: DecoderInputs, lora: LoraBatch, keeps: Sequence[Keep] | None) -> DecoderPass:
        """Hidden states; for a backward `keeps` says what each layer keeps (None: there will be none)."""
        weights = self.weights
        cos, sin = weights.rotary(inputs.embeds, inputs.position_ids)
        context = RowContext(weights, self.kernels, inputs.segments, cos.squeeze(0), sin.squeeze(0))
        x = inputs.embeds
        kept: list[LayerActivations] = []
        for index in range(len(weights.layers)):
            activations = LayerActivations(x)
            x = Layer(index, context, lora).forward(activations)
            if keeps is not None:
                kept.append(drop(activations, keeps[index]))
            if index < len(inputs.deepstack) and inputs.image_rows is not None:
                x.index_add_(0, inputs.image_rows, inputs.deepstack[index].to(x.dtype))
        return DecoderPass(self.kernels.rms_norm(x, weights.norm, weights.epsilon), x, context, lora, kept)

    def backward(self, done: DecoderPass, grad: torch.Tensor) -> None:
        """From the gradient by `done.hidden` to those of the adapters, in `done.lora`; uses up `done` and `grad`."""
        weights = self.weights
        grad = self.kernels.rms_norm_backward(
            grad, done.last, weights.norm, weights.epsilon, torch.zeros_like(done.last)
        )
        for index in reversed(range(len(weights.layers))):
            layer, kept = Layer(index, done.context, done.lora), done.kept.pop()
            layer.recompute(kept)
            grad = layer.backward(grad, kept)
