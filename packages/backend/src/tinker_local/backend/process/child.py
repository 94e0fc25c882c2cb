"""What runs in a child process: it serves an object that a factory makes, and ends with its parent."""

import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tinker_local.backend.heap import freeze_heap, keep_freed_memory, while_importing
from tinker_local.backend.process.channel import Channel
from tinker_local.backend.process.messages import (
    Answer,
    Call,
    Failure,
    Forget,
    ForgetImages,
    Keep,
    KeepImage,
    Log,
    Prepare,
    travels,
)
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.stages import note, process_seconds
from tinker_local.types import ApiError, InternalError

log = logging.getLogger(__name__)

LOAD, CLOSE = "load", "close"
"""Calls that make the object, and that close it and end the process; others are its methods."""

DEVICE_LOST = 70
"""Exit code after a device error, because any later result could be wrong."""

NO_MEMORY = 2
"""cudaErrorMemoryAllocation, after which the device still works. As an AcceleratorError it means that page-locked host
memory is short; if device memory is short, the error is an OutOfMemoryError."""

_LOG_CHARACTERS = 16_000
_HOST_THREADS = 4


def main(descriptor: int) -> None:
    """Run the program that comes over the socket `descriptor`, until that is closed."""
    # Ctrl-C and a service manager's SIGTERM reach all processes. The parent ends this process in order, after the calls
    # that it still needs. (SIG_IGN would be inherited by processes that libraries start here.)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    keep_freed_memory()
    os.dup2(2, 1)  # what libraries print must not mix with the server's output
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=descriptor), os.getppid())
    threading.Thread(target=_end_with, args=(channel,), daemon=True, name="parent").start()
    with while_importing("torch"):
        start = channel.receive()  # imports what the program needs
        if isinstance(start, Prepare):
            with suppress(Exception):  # LOAD imports it again, and answers with the error
                module, _, function = start.what.partition(":")
                imported = importlib.import_module(module)
                if function:
                    getattr(imported, function)()
            note("imports", process_seconds())
            start = channel.receive()
        else:
            note("imports", process_seconds())
    logging.basicConfig(level=start.log_level, handlers=[_Forwarding(channel, start.name)])
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        start.program(Inbox(channel))
    os._exit(0)  # everything is closed; with torch loaded, the interpreter's own exit takes seconds


def _end_with(channel: Channel) -> None:
    """End this process at once, whatever it is doing, when its parent has ended.

    PR_SET_PDEATHSIG would end it together with the *thread* that started it, which only loads and returns.
    """
    channel.wait_for_end()
    os._exit(0)


class _Forwarding(logging.Handler):
    """Sends log records to the parent, which logs them."""

    def __init__(self, channel: Channel, name: str) -> None:
        super().__init__()
        self._channel = channel
        self._process = name

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
            "processName": self._process,
            "threadName": record.threadName,
            "msg": text[:_LOG_CHARACTERS],
            "exc_text": trace and trace[-_LOG_CHARACTERS:],
        }
        try:
            self._channel.send(Log(sent))
        except OSError:
            self.handleError(record)


class Inbox:
    """The calls of the parent, whose images and `values` are kept here until it says to forget them. One thread may
    receive; any thread may send."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.values: dict[str, Any] = {}
        self._images: dict[str, RenderedImage] = {}

    def next(self) -> Any:
        """The next message that is not about what to keep; EOFError if the parent has ended."""
        while True:
            for message in self.take():
                return message

    def take(self) -> list[Any]:
        """The messages of the next record, without those about what to keep. EOFError if the parent has ended."""
        received = self.channel.receive(self._images)
        return [each for each in (received if isinstance(received, list) else [received]) if not self._kept(each)]

    def _kept(self, message: Any) -> bool:
        """Whether `message` was about what to keep."""
        if isinstance(message, KeepImage):
            self._images[message.content_hash] = message.rendered()
        elif isinstance(message, ForgetImages):
            for content_hash in message.content_hashes:
                self._images.pop(content_hash, None)
        elif isinstance(message, Keep):
            self.values[message.name] = message.value
        elif isinstance(message, Forget):
            for name in message.names:
                self.values.pop(name, None)
        else:
            return False
        return True

    def send(self, message: Any) -> None:
        """Send a message to the parent."""
        self.channel.send(message)


def serve_calls(
    inbox: Inbox, make: Callable[[], Any], describe: Callable[[Any], Any], told: tuple[str, ...] = ()
) -> None:
    """Run one call at a time, until `CLOSE`. The program of a child process, with all but `inbox` given.

    `LOAD` makes the object with `make` and answers what `describe` returns of it. Each answer has the attributes `told`
    of the object.
    """
    server = _Server(inbox, make, describe, told)
    while server.answer(inbox.next()):
        pass


def serve_follower(inbox: Inbox, make: Callable[[], Any]) -> None:
    """Make an object with `make` when `LOAD` comes, answer None, and run its `follow`, which gets its orders elsewhere.
    The program of a child process, with all but `inbox` given; it ends when `follow` does."""
    call = inbox.next()
    if call.method != LOAD:
        return
    try:
        follower = make()
        settle_after_load()
    except Exception as error:
        fail(inbox.send, call, error, {})
        inbox.next()
        return
    inbox.send(Answer(call.number, None, {}))
    try:
        follower.follow()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise  # the one that it follows has ended, perhaps in order
    except Exception:
        log.exception("a process that follows another one ends")
        raise


class _Server:
    def __init__(
        self, inbox: Inbox, make: Callable[[], Any], describe: Callable[[Any], Any], told: tuple[str, ...]
    ) -> None:
        self._inbox = inbox
        self._make = make
        self._describe = describe
        self._told = told
        self._target: Any = None

    def answer(self, call: Call) -> bool:
        """Run `call`; whether there may be more."""
        if call.method == CLOSE:
            if self._target is not None:
                self._target.close()
            return False
        try:
            value = (
                self._load() if call.method == LOAD else getattr(self._target, call.method)(*call.args, **call.kwargs)
            )
            self._inbox.send(Answer(call.number, value, self._state()))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            fail(self._inbox.send, call, error, self._state())
        return True

    def _load(self) -> Any:
        self._target = self._make()
        settle_after_load()
        return self._describe(self._target)

    def _state(self) -> Mapping[str, Any]:
        return {} if self._target is None else {name: getattr(self._target, name) for name in self._told}


def settle_after_load() -> None:
    """Few host threads beside a device, and a frozen heap."""
    _few_threads_beside_a_device()
    freeze_heap()


def fail(
    send: Callable[[Failure], None],
    call: Call,
    error: Exception,
    state: Mapping[str, Any],
    cause: BaseException | None = None,
) -> None:
    """Answer `call` with `error`, and end this process if its device no longer works. `cause`: what an engine raised if
    `error` is an ApiError, which a client may see. The last message has to be sent when `send` returns."""
    failure = cause if isinstance(error, ApiError) else error
    lost = isinstance(failure, Exception) and not isinstance(failure, ApiError) and device_is_lost(failure)
    if call.method == LOAD:
        raised = portable(error)
    elif isinstance(error, ApiError):
        raised = error
    else:
        log.error("%s failed in its process", call.method, exc_info=error)
        raised = InternalError(f"{type(error).__name__}: {message_of(error)}")
    send(Failure(call.number, raised, state, final=lost))
    if lost:
        os._exit(DEVICE_LOST)  # even an orderly end would ask the device


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
    raised.add_note(f"In the child process:\n{trace}")
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
