"""`LogFile`: lines that a thread writes, so that no request waits for a disk or a terminal."""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger(__name__)

Line = Mapping[str, object]

MOST_WAITING = 65536
"""Lines that wait for the disk; those beyond are lost."""

AT_ONCE = 1000
"""Lines that are written together at most."""

WARNING_SECONDS = 60.0
"""Between two warnings that lines are lost."""

CLOSE_SECONDS = 2.0
"""How long the end waits for what is not written."""

STDOUT = "-"


def as_json(line: Line) -> bytes:
    """A JSON object; `time`, of `time.time()`, becomes a text."""
    when = datetime.fromtimestamp(float(str(line["time"])), UTC).isoformat(timespec="milliseconds")
    return json.dumps({**line, "time": when}).encode() + b"\n"


class LogFile:
    """Appends to `path`, to standard output for `-`, or to an open descriptor; OSError if a path cannot be opened.
    `encode` makes the bytes of a line, and of `{"time": ..., "lost_lines": ...}`.

    `write` neither blocks nor fails. A line that cannot be written is lost, with those that were to be written with it;
    their count precedes the next that can. A file that was renamed or deleted, as logrotate does, is made anew. Nothing
    is synced to the disk.
    """

    def __init__(self, path: str | int, encode: Callable[[Line], bytes] = as_json) -> None:
        self._path = None if path == STDOUT or isinstance(path, int) else Path(path).absolute()
        self._descriptor = path if isinstance(path, int) else 1 if self._path is None else _open(self._path)
        self._encode = encode
        self._waiting: queue.Queue[Line | threading.Event | None] = queue.Queue(MOST_WAITING)
        self._lost = 0
        self._counting = threading.Lock()
        self._torn = False
        self._warned = -WARNING_SECONDS
        self._thread = threading.Thread(target=self._write_on, name=f"log {path}", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Append `line` soon; its `time` is of `time.time()`."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose(1)

    def flush(self) -> None:
        """Wait until what was given is written, for `CLOSE_SECONDS` at most."""
        written = threading.Event()
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put_nowait(written)
                written.wait(CLOSE_SECONDS)

    def close(self) -> None:
        """Write what waits, for `CLOSE_SECONDS` at most."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _write_on(self) -> None:
        ended = False
        while not ended:
            lines = [self._waiting.get()]
            while len(lines) < AT_ONCE and not self._waiting.empty():
                lines.append(self._waiting.get())
            ended = None in lines
            self._append([line for line in lines if line is not None and not isinstance(line, threading.Event)])
            for each in lines:
                if isinstance(each, threading.Event):
                    each.set()
        if self._path is not None and self._descriptor >= 0:
            os.close(self._descriptor)

    def _append(self, lines: Sequence[Line]) -> None:
        lost = self._lost
        try:
            self._follow()
            if lost:
                self._put(self._encode({"time": time.time(), "lost_lines": lost}))
                self._lose(-lost)
            self._put(b"".join(self._encode(line) for line in lines))
        except OSError as error:
            self._lose(len(lines))
            if time.monotonic() - self._warned >= WARNING_SECONDS:
                self._warned = time.monotonic()
                log.warning("%s: %d lines are lost: %s", self._path or "the output", self._lost, error)

    def _lose(self, lines: int) -> None:
        with self._counting:
            self._lost += lines

    def _put(self, content: bytes) -> None:
        """Write all. What a full disk cuts off is a line that does not end; the next begins on a new one."""
        if self._torn:
            content = b"\n" + content
        while content:
            written = os.write(self._descriptor, content)
            self._torn = written < len(content)
            content = content[written:]

    def _follow(self) -> None:
        """Open the file again if it is not at its path any more."""
        if self._path is None:
            return
        try:
            there = os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            there = False
        if not there:
            opened = _open(self._path)
            os.close(self._descriptor)
            self._descriptor, self._torn = opened, False


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
