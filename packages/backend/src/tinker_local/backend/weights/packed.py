"""Frozen matrices of 8 or 4 bits (`codes.py`), which become numbers of the model's dtype one at a time, where one is
multiplied by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tinker_local.backend.weights.codes import Packed, inputs_of, to_codes
from tinker_local.backend.weights.dense import concatenated, dense
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.backend.weights.joined_names import is_projection
from tinker_local.backend.weights.precision import BITS, Bits, has_groups

CODES, SCALES, ZEROS, ORDER = "qweight", "scales", "zeros", "order"
"""Parameters in place of `weight`; the last two where a published checkpoint has them. vLLM's adapters know a matrix of
codes by the first name."""
MATRICES = (CODES, SCALES, ZEROS)
"""Those with a row for each of the matrix, which several matrices one below the other have so, too."""

_FIELDS = {CODES: "codes", SCALES: "scales", ZEROS: "zeros", ORDER: "order"}
"""Of `Packed`."""


def is_packed(path: str, inputs: int) -> bool:
    """Whether the Linear module at `path`, of transformers or of vLLM, is packed where its model is: a projection of a
    decoder's layer whose rows can be divided into groups. The caller keeps towers out."""
    return is_projection(path) and has_groups(inputs)


def dense_name(name: str) -> str:
    """What the parameter `name` is called in a model that is not packed."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight" if last in (*MATRICES, ORDER) else name


def tensors_of(module: Any) -> Packed:
    """What a packed module, of this project or of vLLM, has."""
    return Packed(module.qweight, module.scales, module.zeros, module.order, module.curved)


class PackedLinear(torch.nn.Linear):
    """Linear module with the tensors of a `Packed` in place of `weight`, which is made anew each time it is read."""

    def __init__(self, linear: torch.nn.Linear, stored: Packed) -> None:
        """In place of `linear`, whose matrix is `stored`."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name in (*MATRICES, ORDER):
            tensor = getattr(stored, _FIELDS[name])
            self.register_parameter(name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))
        self.bias, self.curved = linear.bias, stored.curved
        self._dtype = linear.weight.dtype

    @staticmethod
    def rounded(linear: torch.nn.Linear, bits: Bits, device: torch.device | None = None) -> "PackedLinear":
        """Packs the matrix of `linear`, on `device` if that is quicker, and leaves the result where the matrix is."""
        found = to_codes(linear.weight.to(device), bits)
        codes, scales = (each.to(linear.weight.device) for each in (found.codes, found.scales))
        return PackedLinear(linear, replace(found, codes=codes, scales=scales))

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], in the dtype of activations."""
        return tensors_of(self).numbers(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias

    def matrix(self) -> "PackedMatrix":
        return PackedMatrix(_detached(tensors_of(self)), self._dtype)


class _Product(torch.autograd.Function):
    """x W^T, whose backward makes W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
        ctx.linear = linear
        return x @ tensors_of(linear).numbers(x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ tensors_of(ctx.linear).numbers(grad.dtype), None


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A `FrozenMatrix` that is `stored`. In memory besides it, while one multiplies: [out, in] in `dtype`."""

    stored: Packed
    dtype: torch.dtype

    @property
    def outputs(self) -> int:
        return len(self.stored.codes)

    @property
    def inputs(self) -> int:
        return inputs_of(self.stored.codes)

    @property
    def device(self) -> torch.device:
        return self.stored.codes.device

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
        return self.stored.numbers(self.dtype)


def packed(modules: Sequence[torch.nn.Linear]) -> FrozenMatrix:
    """A `MakeMatrix`. The matrix shares its numbers with the modules. Those that are not packed, such as the LM head,
    are dense."""
    parts = [module for module in modules if isinstance(module, PackedLinear)]
    if len(parts) < len(modules):
        return dense(modules)
    if len(parts) == 1:
        return parts[0].matrix()
    present = [name for name in MATRICES if getattr(parts[0], name) is not None]
    joined = {name: concatenated([getattr(part, name).detach() for part in parts]) for name in present}
    start = 0
    for part in parts:
        rows = slice(start, start + part.out_features)
        for name, matrix in joined.items():
            setattr(part, name, torch.nn.Parameter(matrix[rows], requires_grad=False))
        start += part.out_features
    first = parts[0].matrix()  # its order is that of all of them, as `load_published.py` has seen
    whole = replace(first.stored, codes=joined[CODES], scales=joined[SCALES], zeros=joined.get(ZEROS))
    return PackedMatrix(whole, first.dtype)


def _detached(stored: Packed) -> Packed:
    zeros, order = (None if each is None else each.detach() for each in (stored.zeros, stored.order))
    return replace(stored, codes=stored.codes.detach(), scales=stored.scales.detach(), zeros=zeros, order=order)


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
        setattr(decoder.get_submodule(parent), name, PackedLinear.rounded(module, BITS[precision], device))
