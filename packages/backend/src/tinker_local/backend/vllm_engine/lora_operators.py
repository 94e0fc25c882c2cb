"""LoRA for vLLM's CPU build, for CUDA and for scoring prompts; `patches.py` says why vLLM's own operators do not do."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker_local.backend.vllm_engine.compat_vllm import lora_slots
from tinker_local.types import InternalError

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


_FEW_ROWS, _MOST_OF_B = 32, 2**18
"""Up to so many rows of 16 bits, and numbers of B, are multiplied in float32 on a CPU. There a small product of 16 bits
takes 20 µs to begin, and one of float32 takes 3; with 64 rows, or an LM head, it no longer matters."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One adapter of a module with several outputs beside each other (slices).

    `a` [ranks of all slices, in]. `parts`, one per slice: its ranks (first, last) in `a`, B transposed [rank, width] or
    [rank, less than width], and where its outputs begin. `wide`: the same in float32, for few rows of 16 bits.
    """

    a: torch.Tensor
    parts: Sequence[tuple[int, int, torch.Tensor, int]]
    wide: "Factors | None" = None

    @classmethod
    def of(
        cls, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], widths: Sequence[int], *, trim: bool = False
    ) -> "Factors":
        """From A [rank, in] and B [width, rank] per slice. `trim`: copy them without the ranks at the end that are zero
        in A, which is how vLLM fills a slot that has room for more; reads A, so not for tensors of a GPU."""
        parts, kept, first, offset = [], [], 0, 0
        for a_ri, b_or, width in zip(a, b, widths, strict=True):
            rank = _rank_of(a_ri) if trim else len(a_ri)
            # The adapter and the model may pad a vocabulary differently.
            b_ro = b_or[:width, :rank].T
            if rank:
                kept.append(a_ri[:rank])
                parts.append((first, first + rank, b_ro.contiguous() if trim else b_ro, offset))
            first, offset = first + rank, offset + width
        if len(kept) == 1 and not trim:
            return cls(kept[0], parts)
        joined = torch.cat(kept) if kept else a[0][:0]
        if not trim or joined.itemsize > 2 or sum(b_ro.numel() for _, _, b_ro, _ in parts) > _MOST_OF_B:
            return cls(joined, parts)
        return cls(joined, parts, cls(joined.float(), [(*ranks, b_ro.float(), begin) for *ranks, b_ro, begin in parts]))

    def add(self, y: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
        """y [N, all widths or more] += scale · (x [N, in] @ Aᵀ) @ Bᵀ."""
        if not self.parts:
            return
        if self.wide is not None and len(x) <= _FEW_ROWS and y.itemsize == 2:
            rows = y.float()
            self.wide.add(rows, x.float(), scale)
            y.copy_(rows)
            return
        h = torch.mm(x.to(y.dtype), self.a.to(y.dtype).T)
        for first, last, b_ro, offset in self.parts:
            of_slice = y[:, offset : offset + b_ro.shape[1]]
            of_slice.addmm_(h[:, first:last], b_ro.to(y.dtype), alpha=scale)


def _rank_of(a_ri: torch.Tensor) -> int:
    used = a_ri.any(dim=1).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


class TrimmedSlots:
    """vLLM's slots without their padding, which by default is of rank 128. Each is copied when it is first used after a
    change of any slot of its module."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[int, Factors]] = {}

    def of(
        self, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor], widths: Sequence[int], slot: int
    ) -> Factors:
        """A [slots, 1, rank, in] and B [slots, 1, width, rank] per slice, which live as long as the model."""
        key = lora_a[0].data_ptr(), slot
        changes = sum(tensor._version for tensor in (*lora_a, *lora_b))
        found = self._found.get(key)
        if found is None or found[0] != changes:
            found = changes, Factors.of([a[slot, 0] for a in lora_a], [b[slot, 0] for b in lora_b], widths, trim=True)
            self._found[key] = found
        return found[1]


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
    """A subclass of vLLM's `PunicaWrapperCPU` that multiplies once per adapter and by no more than its rank, and skips
    rows of the base model."""

    class PunicaWrapperBySegments(wrapper):
        fixes_base_rows = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._trimmed = TrimmedSlots()

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
            if not self.token_segments:
                return
            y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
            self._add(y, x, lora_a_stacked, lora_b_stacked, output_slices, self.token_segments, scale)

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
            self._add(y, x, [lora_a_stacked], [lora_b_stacked], [y.shape[-1]], self._sampled_segments, scale)

        def _add(
            self,
            y: torch.Tensor,
            x: torch.Tensor,
            lora_a: Sequence[torch.Tensor],
            lora_b: Sequence[torch.Tensor],
            widths: Sequence[int],
            rows: Sequence[Segment],
            scale: float,
        ) -> None:
            for slot, start, stop in rows:
                self._trimmed.of(lora_a, lora_b, widths, slot).add(y[start:stop], x[start:stop], scale)

    return PunicaWrapperBySegments


