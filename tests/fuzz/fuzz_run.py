"""Runs many cases of one class, in pieces: a file keeps how many have run, and the next piece goes on from there."""

import json
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.fuzz.targets import TARGETS, Fault

STALL = 1.0
"""Seconds of this process's own time that one case may take; other programs on a busy machine do not count."""


@dataclass
class Progress:
    """Of one class. `slowest` in seconds; `resident`: MiB of each piece, when it was warm and at its end."""

    cases: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)
    resident: list[list[int]] = field(default_factory=list)

    def flat(self) -> bool:
        """Whether no piece ended with 100 MiB more than it had when it was warm."""
        return all(end <= warm + 100 for warm, end in self.resident)


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def run_piece(name: str, progress: Progress, count: int) -> None:
    """`count` more cases. A case is given by its class and number alone."""
    target = TARGETS[name]()
    warm = 0
    try:
        for at in range(count):
            if at == count // 10:
                warm = resident_mib()
            number = progress.cases
            start, own = time.monotonic(), time.process_time()
            try:
                target.run(random.Random(f"{name} {number}"))
            except Fault as fault:
                progress.faults.append(f"case {number}: {fault}"[:600])
            own = time.process_time() - own
            if own > STALL:
                progress.faults.append(f"case {number}: took {own:.1f} s")
            progress.slowest = max(progress.slowest, own)
            progress.seconds += time.monotonic() - start
            progress.cases += 1
        progress.resident.append([warm, resident_mib()])
    finally:
        target.close()


def load(file: Path) -> dict[str, Progress]:
    if not file.exists():
        return {}
    return {name: Progress(**values) for name, values in json.loads(file.read_text()).items()}


def save(file: Path, all_progress: dict[str, Progress]) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({name: asdict(each) for name, each in all_progress.items()}, indent=1))
    beside.rename(file)
