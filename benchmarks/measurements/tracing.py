"""Where the time of one training step goes, from the events of torch.profiler."""

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import workloads
from harness.lines import Line
from harness.scale import Scale

from measurements.training import text_datum, train_step, work

TRACE_FOLDER = "TINKER_LOCAL_BENCH_TRACES"
"""Environment variable: where the chrome trace is kept; unset, it is deleted."""

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    (
        "matrix products",
        ("gemm", "gemv", "cutlass", "nvjet", "cublas", "aten::mm", "addmm", "bmm", "grouped_mm", "splitk", "mkl"),
    ),
    ("copies and casts", ("memcpy", "memset", "copy_")),
)
"""An event has the first kind of which a word is in its lower-case name; all others are `elementwise`."""
OTHER = "elementwise and others"
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Event:
    """Work of the device (of the CPU's operators without a GPU); times in microseconds."""

    name: str
    start: float
    duration: float


def measure(scale: Scale, models: Path, trainer: Any, name: str = "trace") -> None:
    """One step of `text.ours` after a warm-up: prints the share of each kind and the slowest kernels."""
    from tinker_local.types import LoraConfig

    trainer.create_adapter("traced", LoraConfig(rank=scale.rank, train_unembed=False))
    works = [work("traced", [text_datum(sequence) for sequence in workloads.ragged_sequences(scale)])]
    for _ in range(scale.warmup):
        train_step(trainer, works)
    kernels(lambda: train_step(trainer, works), name, 12)


def kernels(run: Callable[[], None], name: str, count: int = 24) -> None:
    """Profile `run`, which has run before: prints the share of each kind and the slowest `count` kernels."""
    import torch

    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    trace = _trace(profile)
    events = device_events(trace["traceEvents"], on_gpu=on_gpu)
    seconds = span(events) / 1e6
    for kind, share in shares(events).items():
        Line(f"{name}.{kind}", 100 * share, "%", note=f"of {1000 * seconds:.2f} ms").emit()
    for kernel, microseconds in longest(events, count):
        Line(f"{name}.kernel: {kernel[:70]}", microseconds / 1e3, "ms", note=kind_of(kernel)).emit()


def _trace(profile: Any) -> Any:
    """The chrome trace, kept gzipped if the environment asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        text = path.read_bytes()
    if kept := os.environ.get(TRACE_FOLDER):
        Path(kept).mkdir(parents=True, exist_ok=True)
        (Path(kept) / "training_step.json.gz").write_bytes(gzip.compress(text))
    return json.loads(text)


def device_events(events: Iterable[Mapping[str, Any]], *, on_gpu: bool) -> list[Event]:
    """Kernels, copies and memsets of the GPU by start; without a GPU, each CPU operator's own work, without that of the
    operators that it calls."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in kinds:
            found = Event(event["name"], float(event["ts"]), float(event.get("dur", 0)))
            threads.setdefault(None if on_gpu else event.get("tid"), []).append(found)
    for members in threads.values():
        members.sort(key=lambda event: (event.start, -event.duration))
    apart = [event for members in threads.values() for event in (members if on_gpu else _own_time(members))]
    return sorted(apart, key=lambda event: event.start)


def _own_time(events: Sequence[Event]) -> list[Event]:
    """Split nested events of one thread, ordered by start, into pieces in which only the innermost one runs."""
    pieces: list[Event] = []
    running: list[Event] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        while running and running[-1].start + running[-1].duration <= to:
            done = running.pop()
            end = done.start + done.duration
            if end > now:
                pieces.append(Event(done.name, now, end - now))
                now = end
        if running and to > now:
            pieces.append(Event(running[-1].name, now, to - now))
        now = max(now, to)

    for event in events:
        advance(event.start)
        running.append(event)
    advance(float("inf"))
    return pieces


def kind_of(name: str) -> str:
    """The kind of work behind a kernel's name."""
    lowered = name.lower()
    return next((kind for kind, words in KINDS if any(word in lowered for word in words)), OTHER)


def span(events: Sequence[Event]) -> float:
    """Microseconds from the first event's start to the last one's end."""
    return max(event.start + event.duration for event in events) - min(event.start for event in events)


def shares(events: Sequence[Event]) -> dict[str, float]:
    """Each kind's share of the step, and the share of idle time. Overlapping kernels count once, for the one that began
    first."""
    taken = dict.fromkeys([*(kind for kind, _ in KINDS), OTHER], 0.0)
    now = first = events[0].start
    for event in events:
        end = event.start + event.duration
        if end > now:
            taken[kind_of(event.name)] += end - max(now, event.start)
            now = end
    whole = now - first
    return {kind: time / whole for kind, time in taken.items()} | {IDLE: 1 - sum(taken.values()) / whole}


def longest(events: Sequence[Event], count: int) -> list[tuple[str, float]]:
    """The names that take the most time, with their total microseconds."""
    totals: dict[str, float] = {}
    for event in events:
        totals[event.name] = totals.get(event.name, 0.0) + event.duration
    return sorted(totals.items(), key=lambda item: -item[1])[:count]
