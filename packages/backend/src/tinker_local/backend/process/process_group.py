"""The server's side of its child processes: starts, watches and ends them.

Processes that work together form a group: when one of them ends, or does not answer in time, all are killed.
"""

import logging
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tinker_local.backend.process.child import DEVICE_LOST
from tinker_local.backend.process.early import take
from tinker_local.backend.process.messages import Log, Program, Start
from tinker_local.backend.process.start_process import REAP_SECONDS, end_process, start_process
from tinker_local.types import InternalError

log = logging.getLogger(__name__)

CHANNEL_ENDED = (EOFError, BrokenPipeError, ConnectionResetError)
"""What a channel raises when the other process has ended."""

TICK = 1.0
"""Seconds between two looks at time limits. A limit counts at most this much between two looks, so that it is not over
at once when the whole machine or this process was stopped meanwhile."""

HOST_LOST = 71
"""Exit code of the stand-in of a process on another host, when that host or the connection to it is lost."""


class ProcessEndedError(InternalError):
    """The process that should have answered has ended."""


class ChildProcess:
    """Starts a process that runs `program` (`messages.Program`), and the channel to it. `name`: what it is in messages.
    `environment`: what its environment has besides ours, or instead. `files`: descriptors that it gets under the same
    numbers.

    The process is a fresh interpreter: a fork would share CUDA's state and the server's sockets, and `multiprocessing`
    would import the user's program again. It ends with this process, however that ends, or with `channel`. It leads a
    process group, so that what it started is killed with it.
    """

    def __init__(self, name: str, program: Program, environment: Mapping[str, str], files: Sequence[int]) -> None:
        start = Start(name, program, logging.getLogger("tinker_local.backend").getEffectiveLevel())
        early = None if environment or files else take(name)
        if early is not None:
            self.popen, self.channel = early
            with suppress(*CHANNEL_ENDED):  # it ended while it imported, and so may the next one
                self._send(start)
                return
        self.popen, self.channel = start_process(environment, files)
        self._send(start)

    def _send(self, start: Start) -> None:
        try:
            self.channel.send(start)
        except BaseException:
            self.channel.close()
            end_process(self.popen)
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.popen.pid


