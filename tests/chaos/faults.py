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
from collections import Counter
from collections.abc import Callable
from pathlib import Path

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
    """The server, started again on the same data folder after it was killed or stopped."""

    def __init__(self, folder: Path, base_model: str, arguments: tuple[str, ...] = ()) -> None:
        self.folder, self._base_model, self._arguments = folder, base_model, arguments
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.wire = Wire()
        self.log: list[str] = []
        self.starts = 0
        self.exit_codes: Counter[int] = Counter()

    def start(self) -> None:
        """RuntimeError if it does not become ready."""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.chaos.chaos_server", "serve", "--fake", "--trainer", "process"),
                *("--model", self._base_model, "--port", "0", "--data-dir", str(self.folder / "data")),
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
                self.log.append(line.rstrip())
                if found := re.search(r"ready: http://\S+:(\d+)", line):
                    self.wire.port = int(found[1])
                    ready.set()
            ready.set()

        threading.Thread(target=read, args=(self.process,), daemon=True).start()
        if not ready.wait(240) or self.process.poll() is not None:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log[-30:]))

    def end(self, number: signal.Signals) -> float:
        """Send a signal, wait for the end; seconds that took."""
        start = time.monotonic()
        self.process.send_signal(number)
        try:
            self.exit_codes[self.process.wait(120)] += 1
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"{number.name}: the server did not end within 120 s") from None
        return time.monotonic() - start

    def trainer_pids(self) -> list[int]:
        """Processes that the server started."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found


class Faults:
    """One fault after the other, every `pause` seconds or so, chosen by a seed."""

    def __init__(
        self, subject: Subject, rng: random.Random, pause: tuple[float, float], say: Callable[[str], None]
    ) -> None:
        self._subject, self._rng, self._pause, self._say = subject, rng, pause, say
        self.counts: Counter[str] = Counter()
        self.stops: list[float] = []
        self.kinds: dict[str, Callable[[], None]] = {
            "trainer killed": self._kill_trainer,
            "trainer stopped": self._stop_trainer,
            "sampler raises": lambda: self._while("sampler-raises", 0.3, 1.5),
            "sampler hangs": lambda: self._while("sampler-hangs", 0.5, 4.0),
            "disk full": lambda: self._while("disk-full", 0.5, 3.0),
            "database locked": self._lock_database,
            "connections cut": self._cut,
            "server killed": lambda: self._restart(signal.SIGKILL),
            "server stopped": lambda: self._restart(signal.SIGTERM),
        }

    def run(self, until: float) -> None:
        """Until that time (monotonic); the first round has each fault once."""
        order = list(self.kinds)
        self._rng.shuffle(order)
        while time.monotonic() < until:
            time.sleep(self._rng.uniform(*self._pause))
            kind = order.pop() if order else self._rng.choice(list(self.kinds))
            self._say(kind)
            self.kinds[kind]()
            self.counts[kind] += 1
        for file in self._subject.faults.iterdir():
            file.unlink()

    def _while(self, name: str, least: float, most: float) -> None:
        file = self._subject.faults / name
        file.touch()
        time.sleep(self._rng.uniform(least, most))
        file.unlink()

    def _kill_trainer(self) -> None:
        for pid in self._subject.trainer_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop_trainer(self) -> None:
        """Shorter than its limit or longer: the server has to kill it then."""
        pids = self._subject.trainer_pids()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(self._rng.uniform(0.2, 6.0))

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
        took = self._subject.end(number)
        if number == signal.SIGTERM:
            self.stops.append(took)
        self._subject.wire.cut()
        self._subject.start()
