"""Routes: which experts the positions of a sequence went to, as a sampler records them and a trainer takes them again.

Routes are arrays [N, L, K] of expert numbers: N positions, L layers with routed experts, K experts of a position. Where
all numbers of a position are the largest of the dtype, nothing is recorded of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RouteArray = npt.NDArray[Any]
"""[N, L, K] of uint8 or int16."""


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The layers of a model that have routed experts, ascending, and how many of how many `experts` a position takes:
    `chosen`. Trainer and sampler have the same routes if these are equal."""

    layers: tuple[int, ...]
    chosen: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of routes."""
        return np.dtype(np.uint8 if self.experts < 256 else np.int16)

    @property
    def position_bytes(self) -> int:
        """Of the routes of one position."""
        return len(self.layers) * self.chosen * self.dtype.itemsize

    def unrecorded(self, positions: int) -> RouteArray:
        """Routes of positions of which nothing is recorded."""
        return np.full((positions, len(self.layers), self.chosen), np.iinfo(self.dtype).max, self.dtype)

    def fault(self, routes: RouteArray, positions: int) -> str:
        """What is wrong with the `routes` of so many positions, in words; empty if nothing is."""
        shape = (positions, len(self.layers), self.chosen)
        if routes.shape != shape or routes.dtype != self.dtype:
            return f"are {routes.dtype} {list(routes.shape)}, not {self.dtype} {list(shape)}"
        numbers = routes[recorded(routes)]
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.experts:
            return f"name experts {numbers.min()} to {numbers.max()} of {self.experts}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Of one sequence: those of its first positions, which may be the same array as others have, and its own."""

    common: RouteArray
    own: RouteArray

    def __len__(self) -> int:
        return len(self.common) + len(self.own)

    def read(self, start: int, stop: int) -> RouteArray:
        """Those of the positions [start, stop)."""
        split = len(self.common)
        parts = self.common[start:stop], self.own[max(start - split, 0) : max(stop - split, 0)]
        return np.concatenate(parts)


def recorded(routes: RouteArray) -> npt.NDArray[np.bool_]:
    """Of which positions there are routes, [N]."""
    found: npt.NDArray[np.bool_] = routes[:, 0, 0] != np.iinfo(routes.dtype).max
    return found


REPLAYED = "routes_replayed:mean"
"""The metric of a request to a model with routed experts: the share of its positions that took recorded experts."""


def replayed_share(routes: Sequence[RouteArray | None], positions: int) -> float:
    """The share of so many positions of which there are `routes`."""
    return sum(int(recorded(each).sum()) for each in routes if each is not None) / max(positions, 1)


def first_difference(one: RouteArray | None, other: RouteArray | None, positions: int) -> int:
    """The first of so many positions whose routes differ; `positions` if none does. None: nothing is recorded."""
    if one is None and other is None:
        return positions
    if one is None or other is None:
        present = one if one is not None else other
        assert present is not None
        different = recorded(present[:positions])
    else:
        different = (one[:positions] != other[:positions]).any((1, 2))
    return int(different.argmax()) if different.any() else positions


def digests(routes: RouteArray | None, positions: int) -> npt.NDArray[np.int32]:
    """A number for the routes of each position, [N], equal for equal ones: to bring them together, not to tell them
    apart. 0 where there are none."""
    if routes is None:
        return np.zeros(positions, np.int32)
    flat = np.ascontiguousarray(routes).reshape(positions, -1).view(np.uint8)
    words = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8))).view(np.uint64)
    factors = np.random.default_rng(0).integers(2**63, 2**64 - 1, words.shape[1], np.uint64) | np.uint64(1)
    mixed = (words * factors).sum(1, dtype=np.uint64) >> np.uint64(33)
    return np.where(recorded(routes), mixed.astype(np.int32), 0)
