"""A chaos run: several users, a fault every few seconds, and a history that a correct server could have."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

from tests.chaos.chaos_users import Ledger, Samples, Trains, User, audit
from tests.chaos.faults import Faults, Subject

BASE = "fake/bigram"


@dataclass
class Report:
    """Counts. `violations` is empty if every promise was kept."""

    seed: int
    seconds: float
    faults: Counter[str]
    done: Counter[str]
    statuses: Counter[int]
    audit: Counter[str]
    violations: list[str]
    starts: int
    stops: list[float]
    recoveries: int
    forks: int

    def __str__(self) -> str:
        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{count} {what}" for what, count in sorted(counter.items()))

        answers = ", ".join(f"{count} x {status or 'none'}" for status, count in sorted(self.statuses.items()))
        stops = ", ".join(f"{each:.1f}" for each in self.stops) or "none"
        return "\n".join(
            [
                f"seed {self.seed}, {self.seconds:.0f} s, {sum(self.faults.values())} faults: {counts(self.faults)}",
                f"done: {counts(self.done)}",
                f"answers: {answers}",
                f"starts of the server: {self.starts}; seconds of its stops by SIGTERM: {stops}",
                f"runs continued from checkpoints: {self.recoveries}; steps whose answer was lost: {self.forks}",
                f"afterwards: {counts(self.audit)}",
                f"violations: {len(self.violations)}",
                *dict.fromkeys(self.violations),
            ]
        )


def chaos(
    seconds: float,
    seed: int,
    *,
    pause: tuple[float, float] = (1.0, 4.0),
    calm: float = 10.0,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """`seconds` of faults, then `calm` seconds in which every user must get on, a kill, and an audit."""
    rng = random.Random(seed)
    ledger, start = Ledger(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        subject = Subject(Path(scratch), BASE)
        try:
            subject.start()
            url = subject.wire.url
            users: list[User] = [Trains(url, BASE, seed * 100 + number, ledger) for number in range(3)]
            users += [Samples(url, BASE, seed * 100 + 10 + number, ledger, images=number == 1) for number in range(2)]
            for user in users:
                user.start()
            faults = Faults(subject, rng, pause, say)
            faults.run(time.monotonic() + seconds)
            say(f"calm, {dict(ledger.done)}, {len(ledger.violations)} violations")
            _calm(users, ledger, calm)
            for user in users:
                user.stop()
            for user in users:
                user.join()
            subject.end(SIGKILL)
            subject.start()
            found = audit(url, BASE, ledger, rng)
            faults.stops.append(subject.end(SIGTERM))
        finally:
            for user in locals().get("users", []):
                user.stop()
            subject.process.kill()
            subject.wire.close()
    training = [user for user in users if isinstance(user, Trains)]
    return Report(
        seed,
        time.monotonic() - start,
        faults.counts,
        ledger.done,
        ledger.statuses,
        found,
        ledger.violations,
        subject.starts,
        faults.stops,
        sum(user.recoveries for user in training),
        sum(user.forks for user in training),
    )


def _calm(users: list[User], ledger: Ledger, seconds: float) -> None:
    """Without faults every user ends a few rounds; a machine may be slow, a user may not be stuck."""
    before, end = [user.rounds for user in users], time.monotonic() + 120
    time.sleep(seconds)
    while any(user.rounds < rounds + 2 for user, rounds in zip(users, before, strict=True)):
        if time.monotonic() > end:
            stuck = [type(u).__name__ for u, rounds in zip(users, before, strict=True) if u.rounds < rounds + 2]
            ledger.violated(f"stuck after the faults: {', '.join(stuck)}")
            return
        time.sleep(0.5)
