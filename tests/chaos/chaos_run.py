"""A chaos run: several users, a fault every few seconds, and a history that a correct server could have."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

from tests.chaos.audit import audit
from tests.chaos.chaos_users import Ledger, Owner, User, silent
from tests.chaos.faults import Faults, Subject
from tests.chaos.in_flight_user import MovesWeights
from tests.chaos.sampling_user import QUOTA, Crowds, Samples
from tests.chaos.served import Served
from tests.chaos.training_user import Trains

ALICE, BOB, CAROL = OWNERS = tuple(map(Owner, ("alice", "bob", "carol")))
AUTOSAVE_SECONDS = 3


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


def all_users(url: str, served: Served, seed: int, ledger: Ledger) -> list[User]:
    trains = [Trains(url, served, seed + number, owner, ledger) for number, owner in enumerate((ALICE, ALICE, BOB))]
    samples = [
        Samples(url, served, seed + 10 + number, owner, ledger, images=number == 1)
        for number, owner in enumerate((ALICE, BOB))
    ]
    # A real model does not surely say its word after every text, and the checker would take that for a fault.
    moves = [] if served.real else [MovesWeights(url, served, seed + 30, BOB, ledger)]
    return [*trains, *samples, Crowds(url, served, seed + 20, CAROL, ledger), *moves]


def asynchronous_loops(url: str, served: Served, seed: int, ledger: Ledger) -> list[User]:
    """Two loops with weights that move, and a run beside them that keeps its own."""
    moves = [MovesWeights(url, served, seed + number, owner, ledger) for number, owner in enumerate((ALICE, BOB))]
    return [*moves, Trains(url, served, seed + 10, ALICE, ledger)]


def chaos(
    served: Served,
    seconds: float,
    seed: int,
    *,
    first: Sequence[str] = (),
    calm: float = 10.0,
    make_users: Callable[[str, Served, int, Ledger], list[User]] = all_users,
    say: Callable[[str], None] = silent,
    log: Path | None = None,
) -> Report:
    """`seconds` of faults, of which those of the kinds `first` come first, then `calm` seconds in which every user must
    get on, a kill, and an audit. `log`: where the server's own log is written."""
    rng = random.Random(seed)
    ledger, start = Ledger(say=say), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch, "keys")
        keys.touch(0o600)
        keys.write_text("".join(f"{owner.name} {owner.key}\n" for owner in OWNERS))
        options = ["--api-key-file", str(keys), "--autosave", f"{AUTOSAVE_SECONDS / 60}"]
        options += ["--quota", f"{CAROL.name}:adapters={QUOTA}", *served.arguments]
        subject = Subject(Path(scratch), served.limit, options)
        try:
            subject.start()
            users = make_users(subject.wire.url, served, seed * 100, ledger)
            for user in users:
                user.start()
            faults = Faults(subject, ledger, rng, served, say)
            faults.run(time.monotonic() + seconds, first)
            say(f"calm, {dict(ledger.done)}, {len(ledger.violations)} violations")
            _calm(users, ledger, calm)
            for user in users:
                user.stop()
            for user in users:
                user.join()
            faults.end(SIGKILL)
            subject.start()
            found = audit(subject.wire.url, served, ledger, OWNERS, rng)
            faults.end(SIGTERM)
        finally:
            for user in locals().get("users", []):
                user.stop()
            subject.process.kill()
            subject.wire.close()
            if log is not None:
                log.write_text("\n".join(subject.log))
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
    before, end = [user.rounds for user in users], time.monotonic() + 300
    time.sleep(seconds)
    while any(user.rounds < rounds + 2 for user, rounds in zip(users, before, strict=True)):
        if time.monotonic() > end:
            stuck = [type(u).__name__ for u, rounds in zip(users, before, strict=True) if u.rounds < rounds + 2]
            ledger.violated(f"stuck after the faults: {', '.join(stuck)}")
            return
        time.sleep(0.5)
