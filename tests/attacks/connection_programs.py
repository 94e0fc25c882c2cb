"""Attacks with heads, connections and keys."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException

from tests.attacks.attacker import Attacker, attack
from tests.attacks.tenant import Connection


@attack("11")
def endless_header(attacker: Attacker) -> Iterator[None]:
    """One header of 300 MB, without a key."""
    yield
    attacker.pour(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"a" * 2**20, 300 * 2**20)


@attack("11")
def many_headers(attacker: Attacker) -> Iterator[None]:
    """Headers of four bytes, 60 MB of them, without a key."""
    yield
    attacker.pour(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n", b"a:b\r\n" * 200_000, 60 * 2**20)


@attack("11")
def endless_url(attacker: Attacker) -> Iterator[None]:
    """A URL of 300 MB, without a key."""
    yield
    attacker.pour(b"GET /api/v1/", b"a" * 2**20, 300 * 2**20)


@attack("11")
def endless_chunk_header(attacker: Attacker) -> Iterator[None]:
    """A chunked body whose chunk extension has 100 MB."""
    start = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\n" % attacker.key.encode()
    yield
    attacker.pour(start + b"Transfer-Encoding: chunked\r\n\r\n5;", b"a" * 2**20, 100 * 2**20)


@attack("11")
def many_trailers(attacker: Attacker) -> Iterator[None]:
    """A chunked body with 60 MB of trailers."""
    start = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\n" % attacker.key.encode()
    yield
    attacker.pour(start + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"a:b\r\n" * 200_000, 60 * 2**20)


@attack("11")
def tiny_chunks(attacker: Attacker) -> Iterator[None]:
    """Four gradients with a key in chunks of one byte each, 60 MB of them."""
    head = b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\n" % attacker.key.encode()
    start = head + b"Content-Type: application/x-protobuf\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"1\r\na\r\n" * 100_000
    yield
    attacker.all_at_once([functools.partial(attacker.pour, start, piece, 60 * 2**20)] * 4)


@attack("11")
def slow_heads(attacker: Attacker) -> Iterator[None]:
    """1,500 connections without a key that send a byte of a head now and then, for 25 seconds."""
    yield
    streams = []
    for _ in range(1500):
        try:
            stream = attacker.socket()
            stream.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            streams.append(stream)
        except OSError as error:
            attacker.say(f"{type(error).__name__}")
            break
    attacker.say(f"{len(streams)} connections taken")
    end = time.monotonic() + 25
    open_streams = list(streams)
    while time.monotonic() < end and open_streams:
        time.sleep(1)
        for stream in list(open_streams):
            try:
                stream.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if stream.recv(4096) == b"":
                        raise ConnectionResetError
                stream.send(b"a")
            except BlockingIOError:
                pass
            except OSError:
                open_streams.remove(stream)
    attacker.say(f"{len(open_streams)} open after 25 s")
    for stream in streams:
        stream.close()


@attack("11")
def unfinished_bodies(attacker: Attacker) -> Iterator[None]:
    """16 gradients with a key of which 50 MB of 100 MB are sent, and then nothing for 20 seconds."""
    head = (
        b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %s\r\n"
        b"Content-Type: application/x-protobuf\r\nContent-Length: 100000000\r\n\r\n" % attacker.key.encode()
    )
    piece = bytes(2**20)
    yield

    def one() -> None:
        with attacker.socket() as stream:
            try:
                stream.sendall(head)
                for _ in range(50):
                    stream.sendall(piece)
                stream.settimeout(20)
                answer = stream.recv(4096)
                attacker.say(answer.partition(b"\r\n")[0].decode("latin-1") or "closed without an answer")
            except TimeoutError:
                attacker.say("held for 20 s")
            except OSError as error:
                attacker.say(f"closed ({type(error).__name__})")

    attacker.all_at_once([one] * 16)


@attack("16")
def wrong_keys(attacker: Attacker) -> Iterator[None]:
    """Wrong keys on eight connections, as fast as they are answered, for 10 seconds."""
    yield
    tried = Counter[int]()

    def guess() -> None:
        end = time.monotonic() + 10
        connection = Connection(attacker.url, "tml-wrong-wrong", timeout=10)
        while time.monotonic() < end:
            try:
                status = connection.send("GET", "sessions")[0]
            except (OSError, HTTPException):
                status = 0
                connection.close()
            tried[status] += 1

    attacker.all_at_once([guess] * 8)
    for status, count in tried.items():
        attacker.say(f"{status or 'closed'}: about {count // 10} a second")
