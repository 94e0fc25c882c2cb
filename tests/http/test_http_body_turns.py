"""Large bodies are read in turn, and no byte of them is copied more often than needed."""

import asyncio
import resource
import threading
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect
from tinker_local.backend.control.callers import Caller
from tinker_local.backend.http import bodies, connections
from tinker_local.backend.http.access import CALLER
from tinker_local.backend.scheduling.shared_bytes import SharedBytes
from tinker_local.types import InvalidRequestError, TooManyRequestsError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tests.traced import start_tracing

READ = 256_000
"""Bytes that the loop reads at once."""

HEAD = b"POST /%s HTTP/1.1\r\nHost: h\r\n"


class Wire(asyncio.Transport):
    """One end of a connection, which can be paused."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.closed = False
        self.written = b""

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; /refused before it has read any."""
    size, more = 0, scope["path"] != "/refused"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%08d" % size})


def protocols(count: int, app: Any = app) -> list[tuple[connections.BoundedHttp, Wire]]:
    """Connections of one server."""
    config = uvicorn.Config(app, http=connections.bounded_http(), log_level="critical", ws="none", lifespan="off")
    config.load()
    kind, state = connections.bounded_http(), ServerState()
    made = [(kind(config, state, {}), Wire()) for _ in range(count)]
    for protocol, wire in made:
        protocol.connection_made(wire)
    return made


def ended(made: Sequence[tuple[connections.BoundedHttp, Wire]]) -> None:
    for protocol, _ in made:
        protocol.connection_lost(ConnectionResetError())


@pytest.mark.parametrize("path", [b"read", b"refused"])
async def test_sixteen_unfinished_bodies_lengthen_a_pass_of_the_event_loop_by_one_piece(path: bytes) -> None:
    """Before, each pass read a piece of every body, and up to 32 pieces of those that had been refused."""
    made = protocols(16)
    piece, pieces = bytes(READ), 12
    for protocol, _ in made:
        protocol.data_received(HEAD % path + b"Content-Length: %d\r\n\r\n" % (READ * pieces))
    await asyncio.sleep(0)
    left, reads = [pieces] * len(made), []
    while any(left):
        ready = [number for number, (_, wire) in enumerate(made) if left[number] and not wire.paused]
        for number in ready:
            made[number][0].data_received(piece)
            left[number] -= 1
        reads.append(len(ready))
        assert max(left) - min(left) <= 2  # all get turns
        assert len(reads) < 1000
        await asyncio.sleep(0)
    assert reads[0] == len(made)  # the first piece may come at any time
    assert max(reads[1:]) <= 2  # the first turn is given at once
    for _ in range(2 * len(made)):
        await asyncio.sleep(0)
    size = READ * pieces if path == b"read" else 0
    assert all(wire.written.endswith(b"%08d" % size) for _, wire in made)
    assert not any(wire.paused for _, wire in made)
    ended(made)


async def test_a_large_piece_of_a_body_reaches_the_app_as_the_parser_made_it() -> None:
    """uvicorn copies it into a buffer, and from there into what the app gets."""
    given: list[bytes] = []

    async def keeping(scope: Any, receive: Any, send: Any) -> None:
        given.extend([(await receive())["body"], (await receive())["body"]])
        await app(scope, receive, send)

    (made,) = protocols(1, keeping)
    protocol, _ = made
    pieces = [bytes(READ), bytes(READ), b"small", b"er"]
    protocol.data_received(HEAD % b"read" + b"Content-Length: %d\r\n\r\n" % (3 * READ))
    for group in (pieces[:1], pieces[1:]):
        for piece in group:
            protocol._pieces.append(piece)
            protocol._take_body()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert given[0] is pieces[0]
    assert given[1] == b"".join(pieces[1:])
    ended([made])


