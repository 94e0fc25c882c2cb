"""Ranks of a real trainer are killed and stopped in the middle of steps, while another base model works.

python -m tests.chaos.rank_kills [--kills 50] [--stops 5] [--seed 1] [--shard never]
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput

from tests.attacks.tenant import ADAM
from tests.chaos.chaos_users import Failed, Ledger, Owner, Wireless, logprobs, png, silent, text
from tests.chaos.possible_states import Oracle
from tests.chaos.served import served_tiny
from tests.conftest import Server, start_server
from tests.http.supervised_apps import children

VICTIM, OTHER = "tiny/vl", "tiny/text"
TIMEOUT = 10
"""Of a call of the trainer, besides a hundredth of a second for each position in it."""

SAVED = 3
"""Steps in the checkpoint from which every run begins."""

STEP = {**ADAM, "eps": 1e-3}  # no gradient near 0 moves a weight by a whole learning rate
LORA = {"rank": 4, "seed": 7}
MARK = "TINKER_LOCAL_TEST"
LONG = 300.0
CLOSE = 1e-4
"""Nats between logprobs of equal states in two processes, and the relative difference of norms."""

PROGRAM = """
import sys
from tinker_local.backend.models import supervision
supervision.SHORT_LIFE = 0.0  # kills follow each other sooner than a server would start what ends by itself
from tinker_local.backend.cli.main import main
main(sys.argv[1:])
"""


@dataclass
class RankReport:
    """`errors`: seconds from a signal to the error of the call in which it came, by signal. `recovered`: seconds until
    training works again. `others`: what the other base model, and samplers, did in that time. `left`: files and threads
    of the server after each fault. `worst`: the largest difference of what was computed again from what it was without
    faults; `moved`: the least by which a step changes it (nats)."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: dict[signal.Signals, list[float]] = field(default_factory=dict)
    recovered: list[float] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    left: list[tuple[int, int]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    worst: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0
    say: Callable[[str], None] = silent

    def violated(self, what: str) -> None:
        self.violations.append(what)
        self.say(f"VIOLATION {what}")

    def __str__(self) -> str:
        def times(found: Sequence[float]) -> str:
            return f"median {statistics.median(found):.2f} s, most {max(found):.2f} s"

        lines = [f"{count} {what}" for what, count in sorted(self.counts.items())]
        lines += [f"{number.name} to error: {times(found)}" for number, found in self.errors.items()]
        lines += [f"works again: {times(self.recovered)}"]
        lines += [f"meanwhile: {count} {what}" for what, count in sorted(self.others.items())]
        (files, threads), (last_files, last_threads) = self.left[0], self.left[-1]
        lines += [f"the server's files {files} -> {last_files}, threads {threads} -> {last_threads}"]
        lines += [f"states after faults differ by at most {self.worst:.1g}; a step moves one by {self.moved:.1g}"]
        lines += [f"{self.seconds:.0f} s; violations: {len(self.violations)}", *self.violations]
        return "\n".join(lines)


def marked(mark: str) -> set[int]:
    """Processes that this server, or what it started, has started, also those that now have another parent."""
    found = set()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def shared_memory(ours: Container[int]) -> set[str]:
    """Names of files in /dev/shm that no process but `ours` has mapped. Folders are those of servers, which have their
    sampler versions there, and of other programs. What joblib makes is of others alone."""
    others = ("sem.loky-", "loky-")
    found = {file.name for file in Path("/dev/shm").iterdir() if not (file.name.startswith(others) or file.is_dir())}
    for folder in Path("/proc").iterdir() if found else ():
        with suppress(OSError):
            if folder.name.isdigit() and int(folder.name) not in ours:
                maps = (folder / "maps").read_text()
                found = {name for name in found if f"/dev/shm/{name}" not in maps}
    return found


class Client:
    """A session with one training run or none."""

    def __init__(self, url: str) -> None:
        self.ledger = Ledger()
        self.wire = Wireless(url, Owner("somebody"), self.ledger)
        self._session = str(self.wire.post("create_session", {"tags": [], "user_metadata": {}})["session_id"])
        self._numbers, self._seq_ids = itertools.count(), itertools.count(1)
        self.model = ""

    def beat(self) -> None:
        self.wire.post("session_heartbeat", {"session_id": self._session})

    def create(self, base_model: str) -> None:
        body = {"session_id": self._session, "model_seq_id": next(self._numbers), "base_model": base_model}
        self._begin("create_model", {**body, "lora_config": LORA})

    def resume(self, path: str) -> None:
        number = next(self._numbers)
        body = {"session_id": self._session, "model_seq_id": number, "path": path, "optimizer": True}
        self._begin("load_weights", body)

    def _begin(self, route: str, body: dict[str, Any]) -> None:
        self._seq_ids = itertools.count(1)
        self.model = str(self.wire.result(self.wire.submit(route, body))["model_id"])

    def gradient(self, data: Sequence[Datum], *, forward_only: bool = False) -> str:
        return self.wire.gradient(self.model, next(self._seq_ids), data, forward_only=forward_only)

    def step(self) -> str:
        body = {"model_id": self.model, "seq_id": next(self._seq_ids), "adam_params": STEP, "type": "optim_step"}
        return self.wire.submit("optim_step", body)

    def trained(self, data: Sequence[Datum]) -> tuple[bytes, float]:
        """A step: the logprobs before it, and its norm."""
        gradient, step = self.gradient(data), self.step()
        return _bits(self.wire.result(gradient)), float(self.wire.result(step)["metrics"]["grad_norm"])

    def forward(self, data: Sequence[Datum]) -> bytes:
        return _bits(self.wire.result(self.gradient(data, forward_only=True)))

    def save(self, name: str) -> str:
        body = {"model_id": self.model, "seq_id": next(self._seq_ids), "path": name, "type": "save_weights"}
        return str(self.wire.result(self.wire.submit("save_weights", body))["path"])

    def sampler(self, base_model: str) -> str:
        body = {"session_id": self._session, "sampling_session_seq_id": next(self._numbers), "base_model": base_model}
        return str(self.wire.post("create_sampling_session", body)["sampling_session_id"])

    def finish(self) -> None:
        self.wire.call("POST", f"sessions/{self._session}/finish", b"{}")


def _bits(output: Any) -> bytes:
    return b"".join(each.tobytes() for each in logprobs(output))


class Bystander(threading.Thread):
    """Trains another base model and samples from both, which must go on as if nothing had happened."""

    def __init__(self, url: str, report: RankReport) -> None:
        super().__init__(daemon=True)
        self._client, self._report = Client(url), report
        self._client.create(OTHER)
        self._samplers = {name: self._client.sampler(name) for name in (OTHER, VICTIM)}
        self._first: dict[str, tuple[list[int], Any]] = {}
        self._over = threading.Event()
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        data = [Datum(model_input=ModelInput.from_ints([5, 9, 20]), loss_fn_inputs={"target_tokens": [9, 20, 31]})]
        for number in itertools.count():
            if self._over.is_set():
                return
            try:
                self._client.beat()
                self._client.trained(data)
                self.done[f"steps of {OTHER}"] += 1
                for name, sampler in self._samplers.items():
                    self._sample(name, sampler, number)
                self._over.wait(0.3)  # the ranks that start need the processor
            except Exception as error:
                self._report.violated(f"beside the faults: {type(error).__name__}: {error}")
                return

    def _sample(self, name: str, sampler: str, number: int) -> None:
        (sequence,) = self._client.wire.sample(sampler, number, [text([5, 9, 20])], 1).sequences
        tokens, found = list(sequence.tokens), np.asarray(sequence.logprobs, np.float32)
        first_tokens, first = self._first.setdefault(name, (tokens, found))
        if tokens != first_tokens or not np.allclose(found, first, rtol=0, atol=2e-4):
            self._report.violated(f"{name}: another sample than before")
        self.done[f"samples of {name}"] += 1

    def end(self) -> None:
        self._over.set()
        self.join(LONG)
        if self.is_alive():
            self._report.violated(f"a user of {OTHER} hangs")
        self._report.violations += self._client.ledger.violations


class RankFaults:
    """Faults of the ranks that train `VICTIM`, one after the other, each in a step of a run from the same checkpoint:
    what it computes afterwards is what it computes without faults, to `CLOSE`, and equal states give equal bits."""

    def __init__(self, server: Server, oracle: Oracle, seed: int, mark: str, say: Callable[[str], None]) -> None:
        self.report = RankReport(say=say)
        self._server, self._oracle, self._mark, self._say = server, oracle, mark, say
        self._rng = random.Random(seed)
        self._shared = {file.name for file in Path("/dev/shm").iterdir()}
        # Base models are loaded one after the other.
        found = sorted(pid for pair in self._ranks() for pid in pair)
        self._others = {OTHER: set(found[2:])}
        self._data = [self._random_data(24 if at < SAVED + 2 else 3) for at in range(SAVED + 3)]
        self._idle = Client(server.url)  # has nothing unsaved
        self._idle.create(VICTIM)
        self._expect_one_rank([self._idle.trained(each) for each in self._data[:SAVED]])
        self._path = self._idle.save("saved")
        client = Client(server.url)
        client.resume(self._path)
        self._probes, self._steps, self._seconds = [client.forward(self._probe)], [], 0.0
        for each in self._data[SAVED:-1]:
            start = time.monotonic()
            self._steps.append(client.trained(each))
            self._seconds = time.monotonic() - start
            self._probes.append(client.forward(self._probe))
        client.finish()
        states = [np.frombuffer(each, np.float32) for each in self._probes]
        self.report.moved = min(float(np.abs(a - b).max()) for a, b in itertools.pairwise(states))
        if self.report.moved < 20 * CLOSE:
            self.report.violated(f"a step moves logprobs by {self.report.moved:.1g}, too little to be seen")
        say(f"a step takes {self._seconds:.2f} s")

    @property
    def _probe(self) -> Sequence[Datum]:
        return self._data[-1]

    def _random_data(self, count: int) -> list[Datum]:
        """A quarter with an image."""
        found = []
        for at in range(count):
            tokens = [self._rng.randrange(1, 500) for _ in range(self._rng.randint(10, 60))]
            given, targets = ModelInput.from_ints(tokens[:-1]), tokens[1:]
            if at % 4 == 0:
                given = ModelInput(chunks=(png(self._rng.randrange(6)), *given.chunks))
                targets = [0] * (self._oracle.length(given) - len(targets)) + targets
            found.append(Datum(model_input=given, loss_fn_inputs={"target_tokens": targets}))
        return found

    def _expect_one_rank(self, found: Sequence[tuple[bytes, float]]) -> None:
        """The first steps are those of one rank in this process."""
        name = self._oracle.new(LoraConfig(**LORA))
        for data, (bits, norm) in zip(self._data, found, strict=False):
            expected = np.concatenate(self._oracle.gradient(name, data))
            worst = float(np.abs(np.frombuffer(bits, np.float32) - expected).max())
            alone = self._oracle.step(name, AdamParams(**STEP))
            if worst > 1e-3 or abs(norm / alone - 1) > 1e-3:
                self.report.violated(f"one rank has other logprobs by {worst:.1g}, and norm {alone}: {norm}")

    def _ranks(self) -> list[list[int]]:
        """The processes of all trainers, by rank."""
        found: list[list[int]] = [[], []]
        for pid in children(self._server.process.pid):
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for rank, of_rank in enumerate(found):
                    if f"CUDA_VISIBLE_DEVICES={rank}".encode() in environment:
                        of_rank.append(pid)
        return found

    def _victims(self) -> list[int]:
        """By rank."""
        return [pid for of_rank in self._ranks() for pid in of_rank if pid not in self._others[OTHER]]

    def fault(self, number: signal.Signals, bystander: Bystander) -> bool:
        """Whether it came in a step, and not after it."""
        client = Client(self._server.url)
        client.resume(self._path)
        path = client.save("begin")
        unsaved = int(self._rng.random() < 0.5)
        for at in range(unsaved):
            self._close("a step before the fault", client.trained(self._data[SAVED + at]), self._steps[at])
        before, rank = self._victims(), self._rng.randrange(2)
        counted = Counter(bystander.done)
        calls = {"gradient": client.gradient(self._data[SAVED + unsaved]), "step": client.step()}
        time.sleep(self._rng.uniform(0, 0.6 * self._seconds))
        start = time.monotonic()
        os.kill(before[rank], number)
        failed = self._failures(client, calls)
        if failed:
            seconds = next(iter(failed.values())) - start
            self.report.errors.setdefault(number, []).append(seconds)
            if number == signal.SIGKILL and seconds > 5:
                self.report.counts["errors later than 5 s"] += 1
        elif number == signal.SIGSTOP:  # the limit counts for calls
            self._failures(client, {"gradient": client.gradient(self._probe)})
        self._until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "the ranks did not end")
        self._until(self._works, "training did not begin again")
        self.report.recovered.append(time.monotonic() - start)
        self.report.others += bystander.done - counted
        where = f"in the {next(iter(failed))}" if failed else "after the step"
        self.report.counts[f"{number.name} of rank {rank} {where}"] += 1
        self._say(f"{number.name} of rank {rank} {where}" + (f", error after {seconds:.2f} s" if failed else ""))
        self._check(client, path, unsaved + len(calls) - len(failed))
        self._check_leftovers(before)
        client.finish()
        for violation in client.ledger.violations:
            self.report.violated(violation)
        return bool(failed)

    def _failures(self, client: Client, calls: dict[str, str]) -> dict[str, float]:
        """The calls that fail, and when (monotonic). The first error says what happened, and the step after a gradient
        that failed fails."""
        found: dict[str, float] = {}
        for name, request in calls.items():
            try:
                client.wire.result(request)
                if found:
                    self.report.violated(f"the {name} after a gradient that failed succeeded")
            except Failed as error:
                found[name] = time.monotonic()
                if len(found) == 1 and "SIGKILL" not in str(error) and "gave no answer" not in str(error):
                    self.report.violated(f"the error does not say what happened: {error}")
        return found

    def _check(self, client: Client, path: str, unsaved: int) -> None:
        """The run goes on by itself if nothing is lost that was answered (`unsaved`: steps and gradients), and
        otherwise from what its error names."""
        try:
            probe = client.forward(self._probe)
            self.report.counts["runs that went on by themselves"] += 1
            if unsaved:
                self.report.violated(f"{unsaved} answered calls were lost without an error")
        except Failed as error:
            self.report.counts["runs continued from the checkpoint that the error names"] += 1
            if not unsaved or not error.lost or path not in str(error):
                self.report.violated(f"a run with {unsaved} unsaved calls and {path}: {error}")
            client.resume(path)
            probe = client.forward(self._probe)
        self._close("the state", (probe, 1.0), (self._probes[0], 1.0))
        if self._idle.forward(self._probe) != probe:
            self.report.violated("two runs with one state differ")
        for data, step, after in zip(self._data[SAVED:-1], self._steps, self._probes[1:], strict=True):
            start = time.monotonic()
            self._close("a step", client.trained(data), step)
            self._seconds = time.monotonic() - start
            self._close("the state after a step", (client.forward(self._probe), 1.0), (after, 1.0))
        self._idle.beat()

    def _check_leftovers(self, before: Sequence[int]) -> None:
        found = self._victims()
        if len(found) != 2 or set(found) & set(before):
            self.report.violated(f"the ranks are {found}, they were {before}")
        server = self._server.process.pid
        ours = marked(self._mark)
        if extra := ours - {server, *found, *self._others[OTHER]}:
            self.report.violated(f"processes are left: {extra}")
        if not self._others[OTHER] <= set(children(server)):
            self.report.violated(f"the ranks of {OTHER} are not {self._others[OTHER]} any more")
        if extra_names := shared_memory(ours) - self._shared:
            self.report.violated(f"left in /dev/shm: {extra_names}")
        files, threads = (len(list(Path(f"/proc/{server}/{each}").iterdir())) for each in ("fd", "task"))
        self.report.left.append((files, threads))

    def _close(self, what: str, found: tuple[bytes, float], expected: tuple[bytes, float]) -> None:
        """Logprobs and norms of two processes differ in their last bits; a step more or less moves them by far more."""
        logprobs, wanted = (np.frombuffer(bits, np.float32) for bits, _ in (found, expected))
        worst = max(float(np.abs(logprobs - wanted).max()), abs(found[1] / expected[1] - 1))
        self.report.worst = max(self.report.worst, worst)
        if worst > CLOSE:
            self.report.violated(f"{what} is not what it is without faults, by {worst:.1g}")

    def _works(self) -> bool:
        try:
            return self._server.healthy()
        except urllib.error.HTTPError:
            return False

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + LONG
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(otherwise)
            time.sleep(0.02)

    def end(self) -> None:
        """Stop the server: nothing of it is left."""
        (files, threads), (last_files, last_threads) = self.report.left[0], self.report.left[-1]
        most = 8 + len(self.report.left) // 5
        if last_files - files > most or last_threads - threads > most:
            self.report.violated("files or threads of the server became more with each fault")
        if code := self._server.stop():
            self.report.violated(f"the server ended with {code}")
        if extra := marked(self._mark):
            self.report.violated(f"processes are left: {extra}")


