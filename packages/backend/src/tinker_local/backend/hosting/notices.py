"""What the server tells its operator, a line each: sessions, runs, checkpoints, failures with their reason, and a line
of numbers while something happens.

They are records of the logger `NOTICES` at level INFO, requests at DEBUG; `owner` and `request` are attributes of a
record where they are known. A program that holds its backend itself sees them if it configures that logger.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.heap import MemoryInUse, memory_in_use
from tinker_local.backend.hosting.log_files import Line
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.types import GoneError

NOTICES = logging.getLogger("tinker_local.notices")

STATUS_SECONDS = 30.0
"""Between two status lines."""

MOST_FAILURES = 20
"""Failures that are logged between two status lines; a program that fails all the time would fill the log."""

QUIET = ("create sampling session", "sign download")
"""Changes that are in the audit log alone: a program may make thousands, or they say little."""

GIB = 2**30


def tell_change(line: Line) -> None:
    """Log a line of the audit log for the operator, unless the operation failed: `Notices` logs failures."""
    action, outcome = str(line["action"]), line["outcome"]
    if action in QUIET or outcome == "failed":
        return
    what = str(line.get("path") or line.get("model") or line.get("model_id") or line.get("session_id") or "")
    if (base := line.get("base_model")) and what:
        what = f"{what} of {base}"
    if source := line.get("source_path"):
        what = f"{source} to {what}" if what else str(source)
    text = f"{action}: {what}" if what else action
    if outcome == "refused":
        text += f" was refused ({line.get('status')}): {line.get('why', '')}"
    elif line["by"] is None and action != "download":
        text += ", by the server"
    _tell(logging.INFO, text, line["by"], line.get("request"))


def tell_request(line: Line) -> None:
    """Tell a line of the access log."""
    if NOTICES.isEnabledFor(logging.DEBUG):
        text = f"{line['method']} {line['route']} {line['status']} in {line['ms']} ms from {line['address']}"
        _tell(logging.DEBUG, text, line["owner"], line["request"])


def _tell(level: int, text: str, owner: Any, request: Any) -> None:
    NOTICES.log(level, "%s", text, extra={"owner": owner, "request": request})


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted for all base models until `at`, of the monotonic clock."""

    at: float
    steps: int
    trained: int
    sampled: int
    failures: int

    @classmethod
    def of(cls, backend: ControlPlane) -> "Totals":
        found = backend.metrics().values()
        return cls(
            time.monotonic(),
            sum(model.optimizer_steps for model in found),
            sum(model.trained_tokens for model in found),
            sum(model.sampled_tokens for model in found),
            sum(sum(model.failures.values()) for model in found),
        )


class Notices:
    """Tells of one backend: its failures, and how much it does."""

    def __init__(self, backend: ControlPlane) -> None:
        self._backend = backend
        self._failures = self._untold = 0
        backend.on_failure = self._failed

    def _failed(self, operation: Operation[Any]) -> None:
        """Tell an operation that failed, unless the client cancelled it or its session has ended."""
        if isinstance(operation.error, GoneError):
            return
        self._failures += 1
        if self._failures > MOST_FAILURES:
            self._untold += 1
            return
        timeline = operation.timeline
        text = f"{operation.kind} failed ({timeline.outcome}): {timeline.error}"
        _tell(logging.INFO, text, operation.owner or None, operation.request_id)

    async def tell_numbers(self, seconds: float = STATUS_SECONDS) -> None:
        """Every `seconds`, tell a line of numbers if something has happened; for ever."""
        before = Totals.of(self._backend)
        while True:
            await asyncio.sleep(seconds)
            now = Totals.of(self._backend)
            line = self._line(before, now)
            self._failures = self._untold = 0
            before = now
            if line:
                NOTICES.info("status: %s; %s", line, memory_words(await memory_in_use()))

    def _line(self, before: Totals, now: Totals) -> str:
        """The numbers since `before`; empty if nothing has happened."""
        models = self._backend.metrics().values()
        at = {
            side: (
                sum(getattr(m, f"{side}_running") for m in models),
                sum(getattr(m, f"{side}_waiting") for m in models),
            )
            for side in ("commands", "samples")
        }
        idle = replace(now, at=before.at) == before
        if not self._backend.ready or (idle and not any(map(sum, at.values())) and not self._failures):
            return ""
        seconds = max(now.at - before.at, 1e-9)
        runs = self._backend.runs.count()
        parts = [f"{runs} run{'' if runs == 1 else 's'}"]
        if now.steps > before.steps:
            parts.append(f"{_rate(now.steps - before.steps, seconds)} steps/s")
        if now.trained > before.trained:
            parts.append(f"{_rate(now.trained - before.trained, seconds)} trained tokens/s")
        if now.sampled > before.sampled:
            parts.append(f"{_rate(now.sampled - before.sampled, seconds)} sampled tokens/s")
        for side, (running, waiting) in at.items():
            if running or waiting:
                parts.append(f"{side}: {running} running, {waiting} waiting")
        if self._untold:
            parts.append(f"{self._untold} more failures")
        return ", ".join(parts)


def _rate(count: int, seconds: float) -> str:
    rate = count / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"


def memory_words(memory: MemoryInUse) -> str:
    """Memory of the processes and of each GPU, in words."""
    words = [f"memory {memory.processes / GIB:.1f} GiB"]
    words += [f"GPU {at} {used / GIB:.1f} of {most / GIB:.1f} GiB" for at, (used, most) in memory.gpus.items()]
    return ", ".join(words)
