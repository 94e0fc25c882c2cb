"""In how few bits the frozen weights of layers may be. Imports nothing, so that plans know it too."""

from typing import Literal, get_args

Precision = Literal["int8", "int4"]
Bits = Literal[8, 4]

BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
assert BITS.keys() == {*get_args(Precision)}

GROUPS = (128, 64, 32)
"""How many numbers of a row may share a scale. Narrow models have rows that 128 does not divide."""


def group_of(inputs: int) -> int | None:
    """How many numbers of a row of `inputs` share a scale: the largest of `GROUPS` that divides it; None: none does."""
    return next((size for size in GROUPS if inputs % size == 0), None)
