"""Frozen matrices of 8 or 4 bits (`codes.py`), which become numbers of the model's dtype one at a time, where one is
multiplied by."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.weights.codes import from_codes, inputs_of, to_codes
from tinker_local.backend.weights.dense import concatenated, dense
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.backend.weights.joined_names import GATE_UP, QKV, QKVZ
from tinker_local.backend.weights.precision import BITS, Bits, group_of

CODES, SCALES = "qweight", "scales"
"""Parameters in place of `weight`. vLLM's adapters know a matrix of codes by the first name."""

NAMES = {
    *(name for joined in (QKV, GATE_UP, QKVZ) for name in (*joined.parts, joined.vllm)),
    *("o_proj", "down_proj", "out_proj"),
}
_MODULE = re.compile(r"(?:^|\.)layers\.\d+\.(?:self_attn|linear_attn|mlp)\.(\w+)$")


def is_packed(path: str, inputs: int) -> bool:
    """Whether the Linear module at `path`, of transformers or of vLLM, is packed where its model is: a projection of
    attention or of an MLP of a decoder's layer, whose rows can be divided into groups. The caller keeps towers out."""
    found = _MODULE.search(path)
    return found is not None and found[1] in NAMES and group_of(inputs) is not None


def dense_name(name: str) -> str:
    """What the parameter `name` is called in a model that is not packed."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight" if last in (CODES, SCALES) else name


class PackedLinear(torch.nn.Linear):
    """Linear module with `qweight` and `scales` in place of `weight`, which is made anew each time it is read."""

    def __init__(self, linear: torch.nn.Linear, bits: Bits, device: torch.device | None = None) -> None:
        """Packs the matrix of `linear`, on `device` if that is quicker, and leaves the result where the matrix is."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = (each.to(linear.weight.device) for each in to_codes(linear.weight.to(device), bits))
        self.qweight = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        self._dtype = linear.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], in the dtype of activations."""
        return from_codes(self.qweight, self.scales, self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias

    def matrix(self) -> "PackedMatrix":
        return PackedMatrix(self.qweight.detach(), self.scales.detach(), self._dtype)


class _Product(torch.autograd.Function):
    """x W^T, whose backward makes W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        ctx.linear = linear
        return x @ from_codes(linear.qweight, linear.scales, x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ from_codes(ctx.linear.qweight, ctx.linear.scales, grad.dtype), None


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A `FrozenMatrix` of `codes` and `scales`. In memory besides them, while one multiplies: [out, in] in `dtype`."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def inputs(self) -> int:
        return inputs_of(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weight().T

    def times_plus(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.addmm(given, x, self._weight().T)

    def add_times(self, onto: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return onto.addmm_(x, self._weight().T)

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self._weight()

    def add_back(self, onto: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return onto.addmm_(grad, self._weight())

    def _weight(self) -> torch.Tensor:
        return from_codes(self.codes, self.scales, self.dtype)


def packed(modules: Sequence[torch.nn.Linear]) -> FrozenMatrix:
    """A `MakeMatrix`. The matrix shares its numbers with the modules. Those that are not packed, such as the LM head,
    are dense."""
    parts = [module for module in modules if isinstance(module, PackedLinear)]
    if len(parts) < len(modules):
        return dense(modules)
    if len(parts) == 1:
        return parts[0].matrix()
    joined = {name: concatenated([getattr(part, name).detach() for part in parts]) for name in (CODES, SCALES)}
    start = 0
    for part in parts:
        rows = slice(start, start + part.out_features)
        for name, matrix in joined.items():
            setattr(part, name, torch.nn.Parameter(matrix[rows], requires_grad=False))
        start += part.out_features
    return PackedMatrix(joined[CODES], joined[SCALES], parts[0].matrix().dtype)


def packable_modules(decoder: torch.nn.Module) -> list[tuple[str, torch.nn.Linear]]:
    """The projections in the layers of transformers' `decoder` that are packed, with their paths."""
    return [
        (path, module)
        for path, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear) and is_packed(path, module.in_features)
    ]


def pack_layers(decoder: torch.nn.Module, precision: str, device: torch.device | None = None) -> None:
    """Replace the projections in the layers of transformers' `decoder` by packed ones, which are made on `device`, one
    at a time."""
    for path, module in packable_modules(decoder):
        parent, _, name = path.rpartition(".")
        setattr(decoder.get_submodule(parent), name, PackedLinear(module, BITS[precision], device))
