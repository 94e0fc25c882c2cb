"""Matrices of the frozen base model. What needs a product with one of a layer or of the LM head asks it for that, and
does not see its numbers.

So a matrix may be stored in any way: in one tensor, as a part of a joined one, in memory that is filled just before it
is read (`large_weights.py`), in fewer bits. `W` is what transformers calls `weight`: [out, in].

Legend: T rows, S rows sorted by group, E groups (experts).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Frozen(Protocol):
    """What a matrix, or each of a stack, is: [out, in]; it never changes and needs no gradient."""

    @property
    def outputs(self) -> int:
        """out."""

    @property
    def inputs(self) -> int:
        """in."""

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and results, however the numbers are stored."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""


class FrozenMatrix(Frozen, Protocol):
    """W [out, in]."""

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [T, in] -> [T, out]."""

    def times_plus(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """given + x W^T, in new memory. `given` [T, out], or a bias [out]."""

    def add_times(self, onto: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`onto` [T, out], to which x W^T has been added in place."""

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        """grad W: [T, out] -> [T, in], the gradient of x from that of x W^T."""

    def add_back(self, onto: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """`onto` [T, in], to which grad W has been added in place."""


MakeMatrix = Callable[[Sequence[torch.nn.Linear]], FrozenMatrix]
"""Makes one matrix of those of Linear modules that read the same input, one below the other, without their biases."""


class GroupedProduct(Protocol):
    """Multiplies each row by the matrix of its group, as `kernels/grouped_products.py` does."""

    def multiply(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """x [S, in] and `matrices` [E, in, out]: [S, out]."""

    def multiply_made(
        self,
        x: torch.Tensor,
        outputs: int,
        one: Callable[[int], torch.Tensor],
        every: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The same, by matrices that are made for it: `every` one at once [E, in, outputs], or `one` [in, outputs], of
        a group that has rows, at a time."""


class FrozenStack(Frozen, Protocol):
    """E matrices W_e [out, in] of experts. A row is multiplied by that of its group."""

    @property
    def count(self) -> int:
        """E."""

    def times(self, x: torch.Tensor, groups: GroupedProduct) -> torch.Tensor:
        """x W_e^T for the rows of group e: [S, in] -> [S, out]."""

    def back(self, grad: torch.Tensor, groups: GroupedProduct) -> torch.Tensor:
        """grad W_e for the rows of group e: [S, out] -> [S, in]."""