def by_rows(wrapper: Any) -> Any:
    """A subclass of vLLM's `PunicaWrapperGPU` that multiplies linear layers with `lora_kernels`."""
    from tinker_local.backend.vllm_engine import lora_kernels

    class PunicaWrapperByRows(wrapper):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._tables = lora_kernels.Tables()
            self._side: Any = None
            device = self.token_mapping_meta.token_lora_mapping.device
            # Until an adapter is in a slot, all that there is room for counts.
            self._rank_l = torch.full((self.max_loras,), lora_kernels.RANKS_AT_ONCE, dtype=torch.int32, device=device)

        def holds(self, slot: int, rank: int) -> None:
            """A slot has an adapter of this rank from now on."""
            self._rank_l[slot] = rank

        def multiplies(self, x: torch.Tensor, layer: Any) -> bool:
            """Whether the kernels take a layer's input [N, in] and its factors, after what they need has been copied to
            the device: before a CUDA graph is captured, in which nothing can be."""
            a, b = layer.lora_a_stacked, layer.lora_b_stacked
            if x.ndim != 2 or x.stride(-1) != 1 or {x.itemsize, b[0].itemsize} != {2}:
                return False
            if b[0].shape[-1] > lora_kernels.RANKS_AT_ONCE:
                return False
            self._tables.fill(a, b, layer.output_slices)
            return len(x) > 0

        def add_beside(self, x: torch.Tensor, layer: Any, base: Callable[[], torch.Tensor]) -> torch.Tensor:
            """`base()` [N, out] with LoRA of the input `x` [N, in]. Few rows are multiplied by A beside it, on another
            stream."""
            meta = self.token_mapping_meta
            if meta.no_lora_flag_cpu.item():
                return base()
            rows = lora_kernels.Rows(
                meta.token_lora_mapping,
                meta.token_indices_sorted_by_lora_ids,
                meta.num_tokens_per_lora,
                meta.lora_token_start_loc,
                meta.active_lora_ids,
                self._rank_l,
            )
            if len(x) <= lora_kernels.ROWS_BESIDE and x.is_cuda:
                if self._side is None:
                    self._side = torch.cuda.Stream()
                main = torch.cuda.current_stream()
                self._side.wait_stream(main)
                with torch.cuda.stream(self._side):
                    h = lora_kernels.shrink(x, layer.lora_a_stacked, rows, self._tables)
                y = base()
                main.wait_stream(self._side)
            else:
                y = base()
                h = lora_kernels.shrink(x, layer.lora_a_stacked, rows, self._tables)
            if y.dtype != x.dtype or y.stride(-1) != 1:
                what = f"{y.dtype} with strides {y.stride()} from {x.dtype}"
                raise InternalError(f"a linear layer gave {what}, which no LoRA kernel takes")
            lora_kernels.expand(y, h, layer.lora_b_stacked, layer.output_slices, rows, self._tables)
            return y

    return PunicaWrapperByRows


def multiply_by_rows() -> None:
    """Have linear layers with LoRA on CUDA multiply with `lora_kernels`, in engines that are built from now on."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.punica_wrapper import punica_gpu

    original: Any = BaseLinearLayerWithLoRA._apply_sync
    if hasattr(original, "__wrapped__"):
        return
    by_vllm = punica_gpu.PunicaWrapperGPU
    punica_gpu.PunicaWrapperGPU = by_rows(by_vllm)

    @functools.wraps(original)
    def apply_sync(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        wrapper = self.punica_wrapper
        if not hasattr(wrapper, "add_beside") or not wrapper.multiplies(x, self):
            return original(self, x, bias)
        return wrapper.add_beside(x, self, lambda: self._get_quant_method().apply(self.base_layer, x, bias))

    BaseLinearLayerWithLoRA._apply_sync = apply_sync
    _tell_ranks()


def _tell_ranks() -> None:
    """Have vLLM's manager of adapters tell the kernels the rank of each that it puts into a slot. By default slots have
    room for rank 128, of which an adapter of rank 32 leaves three quarters zero."""
    from vllm.lora.model_manager import LoRAModelManager

    original: Any = LoRAModelManager.activate_adapter

    @functools.wraps(original)
    def activate_adapter(self: Any, lora_id: int) -> bool:
        activated: bool = original(self, lora_id)
        if activated:
            of_modules = [each.lora_a for each in self._registered_adapters[lora_id].loras.values()]
            parts = [part for each in of_modules for part in (each if isinstance(each, list) else [each])]
            rank = max((part.shape[0] for part in parts if part is not None), default=0)
            for wrapper in self.punica_wrapper_mapping.values():
                wrapper.holds(self.lora_index_to_id.index(lora_id), rank)
        return activated

    LoRAModelManager.activate_adapter = activate_adapter


class _OneAdapterHead:
    """The LM head's LoRA operators while all rows belong to one request. Slot None is the base model."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float, **_: Any
    ) -> None:
        if self._slot is not None:
            Factors.of([lora_a[self._slot, 0]], [lora_b[self._slot, 0]], [y.shape[-1]]).add(y, x, scale)


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
