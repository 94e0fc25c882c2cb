"""What happens to the server, and to the connections between it and its users."""

import contextlib
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.chaos_users import Ledger
from tests.chaos.served import Served

ROOT = Path(__file__).parents[2]


class Wire:
    """Forwards one port to the server's present port, and cuts connections."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.port: int | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                self._join(client)
            except OSError:  # no server, or cut meanwhile
                client.close()

    def _join(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self.port or 1), timeout=10)
        server.settimeout(None)
        for stream in (client, server):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := one.recv(65536):
                other.sendall(part)
        self._end(one, other)

    def _end(self, *streams: socket.socket) -> None:
        with self._lock:
            self._open -= set(streams)
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()

    def cut(self) -> None:
        """All connections, in the middle of whatever they carry."""
        with self._lock:
            streams = list(self._open)
        self._end(*streams)

    def close(self) -> None:
        self._listening.close()
        self.cut()


class Subject:
    """The server, started again on the same data folder after it was killed or stopped. Its trainer and its sampler are
    in processes that it ends `limit` seconds after they have stopped to answer."""

    def __init__(self, folder: Path, limit: int, arguments: Sequence[str]) -> None:
        """`arguments`: further options of `tinker-local serve`."""
        self.folder, self.limit, self._arguments = folder, limit, arguments
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.wire = Wire()
        self.log: list[str] = []
        self.starts = 0

    def start(self) -> None:
        """RuntimeError if it does not become ready."""
        limit = str(self.limit)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.chaos.chaos_server", "serve"),
                *("--port", "0", "--data-dir", str(self.folder / "data")),
                *("--trainer", "process", "--trainer-timeout", limit),
                *("--sampler", "process", "--sampler-timeout", limit),
                *("--session-timeout", "60", *self._arguments),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CHAOS_FAULTS": str(self.faults), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        )
        self.starts += 1
        ready = threading.Event()

        def read(process: "subprocess.Popen[str]") -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self.log.append(f"{time.strftime('%H:%M:%S')} {line.rstrip()}")
                if found := re.search(r"ready: http://\S+:(\d+)", line):
                    self.wire.port = int(found[1])
                    ready.set()
            ready.set()

        self._reader = threading.Thread(target=read, args=(self.process,), daemon=True)
        self._reader.start()
        if not ready.wait(600) or self.process.poll() is not None:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log[-30:]))

    def end(self, number: signal.Signals) -> tuple[int, float, list[str]]:
        """Send a signal and wait for the end: the exit code, the seconds that took, and what the server said."""
        start, said = time.monotonic(), len(self.log)
        self.process.send_signal(number)
        try:
            code = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"{number.name}: the server did not end within 120 s") from None
        seconds = time.monotonic() - start
        self._reader.join(30)
        return code, seconds, self.log[said:]

    def is_well(self) -> bool:
        """Whether training and sampling work."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.wire.port}/api/v1/healthz", timeout=20) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def is_child(self, pid: int) -> bool:
        """Whether the server started this process, and it has not ended."""
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            return int(parent) == self.process.pid and state != "Z"
        return False

    def pids_of(self, engine: str) -> dict[str, int]:
        """The processes of the loaded trainer or sampler by their numbers, if they have not ended."""
        found = {}
        for note in sorted(self.folder.glob(f"{engine}-[0-9]")):
            if self.is_child(pid := int(note.read_text())):
                found[note.name.rpartition("-")[2]] = pid
        return found


ENGINES = ("trainer", "sampler")
RESTARTS = ("server killed", "server stopped")
"""Half as likely as others, because nothing else can fail meanwhile."""


