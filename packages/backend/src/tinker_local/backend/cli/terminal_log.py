"""The server's own log, on standard error: a line with the time for each record, or a JSON object.

A thread writes them, so that no request waits for a terminal (after Ctrl-S) or a pipe that is not read.
"""

import logging
import time

from tinker_local.backend.cli.working import ERASE, Bar
from tinker_local.backend.hosting.log_files import Line, LogFile, as_json

STDERR = 2


class TerminalLog(logging.Handler):
    """Writes records to standard error, with `owner` and `request` if a record has these attributes. `as_objects`: as
    JSON, an object a line. `bar`: what the terminal shows below the lines until it ends."""

    def __init__(self, *, as_objects: bool, bar: Bar | None = None) -> None:
        super().__init__()
        self._bar = bar
        self._file = LogFile(STDERR, as_json if as_objects else self._as_text)
        self._errors = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in ("owner", "request") if (value := getattr(record, name, None))}
        if record.exc_info:
            line["error"] = self._errors.formatException(record.exc_info)
        self._file.write(line)

    def _as_text(self, line: Line) -> bytes:
        return (b"" if self._bar is None or self._bar.ended else ERASE.encode()) + as_text(line)

    def flush(self) -> None:
        self._file.flush()

    def end(self) -> None:
        """Write what waits. Not `close`, which every `logging.config.dictConfig` calls, as vLLM does at its import."""
        self._file.close()


def as_text(line: Line) -> bytes:
    """`15:04:05 text [owner, request]`, in the time zone of the machine; warnings with their level and logger."""
    when = time.strftime("%H:%M:%S", time.localtime(float(str(line["time"]))))
    if "lost_lines" in line:
        return f"{when} WARNING {line['lost_lines']} lines of this log are lost\n".encode()
    level = str(line["level"])
    head = "" if level in ("INFO", "DEBUG") else f"{level} {line['logger']}: "
    named = ", ".join(str(line[name]) for name in ("owner", "request") if line.get(name))
    text = f"{when} {head}{_one_line(str(line['message']))}{f' [{_one_line(named)}]' if named else ''}\n"
    if error := line.get("error"):
        text += f"{error}\n"
    return text.encode("utf-8", "replace")


def _one_line(text: str) -> str:
    """`text` without what ends a line or moves a terminal's cursor: names and errors come from clients."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
