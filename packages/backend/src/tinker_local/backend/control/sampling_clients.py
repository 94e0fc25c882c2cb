"""The clients of one sampling session: the one that opened it, and its copies in other processes.

They share its samples' ids. A client's samples have the ids of its block of `CLIENT_BLOCK`: the original has the first
block, a copy that joined has that of its `client_counter` (one that did not join draws a block by itself).
"""

import secrets

from tinker_local.backend.scheduling.completions import CompletionLog
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.types import GoneError, SampleOutput

CLIENT_BLOCK = 1_000_000_000
MOST_CLIENTS = 2**63 // CLIENT_BLOCK - 1


def client_of(seq_id: int) -> int:
    """The number of the client that gave a sample its `seq_id`."""
    return seq_id // CLIENT_BLOCK


class SamplingClients:
    """Who samples in one session, and what of theirs has ended.

    `reopened`: the session is from before a restart. What joined it then is not known any more, so that counting goes
    on from a random number that is far from all of them.
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
        if client not in self._logs:
            self._logs[client] = CompletionLog(self._retention)
        self._logs[client].watch(operation)

    def completions(self, client: int, cursor: int) -> CompletionLog:
        """What `client`, which has seen everything up to `cursor`, is to read on.

        GoneError if that is not what was recorded here: then the server was restarted, and samples of which nobody
        knows any more would be waited for without end.
        """
        log = self._logs.get(client)
        if log is None or cursor > log.last:
            raise GoneError(
                f"cloned_sampler_id: nothing is known of samples of client {client}, up to cursor {cursor}, of this "
                "sampling session: the server was restarted; create the sampling client again"
            )
        return log

    def stop_waiting(self) -> None:
        """Let everybody go who waits for a sample to end."""
        for log in self._logs.values():
            log.stop_waiting()
