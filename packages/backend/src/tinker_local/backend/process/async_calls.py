"""Calls to a process that runs `async_child.serve_async_calls`: any number at the same time, from event loops.

One thread sends and one receives, whatever the number of calls. What waits for a thread at some moment goes together:
each record and each wake-up of a thread costs a turn of the GIL, which takes milliseconds while the server is busy.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from tinker_local.backend.process.calls import CLOSE_SECONDS
from tinker_local.backend.process.channel import Channel
from tinker_local.backend.process.child import CLOSE
from tinker_local.backend.process.messages import (
    Answer,
    Call,
    Cancel,
    Encoded,
    Failure,
    Forget,
    ForgetImages,
    Keep,
    KeepImage,
    Log,
    Notes,
    encode,
)
from tinker_local.backend.process.process_group import CHANNEL_ENDED, ProcessEndedError, ProcessGroup, log_here
from tinker_local.backend.process.sent_images import SentImages
from tinker_local.types import InternalError, NotFoundError

log = logging.getLogger(__name__)

PULSE = "pulse"
"""A method of what the process serves. It returns when that has made progress."""

PULSE_SECONDS = 1.0
"""From one pulse to the next, while calls run."""

_PULSE_NUMBER = 0
_END_SECONDS = 10.0

Value = Callable[[], Any]
"""Gives a value for the process to keep; None when it is not needed any more. May raise NotFoundError then."""


def ignore(_: Any) -> None:
    """The default of `heard`."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call without an answer. `values`: the names of those that it needs."""

    future: "asyncio.Future[Any]"
    heard: Callable[[Any], None]
    values: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """A call to send. `values`: what the process has to keep for it, by name."""

    call: Call
    values: Mapping[str, Value] = field(default_factory=dict)


Outcome = tuple[_Waiting, Answer | Exception]