class ProcessGroup:
    """Runs each of `programs` in a process. When one of them ends, or a `limit` is over, all are killed.

    `name` says what they are ("trainer"). `environments`: what the environment of each has besides ours, or instead;
    none given: nothing. `files`: descriptors that each gets under the same numbers. `on_end` is called once, in a
    thread, when all have been reaped, whatever the reason, and before any call fails for it.
    """

    def __init__(
        self,
        name: str,
        programs: Sequence[Program],
        on_end: Callable[[], None] = lambda: None,
        environments: Sequence[Mapping[str, str]] = (),
        files: Sequence[Sequence[int]] = (),
    ) -> None:
        self.name = name
        self.members: list[ChildProcess] = []
        self._note = ""
        try:
            nothing: list[dict[str, str]] = [{} for _ in programs]
            of_each = zip(programs, environments or nothing, files or [()] * len(programs), strict=True)
            for program, environment, inherited in of_each:
                self.members.append(ChildProcess(name, program, environment, inherited))
        except BaseException:
            for member in self.members:
                member.channel.close()
                end_process(member.popen)
            raise
        # The watch gets the processes and not the channels, so that dropping the group closes its channels.
        self._watch = _Watch(name, [member.popen for member in self.members], on_end)
        weakref.finalize(self, self._watch.expect_end).atexit = False

    @property
    def ended(self) -> bool:
        """Whether all processes have ended."""
        return self._watch.ended.is_set()

    @property
    def why(self) -> str:
        """How it ended, in a sentence without its end; only if `ended`."""
        return f"{self._watch.why} ({self._note})" if self._note else self._watch.why

    def note(self, error: Exception) -> None:
        """Add `error`, after which a process will end, to `why`."""
        self._note = str(error)

    def error(self) -> ProcessEndedError:
        """What to raise after `CHANNEL_ENDED`: waits until the group has ended."""
        if not self.wait(REAP_SECONDS):  # it closed its socket but still runs
            self.kill("closed its channel")
            self.wait(REAP_SECONDS)
        return ProcessEndedError(self.why)

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended, at most `seconds`; whether they have."""
        return self._watch.ended.wait(seconds)

    @contextmanager
    def limit(self, seconds: float | None) -> Iterator[None]:
        """Kill the group if this context lasts longer than `seconds`; None: it may last. Any number at once."""
        if seconds is None:
            yield
            return
        with self._watch.limit(seconds):
            yield

    def kill(self, why: str) -> None:
        """End all processes now. `why` continues the sentence "the trainer's process ..."."""
        self._watch.kill(why)

    def closing(self) -> None:
        """From here on, an end is intended."""
        self._watch.expect_end()

    def close(self, seconds: float) -> None:
        """Wait `seconds` for the end of all processes, which were asked to end, then kill them; close the channels."""
        self.closing()
        if not self.wait(seconds):
            self.kill("did not end")
            self.wait(REAP_SECONDS)
        for member in self.members:
            member.channel.close()


class _Limit:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left = seconds + TICK  # it may begin just before a look


class _Watch:
    """A thread that waits until one process ends, a limit is over, or `kill`; then it kills and reaps all of them."""

    def __init__(self, name: str, processes: Sequence["subprocess.Popen[bytes]"], on_end: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self.closing = False
        self.why = f"the {name} was closed"
        self._name = name
        self._processes = processes
        self._on_end = on_end
        self._killed: str | None = None
        self._limits: set[_Limit] = set()
        self._used = False
        self._idle = False
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._files = {os.pidfd_open(process.pid): process for process in processes}
        threading.Thread(target=self._run, daemon=True, name=f"{name}-watch").start()

    def expect_end(self) -> None:
        self.closing = True

    def kill(self, why: str) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self._killed = self._killed or why
            os.eventfd_write(self._wake, 1)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        limit = _Limit(seconds)
        with self._lock:
            self._limits.add(limit)
            self._used = True
            if self._idle and not self.ended.is_set():
                self._idle = False
                os.eventfd_write(self._wake, 1)
        try:
            yield
        finally:
            with self._lock:
                self._limits.discard(limit)

    def _run(self) -> None:
        first = self._wait()
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):  # not reaped yet, so the id cannot belong to another
                os.killpg(process.pid, signal.SIGKILL)
        for file, process in self._files.items():
            self._reap(file, process)
        if not self.closing:
            self.why = self._how(first)
            log.error("%s", self.why)
        self._on_end()  # before `ended`, so that it comes before the failure of a call
        with self._lock:
            self.ended.set()
            for file in (self._wake, *self._files):
                os.close(file)

    def _wait(self) -> "subprocess.Popen[bytes] | None":
        """Wait for the reason to end: a process that ended by itself, or None."""
        poll = select.poll()
        for file in (self._wake, *self._files):
            poll.register(file, select.POLLIN)
        while True:
            with self._lock:
                # A second without calls before it stops ticking: a wake-up for each call would cost more.
                self._idle = not (self._limits or self._used)
                self._used = False
                idle = self._idle
            before = time.monotonic()
            ready = [file for file, _ in poll.poll(None if idle else TICK * 1000)]
            ended = [process for file, process in self._files.items() if file in ready]
            if self._killed is not None:
                return None
            if ended:
                return ended[0]
            if ready:
                os.eventfd_read(self._wake)
            passed = 0.0 if idle else min(time.monotonic() - before, TICK)
            with self._lock:
                for limit in self._limits:
                    limit.left -= passed
                late = min((limit.seconds for limit in self._limits if limit.left <= 0), default=None)
            if late is not None:
                self._killed = f"gave no answer for {late:.0f} s, and was killed"
                return None

    def _reap(self, file: int, process: "subprocess.Popen[bytes]") -> None:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        if poll.poll(REAP_SECONDS * 1000):
            process.wait()
        else:
            log.error("the %s's process %d was killed but hangs in the kernel", self._name, process.pid)

    def _how(self, first: "subprocess.Popen[bytes] | None") -> str:
        """How it ended, in one sentence without its end."""
        status = None if first is None else first.returncode
        if status is None:
            how = self._killed or "hangs in the kernel"
        elif status == DEVICE_LOST:
            how = f"ended after an error of its device (exit code {status})"
        elif status == HOST_LOST:
            how = "on another host was lost: that host, Ray's actor on it, or the connection ended"
        elif status >= 0:
            how = f"ended with exit code {status}"
        else:
            named = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
            how = f"was ended by {named.get(-status, f'signal {-status}')}"
            if -status == signal.SIGKILL:
                how += ", as the kernel does when memory runs out"
        return f"the {self._name}'s process {how}"


def log_here(message: Log) -> None:
    """Log a record of a child process."""
    record = logging.makeLogRecord(dict(message.record))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
