"""Connections: heads that are bounded, times in which a head and a body must come and an answer must be read, not too
many at once, and bodies that are read in turn.

uvicorn reads whatever is sent before it asks for a key: a head of any length, for any time, on any number of
connections. And it reads a piece of every body in each pass of the event loop, so sixteen large bodies make each pass
sixteen times as long for everybody.
"""

import asyncio
import resource
from collections import OrderedDict, deque
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line and its headers. Also of what a chunked body has besides its content."""

MAX_HEADERS = 256

MAX_PIPELINED = 16
"""Requests of a connection that wait for the answer to an earlier one. No known client sends a second before that;
each takes a hundred times the memory of its 20 bytes."""

HEAD_SECONDS = 20.0
"""In which a whole head must come: from when the connection was opened, or from the first byte of a later head."""

BODY_SECONDS, BODY_BYTES_A_SECOND = 60.0, 16 * 1024
"""In which a body must come, with a second more for every so many of its bytes."""

READ_SECONDS, READ_BYTES_A_SECOND = 60.0, 16 * 1024
"""For which an answer may wait for a client that does not read it. So many bytes that it reads give a second back, up
to as many as there were."""

MAX_CONNECTIONS = 16384
"""Beyond this, and beyond what the limit of open files leaves, the one that has been idle for longest is closed."""

BYTES_OF_A_TURN = 64 * 1024
"""Of a body, after which its connection waits for its turn. A read of the loop has up to 256,000 bytes."""

SPARE_FILES = 256
"""Open files for everything but connections."""


def most_connections() -> int:
    """How many connections are taken."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files - SPARE_FILES))


class TooLarge(Exception):
    """A head over its bounds, or more requests than may wait."""


class ReadingTurns:
    """Lets one paused connection read in each pass of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[InTurn] = deque()
        self._running = False

    def ask(self, flow: "InTurn") -> None:
        """Resume `flow` when its turn comes: now, unless another one had its turn in this pass or waits."""
        self._waiting.append(flow)
        if not self._running:
            self._running = True
            self._next()

    def _next(self) -> None:
        if self._waiting:
            self._waiting.popleft().take_turn()
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._running = False


class InTurn(FlowControl):
    """uvicorn's flow control of one connection, which resumes reading in turn."""

    def __init__(self, transport: asyncio.Transport, turns: ReadingTurns) -> None:
        super().__init__(transport)
        self._turns = turns
        self._asked = False

    def resume_reading(self) -> None:
        if self.read_paused and not self._asked:
            self._asked = True
            self._turns.ask(self)

    def take_turn(self) -> None:
        """Read."""
        self._asked = False
        super().resume_reading()