class AsyncCalls:
    """Calls async methods of the object that the first process of `group` serves, after `child.LOAD` has been answered.
    The others only log.

    The group is killed if the process takes longer than `seconds` to receive what is sent, or to answer a `PULSE`,
    which it gets while calls run. `image_bytes`: how many bytes of pixel values it keeps. `values_kept`: how many
    values it keeps that no call needs, those used last; None: each until it is None here. `state`: what it told with
    its last answer. Calls raise ProcessEndedError once the group has ended and its owner has called `lost`.
    """

    def __init__(
        self, group: ProcessGroup, seconds: float, *, image_bytes: int = 2**30, values_kept: int | None = None
    ) -> None:
        member, *others = group.members
        self.group = group
        self.state: Mapping[str, Any] = {}
        self._channel = member.channel
        self._seconds = seconds
        self._numbers = itertools.count(_PULSE_NUMBER + 1)
        self._waiting: dict[int, _Waiting] = {}
        self._outbox: queue.SimpleQueue[_Order | Cancel | None] = queue.SimpleQueue()
        self._images = SentImages(image_bytes)  # the sender's, like the next three
        self._values: dict[str, Value] = {}  # the last that was used is the last of them
        self._values_kept = values_kept
        self._pulsed = 0.0
        self._pulse: ExitStack | None = None
        self._error: Callable[[], Exception] | None = None
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, daemon=True, name=f"{group.name}-{name}")
            for work, name in ((self._send_all, "send"), (self._receive_all, "receive"))
        ]
        self._threads += [
            threading.Thread(target=self._log, args=(other.channel,), daemon=True, name=f"{group.name}-log")
            for other in others
        ]
        for thread in self._threads:
            thread.start()

    async def call(
        self,
        method: str,
        /,
        *args: Any,
        values: Mapping[str, Value] | None = None,
        heard: Callable[[Any], None] = ignore,
    ) -> Any:
        """Return or raise what `method` of the object does; cancelling this cancels it there.

        `values`: what the process has to keep by then, until it is None here. `heard`: called from a thread with what
        the method tells.
        """
        values = values or {}
        waiting = _Waiting(asyncio.get_running_loop().create_future(), heard, tuple(values))
        number = next(self._numbers)
        with self._lock:
            if self._error is not None:
                raise self._error()
            self._waiting[number] = waiting
        self._outbox.put(_Order(Call(number, method, args), values))
        try:
            return await waiting.future
        finally:
            if self._waiting.pop(number, None) is not None:
                self._outbox.put(Cancel(number))

    def lost(self) -> None:
        """The group has ended: fail all calls, and later ones."""
        self._fail_all(lambda: ProcessEndedError(self.group.why))

    def close(self) -> None:
        """Fail all calls and end the process, within seconds. Blocks."""
        self.group.closing()
        self._fail_all(lambda: InternalError(f"the {self.group.name} was stopped"))
        self._outbox.put(_Order(Call(next(self._numbers), CLOSE)))
        self._outbox.put(None)
        if not self.group.wait(CLOSE_SECONDS):
            self.group.kill("was closed")
            self.group.wait(_END_SECONDS)
        for thread in self._threads:
            thread.join(_END_SECONDS)
        self.group.close(0)

    # The sending thread ---------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            while (orders := self._orders()) is not None:
                with self.group.limit(self._seconds):
                    self._send(orders)
        except CHANNEL_ENDED:
            pass  # the group's end fails the calls
        except Exception as error:
            log.exception("calls to the %s cannot be sent", self.group.name)
            self.group.kill(f"could not be called ({error})")

    def _orders(self) -> list[_Order | Cancel] | None:
        """What there is to send, and a pulse if it is time; None to end."""
        orders: list[_Order | Cancel] = []
        with suppress(queue.Empty):
            order = self._outbox.get(timeout=PULSE_SECONDS if self._waiting else None)
            while order is not None:
                orders.append(order)
                order = self._outbox.get_nowait()
            if not orders:
                return None
            self._outbox.put(None)
        now = time.monotonic()
        if self._waiting and self._pulse is None and now - self._pulsed >= PULSE_SECONDS:
            self._pulsed = now
            self._pulse = ExitStack()
            self._pulse.enter_context(self.group.limit(self._seconds))
            orders.append(_Order(Call(_PULSE_NUMBER, PULSE)))
        return orders

    def _send(self, orders: Iterable[_Order | Cancel]) -> None:
        self._forget_values()
        self._channel.send_joined(list(self._encoded(orders)))
        if too_many := self._images.too_many():
            self._channel.send(ForgetImages(too_many))

    def _encoded(self, orders: Iterable[_Order | Cancel]) -> Iterator[Encoded]:
        """The messages of `orders`, after sending the images and values that the process lacks for them."""
        for order in orders:
            if isinstance(order, Cancel):
                yield encode(order)
                continue
            try:
                encoded = encode(order.call)
                for image in self._images.missing(encoded.images):
                    self._channel.send(KeepImage.of(image, sampler=True))
                    self._images.sent(image)
                self._send_values(order.values)
            except CHANNEL_ENDED:
                raise
            except Exception as error:  # as when memory is short
                self._settle([order.call.number], error)
            else:
                yield encoded

    def _send_values(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if name in self._values:
                self._values[name] = self._values.pop(name)
            elif (kept := value()) is not None:
                self._channel.send(Keep(name, kept))
                self._values[name] = value

    def _unneeded_values(self) -> list[str]:
        if self._values_kept is None:
            return [name for name, value in self._values.items() if not _is_needed(value)]
        if len(self._values) <= self._values_kept:
            return []
        needed = {name for waiting in list(self._waiting.values()) for name in waiting.values}
        unused = [name for name in self._values if name not in needed]
        return unused[: max(0, len(unused) - self._values_kept)]

    def _forget_values(self) -> None:
        unneeded = self._unneeded_values()
        if unneeded:
            for name in unneeded:
                del self._values[name]
            self._channel.send(Forget(unneeded))

    # The receiving thread -------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            while True:
                received = self._channel.receive()
                self._take(received if isinstance(received, list) else [received])
        except CHANNEL_ENDED:
            self.group.error()  # kills a process that closed its channel but runs
        except Exception as error:
            log.exception("answers of the %s cannot be received", self.group.name)
            self.group.kill(f"could not be understood ({error})")

    def _log(self, channel: Channel) -> None:
        """Log what another process of the group does."""
        try:
            while True:
                log_here(channel.receive())
        except CHANNEL_ENDED:
            self.group.error()

    def _take(self, messages: Iterable[Answer | Failure | Notes | Log]) -> None:
        settled: list[Outcome] = []
        for message in messages:
            if isinstance(message, Log):
                log_here(message)
            elif isinstance(message, Notes):
                for number, what in message.told:
                    if (waiting := self._waiting.get(number)) is not None:
                        waiting.heard(what)
            elif isinstance(message, Failure) and message.final:
                self.group.note(message.error)  # its call fails with the process
            else:
                self.state = message.state
                if message.number == _PULSE_NUMBER:
                    self._pulse_ended()
                elif (waiting := self._waiting.pop(message.number, None)) is not None:
                    settled.append((waiting, message.error if isinstance(message, Failure) else message))
        _settle_soon(settled)

    def _pulse_ended(self) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.close()

    def _settle(self, numbers: Iterable[int], error: Exception) -> None:
        """Fail calls."""
        found = [waiting for number in numbers if (waiting := self._waiting.pop(number, None)) is not None]
        _settle_soon([(waiting, error) for waiting in found])

    def _fail_all(self, error: Callable[[], Exception]) -> None:
        with self._lock:
            self._error = self._error or error
            numbers = list(self._waiting)
        for number in numbers:
            self._settle([number], self._error())


def _settle_soon(outcomes: Iterable[Outcome]) -> None:
    """Settle futures with one wake-up of each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].future.get_loop(), []).append(outcome)
    for loop, of_loop in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_settle_now, of_loop)


def _settle_now(outcomes: Iterable[Outcome]) -> None:
    for waiting, outcome in outcomes:
        if waiting.future.done():  # cancelled
            continue
        if isinstance(outcome, Answer):
            waiting.future.set_result(outcome.value)
        else:
            waiting.future.set_exception(outcome)


def _is_needed(value: Value) -> bool:
    try:
        return value() is not None
    except NotFoundError:
        return False
