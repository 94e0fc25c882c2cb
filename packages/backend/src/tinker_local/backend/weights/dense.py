"""Frozen matrices as transformers has them, in the model's dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tinker_local.backend.weights.frozen_matrix import GroupedProduct


@dataclass(frozen=True, slots=True, eq=False)
class _Dense:
    """`weight` [..., out, in]."""

    weight: torch.Tensor

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[-2])

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


class DenseMatrix(_Dense):
    """A `FrozenMatrix` that is a tensor `weight` [out, in]."""

    __slots__ = ()

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T

    def times_plus(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.addmm(given, x, self.weight.T)

    def add_times(self, onto: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return onto.addmm_(x, self.weight.T)

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self.weight

    def add_back(self, onto: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return onto.addmm_(grad, self.weight)


class DenseStack(_Dense):
    """A `FrozenStack` that is a tensor `weight` [E, out, in], which may be a transposed view."""

    __slots__ = ()

    @property
    def count(self) -> int:
        return len(self.weight)

    def times(self, x: torch.Tensor, groups: GroupedProduct) -> torch.Tensor:
        return groups.multiply(x, self.weight.transpose(1, 2))

    def back(self, grad: torch.Tensor, groups: GroupedProduct) -> torch.Tensor:
        return groups.multiply(grad, self.weight)


def dense(modules: Sequence[torch.nn.Linear]) -> DenseMatrix:
    """A `MakeMatrix`. The matrix shares its numbers with the modules: parameters of several become views of it."""
    if len(modules) == 1:
        return DenseMatrix(modules[0].weight.detach())
    matrix = concatenated([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        rows = module.weight.shape[0]
        module.weight = torch.nn.Parameter(matrix[start : start + rows], requires_grad=False)
        start += rows
    return DenseMatrix(matrix)


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate contiguous `parts` by rows: a view, if they lie side by side in memory."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata or part.storage_offset() != end:
            return torch.cat([*parts])
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
