"""The embedding and the LM head in 8 bits (`codes.py`), tied or not. Each is a matrix of a vocabulary, [V, H], the
largest of many models, so that it is never made whole: rows are looked up, or multiplied by a piece at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.weights.codes import Packed, stacked, to_codes
from tinker_local.backend.weights.packed import CODES, ORDER, SCALES, ZEROS, PackedLinear, PackedMatrix, tensors_of
from tinker_local.backend.weights.precision import BITS, GROUPS, PIECE, Packable, has_groups
from tinker_local.types import UnsupportedError

_CPU_PIECE = 2**18
"""The same of `PIECE` on a CPU, whose caches hold so many: a product with one row is about three times as fast."""
_ROUNDING = 0.05
"""Of a row's norm, the most that codes of 8 bits move it: half of a code where the largest of 128 numbers is 127, and
the rounding of its scale."""


def pieces(stored: Packed, dtype: torch.dtype, piece: int | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of the matrix that is `stored`, in `dtype`, with their places: about `piece` numbers at a time, or what
    suits the device."""
    count, inputs = len(stored.codes), stored.codes.shape[1]
    piece = piece or (PIECE if stored.codes.is_cuda else _CPU_PIECE)
    for start in range(0, count, step := max(1, piece // inputs)):
        rows = slice(start, min(start + step, count))
        yield rows, stored.rows(rows).numbers(dtype)


def rows_of(stored: Packed, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `ids` [...] of the matrix that is `stored`, [..., H] in `dtype`."""
    flat = ids.flatten()
    found = Packed(stored.codes.index_select(0, flat), stored.scales.index_select(0, flat)).numbers(dtype)
    return found.view(*ids.shape, -1)


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMatrix(PackedMatrix):
    """A `FrozenMatrix` of 8 bits. In memory besides it, while one multiplies: numbers of a piece, as `pieces` makes
    them, in `dtype`, and sums of a product with its rows in float32."""

    piece: int | None = None

    def times(self, x: torch.Tensor) -> torch.Tensor:
        product = x.new_empty(len(x), self.outputs)
        for rows, weight in self._pieces():
            torch.mm(x, weight.T, out=product[:, rows])
        return product

    def times_plus(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.add_times(given.expand(len(x), -1).clone(), x)

    def add_times(self, onto: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for rows, weight in self._pieces():
            onto[:, rows].addmm_(x, weight.T)
        return onto

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        return self._back(grad).to(grad.dtype)

    def add_back(self, onto: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return onto.add_(self._back(grad))

    def _pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        return pieces(self.stored, self.dtype, self.piece)

    def _back(self, grad: torch.Tensor) -> torch.Tensor:
        """grad W, rounded to float32: sums over a vocabulary would lose in each piece what bfloat16 has no bits for."""
        total = grad.new_zeros(len(grad), self.inputs, dtype=torch.promote_types(grad.dtype, torch.float32))
        for rows, weight in self._pieces():
            of_rows = grad[:, rows]
            if grad.is_cuda and grad.dtype != total.dtype:
                total += torch.mm(of_rows, weight, out_dtype=total.dtype)
            else:
                total.addmm_(of_rows.to(total.dtype), weight.to(total.dtype))
        return total


class PackedHead(PackedLinear):
    """An LM head in 8 bits. Reading `weight` makes the whole matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x, self.matrix())
        return product if self.bias is None else product + self.bias

    def matrix(self) -> VocabularyMatrix:
        found = super().matrix()
        return VocabularyMatrix(found.stored, found.dtype)


class _Product(torch.autograd.Function):
    """x W^T of a matrix that is made in pieces, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: VocabularyMatrix) -> torch.Tensor:
        ctx.matrix = matrix
        return matrix.times(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.matrix.back(grad.flatten(0, -2)).view(*grad.shape[:-1], -1), None


class _PackedRows(torch.nn.Embedding):
    """Looks up rows of codes. Between `torch.nn.Embedding` and the classes of transformers that multiply what it
    gives (see `_class_of`), which find the dtype at `weight`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return rows_of(tensors_of(self), input, self.weight.dtype)


def _class_of(original: Any) -> Any:
    """The class `original` with `_PackedRows` in place of `torch.nn.Embedding`."""
    bases = (_PackedRows,) if original is torch.nn.Embedding else (original, _PackedRows)
    return type(f"Packed{original.__name__}", bases, {})


def shape_of(module: Any) -> tuple[int, int]:
    """[out, in] of a packed linear module, or [V, H] of a packed embedding."""
    if isinstance(module, torch.nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return module.out_features, module.in_features


def plain_product(head: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """x W^T by the numbers of an LM head, packed or not, without its bias."""
    if not isinstance(head, PackedHead):
        return torch.nn.functional.linear(x, head.weight)
    return torch.cat([torch.nn.functional.linear(x, rows) for _, rows in pieces(tensors_of(head), x.dtype)], -1)


def is_tied(model: Any) -> bool:
    """Whether the LM head of transformers' `model`, packed or not, is its embedding's matrix."""
    head, embedding = model.lm_head, model.get_input_embeddings()
    if isinstance(head, PackedHead):
        return head.qweight is embedding.qweight
    return bool(head.weight is embedding.weight)


def packable_vocabulary(model: Any) -> Packable | None:
    """What `pack_vocabulary` packs of transformers' `model`; None if its rows cannot be divided into groups."""
    head = model.lm_head
    return Packable.of([(head.out_features, head.in_features)] * (1 if is_tied(model) else 2))


def pack_vocabulary(model: Any, precision: str, device: torch.device | None = None) -> None:
    """Replace the matrices of embedding and LM head of transformers' `model` by codes, which are made on `device`, a
    piece at a time, and stay where the matrices are. UnsupportedError if its embedding is none that looks up rows."""
    embedding, head, tied = model.get_input_embeddings(), model.lm_head, is_tied(model)
    if not isinstance(embedding, torch.nn.Embedding):
        raise UnsupportedError(f"{model.name_or_path}: its embedding is a {type(embedding).__name__}, which {_REASON}")
    ids = torch.tensor([0, embedding.num_embeddings - 1], device=embedding.weight.device)
    before = embedding(ids).double()
    codes = _codes(embedding.weight, precision, device)
    dtype, place = embedding.weight.dtype, embedding.weight.device
    del embedding.weight
    no_numbers = torch.empty(0, dtype=dtype, device=place)  # for those who ask for its dtype and where it is
    tensors = {"weight": no_numbers, CODES: codes.codes, SCALES: codes.scales, ZEROS: None, ORDER: None}
    for name, tensor in tensors.items():
        parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        embedding.register_parameter(name, parameter)
    embedding.__class__, embedding.curved = _class_of(type(embedding)), codes.curved
    _compare(embedding, ids, before, model.name_or_path)
    model.lm_head = PackedHead(head, codes if tied else _codes(head.weight, precision, device))
    if tied:
        model.lm_head.qweight, model.lm_head.scales = embedding.qweight, embedding.scales


_REASON = "is not packed: --head-precision packs those that look up rows, and multiply them or add to them"


def _compare(embedding: torch.nn.Embedding, ids: torch.Tensor, before: torch.Tensor, where: str) -> None:
    """UnsupportedError if the packed `embedding` gives something else than `before` for `ids`."""
    try:
        apart = (embedding(ids).double() - before).norm(dim=-1)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        name = type(embedding).__name__.removeprefix("Packed")
        raise UnsupportedError(f"{where}: its embedding is a {name}, which {_REASON}") from error
    if bool((apart > _ROUNDING * before.norm(dim=-1)).any()):
        raise UnsupportedError(
            f"{where}: rows of its embedding in 8 bits are {float(apart.max()):.2g} from what they are in its dtype, "
            f"which is more than rounding; serve it without --head-precision"
        )


def _codes(weight: torch.Tensor, precision: str, device: torch.device | None) -> Packed:
    """Of `weight` [V, H], where it is. ValueError if its rows cannot be divided into groups."""
    if not has_groups(weight.shape[1]):
        raise ValueError(f"rows of {weight.shape[1]} numbers cannot be divided into groups of {GROUPS[-1]}")
    step = max(1, PIECE // weight.shape[1])
    made = (to_codes(rows.to(device), BITS[precision]) for rows in weight.detach().split(step))
    return stacked(made, weight.device)
