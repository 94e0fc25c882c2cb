"""Grammars in processes that may be killed (`grammar_server.py`): one for each, and one for each request that follows
it.
xgrammar compiles some patterns of a few hundred characters without an end in sight, and with some grammars that
compile at once a token costs seconds. It cannot be interrupted, and in the engine's process everybody would wait for
it."""

import asyncio
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.threads import THE_SERVER, Places, Who
from tinker_local.backend.vllm_engine import grammar_server
from tinker_local.backend.vllm_engine.grammar_server import (
    NOT_ALLOWED,
    NOTHING_FITS,
    REPLY,
    TOO_MUCH,
    Begin,
    Limits,
    Order,
    Take,
    receive,
    send,
    words_of,
)
from tinker_local.types import InternalError, InvalidRequestError

WALL_SECONDS = 120.0
"""To compile a grammar, on a machine that has others to do."""

SLOW = 1.0
"""Seconds after which a compilation goes on behind everything else on the machine."""

COMPILING, COMPILING_OF_OWNER = 8, 6
"""Grammars that are compiled at a time, of all and of one owner: those of others do not wait for all of its."""

REQUESTS, REQUESTS_OF_OWNER = 256, 192
"""Requests that follow grammars at a time, of all and of one owner; others wait."""

KEPT_BYTES, KEPT = 2**29, 64
"""Of compiled grammars that no request follows, and how many."""


class Matcher:
    """The process of one request. `masks` int32 [sequences, words]: what may follow, a row for each sequence; a bit for
    each token. `waiting`: sequences whose row is not written yet. `patient`: its last answer came at once. `failure`:
    why it does not go on.

    Only the engine's thread uses it, except for `close`.
    """

    def __init__(
        self, grammar: Grammar, channel: socket.socket, memory: int, sequences: int, limits: Limits, words: int
    ):
        self.field = grammar.field
        self.waiting: set[int] = set()
        self.patient = True
        self.failure: Exception | None = None
        self.masks: npt.NDArray[np.int32] = np.frombuffer(mmap.mmap(memory, 0), np.int32).reshape(sequences, words)
        self._limits = limits
        self._channel = channel
        (pid,) = struct.unpack("<i", channel.recv(4) or b"\0\0\0\0")
        try:
            self._process = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:
            self._process = -1
        channel.setblocking(False)
        self._pid = pid
        self._orders: list[Begin | Take] = []
        self._since, self._sent = 0.0, False
        self._last = False
        self._closing = threading.Lock()

    def fileno(self) -> int:
        """Readable when there are answers."""
        return self._channel.fileno()

    def begin(self, sequence: int, stops: Sequence[int]) -> None:
        """A sequence begins, or begins again."""
        self._order(Begin(sequence, tuple(stops)))

    def take(self, sequence: int, token: int) -> None:
        """A sequence goes on with `token`."""
        self._order(Take(sequence, token))

    def _order(self, order: Begin | Take) -> None:
        self.waiting.add(order.sequence)
        self._orders.append(order)

    def flush(self) -> None:
        """Send what was ordered."""
        if self._orders and self.failure is None:
            try:
                self._channel.send(pickle.dumps(self._orders))
            except BlockingIOError:
                return  # the next time
            except OSError:
                self.failure = self._too_much()
                return
            if not self._sent:
                self._since = time.monotonic()
            self._sent, self._orders = True, []

    def read(self, at_once: float) -> None:
        """Take the answers that are there. `at_once`: seconds of processor time that a patient one uses at most."""
        while self.failure is None:
            try:
                data = self._channel.recv(REPLY.size)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.failure = self._too_much()
                return
            sequence, micros, code = REPLY.unpack(data)
            self.waiting.discard(sequence)
            self._since, self._sent = time.monotonic(), bool(self.waiting)
            self.patient = micros <= at_once * 1e6
            if code == TOO_MUCH:
                self.failure = self._too_much()
            elif code == NOTHING_FITS:
                self.failure = InvalidRequestError(
                    f"{self.field}: no token of the vocabulary fits where a sample has come to: a dead end"
                )
            elif code == NOT_ALLOWED:
                self.failure = InternalError(f"{self.field}: a token was drawn that the grammar does not allow")

    def missed(self) -> None:
        """It was waited for in vain: do so no more, and let everything else on the machine go first."""
        self.patient = False
        silent = time.monotonic() - self._since if self._sent else 0.0
        if silent > self._limits.silent_seconds:
            self.failure = self._too_much()
        if not self._last and silent > 0.1:
            self._last = True
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, 19)

    def _too_much(self) -> Exception:
        limits = self._limits
        return InvalidRequestError(
            f"{self.field}: following it takes more than {limits.token_seconds:g} s of processor time for one token, "
            f"{limits.request_seconds:g} s and {1000 * limits.seconds_per_token:g} ms a token in all, "
            f"{limits.silent_seconds:g} s on a busy machine, or {limits.request_bytes / 2**20:.0f} MiB; use fewer "
            "repetitions, choices and rules that refer to themselves"
        )

    def close(self) -> None:
        """End the process, from any thread and again."""
        with self._closing:
            if self._process < 0:
                return
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = -1


@dataclass(slots=True, eq=False)
class _Compiled:
    """The process of one grammar. `size`: bytes of it. `used`: by how many requests now."""

    channel: socket.socket
    size: int
    used: int = 0
    forking: threading.Lock = field(default_factory=threading.Lock)


