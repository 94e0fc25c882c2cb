"""What runs in a child process whose calls run at the same time: an event loop, and an object with async methods."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tinker_local.backend.heap import freeze_heap
from tinker_local.backend.process.child import CLOSE, LOAD, Inbox, fail
from tinker_local.backend.process.messages import Answer, Call, Cancel, Encoded, Failure, Notes, encode
from tinker_local.types import InternalError

Tell = Callable[[Any], None]
"""Tells the caller that something happened; any thread may call it."""


def serve_async_calls(
    inbox: Inbox,
    make: Callable[[Inbox], Any],
    describe: Callable[[Any], Any],
    state: Callable[[Any], Mapping[str, Any]],
) -> None:
    """Run calls at the same time, until `CLOSE`. The program of a child process, with all but `inbox` given.

    `LOAD` comes first; it makes the object with `make`, and answers what `describe` returns of it. Other calls are its
    methods, which get a `Tell` before their arguments. Each answer has the `state` of the object.
    """
    server = _Server(inbox, make, describe, state)
    asyncio.new_event_loop().run_until_complete(server.run())


class _Server:
    def __init__(
        self,
        inbox: Inbox,
        make: Callable[[Inbox], Any],
        describe: Callable[[Any], Any],
        state: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        self._inbox = inbox
        self._make = make
        self._describe = describe
        self._state = state
        self._target: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[Any] = []
        self._lock = threading.Lock()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._inbox.channel.files[0], self._receive)
        await self._ended

    def _receive(self) -> None:
        try:
            for message in self._inbox.take():
                self._handle(message)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._end(error)

    def _handle(self, message: Call | Cancel) -> None:
        if isinstance(message, Cancel):
            if (task := self._tasks.get(message.number)) is not None:
                task.cancel()
        elif message.method == CLOSE:
            self._end(None)
        elif message.method == LOAD:
            self._load(message)
        else:
            task = self._tasks[message.number] = self._loop.create_task(self._run(message))
            task.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    def _end(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None) if error is None else self._ended.set_exception(error)

    def _load(self, call: Call) -> None:
        """Blocks: no other call comes before the answer."""
        try:
            self._target = self._make(self._inbox)
            freeze_heap()
            self._inbox.send(Answer(call.number, self._describe(self._target), self._state(self._target)))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            fail(self._inbox.send, call, error, {})

    async def _run(self, call: Call) -> None:
        try:
            value = await getattr(self._target, call.method)(partial(self._tell, call.number), *call.args)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, InternalError) else None
            fail(self.send, call, error, self._state(self._target), cause)
        else:
            self.send(Answer(call.number, value, self._state(self._target)))

    def _tell(self, number: int, what: Any) -> None:
        self.send((number, what))

    def send(self, message: Answer | Failure | tuple[int, Any]) -> None:
        """Send `message` soon, together with all others of this moment, or at once if it is the last. A pair is what a
        call of this number tells. Any thread may call it."""
        if isinstance(message, Failure) and message.final:
            self._inbox.send(message)
            return
        with self._lock:
            self._outbox.append(message)
            first = len(self._outbox) == 1
        if first:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, []
        with suppress(BrokenPipeError, ConnectionResetError):  # `_receive` sees it, too
            self._inbox.channel.send_joined(list(_encoded(messages)))


def _encoded(messages: Sequence[Any]) -> Iterator[Encoded]:
    """The messages in order, what neighbours tell in one."""
    for are_told, run in itertools.groupby(messages, key=lambda message: isinstance(message, tuple)):
        if are_told:
            yield encode(Notes(list(run)))
        else:
            yield from map(encode, run)
