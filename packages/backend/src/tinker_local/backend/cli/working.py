"""Says that a command is at work: on a terminal with a line that moves, elsewhere with a line every `SECONDS`."""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Self

import click

SECONDS = 10.0
"""From one line to the next."""

REDRAW = 0.2
"""Seconds from one drawing of the bar to the next."""

ERASE = "\r\x1b[2K"


def on_terminal() -> bool:
    """Whether standard error is a terminal that can show a bar."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Working:
    """What a command does now, in lines. Call it with a sentence, without its end, as each stage begins."""

    def __init__(self, stage: str) -> None:
        self._began = time.monotonic()
        self._ended = threading.Event()
        self(stage)
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="working")
        self._thread.start()

    def __call__(self, stage: str) -> None:
        self._stage = stage
        click.echo(f"{stage} ...", err=True)

    def _repeat(self) -> None:
        while not self._ended.wait(SECONDS):
            click.echo(f"{self._stage} ... {time.monotonic() - self._began:.0f} s", err=True)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        """Nothing is done any more. A thread that a stopped terminal holds up is left behind after a second."""
        self._ended.set()
        self._thread.join(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Bar(Working):
    """The same as a line that moves, the last of a terminal.

    Its cursor stays at the line's start, so that what libraries and other processes write takes the bar's place. While
    tqdm shows a bar in this process, this one is not drawn. The cursor is never hidden: a killed process leaves none.
    """

    def __init__(self, stage: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16, pulse_style="green"),
            TimeElapsedColumn(),
        )
        self._console = Console(stderr=True)
        self._shown = Progress(*columns, console=self._console)  # never started: it would hide the cursor
        self._task = self._shown.add_task("", total=None)
        super().__init__(stage)

    def __call__(self, stage: str) -> None:
        self._shown.update(self._task, description=stage)
        self._draw()

    def _repeat(self) -> None:
        while not self._ended.wait(REDRAW):
            self._draw()
        _write(ERASE)

    def _draw(self) -> None:
        if _tqdm_shows_a_bar():
            return
        with self._console.capture() as drawn:
            self._console.print(self._shown.get_renderable())
        _write(f"{ERASE}{drawn.get().rstrip()}\r")


def _write(text: str) -> None:
    with suppress(OSError):  # the terminal is closed: no reason to end what the command does
        click.echo(text, nl=False, err=True)


def _tqdm_shows_a_bar() -> bool:
    shown = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return len(getattr(shown, "_instances", ())) > 0


def working(stage: str) -> Working:
    """A bar or lines; leaving its context ends it."""
    return (Bar if on_terminal() else Working)(stage)
