"""Connections whose heads or bodies do not end: bounded in size, time and number."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from tinker_local.backend.http import connections
from uvicorn.server import ServerState

GET, POST = b"GET /x HTTP/1.1\r\nHost: h\r\n", b"POST /x HTTP/1.1\r\nHost: h\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%08d" % size})


@asynccontextmanager
async def serving(app: Any = app) -> AsyncIterator[tuple[Any, ...]]:
    config = uvicorn.Config(app, http=connections.bounded_http(), log_level="critical", ws="none", lifespan="off")
    config.load()
    state, protocol = ServerState(), connections.bounded_http()
    server = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


async def answer(address: tuple[Any, ...], *pieces: bytes) -> bytes:
    """The first line of the answer to `pieces`; nothing if the connection is closed without."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return (await asyncio.wait_for(reader.readline(), 30)).strip()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",), b"431"),
        ((b"GET /", *[b"a" * 5_000] * 14), b"431"),
        ((GET, b"X: " + b"a" * 70_000), b"431"),
        ((GET, b"a:b\r\n" * 300, b"\r\n"), b"431"),
        ((POST + b"Transfer-Encoding: chunked\r\n\r\n5;", *[b"a" * 2**20] * 2), b"400"),
        ((POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"a:b\r\n" * 300), b"431"),
    ],
    ids=["url", "url in pieces", "header", "headers", "chunk extension", "trailers"],
)
async def test_a_head_that_does_not_end_is_refused(pieces: tuple[bytes, ...], status: bytes) -> None:
    async with serving() as address:
        assert (await answer(address, *pieces)).split()[1:2] in ([status], [])  # or reset while it was sent
        assert b"200" in await answer(address, GET + b"\r\n")


async def test_large_heads_and_bodies_within_the_bounds_are_served() -> None:
    async with serving() as address:
        assert b"200" in await answer(address, GET, b"X: " + b"a" * 60_000, b"\r\n" + b"a:b\r\n" * 200 + b"\r\n")
        assert b"200" in await answer(address, POST + b"Content-Length: 3000000\r\n\r\n", b"a" * 3_000_000)
        chunks = b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n"
        assert b"200" in await answer(address, POST + b"Transfer-Encoding: chunked\r\n\r\n", chunks)
        assert b"200" in await answer(address, GET + b"\r\n", GET + b"\r\n")


async def test_heads_and_bodies_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.05)
    async with serving() as address:
        assert await answer(address) == b""
        assert b"408" in await answer(address, b"GET / HT")
        assert b"408" in await answer(address, POST + b"Content-Length: 5\r\n\r\n12")


async def test_beyond_the_most_connections_the_oldest_idle_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    async with serving() as address:
        pairs = [await asyncio.open_connection(*address) for _ in range(2)]
        assert b"200" in await answer(address, GET + b"\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(pairs[0][0].readexactly(1), 30)
        pairs[1][1].write(GET + b"\r\n")
        assert b"200" in await asyncio.wait_for(pairs[1][0].readline(), 30)
        for _, writer in pairs:
            writer.close()


async def test_requests_that_do_not_wait_for_their_answers_are_bounded() -> None:
    """8 MiB of requests in one connection, without a key, once took 360 MiB and others waited for 2 seconds."""
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write((GET + b"\r\n") * 1000)
        try:
            answered = await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            answered = b""
        assert answered.count(b"200 OK") <= connections.MAX_PIPELINED + 1
        writer.close()
        assert b"200" in await answer(address, (GET + b"\r\n") * 3)


@pytest.mark.parametrize("pieces", [1, 400])
async def test_a_client_that_does_not_read_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    ended, lost = asyncio.Event(), asyncio.Event()
    connection_lost = connections.BoundedHttp.connection_lost

    def tell(self: connections.BoundedHttp, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set()

    monkeypatch.setattr(connections.BoundedHttp, "connection_lost", tell)

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left in reversed(range(pieces)):
            await send({"type": "http.response.body", "body": bytes(10**8 // pieces), "more_body": left > 0})
        ended.set()

    async with serving(large) as address:
        reader, writer = await asyncio.open_connection(*address, limit=2**12)
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(asyncio.gather(ended.wait(), lost.wait()), 30)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(10**8), 30)
        writer.close()


class Line:
    """A transport whose buffer is full, and a loop with a clock that is set."""

    def __init__(self) -> None:
        self.now, self.unread, self.aborted = 0.0, 0, False
        self._timers: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True

    def call_later(self, seconds: float, call: Any) -> Any:
        timer = (self.now + seconds, call)
        self._timers.append(timer)
        return SimpleNamespace(cancel=lambda: self._timers.remove(timer))

    def read_until(self, end: float, bytes_a_second: int) -> None:
        """Read what fills the buffer, which is filled again whenever it is empty; a second at a time."""
        patience = connections.Patience(self, self)  # type: ignore[arg-type]
        while self.now < end and not self.aborted:
            self.unread = 64 * 1024
            patience.begin()
            while self.unread > 0 and self.now < end and not self.aborted:
                self.now, self.unread = self.now + 1, max(0, self.unread - bytes_a_second)
                for timer in [timer for timer in self._timers if timer[0] <= self.now]:
                    self._timers.remove(timer)
                    timer[1]()
            patience.end()


@pytest.mark.parametrize(
    ("bytes_a_second", "cut_off_after"), [(0, 60), (100, 61), (8 * 1024, 120), (16 * 1024, None), (10**6, None)]
)
def test_a_reader_is_cut_off_by_what_it_reads_and_not_by_the_length_of_the_answer(
    bytes_a_second: int, cut_off_after: int | None
) -> None:
    line = Line()
    line.read_until(100_000, bytes_a_second)
    assert line.aborted == (cut_off_after is not None)
    if cut_off_after is not None:
        assert cut_off_after <= line.now <= cut_off_after + 5


def test_a_fast_reader_may_pause_for_a_minute_however_much_it_has_read() -> None:
    line = Line()
    line.read_until(1000, 10**6)
    assert not line.aborted
    line.read_until(2000, 0)
    assert line.aborted
    assert line.now <= 1065
