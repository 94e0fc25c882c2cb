"""Works around three faults of LoRA in vLLM; each has a test that fails without it.

1. CPU, vLLM < 0.33: requests of the base model that share a step with an adapter get the adapter of the last slot,
   because "no adapter" is the index -1 into the stacked weights (vllm-project/vllm#48421, #49656). The weights are
   also copied once per token, which makes a prefill ten times slower.
2. CPU and CUDA, at least to 0.33: prompt logprobs are computed from the prompt's rows while the LM head's LoRA still
   has the mapping of the rows that were sampled (vllm-project/vllm#51594). On CPU that raises as soon as two requests
   share a step, on CUDA the LM head's share is missing. Written for the V1 model runner.
3. All, at least 0.26 to 0.32: Qwen2's class (the language model of Qwen2.5-VL too) does not say that its LM head can
   take an adapter, as Qwen3's does, so adapters with one are refused.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


def _version() -> tuple[int, int]:
    import vllm

    major, minor = vllm.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def fix_before_engine() -> None:
    """Fixes 1 and 3, for engines that are built from now on."""
    _replace_cpu_operators()
    _declare_lm_head_of_qwen2()


def _declare_lm_head_of_qwen2() -> None:
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    if not Qwen2ForCausalLM.embedding_modules:
        Qwen2ForCausalLM.embedding_modules = dict(Qwen3ForCausalLM.embedding_modules)


def _replace_cpu_operators() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or _version() >= (0, 33):
        return
    module = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
    if not hasattr(module.PunicaWrapperCPU, "fixes_base_rows"):
        module.PunicaWrapperCPU = _by_segments(module.PunicaWrapperCPU)  # type: ignore[attr-defined]


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


def _by_segments(wrapper: Any) -> Any:
    """A subclass of vLLM's PunicaWrapperCPU that multiplies once per adapter and leaves the base's rows alone."""

    class PunicaWrapperBySegments(wrapper):
        fixes_base_rows = True

        def update_metadata(
            self, mapping: Any, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any
        ) -> None:
            super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
            self._token_segments = segments(mapping.index_mapping, lora_index_to_id)
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
            add_lora(y, x, lora_a_stacked, lora_b_stacked, output_slices, self._token_segments, scale)

        def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, **_: Any) -> None:
            for slot, start, stop in self._token_segments:
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
    """Stands for the LM head's LoRA operators while all rows belong to one request: slot None is the base model."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float, **_: Any
    ) -> None:
        if self._slot is not None:
            add_lora(y, x, [lora_a], [lora_b], [y.shape[-1]], [(self._slot, 0, len(x))], scale)


class LMHeads:
    """Fix 2: a model's LM heads, the LoRA of which can be set to one request's adapter for all rows."""

    def __init__(self, runner: Any) -> None:
        from vllm.lora.layers import LogitsProcessorWithLoRA

        self._runner = runner
        self._heads = [module for module in runner.model.modules() if isinstance(module, LogitsProcessorWithLoRA)]

    @contextlib.contextmanager
    def of(self, adapter_id: int) -> Iterator[None]:
        """All rows belong to the adapter `adapter_id` (0: the base model) meanwhile."""
        if not self._heads:
            yield
            return
        slots = self._runner.lora_manager._adapter_manager.lora_index_to_id
        one = _OneAdapterHead(slots.index(adapter_id) if adapter_id else None)
        wrappers = [head.punica_wrapper for head in self._heads]
        try:
            for head in self._heads:
                head.punica_wrapper = one
            yield
        finally:
            for head, wrapper in zip(self._heads, wrappers, strict=True):
                head.punica_wrapper = wrapper
