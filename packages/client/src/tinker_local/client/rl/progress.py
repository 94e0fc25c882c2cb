"""Counts of what a rollout has done, and a progress bar."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

Report: TypeAlias = Callable[["RolloutStats"], None]


@dataclass(slots=True)
class RolloutStats:
    """Counts of one rollout, updated while it runs.

    `total`, `done`, `failed`: trajectories (`done` includes failed ones). `turns`: replies. `tokens`: sampled tokens.
    `images`: images that environments have shown. `reward_sum`: over the trajectories that did not fail.
    """

    total: int
    done: int = 0
    failed: int = 0
    turns: int = 0
    tokens: int = 0
    images: int = 0
    reward_sum: float = 0.0

    @property
    def mean_reward(self) -> float:
        """Mean return of the trajectories that ended and did not fail; NaN before there is one."""
        ended = self.done - self.failed
        return self.reward_sum / ended if ended else float("nan")


@contextmanager
def open_progress(option: Literal["auto"] | Report | None, stats: RolloutStats) -> Iterator[Report]:
    """Yields the function to call whenever `stats` changes."""
    if callable(option):
        yield option
    elif option == "auto" and sys.stderr is not None and sys.stderr.isatty():
        with _bar(stats) as report:
            yield report
    else:
        yield _silent


def _silent(stats: RolloutStats) -> None:
    """Show nothing."""


@contextmanager
def _bar(stats: RolloutStats) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("rollout"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[counts]}"), console=Console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task("", total=stats.total, counts="")

        def report(stats: RolloutStats) -> None:
            counts = (
                f"reward {stats.mean_reward:.3f}  turns {stats.turns}  tokens {stats.tokens}  images {stats.images}"
            )
            if stats.failed:
                counts += f"  failed {stats.failed}"
            progress.update(bar, completed=stats.done, counts=counts)

        yield report
