"""Where the time of a start goes: its stages, by name, in the process that runs them."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ended: list["Stage"] = []
_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a start. `seconds`: without those of the stages inside it, so that all together are the whole."""

    name: str
    seconds: float


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Take the time of what runs in this context as the stage `name`. Contexts of a thread may be nested."""
    begun, inner_so_far = time.monotonic(), getattr(_of_thread, "inner", 0.0)
    _of_thread.inner = 0.0
    try:
        yield
    finally:
        seconds = time.monotonic() - begun
        _ended.append(Stage(name, seconds - _of_thread.inner))
        _of_thread.inner = inner_so_far + seconds


def note(name: str, seconds: float) -> None:
    """Add a stage that was timed elsewhere."""
    _ended.append(Stage(name, seconds))


def taken() -> tuple[Stage, ...]:
    """The stages that have ended in this process since the last call, those of one name as one, in order."""
    ended, _ended[:] = list(_ended), []
    seconds: dict[str, float] = {}
    for each in ended:
        seconds[each.name] = seconds.get(each.name, 0.0) + each.seconds
    return tuple(Stage(name, took) for name, took in seconds.items())


def in_words(stages: Sequence[Stage]) -> str:
    """Of `stages`, those of a tenth of a second or more: "weights 6.1 s, graphs 5.0 s"."""
    return ", ".join(f"{each.name} {each.seconds:.1f} s" for each in stages if each.seconds >= 0.05)


def process_seconds() -> float:
    """How long ago this process was started, in seconds, imports and all (Linux)."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
