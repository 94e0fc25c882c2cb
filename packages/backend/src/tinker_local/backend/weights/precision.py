"""In how few bits the frozen weights of layers may be. Imports no torch, so that plans know it too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Bits = Literal[8, 4]

BITS: Mapping[str, Bits] = {"int8": 8, "int4": 4}
"""By the names of `options.Precision`, which are kinds of frozen matrices."""

DENSE = "dense"
"""What a base of no fewer bits than its dtype is called, as a kind of frozen matrix is."""

GROUPS = (128, 64, 32)
"""How many numbers of a row may share a scale. Narrow models have rows that 128 does not divide."""


def base_in(precision: str | None) -> str:
    """A base model in `precision`, in words."""
    if precision is None:
        return "a dense base"
    return f"a base in {BITS[precision]} bits ({precision})" if precision in BITS else f"a base in {precision}"


def group_of(inputs: int) -> int | None:
    """How many numbers of a row of `inputs` share a scale: the largest of `GROUPS` that divides it; None: none does."""
    return next((size for size in GROUPS if inputs % size == 0), None)


@dataclass(frozen=True, slots=True)
class Packable:
    """What of a model can be in fewer bits. `numbers` in its matrices, `scales` of their groups; `largest`: numbers of
    the largest matrix, two of which one may be joined; `scale_bytes`: of a group's scale, and zero point if it has
    one; `stack`: numbers of the largest stack of experts, which are not in `largest`."""

    numbers: int
    scales: int
    largest: int
    scale_bytes: int = 2
    stack: int = 0

    @staticmethod
    def of(matrices: Iterable[tuple[int, int]], stacks: Iterable[tuple[int, int, int]] = ()) -> "Packable | None":
        """`matrices`: [out, in] of each; `stacks`: [E, out, in] of experts. None if there are none, or one cannot be
        divided into groups."""
        numbers = scales = largest = stack = 0
        for count, outputs, inputs in (*((1, *each) for each in matrices), *stacks):
            if (group := group_of(inputs)) is None:
                return None
            size = count * outputs * inputs
            numbers, scales = numbers + size, scales + size // group
            largest, stack = (max(largest, size), stack) if count == 1 else (largest, max(stack, size))
        return Packable(numbers, scales, largest, stack=stack) if numbers else None

    def bytes(self, bits: int) -> int:
        """Of codes of `bits` and all scales."""
        return self.numbers * bits // 8 + self.scale_bytes * self.scales