class Patience:
    """With a client that reads slower than it is answered: ends its connection after `READ_SECONDS`, since an answer
    keeps memory, and a download keeps files.

    A time limit for the whole answer would cut off large ones. With a limit for each piece, a client that reads a byte
    now and then could take for ever.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._left = READ_SECONDS
        self._since = 0.0
        self._unread = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The system takes no more of an answer."""
        self._since, self._unread = self._loop.time(), self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._left, self._look)

    def end(self) -> None:
        """It takes more, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._count()

    def _look(self) -> None:
        self._count()
        if self._left > 0:
            self._timer = self._loop.call_later(self._left, self._look)
        else:
            self._timer = None
            self._transport.abort()

    def _count(self) -> None:
        now, unread = self._loop.time(), self._transport.get_write_buffer_size()
        gained = (self._unread - unread) / READ_BYTES_A_SECOND
        self._left = min(READ_SECONDS, self._left - (now - self._since) + gained)
        self._since, self._unread = now, unread


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with bounds; make a class for each server with `bounded_http`.

    `_idle`: the connections of the server that have no whole head, the one that waits for longest first.
    """

    _idle: "ClassVar[OrderedDict[BoundedHttp, None]]"
    _turns: ClassVar[ReadingTurns]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A body may come in 40,000 chunks at once: the parser calls no Python for each.
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # type: ignore[assignment]
        super().__init__(*args, **kwargs)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = InTurn(transport, self._turns)
        self._patience = Patience(transport, self.loop)
        self._received = self._delivered = self._url_bytes = self._header_bytes = self._bytes_of_turn = 0
        self._body_begun: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_head()
        if len(self.connections) > most_connections():
            oldest = next(iter(self._idle))  # at least this one
            oldest.transport.abort()
            oldest._forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._patience.begin()

    def resume_writing(self) -> None:
        self._patience.end()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._patience.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._body_begun is None and self._timer is None:
            self._idle.pop(self, None)
            self._wait_for_head()
        self._received += len(data)
        super().data_received(data)
        self._take_body()
        if self.transport.is_closing():
            return
        if self._received > MAX_HEAD_BYTES + 8 * self._delivered:
            self._refuse(431 if self._body_begun is None else 400)
        elif self._body_begun is not None and self.cycle is not None:
            self._end_turn(len(data))

    def _take_body(self) -> None:
        """Give the app what came of the body: without copying a large piece, and many chunks as one piece."""
        if not self._pieces:
            return
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._delivered += len(body)
        if self.cycle is None:  # it asks for another protocol
            return
        if not self.cycle.body and len(body) > BYTES_OF_A_TURN:
            self.cycle.body = b""  # type: ignore[assignment]  # to which uvicorn adds without copying
        elif isinstance(self.cycle.body, bytes):
            self.cycle.body = bytearray(self.cycle.body)
        HttpToolsProtocol.on_body(self, body)

    def _end_turn(self, count: int) -> None:
        """Wait for a turn if more than `BYTES_OF_A_TURN` came in this one, with the last `count`."""
        self._bytes_of_turn += count
        if self._bytes_of_turn > BYTES_OF_A_TURN:
            self._bytes_of_turn = 0
            self.flow.pause_reading()
            if self.cycle.response_complete or not self.cycle.message_event.is_set():
                self.flow.resume_reading()  # else the app does so, when it has taken what came

    # What the parser calls; an exception ends the connection ---------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url_bytes = self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._url_bytes += len(url)
        if self._url_bytes > MAX_HEAD_BYTES:
            raise TooLarge
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._header_bytes + self._url_bytes > MAX_HEAD_BYTES:
            raise TooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise TooLarge
        self._forget()
        self._received = self._delivered = 0
        self._body_begun = self.loop.time()
        self._timer = self.loop.call_later(BODY_SECONDS, self._body_is_late)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._take_body()
        self._forget()
        self._received = self._delivered = 0
        self._body_begun = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._idle[self] = None

    def send_400_response(self, msg: str) -> None:
        over = len(self.headers or ()) >= MAX_HEADERS or self._url_bytes + self._header_bytes > MAX_HEAD_BYTES
        self._refuse(431 if over else 400)

    # Times ------------------------------------------------------------------------------------------------------------

    def _wait_for_head(self) -> None:
        self._idle[self] = None
        self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _forget(self) -> None:
        """End the wait for a head or a body."""
        self._idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._received:
            self._refuse(408)
        else:
            self._forget()
            self.transport.close()

    def _body_is_late(self) -> None:
        assert self._body_begun is not None
        self._timer = None
        left = self._body_begun + BODY_SECONDS + self._delivered / BODY_BYTES_A_SECOND - self.loop.time()
        if self.flow.read_paused:  # it is the server that does not read
            left = max(left, 1.0)
        if left > 0:
            self._timer = self.loop.call_later(left, self._body_is_late)
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Answer, unless an answer has begun, and close."""
        self._forget()
        if self.transport.is_closing():
            return
        answered = self.cycle is None or self.cycle.response_complete
        if answered or (self._body_begun is not None and not self.cycle.response_started):
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


def bounded_http() -> type[BoundedHttp]:
    """The protocol of one server."""

    class Http(BoundedHttp):
        _idle: ClassVar[OrderedDict[BoundedHttp, None]] = OrderedDict()
        _turns: ClassVar[ReadingTurns] = ReadingTurns()

    return Http
