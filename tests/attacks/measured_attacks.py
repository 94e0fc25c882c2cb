"""Runs an attack against a server with a victim beside it, and says what the victim and the memory felt."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.attacker import Attack, Serving, programs
from tests.attacks.victim import LONGEST, Memory, Victim
from tests.conftest import Server, start_server

KEYS = ("tml-victim-victim", "tml-attacker-attacker")
ROOT = Path(__file__).parents[2]

CORES = os.sched_getaffinity(0)
ATTACKERS = {max(CORES)} if len(CORES) > 1 else CORES
"""The attacker has a core that neither the server nor the victim uses, if there are two: it is another machine's."""

LEAST_MS, LEAST_MIB = 100.0, 100.0
"""What the victim may lose and the memory may grow in any case."""


@dataclass
class Outcome:
    """Milliseconds and MiB. `before`, `during`: p99 of samples and of steps right before each attack and while it ran;
    `memory`: before, after one, after two."""

    attack: Attack
    before: list[tuple[float, float]] = field(default_factory=list)
    during: list[tuple[float, float]] = field(default_factory=list)
    worst: list[tuple[float, float]] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    peak: float = 0.0
    seconds: list[float] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    alive: bool = True

    def faults(self) -> list[str]:
        """What breaks the promise: a victim slower than twice or 100 ms more (p99), memory that stays, a death."""
        found = [] if self.alive else ["the server is dead"]
        found += [f"the victim was refused: {text}" for text in dict.fromkeys(self.failures)]
        for number, (calm, attacked) in enumerate(zip(self.before, self.during, strict=True), 1):
            for what, was, now in zip(("sample", "step"), calm, attacked, strict=True):
                if now > max(2 * was, was + LEAST_MS):
                    found.append(f"attack {number}: {what} p99 {now:.0f} ms, without {was:.0f} ms")
        start, *after = self.memory
        if after and after[0] > max(1.1 * start, start + LEAST_MIB):
            found.append(f"memory {start:.0f} MiB before, {after[0]:.0f} after")
        if len(after) > 1 and after[1] > max(1.1 * after[0], after[0] + LEAST_MIB):
            found.append(f"memory {after[0]:.0f} MiB after one attack, {after[1]:.0f} after two")
        return found


@contextmanager
def server_of(serving: Serving, arguments: Sequence[str], folder: Path) -> Iterator[tuple[Server, str]]:
    """A server with the two keys, and the name of the model that it serves."""
    keys = folder / "keys"
    keys.write_text("".join(f"{key}\n" for key in KEYS))
    keys.chmod(0o600)
    given = ["--api-key-file", str(keys), *arguments]
    name = "fake/bigram" if serving == "fake" else f"tiny/{serving}"
    if serving == "fake":
        given += ["--fake", "--model", name]
    else:
        from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model

        (make_tiny_text_model if serving == "text" else make_tiny_vl_model)(folder / serving)
        given += ["--kv-cache", "0.25", "--max-rank", "32", "--model", f"{name}={folder / serving}"]
    server = start_server(folder / "data", *given)
    try:
        yield server, name
    finally:
        server.kill()


def measure(attack: Attack, *, calm: float = 6.0, settle: float = 10.0, times: int = 2) -> Outcome:
    """Start a server, and `times` feel `calm` seconds without the attack and then the attack, under one load of the
    machine; memory is the least within `settle` seconds."""
    os.sched_setaffinity(0, CORES - ATTACKERS or CORES)
    with (
        tempfile.TemporaryDirectory() as scratch,
        server_of(attack.serving, attack.arguments, Path(scratch)) as (server, name),
    ):
        memory = Memory(server.process.pid)
        victim = Victim(server.url, KEYS[0], name)
        with victim.feel():  # caches, threads and what the first requests import
            time.sleep(2)
        outcome = Outcome(attack, memory=[memory.settled(1)])
        for _ in range(times):
            with armed(attack, server.url, name) as go:
                with victim.feel() as felt:
                    time.sleep(calm)
                outcome.before.append(milliseconds(felt.p99()))
                outcome.failures += felt.failures
                start = time.monotonic()
                with victim.feel() as felt:
                    outcome.answers = go()
                    time.sleep(max(0.0, start + 3 - time.monotonic()))
            outcome.seconds.append(time.monotonic() - start)
            outcome.during.append(milliseconds(felt.p99()))
            outcome.worst.append(milliseconds(felt.most()))
            outcome.failures += felt.failures
            outcome.memory.append(memory.settled(settle))
            if max(outcome.worst[-1]) >= 1e3 * LONGEST:  # a second attack would measure the rest of the first
                break
        outcome.alive = server.process.poll() is None
        outcome.peak = memory.peak
        victim.close()
        memory.close()
        return outcome


def milliseconds(seconds: tuple[float, float]) -> tuple[float, float]:
    return 1e3 * seconds[0], 1e3 * seconds[1]


@contextmanager
def armed(attack: Attack, url: str, base_model: str) -> Iterator[Callable[[], list[tuple[str, int]]]]:
    """A process that is ready to attack; the function lets it begin and returns what it was answered."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.attacks", "attacker", attack.name, url, KEYS[1], base_model],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.sched_setaffinity(process.pid, ATTACKERS)

    def go() -> list[tuple[str, int]]:
        try:
            answered, _ = process.communicate("go\n", timeout=attack.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return [(f"no answer within {attack.seconds:g} s", 1)]
        return [(text, count) for text, count in json.loads(answered)] if answered else [("the attacker died", 1)]

    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "armed":
            raise RuntimeError(f"{attack.name}: the attacker could not prepare")
        yield go
    finally:
        process.kill()
        process.wait()


HEAD = (
    "| item | attack | sample p99 ms: without → with | step p99 ms: without → with | worst ms | "
    "MiB: before, after one, after two (peak) | the attacker got |\n|---|---|---|---|---|---|---|"
)


def line(outcome: Outcome) -> str:
    """A row of the table."""
    samples, steps = (
        ", ".join(
            f"{calm[kind]:.0f} → {attacked[kind]:.0f}"
            for calm, attacked in zip(outcome.before, outcome.during, strict=True)
        )
        for kind in (0, 1)
    )
    worst = max(max(pair) for pair in outcome.worst)
    memory = ", ".join(f"{each:.0f}" for each in outcome.memory)
    got = "; ".join(f"{count} x {text}" if count > 1 else text for text, count in outcome.answers[:3])
    got = got.replace("|", "\\|").replace("\n", " ")
    if not outcome.alive:
        got = f"THE SERVER IS DEAD; {got}"
    verdict = "holds" if not outcome.faults() else "**fails**"
    return (
        f"| {outcome.attack.item} | {outcome.attack.name}: {verdict} | {samples} | {steps} | "
        f"{worst:.0f} | {memory} ({outcome.peak:.0f}) | {got} |"
    )


def chosen(names: Sequence[str]) -> list[Attack]:
    """By name or item; all without names."""
    found = [each for each in programs().values() if not names or each.name in names or each.item in names]
    if not found:
        raise SystemExit(f"no attack is called {', '.join(names)}; there are {', '.join(programs())}")
    return found
