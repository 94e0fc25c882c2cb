"""Totals of the operations that have ended: how long they took and waited, by kind, and what each owner asked for."""

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from tinker_local.backend.scheduling.operations import NANO, WAITING, Operation, stages

BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds of an operation."""

TOKEN_BOUNDS = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds of a token."""

TOKENS = {"tokens": "trained", "prompt_tokens": "prompt", "sampled_tokens": "sampled"}
"""What an owner's tokens are called, by the facts of a timeline."""


@dataclass(slots=True, eq=False)
class Histogram:
    """`counts`: how many values are at most each of `bounds`, not counted before, and how many are larger than all."""

    bounds: tuple[float, ...] = BOUNDS
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, int]]:
        """As Prometheus has them: each bound, and how many values are not above it."""
        found, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class OperationTotals:
    """Counts each operation that `add` gets. `seconds`, `waited`: by kind, of those that succeeded. `in_stages`: their
    seconds, by kind and stage. `ended`: by owner and kind. `tokens`: of those that succeeded, by owner and one of the
    values of `TOKENS`. Used on the event loop."""

    def __init__(self) -> None:
        self.seconds: dict[str, Histogram] = {}
        self.waited: dict[str, Histogram] = {}
        self.in_stages: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.ended: Counter[tuple[str, ...]] = Counter()
        self.tokens: Counter[tuple[str, ...]] = Counter()

    def add(self, operation: Operation[Any]) -> None:
        """Count an operation that has ended."""
        kind, timeline = operation.kind, operation.timeline
        if operation.owner:
            self.ended[operation.owner, kind] += 1
        if operation.failed:
            return
        self.seconds.setdefault(kind, Histogram()).add((timeline.ended - timeline.stages[0][1]) / NANO)
        waited = 0.0
        for stage, began, ended in stages(timeline, timeline.ended):
            seconds = (ended - began) / NANO
            self.in_stages[kind, stage] += seconds
            waited += seconds if stage in WAITING else 0.0
        self.waited.setdefault(kind, Histogram()).add(waited)
        if operation.owner:
            for name, number in (timeline.facts or {}).items():
                if name in TOKENS and kind != "forward":
                    self.tokens[operation.owner, TOKENS[name]] += number
