"""What the processes of a program do while it samples: kernels of the GPU, stacks of threads, CPU time of threads."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "TINKER_LOCAL_BENCH_WATCH"
HOOKS = Path(__file__).parent / "hooks"

KERNELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("LoRA", ("lora", "_shrink", "_expand")),
    ("draw", ("_draw", "softmax", "topk", "sampling", "exponential", "argmax", "gumbel", "sample")),
    ("attention", ("flash", "fmha", "attention", "reshape_and_cache", "rotary")),
    ("matrix products", ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "xmma")),
    ("norms and activations", ("norm", "silu", "act_and_mul")),
    ("copies", ("memcpy", "memset", "copy", "fill")),
)
"""A kernel is of the first kind of which a word is in its lower-case name."""
OTHER = "others"


def kind_of(kernel: str) -> str:
    """The kind of work behind a kernel's name."""
    lowered = kernel.lower()
    return next((kind for kind, words in KERNELS if any(word in lowered for word in words)), OTHER)


@dataclass(frozen=True, slots=True)
class Watched:
    """What `hooks/sitecustomize.py` wrote of one process."""

    pid: int
    found: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """How many steps of an engine the kernels are of: each draws once, and all that is sure to run once a step is
        the most frequent of the draws' kernels."""
        counts = [count for name, (count, _) in self.found.get("kernels", {}).items() if kind_of(name) == "draw"]
        return max(counts, default=0)

    def kinds(self) -> dict[str, float]:
        """Milliseconds of each kind of kernel, of all steps."""
        totals: dict[str, float] = {}
        for name, (_, microseconds) in self.found.get("kernels", {}).items():
            totals[kind_of(name)] = totals.get(kind_of(name), 0.0) + microseconds / 1e3
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def kernels(self, most: int) -> list[tuple[str, int, float]]:
        """The kernels that take the most time: name, count, milliseconds."""
        found = [(name, count, total / 1e3) for name, (count, total) in self.found.get("kernels", {}).items()]
        return sorted(found, key=lambda item: -item[2])[:most]

    def stacks(self, most: int) -> list[tuple[str, str, float]]:
        """Threads and the innermost frames they were seen in: shares of the looks, without threads that wait."""
        looks = max(1, self.found["looks"])
        rows = [(*key.split("\t", 1), count / looks) for key, count in self.found["stacks"].items()]
        busy = [row for row in rows if not any(word in row[1].split(" < ")[0] for word in WAITING)]
        return sorted(busy, key=lambda row: -row[2])[:most]


WAITING = (
    "threading.py:Condition.wait",
    "threading.py:Event.wait",
    "selectors.py:EpollSelector.select",
    "selectors.py:_PollLikeSelector.select",
    "thread.py:_worker",
    "queue.py:Queue.get",
    "connection.py:wait",
    "subprocess.py:Popen",
)


def watched(folder: Path, seconds: float, patience: float = 60.0) -> list[Watched]:
    """Watch all processes that have `HOOKS` and `folder` in their environment for `seconds`."""
    for old in folder.glob("*.json"):
        old.unlink()
    (folder / "on").touch()
    time.sleep(seconds)
    (folder / "on").unlink()
    end, known = time.monotonic() + patience, -1
    while time.monotonic() < end:  # until no process writes any more
        files = [*folder.glob("*.json")]
        if len(files) == known and not [*folder.glob("*.part")]:
            break
        known = len(files)
        time.sleep(3.0 if seconds >= 0.5 else 1.0)
    return [Watched(int(file.stem), json.loads(file.read_text())) for file in folder.glob("*.json")]


def environment_of(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a program that is watched through `folder`."""
    path = os.pathsep.join([str(HOOKS), *filter(None, [environment.get("PYTHONPATH", "")])])
    return {**environment, "PYTHONPATH": path, VARIABLE: str(folder)}


def processes_of(pid: int) -> list[int]:
    """`pid` and all below it."""
    found, at = [pid], 0
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found


def cpu_seconds(pid: int) -> dict[tuple[int, int], float]:
    """CPU seconds of each thread (process, thread) of `pid` and of all processes below it."""
    tick = os.sysconf("SC_CLK_TCK")
    return {(process, thread): ticks / tick for process in processes_of(pid) for thread, ticks in _threads(process)}


def _threads(process: int) -> Iterator[tuple[int, int]]:
    try:
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
    except OSError:
        return
    for task in tasks:
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(task.name), int(fields[11]) + int(fields[12])


def spent(
    before: Mapping[tuple[int, int], float], after: Mapping[tuple[int, int], float], most: int
) -> Sequence[tuple[int, int, float]]:
    """The threads that computed the longest between two results of `cpu_seconds`: process, thread, seconds."""
    rows = [(*key, seconds - before.get(key, 0.0)) for key, seconds in after.items()]
    return sorted(rows, key=lambda row: -row[2])[:most]


def name_of(process: int) -> str:
    """What a process runs, from its command line."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text[-60:]
