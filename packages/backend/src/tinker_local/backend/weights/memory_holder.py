"""Who keeps the frozen weights that a trainer and a sampler share: the server, which computes nothing.

It has the file descriptors and what the trainer says of them, and gives both to any engine of the same user that asks:
to the sampler, and to a trainer or a sampler that comes back after its process has died. Neither frees what the other
reads. Messages are JSON behind their length, with the descriptors beside them, on a socket in Linux's abstract
namespace, which leaves nothing behind. Each end asks the kernel whether the other is this user.
"""

import array
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

_FILES_AT_ONCE = 64
"""Descriptors of one message; Linux takes 253."""
ANSWER_SECONDS = 60.0
_LENGTH = struct.Struct("!IQ")
"""Of a message: how many descriptors, and how many bytes."""


class Deposit(NamedTuple):
    """`said`: JSON of the one who made the memory. `files`: descriptors of it, which are the receiver's to close."""

    said: Any
    files: Sequence[int]


class MemoryHolder:
    """Keeps one `Deposit` and gives it to engines that connect to `address`, until it is closed.

    `refusal`: why there is none, once an engine has said so. `read`: bytes of shared weights, and of all weights; None
    until the sampler has told them.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.read: tuple[int, int] | None = None
        self.address = f"tinker-local-{secrets.token_hex(16)}"
        self._kept: Deposit | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, daemon=True, name="weights")
        self._accepting.start()

    def close(self) -> None:
        """Forget the memory, which ends with the last engine that maps it. Called twice, it does nothing more."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for file in () if self._kept is None else self._kept.files:
                os.close(file)
            self._kept = None
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, and is done also where a queue of others is full
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
                if _of_this_user(connection):
                    threading.Thread(target=self._serve, args=(connection,), daemon=True, name="weights").start()
                else:
                    connection.close()
            except (OSError, RuntimeError) as error:  # no more files or threads: later there are
                if not self._closed:
                    log.warning("an engine that asks for the shared weights waits: %s", error)
                    time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                asked, files = _receive(connection)
                if asked["what"] == "put":
                    self._keep(Deposit(asked["said"], files))
                    _send(connection, None)
                elif asked["what"] == "refuse":
                    self._refuse(str(asked["why"]))
                    _send(connection, None)
                elif asked["what"] == "tell":
                    shared, whole = asked["read"]
                    self.read = int(shared), int(whole)
                    _send(connection, None)
                else:
                    self._give(connection, wait=asked["what"] == "wait")
            except (OSError, ValueError, KeyError, TypeError):
                """The other has ended, or is none of ours."""

    def _keep(self, deposit: Deposit) -> None:
        with self._changed:
            if self._closed or self._kept is not None:
                for file in deposit.files:
                    os.close(file)
                raise ValueError("there is a deposit")
            self._kept = deposit
            self._changed.notify_all()

    def _refuse(self, why: str) -> None:
        with self._changed:
            self.refusal = self.refusal or why
            self._changed.notify_all()

    def _give(self, connection: socket.socket, *, wait: bool) -> None:
        files: list[int] = []
        try:
            with self._changed:
                if wait:
                    self._changed.wait_for(lambda: self._closed or self.refusal is not None or self._kept is not None)
                kept = self._kept
                files.extend(map(os.dup, () if kept is None else kept.files))  # `close` may come now
            _send(connection, None if kept is None else {"said": kept.said}, files)
        finally:
            for file in files:
                os.close(file)


def put(address: str, deposit: Deposit) -> None:
    """Give the holder at `address` memory to keep, with descriptors of it. RuntimeError if it does not take it."""
    _ask(address, {"what": "put", "said": deposit.said}, deposit.files)


def get(address: str, *, wait: bool) -> Deposit | None:
    """What the holder at `address` keeps. None if there is nothing; with `wait`, if there will be nothing."""
    answer, files = _ask(address, {"what": "wait" if wait else "get"})
    return None if answer is None else Deposit(answer["said"], files)


def refuse(address: str, why: str) -> None:
    """Tell the holder at `address` that weights are not shared."""
    _ask(address, {"what": "refuse", "why": why})


def tell(address: str, read: tuple[int, int]) -> None:
    """Tell the holder at `address` the bytes of weights that a sampler reads there, and those of all weights."""
    _ask(address, {"what": "tell", "read": read})


def _ask(address: str, message: Mapping[str, Any], files: Sequence[int] = ()) -> tuple[Any, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        if message["what"] != "wait":
            connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect("\0" + address)
            if not _of_this_user(connection):  # the server has ended, and another user has taken its address
                raise PermissionError("another user answers there")
            _send(connection, message, files)
            return _receive(connection)
        except OSError as error:
            raise RuntimeError(f"the server that keeps the shared weights does not answer: {error}") from None


def _of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(files), len(data)) + data)
    for start in range(0, len(files), _FILES_AT_ONCE):
        part = array.array("i", files[start : start + _FILES_AT_ONCE])
        connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """A message and its descriptors. ConnectionError if the other ends before."""
    count, length = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    data = _exactly(connection, length)
    files: list[int] = []
    try:
        while len(files) < count:
            room = socket.CMSG_SPACE(_FILES_AT_ONCE * array.array("i").itemsize)
            read, beside, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
            found = array.array("i", b"".join(part for _, _, part in beside))
            files += found
            if not read or not found or flags & socket.MSG_CTRUNC:
                raise ConnectionError("descriptors are missing: this process may not have so many files")
        return json.loads(data), files
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(min(length - len(parts), 2**20))
        if not part:
            raise ConnectionError("the connection has ended")
        parts += part
    return bytes(parts)
