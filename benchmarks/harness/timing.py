"""Seconds of a step and memory of the device. Imports torch when called."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from harness.scale import Scale


def device() -> str:
    """Where models run: "cuda" if there is one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(
    step: Callable[[], object], scale: Scale, *, warmup: int | None = None, repeats: int | None = None
) -> float:
    """Median seconds of `step` after a warm-up. Both run at least once and stop early after `scale.patience` seconds.
    Resets the memory peak before the timed runs."""
    for number, limit in enumerate((warmup or scale.warmup, repeats or scale.repeats)):
        found: list[float] = []
        while len(found) < limit and sum(found) < scale.patience:
            synchronize()
            if number == 1 and not found:
                forget_peak()
            start = time.perf_counter()
            step()
            synchronize()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def seconds_in_turns(
    steps: Mapping[str, Callable[[], object]], scale: Scale, *, at_once: int, warmup: int, repeats: int
) -> dict[str, float]:
    """Median seconds of each of `steps`, which run in turns, so that a clock that falls slows all of them. Each time
    `at_once` run one after the other without waiting for the device between them, as layers of a model do."""
    for limit in (warmup, repeats):
        found = {name: list[float]() for name in steps}
        while all(len(times) < limit and at_once * sum(times) < scale.patience for times in found.values()):
            for name, step in steps.items():
                synchronize()
                start = time.perf_counter()
                for _ in range(at_once):
                    step()
                synchronize()
                found[name].append((time.perf_counter() - start) / at_once)
    return {name: statistics.median(times) for name, times in found.items()}


def forget_peak() -> None:
    """Reset `peak_gib`."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Peak memory of this process's tensors since `forget_peak`, in GiB; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


class DeviceMemory:
    """While open, watches the memory in use on the whole device, by any process; `peak_gib` is its peak."""

    def __init__(self, pause: float = 0.05) -> None:
        self.peak_gib: float | None = None
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="device-memory")

    def __enter__(self) -> "DeviceMemory":
        # A client's process sees no device; this way it does not load torch to find out.
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and device() == "cuda":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        import torch

        while not self._stop.wait(self._pause):
            free, total = torch.cuda.mem_get_info()
            self.peak_gib = max(self.peak_gib or 0.0, (total - free) / 2**30)
