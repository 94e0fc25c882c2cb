"""The clients of one sampling session, and which of their requests have ended."""

import asyncio
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.scheduling.operations import Operation
from tinker_local.types import GoneError, SampleOutput


@dataclass(frozen=True, slots=True)
class Completion:
    """One request that has ended, at `time` (monotonic seconds); `cursor` is its place in the order, from 1."""

    cursor: int
    request_id: str
    failed: bool
    time: float


MOST_UNSEEN = 2**16
"""Completions that are kept of a client that does not ask for them, as the SDK by default."""

MOST_LOGS = 2**14
"""Clients of a sampling session whose completions are kept: those that sampled last."""


class CompletionLog:
    """Completions not seen yet. They are dropped after `retention` seconds, like the results themselves, and beyond
    `MOST_UNSEEN` the oldest. `dropped`: the cursor of the last of these."""

    def __init__(self, retention: float) -> None:
        self._retention = retention
        self._unseen: deque[Completion] = deque()
        self._last = 0
        self.dropped = 0
        self._news = asyncio.Event()
        self._stopped = False

    @property
    def last(self) -> int:
        """The cursor of the last completion."""
        return self._last

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._unseen)

    def watch(self, operation: Operation[Any]) -> None:
        """Note `operation` as soon as it has ended."""
        operation.when_done(self._ended)

    def _ended(self, operation: Operation[Any]) -> None:
        now = time.monotonic()
        while self._unseen and self._unseen[0].time < now - self._retention:
            self._unseen.popleft()
        self._last += 1
        self._unseen.append(Completion(self._last, operation.request_id, operation.failed, now))
        if len(self._unseen) > MOST_UNSEEN:
            self.dropped = self._unseen.popleft().cursor
        self._news.set()

    async def after(self, cursor: int, timeout: float) -> list[Completion]:
        """All that ended after `cursor`, waiting `timeout` seconds at most for the first of them; what ended before
        is forgotten. `cursor` must not be beyond `last`."""
        while self._unseen and self._unseen[0].cursor <= cursor:
            self._unseen.popleft()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._last <= cursor and not self._stopped:
                    self._news.clear()
                    await self._news.wait()
        return [completion for completion in self._unseen if completion.cursor > cursor]

    def stop_waiting(self) -> None:
        """End every wait, now and from now on."""
        self._stopped = True
        self._news.set()


CLIENT_BLOCK = 1_000_000_000
MOST_CLIENTS = 2**63 // CLIENT_BLOCK - 1


def client_of(seq_id: int) -> int:
    """The number of the client that gave a sample its `seq_id`."""
    return seq_id // CLIENT_BLOCK


class SamplingClients:
    """The clients of one session, and their completions.

    `reopened`: the session was made before a restart. Its clients are unknown, so counting continues from a random
    number that is far from theirs.
    """

    def __init__(self, retention: float, *, reopened: bool = False) -> None:
        self._retention = retention
        self._joined = 2**32 + secrets.randbelow(MOST_CLIENTS - 2**33) if reopened else 0
        self._logs: dict[int, CompletionLog] = {}

    def join(self) -> int:
        """A number for a new copy, from 1 on, that no client of the session has."""
        self._joined += 1
        while self._joined in self._logs:  # drawn by a copy that did not join
            self._joined += 1
        return self._joined

    def watch(self, seq_id: int, operation: Operation[SampleOutput]) -> None:
        """Note the end of a client's sample."""
        client = client_of(seq_id)
        if (log := self._logs.pop(client, None)) is None:
            log = CompletionLog(self._retention)
        self._logs[client] = log
        if len(self._logs) > MOST_LOGS:
            del self._logs[next(iter(self._logs))]
        log.watch(operation)

    def completions(self, client: int, cursor: int) -> CompletionLog:
        """What `client`, which has seen everything up to `cursor`, is to read on.

        GoneError if `cursor` was not recorded here: the server was restarted, and the client would wait forever for
        samples that are lost. And if what ended after it was dropped.
        """
        log = self._logs.get(client)
        if log is not None and cursor < log.dropped:
            raise GoneError(
                f"prev_cursor: of the samples that client {client} has not seen, the newest {MOST_UNSEEN} are known, "
                f"after cursor {log.dropped}; ask for them more often"
            )
        if log is None or cursor > log.last:
            raise GoneError(
                f"cloned_sampler_id: nothing is known of samples of client {client}, up to cursor {cursor}, of this "
                "sampling session: the server was restarted; create the sampling client again"
            )
        return log

    def stop_waiting(self) -> None:
        """End the polls that wait for samples."""
        for log in self._logs.values():
            log.stop_waiting()
