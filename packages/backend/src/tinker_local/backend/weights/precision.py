"""In how few bits the frozen weights of layers may be. Imports no torch, so that plans know it too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Bits = Literal[8, 4]

BITS: Mapping[str, Bits] = {"int8": 8, "int4": 4}
"""By the names of `options.Precision`, which are kinds of frozen matrices."""

DENSE = "dense"
"""What a base of no fewer bits than its dtype is called, as a kind of frozen matrix is."""

_AND_HEAD = "+head-"

PIECE = 2**25
"""Numbers of a packed embedding or LM head that exist at a time in the model's dtype: 8,192 rows of 4,096."""

GROUPS = (128, 64, 32)
"""How many numbers of a row may share a scale. Narrow models have rows that 128 does not divide."""


def word_of(layers: str | None, head: str | None) -> str | None:
    """In what a base is, in one word: of its layers, and of embedding and LM head if they are in fewer bits, such as
    int4+head-int8; None: dense."""
    return layers if head is None else f"{layers or DENSE}{_AND_HEAD}{head}"


def parts_of(word: str | None) -> tuple[str | None, str | None]:
    """In what the layers are, and the embedding and LM head, by such a word; None: dense."""
    layers, _, head = (word or DENSE).partition(_AND_HEAD)
    return None if layers == DENSE else layers, head or None


def base_in(precision: str | None, more: str = "") -> str:
    """A base model in `precision`, in words, and `more` of the codes of its layers."""
    layers, head = parts_of(precision)
    found = (
        "a dense base"
        if layers is None
        else f"a base in {BITS[layers]} bits ({layers}{more})"
        if layers in BITS
        else f"a base in {layers}"
    )
    return found if head is None else f"{found} with embedding and LM head in {BITS[head]} bits ({head})"


def group_of(inputs: int) -> int | None:
    """How many numbers of a row of `inputs` share a scale: the largest of `GROUPS` that divides it; None: none does."""
    return next((size for size in GROUPS if inputs % size == 0), None)


@dataclass(frozen=True, slots=True)
class Packable:
    """What of a model can be in fewer bits. `numbers` in its matrices, `scales` of their groups; `largest`: numbers of
    the largest matrix, two of which one may be joined; `scale_bytes`: of a group's scale, and zero point if it has
    one."""

    numbers: int
    scales: int
    largest: int
    scale_bytes: int = 2

    @staticmethod
    def of(matrices: Iterable[tuple[int, int]]) -> "Packable | None":
        """`matrices`: [out, in] of each. None if there are none, or one cannot be divided into groups."""
        numbers = scales = largest = 0
        for outputs, inputs in matrices:
            if (group := group_of(inputs)) is None:
                return None
            numbers, scales = numbers + outputs * inputs, scales + outputs * inputs // group
            largest = max(largest, outputs * inputs)
        return Packable(numbers, scales, largest) if numbers else None

    def bytes(self, bits: int) -> int:
        """Of codes of `bits` and all scales."""
        return self.numbers * bits // 8 + self.scale_bytes * self.scales
