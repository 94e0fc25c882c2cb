"""Causal attention inside segments of one packed row, under a name that Hugging Face models can be loaded with.

A segment is one sequence's contiguous positions. The bounds travel as an explicit keyword argument from the caller of
the decoder to this function; nothing is inferred from position ids. No mask is ever built: transformers makes none for
an attention that has no mask function registered, and one that comes nevertheless is refused.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tinker_local.backend.training import compat_torch
from transformers import AttentionInterface

SEGMENT_ATTENTION = "tinker_local_segments"


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring segments of the same `length`, from position `start` on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Segments:
    """`lengths` of the segments that tile a row, in order, and the same on the device as attention kernels want it."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbours of equal length taken together, so that they make one batched call."""
        runs, start = [], 0
        for length, group in itertools.groupby(self.lengths):
            run = Run(start, len(list(group)), length)
            runs.append(run)
            start = run.stop
        return tuple(runs)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int32 [segments + 1]: where each begins, and the end."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature. `query` [1, heads, T, D]; `key`, `value` [1, kv heads, T, D], where heads is
    a multiple of kv heads; returns [1, T, heads, D]. T is the sum of the segments' lengths."""
    if attention_mask is not None or sliding_window is not None or dropout:
        raise NotImplementedError("segment attention is causal, without masks, windows or dropout")
    if compat_torch.varlen_attention_works(query):
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        output = compat_torch.varlen_attention(q, k, v, segments.bounds, segments.longest, scaling)
        return output.unsqueeze(0), None
    outputs = [_run_attention(query, key, value, run, scaling) for run in segments.runs]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _run_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: Run, scaling: float
) -> torch.Tensor:
    """Attention of one run's segments as a batch, [1, count * length, heads, D]."""
    batched = [
        tensor[0, :, run.start : run.stop].unflatten(1, (run.count, run.length)).transpose(0, 1)
        for tensor in (query, key, value)
    ]
    output = torch.nn.functional.scaled_dot_product_attention(
        *batched, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def register() -> None:
    """Make `attn_implementation=SEGMENT_ATTENTION` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)


def attention_implementations(config: Any) -> str | dict[str, str]:
    """The value of `attn_implementation` for a model of `config`: ours for text, torch's SDPA for a vision tower."""
    if getattr(config, "vision_config", None) is None:
        return SEGMENT_ATTENTION
    return {"": SEGMENT_ATTENTION, "text_config": SEGMENT_ATTENTION, "vision_config": "sdpa"}


def supported_layers(layer_types: Sequence[str]) -> bool:
    """Whether all layers attend to everything before them."""
    return all(layer_type == "full_attention" for layer_type in layer_types)