class Faults:
    """One fault after the other, every `pause` seconds or so, chosen by a seed."""

    def __init__(
        self,
        subject: Subject,
        ledger: Ledger,
        rng: random.Random,
        served: Served,
        say: Callable[[str], None],
    ) -> None:
        self._subject, self._ledger, self._rng, self._pause, self._say = subject, ledger, rng, served.pause, say
        self.counts: Counter[str] = Counter()
        self.stops: list[float] = []
        self.kinds: dict[str, Callable[[], bool | None]] = {
            "trainer killed": lambda: self._kill("trainer"),
            "sampler killed": lambda: self._kill("sampler"),
            "trainer and sampler killed": lambda: self._kill(*ENGINES),
            "trainer stopped for a moment": lambda: self._stop_for_a_moment("trainer"),
            "sampler stopped for a moment": lambda: self._stop_for_a_moment("sampler"),
            "trainer stopped for good": lambda: self._stop_for_good("trainer"),
            "sampler stopped for good": lambda: self._stop_for_good("sampler"),
            "trainer raises": lambda: self._while("trainer-raises", 0.3, 1.5),
            "sampler raises": lambda: self._while("sampler-raises", 0.3, 1.5),
            "sampler killed in a switch": lambda: self._while("sampler-dies-in-switch", 0.5, 3.0),
            "sampler hangs": lambda: self._while("sampler-hangs", 0.5, 2.5 * subject.limit),
            "disk full": lambda: self._while("disk-full", 0.5, 3.0),
            "database locked": self._lock_database,
            "connections cut": self._cut,
            "server killed": lambda: self._restart(signal.SIGKILL),
            "server stopped": lambda: self._restart(signal.SIGTERM),
        }
        if served.real:
            self.kinds |= {
                "trainer lacks memory": lambda: self._while("trainer-lacks-memory", 0.3, 1.5),
                "vLLM raises": lambda: self._while("vllm-raises", 0.3, 1.5),
                "vLLM lacks memory": lambda: self._while("vllm-lacks-memory", 0.3, 1.5),
                "vLLM hangs": lambda: self._while("vllm-hangs", 0.5, 2.0 * subject.limit),
            }

    def run(self, until: float, first: Sequence[str] = ()) -> None:
        """Until that time (monotonic). `first` come first, then each other kind once, if there is a process for it."""
        order = [kind for kind in self.kinds if kind not in first]
        self._rng.shuffle(order)
        order += reversed(first)
        weights = [1 if kind in RESTARTS else 2 for kind in self.kinds]
        while time.monotonic() < until:
            time.sleep(self._rng.uniform(*self._pause))
            happened = False
            while not happened:
                kind = order.pop() if order else self._rng.choices(list(self.kinds), weights)[0]
                while (happened := self.kinds[kind]() is not False) is False and kind in first:
                    time.sleep(0.1)
            self._say(kind)
            self.counts[kind] += 1
        for file in self._subject.faults.iterdir():
            file.unlink()

    def _while(self, name: str, least: float, most: float) -> bool:
        """Whether anything failed by it. It happens in one process of an engine, or in all."""
        file, hit = self._subject.faults / name, self._subject.folder / f"{name}.hit"
        engine = {"vllm": "sampler"}.get(name.partition("-")[0], name.partition("-")[0])
        hit.unlink(missing_ok=True)
        file.write_text(self._rng.choice(["", *self._subject.pids_of(engine)]))
        time.sleep(self._rng.uniform(least, most))
        file.unlink()
        return hit.exists()

    def _kill(self, *engines: str) -> bool:
        """All at once; False if one of them has no process."""
        pids = [self._pid_of(engine) for engine in engines]
        if None in pids:
            return False
        found = [_signal(pid, signal.SIGKILL) for pid in pids if pid is not None]
        self._note_end(*engines)
        return all(found)

    def _pid_of(self, engine: str) -> int | None:
        """One of its processes; None while there is none."""
        pids = [*self._subject.pids_of(engine).values()]
        return self._rng.choice(pids) if pids else None

    def _note_end(self, *engines: str) -> None:
        if "trainer" in engines:
            self._ledger.trainer_ends.append(time.monotonic())

    def _stop_for_a_moment(self, engine: str) -> bool:
        pid = self._pid_of(engine)
        if pid is None or not _signal(pid, signal.SIGSTOP):
            return False
        time.sleep(self._rng.uniform(0.1, 0.5 * self._subject.limit))
        _signal(pid, signal.SIGCONT)
        return True

    def _stop_for_good(self, engine: str) -> bool:
        """The server has to end it, soon unless it is still loading."""
        pid = self._pid_of(engine)
        if pid is None or not self._subject.is_well() or not _signal(pid, signal.SIGSTOP):
            return False
        longest = 20 * self._subject.limit  # vLLM has the time of its start besides, for a restart within its process
        end = time.monotonic() + longest
        while self._subject.is_child(pid):
            if time.monotonic() > end:
                _signal(pid, signal.SIGKILL)
                what = f"the {engine}'s process was stopped for {longest} s, and the server did not end it"
                self._ledger.violated(what)
            time.sleep(0.05)
        self._note_end(engine)
        return True

    def _lock_database(self) -> None:
        """Another program writes, and does not end."""
        path = self._subject.folder / "data" / "metadata.sqlite3"
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(self._rng.uniform(0.5, 4.0))
            connection.rollback()

    def _cut(self) -> None:
        for _ in range(self._rng.randint(1, 5)):
            self._subject.wire.cut()
            time.sleep(self._rng.uniform(0.02, 0.3))

    def _restart(self, number: signal.Signals) -> None:
        saved = self.end(number)
        if saved:
            self._ledger.count("stop with unsaved steps")
            self._ledger.count("run saved by a stop", saved)
        self._subject.wire.cut()
        self._subject.start()

    def end(self, number: signal.Signals) -> int:
        """End the server: how many runs it saved. If nothing was wrong, a stop saves every step; the ledger knows."""
        saves = number == signal.SIGTERM and self._subject.is_well()
        code, seconds, said = self._subject.end(number)
        if number == signal.SIGTERM:
            self.stops.append(seconds)
            text = "\n".join(said)
            if saves and "NOT saved" in text:
                self._ledger.violated(f"a stop did not save everything: {text}")
            if code:
                self._ledger.violated(f"a stop ended with exit code {code}: {text}")
        self._ledger.ends.append((time.monotonic(), saves))
        return sum(" saved tinker://" in line for line in said)


def _signal(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
