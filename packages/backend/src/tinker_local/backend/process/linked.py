"""How processes that are one sampler find each other on their host: sockets, and a file without a name."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SOCKETS, _MEETING = "TINKER_LOCAL_SOCKETS", "TINKER_LOCAL_MEETING"


@dataclass(frozen=True, slots=True, eq=False)
class Linked:
    """What each of several processes gets. `files`: descriptors under the same numbers, for the caller to close.
    `environments`: of each, besides its own. `meeting`: has to stay open as long as they run."""

    files: Sequence[Sequence[int]]
    environments: Sequence[Mapping[str, str]]
    meeting: Any = None

    def close(self) -> None:
        """Close `files`, which the processes have."""
        for file in (file for each in self.files for file in each):
            os.close(file)


def linked(size: int) -> Linked:
    """For `size` processes. A socket links the first one to each other one."""
    if size == 1:
        return Linked([()], [{}])
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size - 1)]
    ours, theirs = [[one.detach() for one in each] for each in zip(*pairs, strict=True)]
    files = [ours, *([link] for link in theirs)]
    meeting = os.fdopen(os.memfd_create("tinker-local-ranks", os.MFD_CLOEXEC), "rb")  # leaves nothing behind
    path = f"/proc/{os.getpid()}/fd/{meeting.fileno()}"
    return Linked(files, [{_SOCKETS: ",".join(map(str, each)), _MEETING: path} for each in files], meeting)


def own_sockets() -> tuple[int, ...]:
    """The sockets of this process: of the first one to each other one in turn, of another to the first."""
    return tuple(int(each) for each in os.environ[_SOCKETS].split(","))


def own_meeting() -> str:
    """The path of a file, empty at first, over which the processes find each other."""
    return os.environ[_MEETING]
