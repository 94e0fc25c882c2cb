"""The server's side of a trainer process: starts it, calls it, and ends it."""

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from tinker_local.backend.training.process.channel import Channel
from tinker_local.backend.training.process.child import CLOSE, DEVICE_LOST, LOAD
from tinker_local.backend.training.process.messages import (
    Answer,
    Call,
    Failure,
    ForgetImages,
    KeepImage,
    Loaded,
    Log,
    Start,
    TrainerFactory,
    encode,
)
from tinker_local.backend.training.process.sent_images import SentImages
from tinker_local.types import InternalError

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long to wait for the end of a call, and for the end of the process, before killing it."""

_CLOSED = "the trainer was closed"
_ENDED = (EOFError, BrokenPipeError, ConnectionResetError)


class TrainerProcess:
    """Starts a process that imports what `factory` needs. `load` creates the trainer in it, `call` runs its methods.

    The process is a fresh interpreter: a fork would share CUDA's state and the server's sockets, and `multiprocessing`
    would import the user's program again. It ends with this process, however that ends. It runs one call at a time;
    others wait. After the process has ended, every call raises InternalError at once. `image_bytes`: how many bytes of
    pixel values it keeps.
    """

    def __init__(self, factory: TrainerFactory, *, image_bytes: int = 2**30) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __package__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal does not reach it, not even before it ignores it
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._channel = Channel(ours, self._process.pid)
        self._numbers = itertools.count(1)
        self._images = SentImages(image_bytes)
        self._turn = threading.Lock()
        self._end: str | None = None
        self._closing = False
        self.images_encoded = 0
        try:
            self._channel.send(Start(factory, logging.getLogger(__package__).getEffectiveLevel()))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def load(self) -> Loaded:
        """Create the trainer. If its factory raises, close the process and raise the same error."""
        try:
            loaded = self.call(LOAD)
        except BaseException:
            self.close()
            raise
        assert isinstance(loaded, Loaded)
        return loaded

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return or raise what `method` of the trainer does. Arrays of the result own their memory."""
        with self._turn:
            if self._end is not None:
                raise InternalError(self._end)
            number = next(self._numbers)
            try:
                self._ask(number, method, args, kwargs)
                return self._answer(number)
            except _ENDED:
                self._end = self._how_it_ended()
            if not self._closing:
                log.error("%s", self._end)
            raise InternalError(self._end)

    def close(self) -> None:
        """End the process in order; after `CLOSE_SECONDS`, kill it together with a running call."""
        self._closing = True
        in_turn = self._turn.acquire(timeout=CLOSE_SECONDS)
        try:
            if in_turn and self._end is None:
                with suppress(*_ENDED):
                    self._channel.send(Call(next(self._numbers), CLOSE))
            self._process.wait(CLOSE_SECONDS if in_turn else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not in_turn:
            self._turn.acquire()  # a running call has ended with the process
        self._end = self._end or _CLOSED
        self._channel.close()
        self._turn.release()

    def _ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send the images that the process lacks, then the call, then which images to forget after it."""
        call = encode(Call(number, method, args, kwargs))
        for image in self._images.missing(call.images):
            self._channel.send(KeepImage.of(image))
            self._images.sent(image)
        self._channel.send_encoded(call)
        if too_many := self._images.too_many():
            self._channel.send(ForgetImages(too_many))

    def _answer(self, number: int) -> Any:
        """Wait for the answer; handle log records that arrive before it."""
        while True:
            message = self._channel.receive()
            if isinstance(message, Log):
                _log(message)
            elif message.number == number:  # earlier numbers belong to interrupted calls (KeyboardInterrupt)
                break
        assert isinstance(message, Answer | Failure)
        self.images_encoded = message.images_encoded
        if isinstance(message, Answer):
            return message.value
        if message.final:
            self._end = f"{self._how_it_ended()} ({message.error})"
            log.error("%s", self._end)
        raise message.error

    def _how_it_ended(self) -> str:
        """How the process ended, in one sentence."""
        try:
            status = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its socket but still runs
            self._process.kill()
            status = self._process.wait()
        if self._closing:
            return _CLOSED
        if status == DEVICE_LOST:
            how = f"ended after an error of its device (exit code {status})"
        elif status >= 0:
            how = f"ended with exit code {status}"
        else:
            how = f"was ended by {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                how += ", as the kernel does when memory runs out"
        return f"the trainer's process {how}; its models are lost until the server is started again"


def _log(message: Log) -> None:
    record = logging.makeLogRecord(dict(message.record))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
