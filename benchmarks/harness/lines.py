"""The output of a measurement: one JSON object per line. Everything else that it prints goes to the log."""

import json
import sys
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Line:
    """One number. `name` is how ratios refer to it.

    `seconds`: the median behind `value`, if that is a rate. `peak_gib`: the peak memory of the device meanwhile (None
    on a CPU). `note`: settings that the name does not show. `error`: why there is no value. `skipped`: why it was not
    tried.
    """

    name: str
    value: float | None = None
    unit: str = ""
    seconds: float | None = None
    peak_gib: float | None = None
    note: str = ""
    error: str = ""
    skipped: str = ""

    def emit(self) -> None:
        """Print the line for the process that started this one."""
        print(json.dumps({"line": self.name} | {k: v for k, v in asdict(self).items() if v not in (None, "")}))
        sys.stdout.flush()


def parse(text: str) -> Line | None:
    """Parse a line of output; None if it is for the log."""
    if not text.startswith('{"line":'):
        return None
    found = json.loads(text)
    return Line(**{field.name: found[field.name] for field in fields(Line) if field.name in found})


class Unavailable(Exception):
    """A measurement lacks something that it needs; the message says what."""


def failed(name: str, error: BaseException) -> Line:
    """`name` without a value."""
    if isinstance(error, Unavailable):
        return Line(name, skipped=str(error))
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return Line(name, error=text[:300])
