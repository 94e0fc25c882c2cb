"""Writes checkpoints in fewer bits as others publish them, by code that is not this project's, and what their numbers
are."""

import importlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_PROJECTION = re.compile(
    r"^(?!.*(?:visual|vision)).*layers\.\d+\."
    r"(?:self_attn\.(?:[qkvo]|qkv)_proj|linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)|mlp\.\w+_proj)\.weight$"
)

Quantize = Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
"""Of a matrix [out, in] in float32: the tensors by which a checkpoint stores it, by their suffixes, and what numbers
these are, in float64."""


@dataclass(frozen=True, slots=True)
class Method:
    """`config`: what config.json says. `dtype`: of the tensors that stay as they are."""

    quantize: Quantize
    config: Mapping[str, Any]
    dtype: torch.dtype = torch.float16


def publish(source: Path, folder: Path, method: Method, keep: str = "$^") -> tuple[str, str]:
    """The model at `source` by `method` in a folder of `folder`, but for projections that the pattern `keep` matches;
    and in another one, not packed, with the same numbers. Returns both."""
    packed, dense = folder / "packed", folder / "dense"
    for each in (packed, dense):
        shutil.copytree(source, each)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if _PROJECTION.match(name) is None or re.search(keep, name):
            stored[name] = plain[name] = tensor.to(method.dtype)
            continue
        parts, numbers = method.quantize(tensor)
        stored |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
        plain[name] = numbers.float().contiguous()
        assert torch.equal(plain[name].double(), numbers), "they have to be numbers in float32"
    assert stored.keys() != plain.keys() or any(stored[name].dtype != plain[name].dtype for name in stored)
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": method.config}))
    return str(packed), str(dense)


def gptq(bits: int, group: int, *, v2: bool = False, zeros: bool = False, order: bool = False) -> Method:
    """As AutoGPTQ and GPTQModel write it, by vLLM's functions: the codes of eight (or four) rows of W^T in an integer,
    and zero points that are stored less one, except in their second format."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    def quantize(weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        inputs, outputs = weight.T.shape
        by_importance = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        columns = by_importance if order else torch.arange(inputs)  # the same for matrices that read the same input
        codes, scales, points = integers(weight[:, columns], bits, group, zeros=zeros, least=0 if v2 else 1)
        groups = (torch.arange(inputs) // (inputs // len(scales))).int()
        places = columns.argsort()
        numbers = numbers_of(codes, scales, points)[:, places]
        codes, groups = codes[places], groups[places]
        parts = {
            "qweight": quant_utils.gptq_pack(codes, bits, inputs, outputs),
            "qzeros": quant_utils.pack_cols(points - (0 if v2 else 1), bits, len(scales), outputs),
            "scales": scales,
            "g_idx": groups,
        }
        return parts, numbers

    written = {"checkpoint_format": "gptq_v2"} if v2 else {}
    common = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": not zeros}
    return Method(quantize, {**common, **written})


def awq(group: int) -> Method:
    """As AutoAWQ writes it ("gemm"), by vLLM's functions: codes of eight columns of W^T in an integer, interleaved."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    def quantize(weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        inputs, outputs = weight.T.shape
        codes, scales, points = integers(weight, 4, group, zeros=True)
        parts = {
            "qweight": quant_utils.awq_pack(codes, 4, inputs, outputs),
            "qzeros": quant_utils.awq_pack(points, 4, len(scales), outputs),
            "scales": scales,
        }
        return parts, numbers_of(codes, scales, points)

    return Method(
        quantize, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    )


def scheme(strategy: str, bits: int, **others: Any) -> dict[str, Any]:
    """Arguments of compressed-tensors for weights."""
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **others}


