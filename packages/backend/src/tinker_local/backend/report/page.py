"""The page of a report, in Markdown, and what is taken out of messages before they are shown on it."""

import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Section:
    """A part of the page: a table, with `notes` below it. `rows`: of as many cells as `columns`."""

    title: str
    columns: Sequence[str] = ()
    rows: list[Sequence[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"## {self.title}", ""]
        if self.rows:
            lines += [_row(self.columns), _row(["---"] * len(self.columns)), *map(_row, self.rows), ""]
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


_PATH = re.compile(r"(?<![\w/.])(?:~|[A-Za-z]:|\.{1,2})?(?:[/\\][^\s/\\'\"`:;,()\[\]{}]+)+[/\\]?")
_KEY = re.compile(r"\b(?:tml-|hf_|sk-|tk_)[\w-]{4,}")
SHORTEST = 3
"""Letters of a name that is taken out; a shorter one may be a part of any word."""


class Private:
    """What must not be on the page: `names` (of the model, say), this machine's and its user's, paths and keys."""

    def __init__(self, names: Iterable[str]) -> None:
        home = Path.home()
        found = {*names, str(home), home.name, os.environ.get("USER", ""), socket.gethostname(), str(Path.cwd())}
        found |= {value for name, value in os.environ.items() if name.endswith(("_KEY", "_TOKEN", "_SECRET"))}
        self._names = sorted((name for name in found if len(name) >= SHORTEST), key=len, reverse=True)

    def without(self, text: str) -> str:
        """`text` in one line, with a placeholder for each of them."""
        text = _PATH.sub("<path>", _KEY.sub("<key>", text))
        for name in self._names:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
        return " ".join(text.split())
