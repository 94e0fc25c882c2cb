"""Attention on packed rows, as a function that transformers' models look up by name.

transformers passes the settings of each layer: the scale of the scores, a sliding window, a soft cap, sinks. It builds
no mask for registered functions that it does not know, so nothing is padded; the function itself separates segments.
Legend: T tokens, H hidden size, N query heads, M key-value heads, D head size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.decoders.packed_delta_net import is_delta_net
from tinker_local.backend.training.model.decoders.packed_short_conv import is_short_conv
from tinker_local.backend.training.model.per_layer import per_layer_arguments
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.weights.large_weights import LargeWeights, entering
from tinker_local.types import UnsupportedError
from transformers import AttentionInterface

ATTENTION = "tinker_local_packed"
"""The function's name in transformers' registry. If it contained "flash", transformers would look for a package."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    """The argument `packed`, which a model passes on to attention. `rules`: how each attention module attended, by its
    `id`."""

    segments: Segments
    rules: dict[int, AttentionRule] = field(default_factory=dict)


_calls: dict[int, PackedCall] = {}
"""What runs, by the `id` of the model's config: the layers of some models pass no arguments on to attention. Not by
thread, since autograd runs backwards in its own."""


@contextmanager
def attending(modules: Any, implementation: str, packed: PackedCall | None = None) -> Iterator[None]:
    """Make transformers' decoder `modules` attend with `implementation`: `ATTENTION`, which gets `packed`, or
    "eager"."""
    AttentionInterface.register(ATTENTION, packed_attention)
    config = modules.config
    chosen, config._attn_implementation = config._attn_implementation, implementation
    if packed is not None:
        _calls[id(config)] = packed
    try:
        yield
    finally:
        config._attn_implementation = chosen
        _calls.pop(id(config), None)


def attends(layer: Any) -> bool:
    """Whether transformers' `layer` has softmax attention, and nothing in its place that is computed here."""
    return not any(is_delta_net(module) or is_short_conv(module) for module in layer.children())


@torch.no_grad()
def attention_rules(modules: Any, weights: LargeWeights) -> Mapping[int, AttentionRule]:
    """How each attention module of the decoder `modules` attends, by its `id`: the settings that it passes on. What
    stands in its place (`packed_delta_net.py`, `packed_short_conv.py`) has none. Walks through `weights`."""
    parameter = next(modules.parameters())
    embeds = torch.zeros(1, 1, modules.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
    packed = PackedCall(Segments((1,), parameter.device))
    with attending(modules, ATTENTION, packed), entering(modules.layers, weights):
        modules(inputs_embeds=embeds, use_cache=False, packed=packed, **per_layer_arguments(modules, 1))
    attending_layers = sum(attends(layer) for layer in modules.layers)
    if len(packed.rules) != attending_layers:
        raise UnsupportedError(
            f"{len(packed.rules)} of {attending_layers} layers attend through the function that is registered "
            "with transformers; in the others the sequences of a packed row would see each other"
        )
    return packed.rules


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed: PackedCall | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside the segments of the row; transformers' attention signature. `query` [1, N, T, D], `key`
    and `value` [1, M, T, D]; returns [1, T, N, D]. `s_aux` [N]: sinks. UnsupportedError if a model cannot be packed."""
    packed = packed or _calls.get(id(getattr(module, "config", None)))
    if packed is None:
        raise UnsupportedError("its layers do not pass keyword arguments on to attention")
    if attention_mask is not None:
        raise UnsupportedError("it makes its own attention mask")
    if dropout or not getattr(module, "is_causal", True):
        raise UnsupportedError("its attention is not causal, or has dropout")
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedError(f"its values have {value.shape[-1]} numbers per head, its queries {query.shape[-1]}")
    rule = AttentionRule(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        None if s_aux is None else s_aux.detach(),
        _sees_whole_images(module, sliding_window),
    )
    packed.rules[id(module)] = rule
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    return _Attention.apply(*rows, packed.segments, rule)[None], None


def _sees_whole_images(module: torch.nn.Module, window: int | None) -> bool:
    """See `AttentionRule`. transformers' class says so by the masks that it makes, where images are given to it."""
    in_windows_alone = getattr(getattr(module, "config", None), "use_bidirectional_attention", None) == "vision"
    return window is not None or not in_windows_alone


class _Attention(torch.autograd.Function):
    """Connects `attend` and `attend_backward` to autograd."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, rule: AttentionRule
    ) -> torch.Tensor:
        query, key, value = query.detach(), key.detach(), value.detach()
        output, logsumexp = attend(query, key, value, segments, rule)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.segments, ctx.rule = segments, rule
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        return *attend_backward(grad, query, key, value, output, logsumexp, ctx.segments, ctx.rule), None, None