class GrammarProcess:
    """Checks grammars for the engine of `model` and makes matchers of them. Its process starts with the first grammar,
    which so takes some seconds. Used on one event loop."""

    def __init__(self, model: str, vocab_size: int, limits: Limits | None = None) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._limits = limits or Limits()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self._compiling = Places(COMPILING, COMPILING_OF_OWNER)
        self._requests = Places(REQUESTS, REQUESTS_OF_OWNER)
        self._turns: dict[Grammar, asyncio.Lock] = {}
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """InvalidRequestError if it is invalid, or takes too much to compile."""
        (await self._ready(grammar)).used -= 1
        self._forget_most()

    async def open(self, grammar: Grammar, sequences: int, who: Who = THE_SERVER) -> "OpenMatcher":
        """A matcher for a request of so many samples; InvalidRequestError as for `check`."""
        await self._requests.take(who)
        try:
            compiled = await self._ready(grammar, who)
            try:
                matcher = await in_daemon_thread(self._fork, grammar, compiled, sequences)
            except BaseException:
                self._give_back(grammar, compiled)
                raise
        except BaseException:
            self._requests.leave(who)
            raise
        return OpenMatcher(self, grammar, compiled, matcher, who)

    def release(self, grammar: Grammar, compiled: _Compiled, matcher: Matcher, who: Who) -> None:
        """A request of `who` has ended."""
        matcher.close()
        self._requests.leave(who)
        self._give_back(grammar, compiled)

    def _give_back(self, grammar: Grammar, compiled: _Compiled) -> None:
        compiled.used -= 1
        self._forget_most()

    def _forget_most(self) -> None:
        """End processes of grammars that no request follows, the oldest first, if there are too many."""
        idle = [(grammar, one) for grammar, one in self._compiled.items() if not one.used]
        count, size = len(idle), sum(one.size for _, one in idle)
        for grammar, one in idle:
            if count <= KEPT and size <= KEPT_BYTES:
                return
            del self._compiled[grammar]
            one.channel.close()
            count, size = count - 1, size - one.size

    async def _ready(self, grammar: Grammar, who: Who = THE_SERVER) -> _Compiled:
        """Compiled, and counted as used once more."""
        turn = self._turns.setdefault(grammar, asyncio.Lock())
        async with turn:
            found = self._compiled.get(grammar)
            if found is not None and _has_ended(found.channel):
                del self._compiled[grammar]
                found = None
            try:
                if found is None:
                    async with self._compiling.turn(who):
                        found = await in_daemon_thread(self._compile, grammar)
                    self._compiled[grammar] = found
            finally:
                self._turns.pop(grammar, None)
        self._compiled.move_to_end(grammar)
        found.used += 1
        return found

    def _compile(self, grammar: Grammar) -> _Compiled:
        channel = self._branch()
        limits = self._limits
        reason: str | None
        try:
            pid: int = receive(channel)
            send(channel, Order(grammar, limits))
            channel.settimeout(SLOW)
            channel.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, 19)
        except (EOFError, OSError):
            pass
        try:
            channel.settimeout(WALL_SECONDS)
            reason, size = receive(channel)
            channel.settimeout(None)
        except (EOFError, OSError):
            reason, size = (
                f"{grammar.field}: {len(grammar.text)} characters take more than {limits.compile_seconds:g} s of "
                f"processor time and {limits.compile_bytes / 2**30:.3g} GiB to compile, or crash the compiler; write "
                "it with fewer repetitions and choices",
                0,
            )
        if reason is None and size > limits.compiled_bytes:
            reason = f"{grammar.field}: {size / 2**20:.0f} MiB compiled; the limit is {limits.compiled_bytes >> 20} MiB"
        if reason is not None:
            channel.close()
            raise InvalidRequestError(reason)
        return _Compiled(channel, size)

    def _branch(self) -> socket.socket:
        """A channel to a new fork of the process that knows the vocabulary."""
        ours, theirs = socket.socketpair()
        with theirs, self._starting:
            socket.send_fds(self._running(), [b"g"], [theirs.fileno()])
        return ours

    def _fork(self, grammar: Grammar, compiled: _Compiled, sequences: int) -> Matcher:
        words = words_of(self._vocab_size)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("grammar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, 4 * words * sequences)
            with theirs, compiled.forking:
                socket.send_fds(compiled.channel, [b"f"], [theirs.fileno(), memory])
            return Matcher(grammar, ours, memory, sequences, self._limits, words)
        except OSError as error:
            raise InternalError(f"{grammar.field}: the process that follows it has ended: {error}") from error
        finally:
            os.close(memory)

    def _running(self) -> socket.socket:
        if self._closed:
            raise InvalidRequestError("the sampling engine was stopped")
        if self._control is None or self._process is None or self._process.poll() is not None:
            ours, theirs = socket.socketpair()
            program = [sys.executable, "-c", f"import {grammar_server.__name__} as server; server.main()"]
            with theirs:
                self._process = subprocess.Popen(
                    [*program, str(theirs.fileno()), self._model, str(self._vocab_size)], pass_fds=[theirs.fileno()]
                )
            if ours.recv(1) != b"r":
                raise InternalError("the process for grammars did not start")
            self._control = ours
        return self._control

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        with self._starting:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()


def _has_ended(channel: socket.socket) -> bool:
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(slots=True, eq=False)
class OpenMatcher:
    """A matcher until `close`."""

    _processes: GrammarProcess
    _grammar: Grammar
    _compiled: _Compiled
    matcher: Matcher
    _who: Who
    _closed: bool = False

    def close(self) -> None:
        """Once, on the loop."""
        if not self._closed:
            self._closed = True
            self._processes.release(self._grammar, self._compiled, self.matcher, self._who)
