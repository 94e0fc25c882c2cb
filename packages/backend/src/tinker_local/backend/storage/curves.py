"""Curves: what each training run has done, a line of JSON for each optimizer step and each call of `log_metrics`."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from cachetools import LRUCache
from tinker_local.backend.threads import CURVES

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Of one run: about 100,000 steps. Later ones are not recorded."""

COUNTED_BYTES = 4096
"""Of a run, which are counted at a time."""

BYTES_AT_ONCE = 2**20
"""That one answer reads."""

WARNING_SECONDS = 60.0
"""Between two warnings that lines are lost."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a curve. `lines`: objects with `time`, and of steps the fields of a `Point`, of metrics that a program
    gave `step` (or null) and `metrics`. `next`: where the next part begins. `full`: no more is recorded."""

    lines: Sequence[Mapping[str, Any]]
    next: int
    full: bool


class Curves:
    """A file in `folder` for each run that has taken a step. One thread writes and reads them, those of a session in
    order, so no step waits for the disk; what it does not take is lost, with a warning. `take`: counts bytes of a run,
    `COUNTED_BYTES` at a time; whether there is room for them."""

    def __init__(self, folder: Path, take: Callable[[str, int], bool] = lambda run_id, size: True) -> None:
        self._folder = folder
        self._take = take
        self._room: LRUCache[str, int] = LRUCache(4096)  # bytes that were counted and not written, by run
        self._warned = -WARNING_SECONDS

    def add_step(self, run_id: str, point: Mapping[str, Any]) -> None:
        """Record an optimizer step, the fields of a `Point`."""
        CURVES.run(self._append, run_id, point)

    def add_metrics(self, run_id: str, step: int | None, metrics: Mapping[str, float]) -> "asyncio.Future[bool]":
        """Record numbers that a program gives; whether there was room."""
        return CURVES.run(self._append, run_id, {"time": time.time(), "step": step, "metrics": dict(metrics)})

    def read(self, run_id: str, after: int) -> "asyncio.Future[Piece]":
        """What comes after the first `after` bytes, a `next` of an earlier piece or 0."""
        return CURVES.run(self._read, run_id, after)

    def keep(self, run_ids: "Callable[[Collection[str]], Collection[str]]") -> "asyncio.Future[None]":
        """Delete the curves of all runs but those that `run_ids` keeps of the ones it is given."""
        return CURVES.run(self._keep, run_ids)

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{quote(run_id, safe='')}.jsonl"

    def _append(self, run_id: str, line: Mapping[str, Any]) -> bool:
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            file = os.open(self._path(run_id), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if (size := os.fstat(file).st_size) + len(content) > MOST_BYTES:
                    return False
                if not self._has_room(run_id, len(content)):
                    return False
                if os.write(file, content) < len(content):
                    self._room[run_id] += len(content)
                    os.truncate(file, size)  # a full disk; half a line would make the next one unreadable
                    raise OSError("there is no room on the disk")
            finally:
                os.close(file)
        except OSError as error:
            if time.monotonic() - self._warned >= WARNING_SECONDS:
                self._warned = time.monotonic()
                log.warning("%s: what runs have done is not recorded: %s", self._folder, error)
            return False
        return True

    def _has_room(self, run_id: str, size: int) -> bool:
        """Use `size` bytes of what was counted for a run, or count more."""
        room = self._room.get(run_id, 0)
        if room < size and self._take(run_id, COUNTED_BYTES):
            room += COUNTED_BYTES
        if room < size and self._take(run_id, size):
            room += size
        if room < size:
            return False
        self._room[run_id] = room - size
        return True

    def _read(self, run_id: str, after: int) -> Piece:
        try:
            with self._path(run_id).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(min(after, size))
                content = file.read(BYTES_AT_ONCE)
        except FileNotFoundError:
            return Piece([], 0, False)
        whole = content[: content.rfind(b"\n") + 1]
        lines = []
        for line in whole.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # `after` was within a line, or a power cut tore one
                continue
        return Piece(lines, min(after, size) + len(whole), size > MOST_BYTES - 1024)

    def sizes(self) -> dict[str, int]:
        """The bytes of each curve; blocks."""
        return {unquote(path.stem): path.stat().st_size for path in self._folder.glob("*.jsonl")}

    def _keep(self, run_ids: "Callable[[Collection[str]], Collection[str]]") -> None:
        if not self._folder.is_dir():
            return
        found = {unquote(path.stem): path for path in self._folder.glob("*.jsonl")}
        kept = set(run_ids(list(found)))
        for run_id, path in found.items():
            if run_id not in kept:
                path.unlink(missing_ok=True)
