"""In how few bits the frozen weights of layers may be. Imports no torch, so that plans know it too."""

from collections.abc import Mapping
from typing import Literal

Bits = Literal[8, 4]

BITS: Mapping[str, Bits] = {"int8": 8, "int4": 4}
"""By the names of `options.Precision`, which are kinds of frozen matrices."""

GROUPS = (128, 64, 32)
"""How many numbers of a row may share a scale. Narrow models have rows that 128 does not divide."""


def group_of(inputs: int) -> int | None:
    """How many numbers of a row of `inputs` share a scale: the largest of `GROUPS` that divides it; None: none does."""
    return next((size for size in GROUPS if inputs % size == 0), None)
