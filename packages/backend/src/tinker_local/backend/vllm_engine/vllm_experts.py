"""Adapters of routed experts in vLLM: in the hosted layout, and computed on CPU, which vLLM has no operators for."""

import functools
import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from tinker_local.backend.families import family_of
from tinker_local.backend.vllm_engine.lora_operators import Segment, add_lora


def share_factors(config: Any, _: int) -> None:
    """Have an engine of a model with experts, of vLLM's `config`, take adapters in which experts share factors."""
    if family_of(config.model_config.hf_config.model_type, config.model_config.model).lora.experts is not None:
        config.lora_config.enable_moe_shared_loras = True


def take_adapters_on_cpu() -> None:
    """Have vLLM compute experts that take adapters in plain torch; otherwise it chooses Triton, which has no CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    oracle: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    method: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    original = method.select_unquantized_moe_backend
    if hasattr(original, "in_torch"):
        return

    def select(moe_config: Any) -> Any:
        if moe_config.is_lora_enabled:
            return oracle.UnquantizedMoeBackend.CPU, _experts_in_torch()
        return original(moe_config)

    select.in_torch = True  # type: ignore[attr-defined]
    oracle.select_unquantized_moe_backend = method.select_unquantized_moe_backend = select


@functools.cache
def _experts_in_torch() -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

    class ExpertsInTorch(LoRAExpertsMixin, CPUUnquantizedExperts):
        """Expert by expert, with the adapters of the rows of each."""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leave the weights as they were loaded, not packed for vLLM's own kernel."""

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            **_: Any,
        ) -> None:
            """`hidden_states` [T, H], `w1` [E, 2 I, H], `w2` [E, H, I]; writes `output` [T, H]."""
            if activation != MoEActivation.SILU:
                raise NotImplementedError(f"experts with the activation {activation} take no adapters on CPU")
            context, width = self._lora_context, w2.shape[2]
            rows = [] if context is None else context.punica_wrapper.token_segments
            slots = _slots_of_rows(rows, len(hidden_states))
            output.zero_()
            for expert in topk_ids.unique().tolist():
                tokens, nth = torch.nonzero(topk_ids == expert, as_tuple=True)
                x, of_rows = hidden_states[tokens], slots[tokens]
                gate_up = x @ w1[expert].T
                if context is not None:
                    for place in range(2):
                        a, b = context.w13_lora_a_stacked[place], context.w13_lora_b_stacked[place]
                        _add_adapters(gate_up[:, place * width :][:, :width], x, a, b, of_rows, expert)
                activated = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
                found = activated @ w2[expert].T
                if context is not None:
                    a, b = context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0]
                    _add_adapters(found, activated, a, b, of_rows, expert)
                output.index_add_(0, tokens, (found * topk_weights[tokens, nth, None]).to(output.dtype))

    return ExpertsInTorch


def _slots_of_rows(segments: Sequence[Segment], count: int) -> torch.Tensor:
    """The slot of each row, -1 for the base model."""
    slots = torch.full((count,), -1)
    for slot, start, stop in segments:
        slots[start:stop] = slot
    return slots


def _add_adapters(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, expert: int
) -> None:
    """Add B A x of each row's adapter to `y` [N, out]. `a`, `b` [slots, E or 1, ...]: 1 where experts share it."""
    runs = torch.nonzero(slots.diff()).flatten() + 1
    edges = [0, *runs.tolist(), len(slots)]
    found = [(int(slots[start]), start, stop) for start, stop in pairwise(edges) if stop > start and slots[start] >= 0]
    of_a, of_b = (m[:, expert if m.shape[1] > 1 else 0, None] for m in (a, b))
    add_lora(y, x, [of_a], [of_b], [y.shape[1]], found, 1.0)
