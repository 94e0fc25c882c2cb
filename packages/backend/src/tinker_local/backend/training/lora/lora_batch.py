"""Concatenates the adapters of one micro-batch, so that the tokens of all adapters share every matmul.

Legend: T tokens, R columns (ranks of all adapters of the micro-batch, concatenated, then zeros up to a multiple of 16),
L blocks of one kind, N adapters, in and out: widths of a projection.

For all adapters together, A is [R, in] and B [out, R]. A token's row of h = x A^T has R numbers. Those in the
columns of other adapters are set to zero, so y = W x + B h adds nothing of other adapters, whatever their ranks and
number. A projection costs R / in more, a few per cent, and takes as many matmuls as for one adapter. Projections that
read the same input (a group, see `lora.Target`) have their A's concatenated.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tinker_local.backend.training.kernels import compat_torch
from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, Groups
from tinker_local.backend.training.run.transfer import to_device
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix

_COLUMNS = 16
"""R is a multiple of this, the narrowest tile of tensor cores."""
_STEP = 8
"""Beside experts, the columns of an adapter start at a multiple of this: 16 bytes, which a kernel reads at once."""


def columns_of(groups: Groups, rank: int) -> int:
    """How many columns of R an adapter of `rank` takes, of a model whose targets are `groups`."""
    step = _STEP if any(map(_of_experts, groups)) else 1
    return -(-rank // step) * step


def _of_experts(group: str) -> bool:
    return group.startswith("experts.")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns [start, stop) of R belong to `adapter`."""

    adapter: Adapter
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """Whose tokens they are. `columns` int32 [N, 2]: of each adapter its first column and how many it has (see
    `columns_of`), with zeros beyond its rank; last, if it has tokens, the base model with none. `widest`: the largest
    number. `of_tokens` int64 [T]: the place in `columns`; `others` bool [T, R]: True for columns of other adapters than
    the token's. Both are None if one has all tokens."""

    columns: torch.Tensor
    widest: int
    of_tokens: torch.Tensor | None = None
    others: torch.Tensor | None = None

    def rows(self, index: torch.Tensor | slice) -> "Owners":
        """The same, for the tokens of `index` only."""
        if self.of_tokens is None or self.others is None:
            return self
        return Owners(self.columns, self.widest, self.of_tokens[index], self.others[index])


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A group of projections in one block (or the LM head).

    `a` [p R, in] for p projections; `b` [out, R] of each, scaled by alpha / r. `grad_a`, `grad_b` receive the
    gradients, in the same shapes (with respect to the scaled b). Of experts, the factor that they do not share is
    [E, ...], and `experts.py` multiplies by it.
    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    owners: Owners
    grad_a: torch.Tensor | None = None
    grad_b: tuple[torch.Tensor, ...] = ()

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """h = x A^T, with zeros in the columns of other adapters. x [T, in] -> [T, p, R]."""
        return self.masked((x @ self.a.T).unflatten(1, (len(self.b), -1)))

    def up(self, h: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Write h B^T of each projection to its [T, out] in `outputs`. h [T, p, R]."""
        for place, (b, output) in enumerate(zip(self.b, outputs, strict=True)):
            torch.mm(h[:, place], b.T, out=output)

    def up_gradient(self, h: torch.Tensor, grad_outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradient of h [T, p, R] from those of the outputs, [T, out] each. Writes B's gradient."""
        grad_h = torch.empty_like(h)
        for place, (b, grad_output) in enumerate(zip(self.b, grad_outputs, strict=True)):
            torch.mm(grad_output, b, out=grad_h[:, place])
            compat_torch.mm_into_float32(grad_output.T, h[:, place], self.grad_b[place])
        return self.masked(grad_h)

    def write_a_gradient(self, grad_h: torch.Tensor, x: torch.Tensor) -> None:
        """Write A's gradient from the gradient of h [T, p, R] and the input [T, in]."""
        assert self.grad_a is not None
        compat_torch.mm_into_float32(grad_h.flatten(1).T, x, self.grad_a)

    def add_a_gradient(self, grad_h: torch.Tensor, x: torch.Tensor) -> None:
        """The same, added to what `write_a_gradient` wrote for other rows."""
        assert self.grad_a is not None
        found = torch.empty_like(self.grad_a)
        compat_torch.mm_into_float32(grad_h.flatten(1).T, x, found)
        self.grad_a.add_(found)

    def rows(self, index: torch.Tensor | slice) -> "LowRank":
        """The same, for the tokens of `index` only."""
        return LowRank(self.a, self.b, self.owners.rows(index), self.grad_a, self.grad_b)

    def masked(self, h: torch.Tensor) -> torch.Tensor:
        """`h` [T, p, R] with zeros in the columns of other adapters, in place."""
        # Fill instead of multiplying: other adapters' h may be infinite, and 0 x inf is NaN.
        others = self.owners.others
        return h if others is None else h.masked_fill_(others[:, None], 0)


Parts = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Splits the joined output of a group's projections, [T, ...], into one view per projection."""


def project(
    x: torch.Tensor,
    matrix: FrozenMatrix,
    bias: torch.Tensor | None,
    low_rank: LowRank | None,
    parts: Parts,
    *,
    partly: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h [T, p, R] and x W^T + bias + low rank. The low rank is computed first: the large matmul accumulates onto
    it, which saves a pass over the output. `partly`: whether `parts` leaves out some of the output."""
    if low_rank is None:
        return None, matrix.times(x) if bias is None else matrix.times_plus(x, bias)
    h = low_rank.down(x)
    output = (x.new_zeros if partly else x.new_empty)(len(x), matrix.outputs)
    low_rank.up(h, parts(output))
    matrix.add_times(output, x)
    return h, output if bias is None else output.add_(bias)


def project_onto(
    residual: torch.Tensor,
    x: torch.Tensor,
    matrix: FrozenMatrix,
    low_rank: LowRank | None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """h [T, 1, R] and residual + (x W^T + bias + low rank), for a group of one projection.

    The residual is added last. Its numbers are large, and in 16 bits far apart: a low rank or bias alone would be lost
    wherever it is below half a step, always, and not cancel over positions as other rounding does. Without a low rank
    it is added last as well, so that an adapter with B = 0 is the base model."""
    h, update = project(x, matrix, bias, low_rank, whole)
    return h, update.add_(residual)


def project_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    matrix: FrozenMatrix,
    low_rank: LowRank | None,
    h: torch.Tensor | None,
    parts: Parts,
) -> torch.Tensor:
    """The gradient of x from that of the output. Writes the adapters' gradients."""
    if low_rank is None:
        return matrix.back(grad)
    assert h is not None, "kept or recomputed before the backward"
    grad_h = low_rank.up_gradient(h, parts(grad))
    low_rank.write_a_gradient(grad_h, x)
    return through(grad, matrix, low_rank, grad_h)


def through(
    grad: torch.Tensor, matrix: FrozenMatrix, low_rank: LowRank | None, grad_h: torch.Tensor | None
) -> torch.Tensor:
    """grad W + grad_h A: the gradient of a group's input from those of its output and h."""
    if low_rank is None or grad_h is None:
        return matrix.back(grad)
    return matrix.add_back(grad_h.flatten(1) @ low_rank.a, grad)


def whole(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`Parts` of a group of one projection."""
    return (output,)


class LoraBatch:
    """All adapters of a micro-batch in `dtype`, with gradients in `grad_dtype`. `groups`: of the base model's targets;
    `slices`: the rows of each adapter.

    A group that no adapter trains is None. A block's gradients are complete after its backward; `add_gradients` then
    adds them to each adapter's.
    """

    def __init__(
        self,
        groups: Groups,
        slices: Sequence[AdapterSlice],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        *,
        gradient: bool,
    ) -> None:
        self._groups = groups
        self._columns = _columns(slices, groups)
        self._width = -(-(self._columns[-1].stop if self._columns else 0) // _COLUMNS) * _COLUMNS
        self._dtype, self._grad_dtype = dtype, grad_dtype
        self._owners = self._make_owners(slices) if self._columns else None
        self._a: dict[str, torch.Tensor] = {}
        self._b: dict[tuple[str, str], torch.Tensor] = {}
        for group in groups:
            self._fill(group)
        self._grad_a = {name: self._gradients(name, a) for name, a in self._a.items() if gradient}
        self._grad_b = {key: self._gradients(key[0], b) for key, b in self._b.items() if gradient}
        self._blocks = {name: self._of_blocks(name) for name in self._a}

    def group(self, name: str, index: int = 0) -> LowRank | None:
        """The adapters' matrices for a group in block `index` of its kind."""
        blocks = self._blocks.get(name)
        return None if blocks is None else blocks[index]

    def trained(self) -> list[str]:
        """The groups that at least one adapter trains."""
        return list(self._a)

    def add_gradients(self, adapter: Adapter, flat: torch.Tensor, groups: Sequence[str]) -> None:
        """Add the gradients of `adapter` in `groups` to `flat`, a vector of its layout."""
        columns = next(c for c in self._columns if c.adapter is adapter)
        for group in groups:
            projections = self._groups[group]
            for place, (a, b) in enumerate(_factors(adapter, flat, group, projections)):
                first = place * self._width
                a.add_(self._grad_a[group][..., first + columns.start : first + columns.stop, :])
                b.add_(self._grad_b[group, projections[place]][..., columns.start : columns.stop], alpha=adapter.scale)

    @property
    def columns(self) -> int:
        """R."""
        return self._width

    @property
    def adapters(self) -> list[Adapter]:
        """Each adapter once."""
        return [columns.adapter for columns in self._columns]

    def _fill(self, group: str) -> None:
        """Concatenate the adapters' matrices of `group`, with zeros where an adapter has none."""
        projections = self._groups[group]
        found = [(c, _factors(c.adapter, c.adapter.weights, group, projections)) for c in self._columns]
        trained = [(c, factors) for c, factors in found if factors]
        if not trained:
            return
        # Zeros only where some remain: matrices of experts are large.
        filled = sum(c.stop - c.start for c, _ in trained) == self._width
        new = functools.partial(
            torch.empty if filled else torch.zeros, dtype=self._dtype, device=trained[0][0].adapter.weights.device
        )
        likes = trained[0][1]
        (*stacked, _, inputs) = likes[0][0].shape
        a_all = new(*stacked, len(projections) * self._width, inputs)
        for place, projection in enumerate(projections):
            b_all = new(*likes[place][1].shape[:-1], self._width)
            for c, factors in trained:
                a, b = factors[place]
                first = place * self._width
                a_all[..., first + c.start : first + c.stop, :] = a
                torch.mul(b, c.adapter.scale, out=b_all[..., c.start : c.stop])  # scale before rounding, in one pass
            self._b[group, projection] = b_all
        self._a[group] = a_all

    def _make_owners(self, slices: Sequence[AdapterSlice]) -> Owners:
        device = self._columns[0].adapter.weights.device
        table = [(c.start, columns_of(self._groups, c.stop - c.start)) for c in self._columns]
        widest = max(count for _, count in table)
        places = {id(c.adapter): place for place, c in enumerate(self._columns)}
        if any(part.adapter is None for part in slices):
            table.append((0, 0))
        columns = to_device(np.array(table, np.int32), device)
        if len(slices) == 1:
            return Owners(columns, widest)
        of_tokens = np.zeros(slices[-1].stop, np.int64)
        others = np.ones((slices[-1].stop, self._width), np.bool_)
        for part in slices:
            place = len(self._columns) if part.adapter is None else places[id(part.adapter)]
            start, count = table[place]
            of_tokens[part.start : part.stop] = place
            others[part.start : part.stop, start : start + count] = False
        return Owners(columns, widest, to_device(of_tokens, device), to_device(others, device))

    def _of_blocks(self, group: str) -> list[LowRank]:
        """Of each block of its kind. Made once, since a block asks several times and each view takes the host's time,
        which a GPU waits for where matrices are small."""
        assert self._owners is not None
        keys = [(group, projection) for projection in self._groups[group]]
        matrices = zip(self._a[group].unbind(), zip(*(self._b[key].unbind() for key in keys), strict=True), strict=True)
        if group not in self._grad_a:
            return [LowRank(a, b, self._owners) for a, b in matrices]
        grad_a, grad_b = self._grad_a[group].unbind(), zip(*(self._grad_b[key].unbind() for key in keys), strict=True)
        return [LowRank(*each, self._owners, *grads) for each, *grads in zip(matrices, grad_a, grad_b, strict=True)]

    def _gradients(self, group: str, matrices: torch.Tensor) -> torch.Tensor:
        """Memory for the gradients of `matrices`. Zeros, since the head adds to them and a model may leave projections
        out; those of experts are large, and written whole."""
        new = torch.empty_like if _of_experts(group) else torch.zeros_like
        return new(matrices, dtype=self._grad_dtype)


def _factors(
    adapter: Adapter, flat: torch.Tensor, group: str, projections: Sequence[str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each of the group's `projections` in all blocks, as views of `flat`; none if the adapter does not
    train the group."""
    pairs = ((adapter.stack(flat, group, projection, factor) for factor in "AB") for projection in projections)
    found = [(a, b) for a, b in pairs if a is not None and b is not None]
    assert len(found) in (0, len(projections)), "attention, MLP and LM head are trained wholly or not at all"
    return found


def _columns(slices: Sequence[AdapterSlice], groups: Groups) -> list[Columns]:
    found: list[Columns] = []
    for adapter in {id(part.adapter): part.adapter for part in slices if part.adapter is not None}.values():
        start = columns_of(groups, found[-1].stop) if found else 0
        found.append(Columns(adapter, start, start + adapter.config.rank))
    return found
