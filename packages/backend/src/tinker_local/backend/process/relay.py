"""A process on another host, behind a stand-in that is a process of this one.

The stand-in gets the messages of the server as any child process does and forwards them, undecoded, to a relay beside
the process on the other host; answers come back the same way. If the process, the relay or its host ends, so does the
stand-in, and if the stand-in ends, so does the process. So nothing else has to know that a process is elsewhere.

Relay and stand-in prove to each other that they know a secret (HMAC). What they send is not encrypted.
"""

import logging
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import MappingProxyType
from typing import NamedTuple

from tinker_local.backend.process.channel import Channel, message_bytes
from tinker_local.backend.process.child import Inbox, fail
from tinker_local.backend.process.linked import linked
from tinker_local.backend.process.messages import Program, Start
from tinker_local.backend.process.process_group import HOST_LOST
from tinker_local.backend.process.start_process import end_process, start_process

PROBE_SECONDS, PROBES = 2, 3
"""The kernel asks the other host after so many seconds of silence, and again, so often. A host without an answer is
lost: 8 s after its last one."""

_HANDSHAKE_SECONDS = 10
_END_SECONDS = 10.0

_ENDED = (EOFError, OSError)


class Address(NamedTuple):
    """Where a relay listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Links:
    """Two connections between a stand-in and a relay. `messages`: both ways. `status`: silent until the relay sends how
    the process ended. The kernel can tell by its silence alone that a host is gone: on a connection with data on the
    way it waits for a quarter of an hour."""

    messages: Connection
    status: Connection


class Relay:
    """Listens on this host's address `host` for one stand-in, and then starts the process that the first message
    describes, with this process's environment and `environment`. It gets the descriptors `files` under the same
    numbers, which are then closed."""

    def __init__(
        self, host: str, secret: bytes, environment: Mapping[str, str] = MappingProxyType({}), files: Sequence[int] = ()
    ) -> None:
        self._server = socket.create_server((host, 0))
        self._secret = secret
        self._environment = environment
        self._files = files
        self.address = Address(*self._server.getsockname()[:2])

    def run(self) -> None:
        """Serve one stand-in; return when the process has ended, or end it when the stand-in has."""
        with self._server:
            links = Links(self._accept(), self._accept())
        try:
            popen, channel = start_process(self._environment, self._files)
        finally:
            for file in self._files:
                os.close(file)

        def forward() -> None:
            with suppress(*_ENDED):
                while True:
                    channel.send_bytes(links.messages.recv_bytes())
            _end_if_it_runs(popen)

        def watch() -> None:
            with suppress(*_ENDED):
                links.status.recv_bytes()
            _end_if_it_runs(popen)

        for work in (forward, watch):
            threading.Thread(target=work, daemon=True, name="relay").start()
        with suppress(*_ENDED):
            while True:
                links.messages.send_bytes(channel.receive_bytes())
        with suppress(subprocess.TimeoutExpired):  # it has closed its channel, so it is about to end
            popen.wait(_END_SECONDS)
        _end_if_it_runs(popen)
        with suppress(*_ENDED):
            links.status.send_bytes(str(popen.wait()).encode())
            _shut_down(links.messages)

    def _accept(self) -> Connection:
        """The next connection of one that knows the secret."""
        while True:
            accepted, _ = self._server.accept()
            with suppress(AuthenticationError, *_ENDED):
                return _proven(accepted, self._secret, first=True)


class Relays:
    """Those of `size` processes that are one rank or one sampler, each in a thread."""

    def __init__(self, host: str, secret: bytes, size: int) -> None:
        links = linked(size)
        self._meeting = links.meeting
        each = zip(links.environments, links.files, strict=True)
        relays = [Relay(host, secret, environment, files) for environment, files in each]
        self.addresses = [relay.address for relay in relays]
        self.threads = [threading.Thread(target=relay.run, daemon=True, name="relay") for relay in relays]
        for thread in self.threads:
            thread.start()


def connect(address: Address, secret: bytes) -> Links:
    """Connect to a relay; OSError if it cannot be reached, AuthenticationError if it has another secret."""
    messages, status = (
        _proven(socket.create_connection(address, _HANDSHAKE_SECONDS), secret, first=False) for _ in range(2)
    )
    return Links(messages, status)


def _proven(connected: socket.socket, secret: bytes, *, first: bool) -> Connection:
    """A connection whose ends have shown each other that both know `secret`. `first`: this end asks first."""
    connected.settimeout(None)
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): PROBE_SECONDS,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): PROBE_SECONDS,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): PROBES,
    }
    for (level, option), value in options.items():
        connected.setsockopt(level, option, value)
    _limit_reads(connected, _HANDSHAKE_SECONDS)
    connection = Connection(os.dup(connected.fileno()))
    try:
        for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            step(connection, secret)
        _limit_reads(connected, 0)
    except BaseException:
        connection.close()
        raise
    finally:
        connected.close()
    return connection


def _shut_down(connection: Connection) -> None:
    """End a connection from which another thread of this process may be reading; to close it would not."""
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        connected.shutdown(socket.SHUT_RDWR)


def _limit_reads(connected: socket.socket, seconds: int) -> None:
    """0: without a limit."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _end_if_it_runs(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        end_process(process)


def standing_in(name: str, program: Program, find: Callable[[], Links]) -> Program:
    """The program of a stand-in for the process `name`, which runs `program` elsewhere. See `stand_in`."""
    level = logging.getLogger("tinker_local.backend").getEffectiveLevel()
    return partial(stand_in, start=bytes(message_bytes(Start(name, program, level))), find=find)


def stand_in(inbox: Inbox, start: bytes, find: Callable[[], Links]) -> None:
    """Be a process on another host, for the server. The program of a child process, with all but `inbox` given.

    `start`: the `messages.Start` of that process, as bytes; this one cannot read it without importing its program.
    `find`: the connections to its relay; if it raises, the first call does.
    """
    try:
        links = find()
    except Exception as error:
        fail(inbox.send, inbox.next(), error, {})
        inbox.next()
        return
    threading.Thread(target=_forward, args=(inbox.channel, links, start), daemon=True, name="stand-in").start()
    ending: list[int] = []
    watch = threading.Thread(target=_watch, args=(links, ending), daemon=True, name="stand-in-status")
    watch.start()
    with suppress(*_ENDED):
        while True:
            inbox.channel.send_bytes(links.messages.recv_bytes())
    watch.join()
    _end_like(ending[0])


def _forward(channel: Channel, links: Links, start: bytes) -> None:
    with suppress(*_ENDED):  # the status says how it ended
        links.messages.send_bytes(start)
        while True:
            links.messages.send_bytes(channel.receive_bytes())


def _watch(links: Links, ending: list[int]) -> None:
    """Wait for the status of the process, or end this one when its host or its relay is lost."""
    try:
        ending.append(int(links.status.recv_bytes()))
    except _ENDED:
        os._exit(HOST_LOST)


def _end_like(status: int) -> None:
    """End this process as another one did: with an exit code, or by a signal (below 0)."""
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))
