"""The attention of packed rows as a function that the models of transformers look up by name.

transformers hands it what a layer knows: the scale of the scores, a sliding window, a soft cap, sinks. It makes no mask
for an attention that it does not know, so nothing is padded and no segment sees another. Legend: T tokens, H hidden
size, N query heads, M key-value heads, D head size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tinker_local.backend.training.attention import AttentionRule, Segments, attend, attend_backward
from tinker_local.types import UnsupportedError
from transformers import AttentionInterface

ATTENTION = "tinker_local_packed"
"""The name of the function in transformers' registry. (With "flash" in it, transformers would look for a package.)"""


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    """What a model is called with as `packed`, and passes on to attention. `rules`: how each module attended, by its
    `id`."""

    segments: Segments
    rules: dict[int, AttentionRule] = field(default_factory=dict)


@contextmanager
def attending(modules: Any, implementation: str) -> Iterator[None]:
    """Inside, the decoder `modules` of transformers attends with `implementation`: `ATTENTION`, or "eager"."""
    AttentionInterface.register(ATTENTION, packed_attention)
    config = modules.config
    chosen, config._attn_implementation = config._attn_implementation, implementation
    try:
        yield
    finally:
        config._attn_implementation = chosen


@torch.no_grad()
def attention_rules(modules: Any) -> Mapping[int, AttentionRule]:
    """How each attention module of the decoder `modules` attends, by its `id`: what it hands to the function."""
    parameter = next(modules.parameters())
    embeds = torch.zeros(1, 1, modules.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
    packed = PackedCall(Segments((1,), parameter.device))
    with attending(modules, ATTENTION):
        modules(inputs_embeds=embeds, use_cache=False, packed=packed)
    if len(packed.rules) != len(modules.layers):
        raise UnsupportedError(
            f"{len(packed.rules)} of {len(modules.layers)} layers attend through the function that is registered with "
            "transformers; the others would see their neighbours in a packed row"
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
    """transformers' attention signature, causal inside the segments of the row. `query` [1, N, T, D], `key` and `value`
    [1, M, T, D]; returns [1, T, N, D]. `s_aux` [N]: sinks. UnsupportedError says why a model cannot be packed."""
    if packed is None:
        raise UnsupportedError("its layers do not pass keyword arguments on to attention")
    if attention_mask is not None:
        raise UnsupportedError("it makes an attention mask of its own")
    if dropout or not getattr(module, "is_causal", True):
        raise UnsupportedError("its attention is not causal, or has dropout")
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedError(f"its values have {value.shape[-1]} numbers per head, its queries {query.shape[-1]}")
    rule = AttentionRule(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        None if s_aux is None else s_aux.detach(),
    )
    packed.rules[id(module)] = rule
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    return _Attention.apply(*rows, packed.segments, rule)[None], None


class _Attention(torch.autograd.Function):
    """`attend` and its backward."""

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