def rank_faults(
    folder: Path,
    *,
    kills: int,
    stops: int,
    seed: int,
    shard: str = "never",
    minutes: float = 600.0,
    say: Callable[[str], None] = silent,
) -> RankReport:
    """As many faults in steps, at random, of which none begins after `minutes`. `folder` gets the models and the
    server's data."""
    start, mark = time.monotonic(), uuid4().hex
    served = served_tiny(folder / "vl")
    make_tiny_text_model(folder / "text")
    os.environ[MARK] = mark
    try:
        server = start_server(
            folder / "data",
            *("--model", f"{VICTIM}={folder / 'vl'}", "--model", f"{OTHER}={folder / 'text'}"),
            *("--train-gpus", "0,1", "--shard", shard, "--trainer-timeout", str(TIMEOUT)),
            *("--session-timeout", "3600"),
            *("--max-rank", "8", "--kv-cache", "0.25", "--max-context-length", "256", "--dtype", "float32"),
            program=PROGRAM,
            seconds=1800,
        )
    finally:
        del os.environ[MARK]
    try:
        faults = RankFaults(server, Oracle(served), seed, mark, say)
        bystander = Bystander(server.url, faults.report)
        bystander.start()
        end = time.monotonic() + 60 * minutes
        for number, count in ((signal.SIGSTOP, stops), (signal.SIGKILL, kills)):
            while count and time.monotonic() < end:
                count -= faults.fault(number, bystander)
        bystander.end()
        faults.end()
    finally:
        server.kill()
    faults.report.seconds = time.monotonic() - start
    return faults.report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.rank_kills")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="no fault begins later")
    parser.add_argument("--shard", choices=("never", "2"), default="never")
    arguments = parser.parse_args()

    def say(what: str) -> None:
        print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        report = rank_faults(Path(scratch), say=say, **vars(arguments))
    print(report)
    return int(bool(report.violations))


if __name__ == "__main__":
    sys.exit(main())
