"""Answers that clients do not read: they are sent in pieces, and those of an owner leave room for others'."""

import asyncio
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from tinker_local.backend.control.callers import Caller
from tinker_local.backend.http import delivery
from tinker_local.backend.http.access import CALLER
from tinker_local.backend.http.delivery import Delivery

SIZE = 1_000_000


class Client:
    """Takes a message for each `read`; `read_all` from then on."""

    def __init__(self, app: Delivery, owner: str | None, path: str = "/api/v1/retrieve_future") -> None:
        self._scope: Scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        if owner is not None:
            self._scope[CALLER] = Caller(owner)
        self._reads = asyncio.Semaphore(0)
        self._all = False
        self._news = asyncio.Event()
        self.got: list[Message] = []
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Message) -> None:
        if not self._all:
            await self._reads.acquire()
        self.got.append(message)
        self._news.set()

    async def has(self, count: int) -> None:
        """Wait for so many messages."""
        while len(self.got) < count:
            self._news.clear()
            await self._news.wait()

    async def read_all(self) -> bytes:
        self._all = True
        self._reads.release()
        await self.task
        assert [message.get("more_body") for message in self.got[1:-1]] == [True] * (len(self.got) - 2)
        assert not self.got[-1].get("more_body")
        return b"".join(message.get("body", b"") for message in self.got)

    async def begin(self) -> int:
        """The status."""
        self._reads.release()
        await self.has(1)
        return int(self.got[0]["status"])


BODY = bytes(range(256)) * (SIZE // 256)


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(BODY)(scope, receive, send)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Delivery:
    monkeypatch.setattr(delivery, "MAX_ANSWER_BYTES", 3 * SIZE)
    return Delivery(answers)


async def test_a_large_answer_is_sent_in_pieces_as_the_client_reads_on_fakes(app: Delivery) -> None:
    client = Client(app, "alice")
    assert await client.begin() == 200
    for count in range(2, 4):
        client._reads.release()
        await client.has(count)
        assert len(client.got[-1]["body"]) == delivery.PIECE_BYTES
        assert not client.task.done()
    assert await client.read_all() == BODY
    assert app._unread.total == 0


async def test_answers_that_an_owners_clients_do_not_read_are_bounded_and_others_are_answered_on_fakes(
    app: Delivery,
) -> None:
    first = Client(app, "alice")
    assert await first.begin() == 200
    second = Client(app, "alice")  # of which she would have 2 MB, where 1 is left
    assert await second.begin() == 429
    said = (await second.read_all()).decode()
    assert "'alice'" in said
    assert str(len(BODY)) in said
    bob, console = Client(app, "bob"), Client(app, None)
    for other in (bob, console):
        assert await other.begin() == 200
        assert await other.read_all() == BODY
    assert await first.read_all() == BODY
    again = Client(app, "alice")
    assert await again.begin() == 200
    again.task.cancel()  # the client leaves
    await asyncio.gather(again.task, return_exceptions=True)
    assert app._unread.total == 0


async def test_one_answer_is_sent_however_large_and_a_stream_goes_on_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_ANSWER_BYTES", 10)

    async def parts() -> Any:
        yield b"small"
        yield BODY
        yield b"end"

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(parts())(scope, receive, send)

    assert await Client(Delivery(answers), "alice").read_all() == BODY
    stream = Client(Delivery(streams), "alice")
    stream._all = True
    stream._reads.release()
    await stream.has(1 + 1 + -(-len(BODY) // delivery.PIECE_BYTES) + 2)
    assert b"".join(message.get("body", b"") for message in stream.got) == b"small" + BODY + b"end"
    stream.task.cancel()
