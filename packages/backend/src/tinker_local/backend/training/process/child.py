"""The child process: builds the trainer, runs one call at a time, and ends with the process that started it."""

import faulthandler
import gc
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.backend.training.process.channel import Channel
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
    travels,
)
from tinker_local.backend.training.trainer import Trainer
from tinker_local.types import ApiError, InternalError, LoraConfig

log = logging.getLogger(__name__)

LOAD, CLOSE = "load", "close"
"""Calls other than the methods of `Trainer`."""

DEVICE_LOST = 70
"""Exit code after a device error, because any later result could be wrong."""

NO_MEMORY = 2
"""cudaErrorMemoryAllocation, after which the device still works. As an AcceleratorError it means that page-locked host
memory is short; if device memory is short, the error is an OutOfMemoryError."""

_LOG_CHARACTERS = 16_000
_HOST_THREADS = 4
_SIZED_RANKS = tuple(2**power for power in range(10))


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until the other end closes it or sends `CLOSE`."""
    # Ctrl-C and a service manager's SIGTERM reach all processes. The parent ends this process in order, after the calls
    # that it still needs. (SIG_IGN would be inherited by processes that libraries start here.)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.dup2(2, 1)  # what libraries print must not mix with the server's output
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=descriptor), os.getppid())
    threading.Thread(target=_end_with, args=(channel,), daemon=True, name="parent").start()
    start: Start = channel.receive()  # imports what the factory needs
    logging.basicConfig(level=start.log_level, handlers=[_Forwarding(channel)])
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _Server(channel, start.factory).run()
    os._exit(0)  # everything is closed; with torch loaded, the interpreter's own exit takes seconds


def _end_with(channel: Channel) -> None:
    """End this process at once, whatever it is doing, when its parent has ended.

    PR_SET_PDEATHSIG would end it together with the *thread* that started it, which only loads and returns.
    """
    channel.wait_for_end()
    os._exit(0)


class _Forwarding(logging.Handler):
    """Sends log records to the parent, which logs them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        trace = None if record.exc_info is None else "".join(traceback.format_exception(*record.exc_info))
        sent = {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "pathname": record.pathname,
            "filename": record.filename,
            "module": record.module,
            "lineno": record.lineno,
            "funcName": record.funcName,
            "created": record.created,
            "process": record.process,
            "processName": "trainer",
            "threadName": record.threadName,
            "msg": text[:_LOG_CHARACTERS],
            "exc_text": trace and trace[-_LOG_CHARACTERS:],
        }
        try:
            self._channel.send(Log(sent))
        except OSError:
            self.handleError(record)


class _Server:
    def __init__(self, channel: Channel, factory: TrainerFactory) -> None:
        self._channel = channel
        self._factory = factory
        self._trainer: Trainer | None = None
        self._images: dict[str, RenderedImage] = {}

    def run(self) -> None:
        """Take messages until `CLOSE`."""
        while True:
            message = self._channel.receive(self._images)
            if isinstance(message, KeepImage):
                self._images[message.content_hash] = message.rendered()
            elif isinstance(message, ForgetImages):
                for content_hash in message.content_hashes:
                    self._images.pop(content_hash, None)
            elif message.method != CLOSE:
                self._answer(message)
            else:
                if self._trainer is not None:
                    self._trainer.close()
                return

    def _answer(self, call: Call) -> None:
        try:
            value = (
                self._load() if call.method == LOAD else getattr(self._trainer, call.method)(*call.args, **call.kwargs)
            )
            self._channel.send(Answer(call.number, value, self._encoded()))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            self._fail(call, error)

    def _fail(self, call: Call, error: Exception) -> None:
        lost = not isinstance(error, ApiError) and device_is_lost(error)
        if call.method == LOAD:
            raised = portable(error)
        elif isinstance(error, ApiError):
            raised = error
        else:
            log.error("%s failed in the trainer's process", call.method, exc_info=error)
            raised = InternalError(f"{type(error).__name__}: {message_of(error)}")
        self._channel.send(Failure(call.number, raised, self._encoded(), final=lost))
        if lost:
            os._exit(DEVICE_LOST)  # even an orderly end would ask the device

    def _load(self) -> Loaded:
        trainer = self._trainer = self._factory()
        _few_threads_beside_a_device()
        # Freeze long-lived objects so that garbage collection does not delay kernel launches.
        gc.collect()
        gc.freeze()
        switch = (False, True)
        sizes = {key: adapter_sizes(trainer, *key) for key in itertools.product(OPTIMIZERS, switch, switch, switch)}
        return Loaded(trainer.vocab_size, trainer.max_context_length, sizes)

    def _encoded(self) -> int:
        return 0 if self._trainer is None else self._trainer.images_encoded


def adapter_sizes(trainer: Trainer, optimizer: str, unembed: bool, mlp: bool, attn: bool) -> dict[int, int]:
    """The size of an adapter in bytes at each rank of 2^i that the trainer accepts."""
    sizes = {}
    for rank in _SIZED_RANKS:
        config = LoraConfig(rank=rank, train_unembed=unembed, train_mlp=mlp, train_attn=attn)
        try:
            sizes[rank] = trainer.adapter_bytes(config, optimizer)
        except ApiError:
            break
    return sizes


def device_is_lost(error: Exception) -> bool:
    """Whether the device can no longer be used; after such an error, CUDA fails every call."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != NO_MEMORY:
        return True
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def portable(error: Exception) -> Exception:
    """The error for the parent to raise: `error` itself if it can be pickled, else a built-in type."""
    if isinstance(error, ApiError):
        return error
    raised = error
    if not travels(error):
        kinds = (kind for kind in (OSError, ValueError) if isinstance(error, kind))
        raised = next(kinds, RuntimeError)(f"{type(error).__name__}: {message_of(error)}")
    trace = "".join(traceback.format_exception(error))
    raised.add_note(f"In the trainer's process:\n{trace}")
    return raised


def message_of(error: Exception) -> str:
    """The message of `error`, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "(no message)"


def _few_threads_beside_a_device() -> None:
    """With the model on a GPU, the host only copies and adds up; more threads would disturb other processes.

    On CPU, torch's own choice stays (OMP_NUM_THREADS or all cores), as for a trainer in the server's process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.set_num_threads(min(_HOST_THREADS, torch.get_num_threads()))
