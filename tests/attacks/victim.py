"""What another user of the server feels: one-token samples and 512-token steps in a loop, and the server's memory."""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.tenant import ADAM, PROTOBUF, Connection, Refused, Tenant, gradient_message, sample_body

TOKENS = [1 + number % 100 for number in range(513)]
LONGEST = 45.0
"""Seconds after which the victim gives up waiting."""


def percentile(latencies: Sequence[float], share: float) -> float:
    """Of latencies measured one after the other.

    While one of them takes ten seconds, a hundred others that should have begun are not measured at all. So each counts
    for the waits of those that would have begun meanwhile, at the pace of the median.
    """
    pace = max(statistics.median(latencies), 1e-3)
    all_waits = sorted(each - skipped * pace for each in latencies for skipped in range(max(1, math.ceil(each / pace))))
    return all_waits[min(len(all_waits) - 1, math.ceil(share * len(all_waits)) - 1)]


@dataclass
class Felt:
    """Seconds that each sample and each step took; `failures` of those that were refused."""

    samples: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def p99(self) -> tuple[float, float]:
        """Of samples and of steps."""
        return percentile(self.samples, 0.99), percentile(self.steps, 0.99)

    def most(self) -> tuple[float, float]:
        return max(self.samples), max(self.steps)


class Victim:
    """A tenant with two threads. `feel` runs them for as long as a context lasts."""

    def __init__(self, url: str, key: str, base_model: str) -> None:
        self._tenant = tenant = Tenant(url, key, base_model)
        self._model, self._sampler = tenant.run(), tenant.sampler()
        self._closing = threading.Event()
        threading.Thread(target=self._stay_alive, daemon=True).start()

    def _stay_alive(self) -> None:
        connection = self._tenant.another_connection()
        while not self._closing.wait(2.0):
            with contextlib.suppress(OSError, Refused):
                connection.post("session_heartbeat", {"session_id": self._tenant.session})

    def close(self) -> None:
        self._closing.set()

    @contextlib.contextmanager
    def feel(self) -> Iterator[Felt]:
        """Sample and train until the context ends; then wait for what is in flight."""
        felt, stop = Felt(), threading.Event()

        def loop(once: Callable[[Connection], None], found: list[float]) -> None:
            connection = self._tenant.another_connection()
            while not stop.is_set() or not found:
                start = time.monotonic()
                try:
                    once(connection)
                except (OSError, Refused) as error:
                    felt.failures.append(f"{type(error).__name__}: {error}")
                    time.sleep(0.05)
                found.append(time.monotonic() - start)
            connection.close()

        threads = [
            threading.Thread(target=loop, args=(self._sample, felt.samples)),
            threading.Thread(target=loop, args=(self._step, felt.steps)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield felt
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _sample(self, connection: Connection) -> None:
        body = sample_body(self._sampler, self._tenant.next_sample())
        connection.wait(connection.post("asample", body)["request_id"], LONGEST)

    def _step(self, connection: Connection) -> None:
        message = gradient_message(self._model, self._tenant.next_seq_id(), TOKENS)
        status, _, content = connection.send(
            "POST", "forward_backward", message.SerializeToString(), Content_Type=PROTOBUF
        )
        step = {"model_id": self._model, "seq_id": self._tenant.next_seq_id(), "adam_params": ADAM}
        submitted = connection.post("optim_step", {**step, "type": "optim_step"})
        if status != 200:
            raise Refused(status, content.decode("utf-8", "replace"))
        connection.wait(submitted["request_id"], LONGEST)


class Memory:
    """Resident memory of a process and those that it started, watched from a thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = 0.0
        self._closing = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._closing.wait(0.1):
            self.peak = max(self.peak, self.now())

    def now(self) -> float:
        """MiB; 0 if the process has ended."""
        with contextlib.suppress(OSError):
            return sum(_resident(pid) for pid in _family(self._pid)) / 2**20
        return 0.0

    def settled(self, seconds: float) -> float:
        """The least within `seconds`, MiB."""
        end, least = time.monotonic() + seconds, self.now()
        while time.monotonic() < end:
            time.sleep(0.25)
            least = min(least, self.now())
        return least

    def close(self) -> None:
        self._closing.set()


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096
