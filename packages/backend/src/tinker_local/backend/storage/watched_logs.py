"""`--watch-logs DIR`: the `metrics.jsonl` files that other programs write below a folder, such as the Tinker Cookbook.

Files are read only when a client asks, in a thread. Their content and names are untrusted: everything is bounded, and
no symbolic link is followed.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints.jsonl"

SCAN_SECONDS = 5.0
"""For which the last scan is good."""

MOST_LOGS = 200
"""Of a scan, the newest."""

MOST_FOLDERS = 20_000
"""That one scan looks at."""

DEEPEST = 12
"""Folders below the watched one."""

MOST_BYTES = 64 * 2**20
"""Of one file; later lines are not read."""

BYTES_AT_ONCE = 2**20
"""That one answer reads. A longer line is skipped."""

CHECKPOINT_BYTES = 2**18
"""At the end of a `checkpoints.jsonl`, in which its run is looked for."""

MOST_METRICS = 256
"""Numbers of one line."""

LONGEST_METRIC = 128
"""Characters of a metric's name; a longer one is left out."""

LARGEST_STEP = 2**53

_RUN = re.compile(rb"tinker://([\x21-\x2e\x30-\x7e]{1,256}?)/")


@dataclass(frozen=True, slots=True)
class Log:
    """One `metrics.jsonl`. `id`: of its path. `name`: its folder, below the watched one, as text. `run_id`: the run of
    the newest checkpoint in the `checkpoints.jsonl` beside it, if it names one. `changed`: seconds since 1970."""

    id: str
    name: str
    run_id: str | None
    changed: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A part of a log. `lines`: objects with `step` (null if the line has none) and `metrics`. `next`: where the next
    part begins. `file`: changes if the file was replaced or cut, and is then read from its beginning. `full`: no more
    of it is read."""

    lines: Sequence[Mapping[str, Any]]
    next: int
    file: str
    full: bool


class WatchedLogs:
    """The logs below `folder`. Blocks; callable from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._scanned = -math.inf
        self._scanning = threading.Lock()
        self._found: dict[str, tuple[Log, tuple[str, ...]]] = {}
        self._runs: dict[tuple[str, ...], tuple[tuple[int, ...], str | None]] = {}

    def logs(self) -> list[Log]:
        """The newest logs, the newest first."""
        with self._scanning:
            if time.monotonic() - self._scanned >= SCAN_SECONDS:
                self._found = {log.id: (log, parts) for log, parts in self._scan()}
                self._runs = {parts: self._runs[parts] for _, parts in self._found.values() if parts in self._runs}
                self._scanned = time.monotonic()
            return [log for log, _ in self._found.values()]

    def log(self, log_id: str) -> Log | None:
        """One of `logs`."""
        return next((log for log in self.logs() if log.id == log_id), None)

    def read(self, log_id: str, after: int, file: str) -> LogPiece | None:
        """What comes after the first `after` bytes of `file`, which an earlier piece named; all if it is another one by
        now. None if the log does not exist."""
        found = self._found.get(log_id)
        if found is None:
            return None
        try:
            with self._opened((*found[1], METRICS)) as opened:
                state = os.fstat(opened)
                now = f"{state.st_ino:x}-{zlib.crc32(_first_line(opened)):x}"
                begin = after if file == now and after <= state.st_size else 0
                content = os.pread(opened, BYTES_AT_ONCE, begin)
        except OSError:
            return None
        end = content.rfind(b"\n") + 1
        if not end and len(content) == BYTES_AT_ONCE:
            end = len(content)  # within a line that is too long
        lines = [line for each in content[:end].split(b"\n") if (line := parse_line(each)) is not None]
        full = begin + end >= MOST_BYTES
        return LogPiece(lines, begin + end, now, full) if begin < MOST_BYTES else LogPiece([], begin, now, full=True)

    def _scan(self) -> list[tuple[Log, tuple[str, ...]]]:
        found = sorted(self._files(), key=lambda each: each[1].st_mtime_ns, reverse=True)
        return [(self._log(parts, state), parts) for parts, state in found[:MOST_LOGS]]

    def _files(self) -> Iterator[tuple[tuple[str, ...], os.stat_result]]:
        """The folders with a log, as the parts of their paths, and what is known of the file."""
        waiting: list[tuple[str, ...]] = [()]
        for _ in range(MOST_FOLDERS):
            if not waiting:
                return
            parts = waiting.pop()
            try:
                with os.scandir(self._folder.joinpath(*parts)) as entries:
                    for entry in entries:
                        if entry.name == METRICS and entry.is_file(follow_symlinks=False):
                            yield parts, entry.stat(follow_symlinks=False)
                        elif len(parts) < DEEPEST and entry.is_dir(follow_symlinks=False):
                            waiting.append((*parts, entry.name))
            except OSError:
                continue  # it is gone, or may not be read

    def _log(self, parts: tuple[str, ...], state: os.stat_result) -> Log:
        path = "/".join(parts)
        log_id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        name = os.fsencode(path).decode("utf-8", "replace") or "."
        return Log(log_id, name, self._run(parts), state.st_mtime, state.st_size)

    def _run(self, parts: tuple[str, ...]) -> str | None:
        """The run of the newest checkpoint that the folder names; read again only when that file has changed."""
        try:
            with self._opened((*parts, CHECKPOINTS)) as opened:
                state = os.fstat(opened)
                key = (state.st_ino, state.st_mtime_ns, state.st_size)
                known = self._runs.get(parts)
                if known is None or known[0] != key:
                    content = os.pread(opened, CHECKPOINT_BYTES, max(0, state.st_size - CHECKPOINT_BYTES))
                    runs = _RUN.findall(content)
                    known = self._runs[parts] = key, runs[-1].decode("ascii") if runs else None
                return known[1]
        except OSError:
            return None

    @contextmanager
    def _opened(self, parts: Sequence[str]) -> Iterator[int]:
        """The regular file at `parts` below the folder, without following a link on the way. OSError."""
        here = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                there = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = there
            # Without O_NONBLOCK, opening a FIFO would wait for somebody who writes.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            there = os.open(parts[-1], flags, dir_fd=here)
            os.close(here)
            here = there
            if not stat.S_ISREG(os.fstat(here).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            yield here
        finally:
            os.close(here)


def _first_line(file: int) -> bytes:
    """By which a file that was written anew is known; nothing while its first line is not whole."""
    content = os.pread(file, 1024, 0)
    return content.partition(b"\n")[0] if b"\n" in content or len(content) == 1024 else b""


def parse_line(line: bytes) -> Mapping[str, Any] | None:
    """The step and the finite numbers of a line of `metrics.jsonl`; None if it has none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    step = found.pop("step", None)
    metrics: dict[str, float] = {}
    for name, value in found.items():
        if len(metrics) < MOST_METRICS and _is_text(name) and (number := _number(value)) is not None:
            metrics[name] = number
    whole = isinstance(step, int) and not isinstance(step, bool) and abs(step) <= LARGEST_STEP
    return {"step": step if whole else None, "metrics": metrics} if metrics else None


def _is_text(name: str) -> bool:
    """Whether a metric's name can be sent; half of a surrogate pair cannot."""
    return 1 <= len(name) <= LONGEST_METRIC and not any("\ud800" <= character <= "\udfff" for character in name)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
