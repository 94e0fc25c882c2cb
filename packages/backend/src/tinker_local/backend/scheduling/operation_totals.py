"""Totals of the operations that have ended: how long they took and waited, by kind, and what each owner asked for."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tinker_local.backend.scheduling.operations import Operation, Timeline

BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds."""

TOKENS = {"tokens": "trained", "prompt_tokens": "prompt", "sampled_tokens": "sampled"}
"""What an owner's tokens are called, by the facts of a timeline."""

NANO = 1e-9


@dataclass(slots=True, eq=False)
class Histogram:
    """`counts`: how many values are at most each of `BOUNDS`, not counted before, and how many are larger than all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, int]]:
        """As Prometheus has them: each bound, and how many values are not above it."""
        found, below = [], 0
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found


class OperationTotals:
    """Counts each operation that `add` gets. `seconds`, `waited`: by kind, of those that succeeded. `ended`: by owner
    and kind. `tokens`: of those that succeeded, by owner and one of the values of `TOKENS`. Used on the event loop."""

    def __init__(self) -> None:
        self.seconds: dict[str, Histogram] = {}
        self.waited: dict[str, Histogram] = {}
        self.ended: Counter[tuple[str, ...]] = Counter()
        self.tokens: Counter[tuple[str, ...]] = Counter()

    def add(self, operation: Operation[Any]) -> None:
        """Count an operation that has ended."""
        kind, timeline = operation.kind, operation.timeline
        if operation.owner:
            self.ended[operation.owner, kind] += 1
        if operation.failed:
            return
        self.seconds.setdefault(kind, Histogram()).add((timeline.ended - timeline.stages[0][1]) * NANO)
        self.waited.setdefault(kind, Histogram()).add(_waited(timeline))
        if operation.owner:
            for name, number in (timeline.facts or {}).items():
                if name in TOKENS and kind != "forward":
                    self.tokens[operation.owner, TOKENS[name]] += number


def _waited(timeline: Timeline) -> float:
    """Seconds in the stage `waiting`."""
    ends = [*(began for _, began in timeline.stages[1:]), timeline.ended]
    return NANO * sum(
        max(0, end - began) for (stage, began), end in zip(timeline.stages, ends, strict=True) if stage == "waiting"
    )
