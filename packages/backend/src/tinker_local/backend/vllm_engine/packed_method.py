"""How vLLM multiplies by packed matrices (`weights/codes.py`): by the numbers that the trainer multiplies by.

A linear method of this project, since vLLM's would each keep the codes in another layout, some for certain processors
alone, and some quantise activations as well. It leaves codes and scales as they are loaded, so that both engines read
one copy of them.
"""

import functools
import re
from typing import Any

import torch
from tinker_local.backend.weights.codes import from_codes
from tinker_local.backend.weights.packed import CODES, SCALES, is_packed
from tinker_local.backend.weights.precision import BITS, Bits, group_of

_DECODER = re.compile(r"^(?:language_model\.)?model\.(?:language_model\.)?layers\.")
"""Paths of vLLM's modules in a language model's layers, and not in those of a vision tower."""


def name_of(precision: str) -> str:
    """What vLLM calls matrices of `precision`, "int8" or "int4"."""
    return f"tinker_local_{precision}"


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
    from vllm.model_executor.parameter import ModelWeightParameter

    @register_weight_loader_v2_supported_method
    class PackedMethod(LinearMethodBase):
        def __init__(self, bits: Bits) -> None:
            self._bits = bits

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
            rows, inputs, size = sum(output_partition_sizes), input_size_per_partition, group_of(input_size)
            assert size is not None, "is_packed"
            of_code = (rows, inputs, torch.int8) if self._bits == 8 else (rows, inputs // 2, torch.uint8)
            for name, (*shape, dtype) in {CODES: of_code, SCALES: (rows, inputs // size, torch.bfloat16)}.items():
                parameter = ModelWeightParameter(
                    data=torch.empty(shape, dtype=dtype),
                    input_dim=1,
                    output_dim=0,
                    weight_loader=attributes["weight_loader"],
                )
                layer.register_parameter(name, parameter)

        def process_weights_after_loading(self, layer: Any) -> None:
            """They stay as they are."""

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return torch.nn.functional.linear(x, from_codes(layer.qweight, layer.scales, x.dtype), bias)

    class PackedConfig(QuantizationConfig):
        precision: str

        def get_name(self) -> Any:
            return name_of(self.precision)

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

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            if _DECODER.match(prefix) and is_packed(prefix, layer.input_size):
                return PackedMethod(BITS[self.precision])
            return UnquantizedLinearMethod()

    for precision in BITS:
        config = type(f"Packed{precision.title()}Config", (PackedConfig,), {"precision": precision})
        register_quantization_config(name_of(precision))(config)
