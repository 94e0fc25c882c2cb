"""How vLLM multiplies by packed matrices (`weights/codes.py`): by the numbers that the trainer multiplies by.

A linear method of this project, since vLLM's would each keep the codes in another layout, some for certain processors
alone, and some quantise activations as well. It leaves codes and scales as they are loaded, so that both engines read
one copy of them. Of a published checkpoint vLLM sees this method in place of what its `quantization_config` names.
"""

import functools
import re
from collections.abc import Set
from dataclasses import asdict
from typing import Any

import torch
from tinker_local.backend.vllm_engine.packed_experts_method import method_for
from tinker_local.backend.weights.codes import Packed, codes_of, times
from tinker_local.backend.weights.joined_names import JOINED
from tinker_local.backend.weights.layout import OWN, Layout
from tinker_local.backend.weights.packed import CODES, ORDER, SCALES, ZEROS, is_packed
from tinker_local.backend.weights.published import WEIGHTS, Published

_DECODER = re.compile(r"^(?:language(?:_model)?\.)?model\.(?:(?:language|text)_model\.)?layers\.")
"""What vLLM calls modules in a language model's layers, and not in those of a vision tower. That of LFM2-VL has another
name where it is made than in the whole model."""
_PARTS = {joined.vllm: joined.parts for joined in JOINED}


def name_of(precision: str) -> str:
    """What vLLM calls matrices of `precision`, "int8" or "int4", or those of a published checkpoint."""
    return f"tinker_local_{precision}"


def config_of(published: Published) -> dict[str, Any]:
    """What vLLM's config has in place of the `quantization_config` of `published`."""
    return {"quant_method": name_of(WEIGHTS), "layout": asdict(published.layout), "modules": published.tails()}


def is_among(modules: Set[str], prefix: str) -> bool:
    """Whether vLLM's module at `prefix` is one of `modules`, named from `layers.` on as files name them."""
    path = prefix[prefix.index("layers.") :]
    parent, _, name = path.rpartition(".")
    return path in modules or (name in _PARTS and f"{parent}.{_PARTS[name][0]}" in modules)


@functools.cache
def register() -> None:
    """Make the methods known to vLLM."""
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.parameter import ModelWeightParameter, RowvLLMParameter

    @register_weight_loader_v2_supported_method
    class PackedMethod(LinearMethodBase):
        def __init__(self, layout: Layout) -> None:
            self._layout = layout

        def create_weights(
            self,
            layer: Any,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            rows, inputs, layout = sum(output_partition_sizes), input_size_per_partition, self._layout
            groups = layout.groups(input_size)
            matrices = {CODES: codes_of(layout, rows, inputs), SCALES: (rows, groups, getattr(torch, layout.scales))}
            if layout.zeros:
                matrices[ZEROS] = (rows, groups, torch.int16)
            for name in (ZEROS, ORDER):
                layer.register_parameter(name, None)
            for name, (*shape, dtype) in matrices.items():
                parameter = ModelWeightParameter(
                    data=torch.empty(shape, dtype=dtype),
                    input_dim=1,
                    output_dim=0,
                    weight_loader=attributes["weight_loader"],
                )
                layer.register_parameter(name, parameter)
            if layout.order:  # a vector, which each engine has; joined matrices have the same one
                groups_of_columns = torch.empty(inputs, dtype=torch.int32)
                vector = RowvLLMParameter(
                    data=groups_of_columns, input_dim=0, weight_loader=attributes["weight_loader"]
                )
                layer.register_parameter(ORDER, vector)

        def process_weights_after_loading(self, layer: Any) -> None:
            """They stay as they are."""

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            curved = self._layout.curved
            product = times(x, Packed(layer.qweight, layer.scales, layer.zeros, layer.order, curved))
            return product if bias is None else product + bias

    class PackedConfig(QuantizationConfig):
        name: str
        layout: Layout

        def get_name(self) -> Any:
            return name_of(self.name)

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 75

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "PackedConfig":
            return cls()

        def is_packed(self, layer: Any, prefix: str) -> bool:
            return is_packed(prefix, layer.input_size)

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return method_for(layer, self.layout) if self.name in OWN else None
            if _DECODER.match(prefix) and self.is_packed(layer, prefix):
                return PackedMethod(self.layout)
            return UnquantizedLinearMethod()

    @register_quantization_config(name_of(WEIGHTS))
    class PublishedConfig(PackedConfig):
        name = WEIGHTS

        def __init__(self, layout: Layout, modules: Set[str]) -> None:
            super().__init__()
            self.layout = layout
            self._modules = modules

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "PublishedConfig":
            return cls(Layout(**config["layout"]), frozenset(config["modules"]))

        def is_packed(self, layer: Any, prefix: str) -> bool:
            return is_among(self._modules, prefix)

    for precision, layout in OWN.items():
        config = type(f"Packed{precision.title()}Config", (PackedConfig,), {"name": precision, "layout": layout})
        register_quantization_config(name_of(precision))(config)
