"""How the numbers of a packed matrix are stored, which both engines have to know before they read one. Imports no
torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tinker_local.backend.weights.precision import GROUPS, Bits

Codes = Literal["int8", "int4", "float8"]
Scales = Literal["float16", "bfloat16", "float32"]

BITS_OF: Mapping[Codes, Bits] = {"int8": 8, "int4": 4, "float8": 8}
"""Bits of a code."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`codes`: integers, or numbers of 8 bits (float8_e4m3fn). `scales`: their dtype. `group`: how many numbers of a
    row share a scale; None: all of them. `zeros`: whether a group has a zero point, which is subtracted from its codes.
    `order`: whether each column names its group; else groups are columns side by side. `curved`: as of
    `codes.Packed`."""

    codes: Codes
    scales: Scales = "bfloat16"
    group: int | None = GROUPS[0]
    zeros: bool = False
    order: bool = False
    curved: bool = False

    @property
    def bits(self) -> Bits:
        return BITS_OF[self.codes]

    @property
    def scale_bytes(self) -> int:
        """Of a group's scale and zero point."""
        return (4 if self.scales == "float32" else 2) + 2 * self.zeros

    def groups(self, inputs: int) -> int:
        """How many scales a row of `inputs` numbers has here. Where the group does not divide the row, a scale is
        there more than once, so that all groups have one size."""
        if self.group is None:
            return 1
        return -(-inputs // self.group) if self.order else inputs // math.gcd(self.group, inputs)


OWN: Mapping[str, Layout] = {"int8": Layout("int8"), "int4": Layout("int4", group=GROUPS[-1], curved=True)}
"""What `codes.to_codes` makes, by the names of `options.Precision`."""