async def test_thousands_of_chunks_that_come_at_once_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []
    monkeypatch.setattr(HttpToolsProtocol, "on_body", lambda self, body: taken.append(body))
    made = protocols(1)
    protocol, _ = made[0]
    protocol.data_received(HEAD % b"read" + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 10_000)
    protocol.data_received(b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n")
    assert taken == [b"a" * 10_000] * 2
    ended(made)


class Sent:
    """A request with a body of `parts`; the client goes after the last if `breaks`, and sends the last when `ends`."""

    def __init__(
        self, parts: Sequence[bytes], *, owner: str = "a", declared: int | None = None, breaks: bool = False
    ) -> None:
        self.headers = {} if declared is None else {"content-length": str(declared)}
        self.scope = {CALLER: Caller(owner)}
        self.ends = asyncio.Event()
        self.ends.set()
        self._parts, self._breaks = parts, breaks

    async def stream(self) -> AsyncIterator[bytes]:
        for number, part in enumerate(self._parts, 1):
            if number == len(self._parts):
                await self.ends.wait()
            yield part
        if self._breaks:
            raise ClientDisconnect


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken off"])
async def test_a_large_body_is_joined_and_freed_in_a_thread(
    breaks: bool, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not copied as it comes: a buffer that grows to 50 MB is copied nine times. Not freed on the event loop; and the
    system gets the memory."""
    pieces = [bytes([number]) * READ for number in range(8)]
    threads: list[int] = []
    dropped, given_back = threading.Event(), []
    joined, drop = bodies.Incoming._joined, bodies.Incoming.drop

    def joining(incoming: bodies.Incoming) -> bytearray:
        threads.append(threading.get_ident())
        return joined(incoming)

    def dropping(incoming: bodies.Incoming) -> None:
        drop(incoming)
        assert not incoming._parts
        assert incoming._buffer is None
        dropped.set()

    monkeypatch.setattr(bodies.Incoming, "_joined", joining)
    monkeypatch.setattr(bodies.Incoming, "drop", dropping)
    monkeypatch.setattr(bodies.Incoming, "freed", 0)
    monkeypatch.setattr(bodies, "GIVEN_BACK_BYTES", 3 * READ)
    monkeypatch.setattr(bodies, "give_memory_back", lambda: given_back.append(threading.get_ident()))
    request: Any = Sent(pieces, breaks=breaks, declared=len(pieces) * READ if declared else None)
    if breaks:
        with pytest.raises(ClientDisconnect):
            async with bodies.body_of(request, 2**24, 2**24):
                raise AssertionError("the body is not whole")
    else:
        async with bodies.body_of(request, 2**24, 2**24) as body:
            assert body == b"".join(pieces)
    assert await asyncio.to_thread(dropped.wait, 30)
    assert given_back
    assert threading.get_ident() not in {*given_back, *threads}
    assert len(threads) == (not breaks and not declared)
    assert bodies._held.total == 0


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_large_body_is_held_once(declared: bool) -> None:
    """The parts of 50 MB and the whole once lay side by side."""
    size = 200 * READ
    incoming = bodies.Incoming(size if declared else None)
    start_tracing()
    for number in range(200):
        incoming.append(bytes([number]) * READ)
    whole = await incoming.whole()
    kept, most = tracemalloc.get_traced_memory()
    assert whole == b"".join(bytes([number]) * READ for number in range(200))
    assert kept < 1.1 * size
    if declared:
        assert most < 1.1 * size  # the memory of a buffer counts at once here, whether it is filled or not
    assert not incoming._parts


async def test_memory_is_taken_for_what_came_and_not_for_what_was_declared() -> None:
    incoming = bodies.Incoming(bodies.MAX_GRADIENT_BYTES)
    before = resident()
    incoming.append(bytes(bodies.JOINED_INLINE_BYTES))
    assert incoming._buffer is None
    incoming.append(b"1")
    assert incoming._buffer is not None
    assert resident() - before < 64 * 2**20


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("size", [bodies.JOINED_INLINE_BYTES, 2 * bodies.JOINED_INLINE_BYTES])
async def test_a_body_of_another_length_than_declared_is_whole_or_refused(size: int) -> None:
    parts = [b"x" * (size // 4)] * 4
    async with bodies.body_of(Sent(parts, declared=size + 5), 2**24, 9) as body:  # type: ignore[arg-type]
        assert body == b"".join(parts)
    with pytest.raises(InvalidRequestError, match="Content-Length"):
        async with bodies.body_of(Sent([*parts, *parts], declared=size * 3 // 2), 2**24, 9):  # type: ignore[arg-type]
            pass
    assert bodies._held.total == 0


async def test_a_body_that_drips_takes_about_the_memory_of_its_bytes() -> None:
    parts = bodies.Incoming()
    for number in range(300_000):
        parts.append(b"%d" % (number % 10))
    assert len(parts._parts) <= 300_000 / bodies.PART_BYTES
    parts.append(bytes(READ))
    parts.append(b"end")
    whole = await parts.whole()
    assert whole == b"0123456789" * 30_000 + bytes(READ) + b"end"
    assert parts.size == len(whole)


# What is held of all bodies ------------------------------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies._held, "most", 240)
    monkeypatch.setattr(bodies, "ALWAYS_TAKEN_BYTES", 50)


async def taken(sent: Sent) -> bytes:
    async with bodies.body_of(sent) as body:  # type: ignore[arg-type]
        return bytes(body)


@pytest.mark.usefixtures("little_room")
async def test_what_is_held_of_unfinished_bodies_is_shared_by_owners() -> None:
    first, second = (Sent([bytes(60), b"end"], owner=owner) for owner in "ab")
    for sent in (first, second):
        sent.ends.clear()
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(taken(each)) for each in (first, second)]
        await asyncio.sleep(0)
        with pytest.raises(
            TooManyRequestsError,
            match=r"120 bytes of requests of the owner 'a' come or wait to be parsed, and 60 of others.*send fewer",
        ):
            await taken(Sent([bytes(60)]))
        assert len(await taken(Sent([bytes(60)], owner="c"))) == 60  # there is room for another owner
        assert len(await taken(Sent([bytes(50)]))) == 50  # a poll of the same
        first.ends.set()
        second.ends.set()
    assert [len(task.result()) for task in held] == [63, 63]
    assert bodies._held.total == 0


@pytest.mark.usefixtures("little_room")
async def test_bodies_that_wait_to_be_parsed_count_until_they_are() -> None:
    async with bodies.body_of(Sent([bytes(100)])):  # type: ignore[arg-type]
        with pytest.raises(TooManyRequestsError, match="200 bytes of requests of the owner 'a'"):
            await taken(Sent([bytes(100)]))
        assert len(await taken(Sent([bytes(60)], owner="b"))) == 60
    assert len(await taken(Sent([bytes(100)]))) == 100


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_owners_that_take_what_they_can_have_equal_shares_and_leave_one(count: int) -> None:
    shared = SharedBytes(100_000)
    owners = [str(number) for number in range(count)]
    while ready := [owner for owner in owners if not shared.over(owner)]:
        for owner in ready:
            shared.take(owner, 1)
    shares = {shared.of(owner) for owner in owners}
    assert max(shares) - min(shares) <= 1
    assert abs(max(shares) - 100_000 / (count + 1)) <= count + 1
    for owner in owners:
        shared.give(owner, shared.of(owner))
    assert (shared.total, dict(shared._held)) == (0, {})
