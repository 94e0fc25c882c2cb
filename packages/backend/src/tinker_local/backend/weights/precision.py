"""In how few bits the frozen weights of layers, embedding and LM head may be. Imports no torch: plans know it, too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Bits = Literal[8, 4]

BITS: Mapping[str, Bits] = {"int8": 8, "int4": 4}
"""By the names of `options.Precision`, which are kinds of frozen matrices."""

WORDS: Mapping[str, str] = {"int8": "int8", "int4": "int4-curved"}
"""What records call a base that has the precision of this name. Another word for other numbers: an adapter belongs to
those beside which it learned."""

EVEN = "int4"
"""What records of earlier servers call 4 bits whose codes had even steps. No server makes them now."""

DENSE = "dense"
"""What a base of no fewer bits than its dtype is called, as a kind of frozen matrix is."""

_AND_HEAD = "+head-"

PIECE = 2**25
"""Numbers of a packed embedding or LM head that exist at a time in the model's dtype: 8,192 rows of 4,096."""

GROUPS = (128, 64, 32)
"""How many numbers of a row may share a scale. Narrow models have rows that 128 does not divide."""

HALF = 16
"""Two codes of 4 bits are in one byte, of numbers that lie so far apart: of each 32 of a row the first 16 are in the
low halves of bytes, the others in the high ones. A kernel then reads and writes neighbours without an exchange between
its threads."""

_LARGEST_GROUP: Mapping[Bits, int] = {8: 128, 4: 32}
"""By the bits of codes. 4 bits leave errors that smaller groups make smaller; in 8 bits they hardly show."""


def word_of(layers: str | None, head: str | None) -> str | None:
    """How records call a base whose layers are in `layers`, an option or a published checkpoint's word, and whose
    embedding and LM head in `head`, an option, such as int4-curved+head-int8; None: dense."""
    word = WORDS.get(layers, layers) if layers else None
    return word if head is None else f"{word or DENSE}{_AND_HEAD}{head}"


def parts_of(word: str | None) -> tuple[str | None, str | None]:
    """In what the layers are, and the embedding and LM head, by such a word; None: dense."""
    layers, _, head = (word or DENSE).partition(_AND_HEAD)
    return None if layers == DENSE else layers, head or None


def option_of(layers: str | None) -> str | None:
    """The option that makes layers that records call `layers`; None if there is none: they were dense, a published
    checkpoint's, or in bits that no server makes now."""
    return next((precision for precision, each in WORDS.items() if each == layers), None)


def base_in(word: str | None, more: str = "") -> str:
    """A base model, in words, that records call `word`, and `more` of the codes of its layers."""
    layers, head = parts_of(word)
    option = option_of(layers)
    if layers is None:
        found = "a dense base"
    elif layers == EVEN:
        found = f"a base in 4 bits of even steps ({EVEN}), as earlier servers made it"
    else:
        found = f"a base in {layers}" if option is None else f"a base in {BITS[option]} bits ({layers}{more})"
    return found if head is None else f"{found} with embedding and LM head in {BITS[head]} bits ({head})"


def group_of(inputs: int, bits: Bits) -> int | None:
    """How many numbers of a row of `inputs` share a scale where codes have `bits`: the largest of `GROUPS` that may be
    and divides it; None: none does."""
    return next((size for size in GROUPS if size <= _LARGEST_GROUP[bits] and inputs % size == 0), None)


def has_groups(inputs: int) -> bool:
    """Whether rows of `inputs` numbers can be divided into groups, with any bits."""
    return inputs % GROUPS[-1] == 0


@dataclass(frozen=True, slots=True)
class Packable:
    """What of a model can be in fewer bits. `numbers` in its matrices; `scales` of their groups, by the bits of codes;
    `largest`: numbers of the largest matrix, two of which one may be joined; `scale_bytes`: of a group's scale, and
    zero point if it has one; `stack`: numbers of the largest stack of experts, which are not in `largest`."""

    numbers: int
    scales: Mapping[Bits, int]
    largest: int
    scale_bytes: int = 2
    stack: int = 0

    @staticmethod
    def of(matrices: Iterable[tuple[int, int]], stacks: Iterable[tuple[int, int, int]] = ()) -> "Packable | None":
        """`matrices`: [out, in] of each; `stacks`: [E, out, in] of experts. None if there are none, or one cannot be
        divided into groups."""
        numbers = largest = stack = 0
        scales = dict.fromkeys(BITS.values(), 0)
        for count, outputs, inputs in (*((1, *each) for each in matrices), *stacks):
            size = count * outputs * inputs
            for bits in scales:
                if (group := group_of(inputs, bits)) is None:
                    return None
                scales[bits] += size // group
            numbers += size
            largest, stack = (max(largest, size), stack) if count == 1 else (largest, max(stack, size))
        return Packable(numbers, scales, largest, stack=stack) if numbers else None

    def bytes(self, bits: Bits) -> int:
        """Of codes of `bits` and all scales."""
        return self.numbers * bits // 8 + self.scale_bytes * self.scales[bits]
