"""How vLLM multiplies by packed experts (`weights/packed_stack.py`): by the numbers that the trainer multiplies by, and
with adapters.

A method and classes of experts of this project. vLLM 0.32 has experts in 8 and 4 bits too: those in Triton
(`TritonWNA16Experts`) say that they take adapters, and compute without; Marlin's keep the codes in another layout, of
which the trainer would need a copy.
"""

import functools
import math
from typing import Any

import torch
from tinker_local.backend.vllm_engine.vllm_experts import experts_in_torch
from tinker_local.backend.weights.codes import Packed, codes_of
from tinker_local.backend.weights.layout import Layout
from tinker_local.backend.weights.packed import CODES, SCALES
from tinker_local.backend.weights.packed_stack import experts_are_packed

_STACKS = ("w13", "w2")


def method_for(layer: Any, layout: Layout) -> Any:
    """For vLLM's `layer`, if it is one of routed experts that are packed, with codes and scales of `layout`; else
    None."""
    if not hasattr(layer, "moe_config") or not experts_are_packed(
        layer.hidden_size, layer.moe_config.intermediate_size_per_partition
    ):
        return None
    return _method()(layer.moe_config, layout)


@functools.cache
def _method() -> Any:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        UnquantizedMoeBackend,
        make_unquantized_moe_kernel,
    )
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.utils import set_weight_attrs
    from vllm.platforms import current_platform

    class PackedExpertsMethod(FusedMoEMethodBase):
        def __init__(self, moe: Any, layout: Layout) -> None:
            super().__init__(moe)
            self._layout = layout
            self.experts_cls = _experts_in_torch() if current_platform.is_cpu() else experts_in_triton()

        def create_weights(
            self,
            layer: Any,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            def loaded(param: Any, loaded_weight: torch.Tensor, **place: Any) -> Any:
                """One expert's part, as a layer's loading says, or all of it, as gpt-oss's does."""
                if place:
                    return attributes["weight_loader"](param, loaded_weight, **place)
                return param.data.copy_(loaded_weight)

            width, layout = intermediate_size_per_partition, self._layout
            layer.curved = layout.curved
            for name, outputs, inputs in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
                rows, in_codes, dtype = codes_of(layout, outputs, inputs)
                shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                    CODES: ((rows, in_codes), dtype),
                    SCALES: ((rows, layout.groups(inputs)), getattr(torch, layout.scales)),
                }
                if self.moe.has_bias:
                    shapes["bias"] = ((rows,), params_dtype)
                for kind, (shape, of_kind) in shapes.items():
                    made = torch.nn.Parameter(torch.empty(num_experts, *shape, dtype=of_kind), requires_grad=False)
                    layer.register_parameter(f"{name}_{kind}", made)
                    set_weight_attrs(made, {"weight_loader": loaded, "quant_method": "group"})

        def process_weights_after_loading(self, layer: Any) -> None:
            """They stay as they are, by the names that vLLM's layers with adapters read."""
            for name in _STACKS:
                layer.register_parameter(f"{name}_weight", getattr(layer, f"{name}_{CODES}"))
                delattr(layer, f"{name}_{CODES}")
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            backend = UnquantizedMoeBackend.CPU if current_platform.is_cpu() else UnquantizedMoeBackend.TRITON
            self.moe_kernel = make_unquantized_moe_kernel(
                self.moe_quant_config, self.moe, backend=backend, experts_cls=self.experts_cls
            )
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

        def get_fused_moe_quant_config(self, layer: Any) -> Any:
            return UnquantizedFusedMoEMethod.get_fused_moe_quant_config(self, layer)

        def apply(
            self,
            layer: Any,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: Any,
            shared_experts_input: torch.Tensor | None,
        ) -> Any:
            assert self.moe_kernel is not None, "weights are loaded"
            return self.moe_kernel.apply(
                hidden_states=x,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )

    return PackedExpertsMethod


@functools.cache
def _experts_in_torch() -> Any:
    base: Any = experts_in_torch()

    class PackedExpertsInTorch(base):
        """The numbers of one expert at a time."""

        def process_weights_after_loading(self, layer: Any) -> None:
            self._scales, self._curved = [getattr(layer, f"{name}_{SCALES}") for name in _STACKS], layer.curved

        def matrix(self, place: int, stack: torch.Tensor, expert: int, dtype: torch.dtype) -> torch.Tensor:
            return Packed(stack[expert], self._scales[place][expert], curved=self._curved).numbers(dtype)

    return PackedExpertsInTorch


@functools.cache
def experts_in_triton() -> Any:
    """vLLM's class of experts with packed stacks that take adapters on CUDA."""
    from tinker_local.backend.weights.triton_experts_codes import Blocks, block_size, times_experts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    class PackedExpertsInTriton(TritonExperts):
        """vLLM's experts in Triton, but for the products with the frozen stacks, which read their codes."""

        def process_weights_after_loading(self, layer: Any) -> None:
            self._scales, self._curved = [getattr(layer, f"{name}_{SCALES}") for name in _STACKS], layer.curved

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            apply_router_weight_on_input: bool,
            workspace13: torch.Tensor,
            workspace2: torch.Tensor,
            expert_map: torch.Tensor | None = None,
            **_: Any,
        ) -> None:
            """`hidden_states` [T, H], codes `w1` of [E, 2 I, H] and `w2` of [E, H, I]; writes `output` [T, H]. Does not
            wait for the device."""
            assert expert_map is None, "all experts are on one GPU, which `check_precision` sees to"
            (tokens, chosen), (count, doubled, _) = topk_ids.shape, w1.shape
            hidden, width = hidden_states.shape[1], self.adjust_N_for_activation(doubled, activation)
            gate_up = _in(workspace2, tokens, chosen, doubled)
            activated = _in(workspace13, tokens * chosen, width)
            found = _in(workspace2, tokens, chosen, hidden)
            size = block_size(topk_ids.numel(), count)
            pairs, experts, filled = moe_align_block_size(topk_ids, size, count)
            blocks = Blocks(pairs, experts, filled, size)
            scales13, scales2 = self._scales
            adapters, lora = self._lora_context, {}
            times_experts(hidden_states, w1, scales13, blocks, gate_up, self.w1_bias, curved=self._curved)
            of_both = {"topk_weights": topk_weights, "num_tokens": tokens, "w1": w1, "w2": w2, "top_k_num": chosen}
            if adapters is not None:
                x = hidden_states
                names = (
                    "sorted_token_ids_lora",
                    "expert_ids_lora",
                    "num_tokens_post_padded_lora",
                    "token_lora_mapping",
                )
                given = {"topk_ids": topk_ids, "expert_map": None, **of_both}
                lora = dict(zip(names, self.apply_w13_lora(adapters, y=gate_up, x=x, **given), strict=True))
            self.activation(activation, activated, gate_up.view(-1, doubled))
            weights = None if apply_router_weight_on_input else topk_weights
            times_experts(activated, w2, scales2, blocks, found, self.w2_bias, weights, curved=self._curved)
            if adapters is not None:
                self.apply_w2_lora(adapters, y=found, x=activated, **lora, **of_both)
            self.moe_sum(found, output)

    return PackedExpertsInTriton


def _in(workspace: torch.Tensor, *shape: int) -> torch.Tensor:
    """The beginning of `workspace`, in this `shape`."""
    return workspace.flatten()[: math.prod(shape)].view(shape)
