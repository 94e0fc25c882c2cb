"""LoRA for vLLM's CPU build and for scoring prompts; `patches.py` says why vLLM's own operators do not do."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tinker_local.backend.vllm_engine.compat_vllm import lora_slots

Segment = tuple[int, int, int]
"""(slot, start, stop): rows [start, stop) belong to the adapter in that slot."""


def segments(adapter_ids: Sequence[int], slots: Sequence[int | None]) -> list[Segment]:
    """Runs of equal ids > 0 in `adapter_ids` (one id per row, 0 = base model), with the slot of each id."""
    ids = np.asarray(adapter_ids, np.int64)
    if not ids.any():
        return []
    edges = np.flatnonzero(np.diff(ids)) + 1
    starts, stops = [0, *edges.tolist()], [*edges.tolist(), len(ids)]
    return [(slots.index(int(ids[a])), a, b) for a, b in zip(starts, stops, strict=True) if ids[a] > 0]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    widths: Sequence[int],
    rows: Sequence[Segment],
    scale: float,
) -> None:
    """y[rows, slice] += scale · (x @ Aᵀ) @ Bᵀ for each segment and each slice of the outputs.

    y [N, sum of widths or more], x [N, in]; A [slots, 1, rank, in] and B [slots, 1, width, rank] per slice.
    """
    for slot, start, stop in rows:
        offset = 0
        for a, b, width in zip(lora_a, lora_b, widths, strict=True):
            delta = (x[start:stop].to(y.dtype) @ a[slot, 0].to(y.dtype).T) @ b[slot, 0].to(y.dtype).T
            # The adapter and the model may pad a vocabulary differently.
            used = min(delta.shape[1], width)
            y[start:stop, offset : offset + used] += scale * delta[:, :used]
            offset += width


class _Small(int):
    """An int that is never greater than another number."""

    def __gt__(self, other: object) -> bool:
        return False


def allow_large_vocabularies() -> None:
    """Have an LM head of any size take adapters."""
    from vllm.lora.layers import LogitsProcessorWithLoRA

    original: Any = LogitsProcessorWithLoRA.create_lora_weights

    @functools.wraps(original)
    def create_lora_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        size = self.base_layer.vocab_size
        self.base_layer.vocab_size = _Small(size)
        try:
            original(self, *args, **kwargs)
        finally:
            self.base_layer.vocab_size = size

    if not hasattr(original, "__wrapped__"):
        LogitsProcessorWithLoRA.create_lora_weights = create_lora_weights


def by_segments(wrapper: Any) -> Any:
    """A subclass of vLLM's `PunicaWrapperCPU` that multiplies once per adapter and skips rows of the base model."""

    class PunicaWrapperBySegments(wrapper):
        fixes_base_rows = True

        def update_metadata(
            self, mapping: Any, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any
        ) -> None:
            super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
            self.token_segments = segments(mapping.index_mapping, lora_index_to_id)
            self._sampled_segments = segments(mapping.prompt_mapping, lora_index_to_id)

        def add_lora_linear(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a_stacked: Sequence[torch.Tensor],
            lora_b_stacked: Sequence[torch.Tensor],
            scale: float,
            output_slices: Sequence[int],
            **_: Any,
        ) -> None:
            y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
            add_lora(y, x, lora_a_stacked, lora_b_stacked, output_slices, self.token_segments, scale)

        def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, **_: Any) -> None:
            for slot, start, stop in self.token_segments:
                y[start:stop] += x[start:stop].to(y.dtype) @ lora_b_stacked[slot, 0].to(y.dtype).T

        def add_lora_logits(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a_stacked: torch.Tensor,
            lora_b_stacked: torch.Tensor,
            scale: float,
            **_: Any,
        ) -> None:
            add_lora(y, x, [lora_a_stacked], [lora_b_stacked], [y.shape[-1]], self._sampled_segments, scale)

    return PunicaWrapperBySegments


class _OneAdapterHead:
    """The LM head's LoRA operators while all rows belong to one request. Slot None is the base model."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float, **_: Any
    ) -> None:
        if self._slot is not None:
            add_lora(y, x, [lora_a], [lora_b], [y.shape[-1]], [(self._slot, 0, len(x))], scale)


class LMHeads:
    """A model's LM heads, whose LoRA can be set to one request's adapter for all rows."""

    def __init__(self, runner: Any) -> None:
        from vllm.lora.layers import LogitsProcessorWithLoRA

        self._runner = runner
        self._heads = [module for module in runner.model.modules() if isinstance(module, LogitsProcessorWithLoRA)]

    @contextlib.contextmanager
    def of(self, adapter_id: int) -> Iterator[None]:
        """Within it, all rows belong to the adapter `adapter_id` (0: the base model)."""
        if not self._heads:
            yield
            return
        slots = lora_slots(self._runner.lora_manager)
        one = _OneAdapterHead(slots.index(adapter_id) if adapter_id else None)
        wrappers = [head.punica_wrapper for head in self._heads]
        try:
            for head in self._heads:
                head.punica_wrapper = one
            yield
        finally:
            for head, wrapper in zip(self._heads, wrappers, strict=True):
                head.punica_wrapper = wrapper
