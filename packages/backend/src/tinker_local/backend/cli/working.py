"""Says that a command is at work: on a terminal with a line that moves, elsewhere with a line every `SECONDS`."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

SECONDS = 10.0


class Working:
    """What a command does now. Call it with a sentence, without its end, as each stage begins."""

    def __init__(self, stage: str) -> None:
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._shown = None
        self._thread: threading.Thread | None = None
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(pulse_style="green"),
                TimeElapsedColumn(),
            )
            self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._shown.add_task("", total=None)
            self._shown.start()
        self(stage)
        if self._shown is None:
            self._thread = threading.Thread(target=self._repeat, daemon=True, name="working")
            self._thread.start()

    def __call__(self, stage: str) -> None:
        self._stage = stage
        if self._shown is None:
            click.echo(f"{stage} ...", err=True)
        else:
            self._shown.update(self._task, description=stage)

    def _repeat(self) -> None:
        while not self._ended.wait(SECONDS):
            click.echo(f"{self._stage} ... {time.monotonic() - self._began:.0f} s", err=True)

    def end(self) -> None:
        """Nothing is done any more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._shown is not None:
            self._shown.stop()


@contextmanager
def working(stage: str) -> Iterator[Working]:
    """A `Working` that ends with the context."""
    now = Working(stage)
    try:
        yield now
    finally:
        now.end()
