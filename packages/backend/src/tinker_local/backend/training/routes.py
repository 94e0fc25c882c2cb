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

    def fault(self, routes: "Routes", positions: int) -> str:
        """What is wrong with the `routes` of so many positions, in words; empty if nothing is."""
        of_position = len(self.layers), self.chosen
        for part in (routes.common, routes.own):
            if part.shape[1:] != of_position or part.dtype != self.dtype:
                return f"are {part.dtype} {list(part.shape[1:])}, not {self.dtype} {list(of_position)} of each position"
            numbers = part[recorded(part)]
            if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.experts:
                return f"name experts {numbers.min()} to {numbers.max()} of {self.experts}"
        return "" if len(routes) == positions else f"are of {len(routes)} positions, not of {positions}"


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Of one sequence: those of its first positions, which may be the same array as others have, and its own."""

    common: RouteArray
    own: RouteArray

    @classmethod
    def of(cls, routes: RouteArray) -> "Routes":
        """Without anything in common."""
        return cls(routes[:0], routes)

    def __len__(self) -> int:
        return len(self.common) + len(self.own)

    def read(self, start: int, stop: int) -> RouteArray:
        """Those of the positions [start, stop)."""
        split = len(self.common)
        if start >= split:
            return self.own[start - split : stop - split]
        return np.concatenate([self.common[start:stop], self.own[: max(stop - split, 0)]])

    def first(self, positions: int) -> "Routes":
        """Those of the first positions, without a copy."""
        split = len(self.common)
        common = self.common if positions >= split else self.common[:positions]
        return Routes(common, self.own[: max(positions - split, 0)])

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which positions are recorded, [N]."""
        return np.concatenate([recorded(self.common), recorded(self.own)])


def recorded(routes: RouteArray) -> npt.NDArray[np.bool_]:
    """Of which positions there are routes, [N]."""
    found: npt.NDArray[np.bool_] = routes[:, 0, 0] != np.iinfo(routes.dtype).max
    return found


def with_common(rows: Sequence[RouteArray], most: int) -> list[Routes]:
    """The routes of sequences, of whose first positions, `most` at most, those that most of them share are one array:
    as many as save the most. Copies."""
    first = rows[0]
    alike = [first_difference(Routes.of(first), Routes.of(each), min(most, len(first), len(each))) for each in rows]
    split = max(alike, key=lambda length: length * sum(length <= each for each in alike))
    common = first[:split].copy()
    return [
        Routes(common, each[split:].copy()) if same >= split else Routes.of(each.copy())
        for each, same in zip(rows, alike, strict=True)
    ]


REPLAYED = "routes_replayed:mean"
"""The metric of a request to a model with routed experts: the share of its positions that took recorded experts."""


def replayed_share(routes: Sequence[Routes | None], positions: int) -> float:
    """The share of so many positions of which there are `routes`."""
    return sum(int(each.known.sum()) for each in routes if each is not None) / max(positions, 1)


def first_difference(one: Routes | None, other: Routes | None, positions: int) -> int:
    """The first of so many positions whose routes differ; `positions` if none does. None: nothing is recorded."""
    if one is None or other is None:
        present = other if one is None else one
        different = np.zeros(0, np.bool_) if present is None else recorded(present.read(0, positions))
        return int(different.argmax()) if different.any() else positions
    start = min(len(one.common), positions) if one.common is other.common else 0
    different = (one.read(start, positions) != other.read(start, positions)).any((1, 2))
    return start + int(different.argmax()) if different.any() else positions


def digests(routes: Routes | None, positions: int, known: dict[int, npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """A number for the routes of each position, [N], equal for equal ones: to bring them together, not to tell them
    apart. 0 where there are none. `known`: those of arrays that several sequences have."""
    if routes is None:
        return np.zeros(positions, np.int32)
    common = known.get(id(routes.common))
    if common is None:
        common = known[id(routes.common)] = _digests(routes.common)
    return np.concatenate([common, _digests(routes.own)])


def _digests(routes: RouteArray) -> npt.NDArray[np.int32]:
    flat = np.ascontiguousarray(routes).reshape(len(routes), routes.shape[1] * routes.shape[2]).view(np.uint8)
    words = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8))).view(np.uint64)
    factors = np.random.default_rng(0).integers(2**63, 2**64 - 1, words.shape[1], np.uint64) | np.uint64(1)
    mixed = (words * factors).sum(1, dtype=np.uint64) >> np.uint64(33)
    return np.where(recorded(routes), mixed.astype(np.int32), 0)