def compressed(
    scheme: Mapping[str, Any], *, pack: bool = True, order: bool = False, scales: torch.dtype = torch.bfloat16
) -> Method:
    """As llm-compressor writes it, by the compressors of compressed-tensors, which pack codes into integers or not."""
    theirs: Any = importlib.import_module("compressed_tensors.quantization")
    calculate_qparams: Any = importlib.import_module("compressed_tensors.quantization.utils").calculate_qparams
    compressors: Any = importlib.import_module("compressed_tensors.compressors.base")
    arguments = theirs.QuantizationArgs(**scheme)
    kind = "pack-quantized" if pack else f"{scheme['type']}-quantized"
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    whole = theirs.QuantizationScheme(targets=["Linear"], weights=arguments)

    def quantize(weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight.shape
        size = scheme.get("group_size") or inputs
        by_importance = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        groups = (by_importance.argsort() // size).int() if order else (torch.arange(inputs) // size).int()
        grouped = weight[:, groups.argsort(stable=True)].view(outputs, -1, size)
        found, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
        if scheme["strategy"] == "tensor":
            found, zeros = found.amax().reshape(1), zeros.flatten()[:1]
        state = {"weight": weight, "weight_scale": found.to(scales), "weight_zero_point": zeros}
        if order:
            state["weight_g_idx"] = groups
        stored = compressor.compress(state, whole)
        # In float64, so that it does not matter how their reader rounds.
        read = {**stored, "weight_scale": stored["weight_scale"].double()}
        numbers = compressor.decompress(read, whole)["weight"].double()
        return {name: each for name, each in stored.items() if isinstance(each, torch.Tensor)}, numbers

    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json()), "format": kind}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Method(quantize, config, torch.bfloat16)


def compressed_blocks() -> Method:
    """FP8 in blocks, as llm-compressor writes it."""
    of_qwen = fp8((128, 128))

    def quantize(weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        parts, numbers = of_qwen.quantize(weight)
        return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, numbers

    weights = scheme("block", 8, type="float", block_structure=[128, 128])
    activations = scheme("group", 8, type="float", group_size=128, dynamic=True)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    return Method(quantize, config, torch.bfloat16)


def integers(
    weight: torch.Tensor, bits: int, group: int, *, zeros: bool, least: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes without sign of `weight` [out, in], transposed as GPTQ and AWQ have it, with scales in float16 and zero
    points of groups, `least` or more."""
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    signed, unsigned = {
        4: (scalar_types.uint4b8, scalar_types.uint4),
        8: (scalar_types.uint8b128, scalar_types.uint8),
    }[bits]
    outputs = len(weight)
    _, codes, scales, points = quant_utils.quantize_weights(
        weight.T.half(), unsigned if zeros else signed, group, zero_points=zeros
    )
    scales = scales.half().reshape(-1, outputs)
    middle = torch.full(scales.shape, 2 ** (bits - 1))
    found = middle if points is None else points.reshape(-1, outputs).clamp(min=least)
    assert not zeros or len(found.unique()) > 3
    return codes, scales, found


def numbers_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """[out, in], in float64."""
    size = len(codes) // len(scales)
    return ((codes - zeros.repeat_interleave(size, 0)).double() * scales.double().repeat_interleave(size, 0)).T


def fp8(blocks: tuple[int, int] | None, *, rows: bool = False) -> Method:
    """As Qwen publishes it, by vLLM's functions: a scale for each block of 128 x 128; or one for a matrix, or for each
    row."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    def quantize(weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight.shape
        down, right = blocks or (1 if rows else outputs, inputs)
        padded = torch.nn.functional.pad(weight, (0, -inputs % right, 0, -outputs % down))
        shape = quant_utils.GroupShape(down, right)
        codes, scales = quant_utils.scaled_quantize(padded, shape, torch.float8_e4m3fn)
        if blocks:
            scales = scales.bfloat16()  # as Qwen3 has them; DeepSeek's are in float32
        spread = scales.repeat_interleave(down, 0).repeat_interleave(right, 1)
        numbers = (codes.float() * spread.float())[:outputs, :inputs].double()
        codes = codes.view(torch.uint8)[:outputs, :inputs].contiguous().view(torch.float8_e4m3fn)
        if blocks:
            return {"weight": codes, "weight_scale_inv": scales}, numbers
        return {"weight": codes, "weight_scale": scales if rows else scales.flatten()[0]}, numbers

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Method(quantize, config | ({"weight_block_size": [*blocks]} if blocks else {}), torch.bfloat16)
