"""A fresh interpreter that is connected with this process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tinker_local.backend.process.channel import Channel

REAP_SECONDS = 10.0
"""A killed process that has not ended by then hangs in the kernel."""


def start_process(environment: Mapping[str, str], files: Sequence[int]) -> "tuple[subprocess.Popen[bytes], Channel]":
    """A process that waits for its `Start`, and the channel to it. See `process_group.ChildProcess`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", __package__, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *files],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal does not reach it, not even before it ignores it
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return popen, Channel(ours, popen.pid)


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that leads a process group, and all of that group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(REAP_SECONDS)
