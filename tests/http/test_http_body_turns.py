"""Large bodies are read in turn, and no byte of them is copied more often than needed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect
from tinker_local.backend.control.callers import Caller
from tinker_local.backend.http import bodies, connections
from tinker_local.backend.http.access import CALLER
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

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


@pytest.mark.mutation("bodies-out-of-turn", "connections.py", "self._turns.ask(self)", "self.take_turn()")
@pytest.mark.mutation("rests-of-refused-bodies-at-once", "connections.py", "self._end_turn(len(data))", "pass")
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


@pytest.mark.mutation(
    "pieces-of-bodies-copied", "connections.py", "if not self.cycle.body and len(body) > BYTES_OF_A_TURN:", "if False:"
)
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


@pytest.mark.mutation(
    "python-for-each-chunk", "connections.py", "self.on_body = self._pieces.append  # type: ignore[assignment]", ""
)
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
    """A request with a body of `parts`; the client goes after the last if `breaks`."""

    def __init__(self, parts: Sequence[bytes], *, breaks: bool = False) -> None:
        self.headers: dict[str, str] = {}
        self.scope = {CALLER: Caller("a")}
        self._parts, self._breaks = parts, breaks

    async def stream(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._breaks:
            raise ClientDisconnect


@pytest.mark.mutation(
    "bodies-joined-on-the-loop", "bodies.py", "else await PARSING.run(parts.joined)", "else parts.joined()"
)
@pytest.mark.mutation(
    "bodies-freed-at-once", "bodies.py", "            PARSING.run(parts.drop)\n", "            pass\n"
)
@pytest.mark.mutation(
    "memory-of-bodies-kept", "bodies.py", "                give_memory_back()\n", "                pass\n"
)
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken off"])
async def test_parts_of_a_large_body_are_joined_and_freed_in_a_thread(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not copied as they come: a buffer that grows to 50 MB is copied nine times. Not freed on the event loop; and the
    system gets the memory."""
    pieces = [bytes([number]) * READ for number in range(8)]
    threads: dict[str, int] = {}
    dropped = threading.Event()
    kept: list[bytes] = []
    joined, drop = bodies.Parts.joined, bodies.Parts.drop

    def joining(parts: bodies.Parts) -> bytes:
        threads["joined"] = threading.get_ident()
        kept.extend(parts._parts)
        return joined(parts)

    def dropping(parts: bodies.Parts) -> None:
        drop(parts)
        assert not parts._parts
        dropped.set()

    monkeypatch.setattr(bodies.Parts, "joined", joining)
    monkeypatch.setattr(bodies.Parts, "drop", dropping)
    monkeypatch.setattr(bodies.Parts, "freed", 0)
    monkeypatch.setattr(bodies, "GIVEN_BACK_BYTES", 3 * READ)
    given_back: list[int] = []
    monkeypatch.setattr(bodies, "give_memory_back", lambda: given_back.append(threading.get_ident()))
    request: Any = Sent(pieces, breaks=breaks)
    if breaks:
        with pytest.raises(ClientDisconnect):
            await bodies.read_body(request, 2**24, 2**24)
    else:
        assert await bodies.read_body(request, 2**24, 2**24) == b"".join(pieces)
        assert all(one is other for one, other in zip(kept, pieces, strict=True))
        assert threads["joined"] != threading.get_ident()
    assert await asyncio.to_thread(dropped.wait, 30)
    assert len(given_back) == len(pieces) // 3
    assert threading.get_ident() not in given_back
    assert not bodies._unfinished


async def test_a_body_that_drips_takes_about_the_memory_of_its_bytes() -> None:
    parts = bodies.Parts()
    for number in range(300_000):
        parts.append(b"%d" % (number % 10))
    assert len(parts._parts) <= 300_000 / bodies.PART_BYTES
    parts.append(bytes(READ))
    parts.append(b"end")
    whole = parts.joined()
    assert whole == b"0123456789" * 30_000 + bytes(READ) + b"end"
    assert parts.size == len(whole)
