"""The attacks, each a program that runs in its own process against a server on loopback, bounded in count and time.

A program prepares what it will send, yields once, and attacks when it is resumed. It says what it was answered.
"""

import contextlib
import functools
import io
import json
import os
import re
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.attacks.tenant import PROTOBUF, Connection, Refused, Tenant, gradient_message, sample_body

Serving = Literal["fake", "text", "vision"]
"""What the server serves: the fakes, or a tiny real model."""


@dataclass
class Attacker:
    """Who attacks. `key` is a valid one, which programs without a key do not use."""

    url: str
    key: str
    base_model: str
    answers: Counter[str] = field(default_factory=Counter)

    def say(self, text: str) -> None:
        """What was answered; ids and numbers of bytes that differ between answers count as one."""
        self.answers[re.sub(r"[0-9a-f]{8}-[0-9a-f-]+", "ID", text)[:160]] += 1

    def tenant(self) -> Tenant:
        return Tenant(self.url, self.key, self.base_model)

    def send(self, path: str, body: bytes, **headers: str) -> None:
        """Post `body`, say what was answered, and follow a promise to its result."""
        connection = Connection(self.url, self.key)
        with contextlib.closing(connection):
            try:
                status, _, content = connection.send("POST", path, body, **headers)
                text = content.decode("utf-8", "replace")
                if status == 200 and '"request_id"' in text:
                    connection.wait(json.loads(text)["request_id"], 120)
                    text = "done"
                self.say(f"{status} {text}")
            except Refused as error:
                self.say(str(error))
            except (OSError, HTTPException, TimeoutError) as error:
                self.say(f"{type(error).__name__}: {error}")

    def all_at_once(self, calls: Sequence[Callable[[], object]]) -> None:
        """Each call in a thread."""
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)

    def socket(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=30)

    def pour(self, start: bytes, piece: bytes, most: int, seconds: float = 20.0) -> None:
        """Send `start`, then `piece` again and again up to `most` bytes, on one connection without a key."""
        end, sent = time.monotonic() + seconds, len(start)
        with self.socket() as stream:
            try:
                stream.sendall(start)
                while sent < most and time.monotonic() < end:
                    stream.sendall(piece)
                    sent += len(piece)
            except OSError as error:
                self.say(f"closed ({type(error).__name__}) below {1 << sent.bit_length()} bytes")
                stream.settimeout(2)
            else:
                stream.settimeout(5)
            with contextlib.suppress(OSError):
                answer = stream.recv(4096)
                self.say(answer.partition(b"\r\n")[0].decode("latin-1") or "closed without an answer")
                return
            self.say(f"{sent} bytes taken, no answer")


Program = Callable[[Attacker], Iterator[None]]


@dataclass(frozen=True)
class Attack:
    """`item`: which defect it is; `serving`: against what; `arguments` of the server; `seconds` it may take."""

    name: str
    item: str
    program: Program
    serving: Serving = "fake"
    arguments: tuple[str, ...] = ()
    seconds: float = 60.0


ATTACKS: dict[str, Attack] = {}


def attack(item: str, **settings: Any) -> Callable[[Program], Program]:
    """Register a program under its function's name."""

    def register(program: Program) -> Program:
        name = program.__name__.replace("_", "-")
        ATTACKS[name] = Attack(name, item, program, **settings)
        return program

    return register


def zstd(body: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=19).compress(body))


GRADIENT = {"Content_Type": PROTOBUF}

# Protobuf (8) ---------------------------------------------------------------------------------------------------------


@attack("8")
def empty_data(attacker: Attacker) -> Iterator[None]:
    """Two requests of 2,000,000 empty `Datum`s, 400 bytes each as zstd."""
    tenant = attacker.tenant()
    model = tenant.run()
    bodies = [
        zstd(gradient_message(model, seq_id, [1, 2], 0).SerializeToString() + b"\x1a\x00" * 2_000_000)
        for seq_id in (1, 2)
    ]
    yield
    attacker.all_at_once(
        [
            functools.partial(attacker.send, "forward_backward", body, Content_Encoding="zstd", **GRADIENT)
            for body in bodies
        ]
    )


@attack("8")
def empty_chunks(attacker: Attacker) -> Iterator[None]:
    """Two requests of one `Datum` of 2,000,000 empty chunks."""
    tenant = attacker.tenant()
    model = tenant.run()
    chunks = b"\x0a\x00" * 2_000_000
    datum = b"\x1a" + varint(len(chunks)) + chunks
    bodies = [zstd(gradient_message(model, seq_id, [1, 2], 0).SerializeToString() + datum) for seq_id in (1, 2)]
    yield
    attacker.all_at_once(
        [
            functools.partial(attacker.send, "forward_backward", body, Content_Encoding="zstd", **GRADIENT)
            for body in bodies
        ]
    )


@attack("8")
def unknown_fields(attacker: Attacker) -> Iterator[None]:
    """Two requests of 10 MB of unknown protobuf fields."""
    tenant = attacker.tenant()
    model = tenant.run()
    unknown = b"\xa0\x06\x00" * 3_400_000
    bodies = [gradient_message(model, seq_id, [1, 2]).SerializeToString() + unknown for seq_id in (1, 2)]
    yield
    attacker.all_at_once([functools.partial(attacker.send, "forward_backward", body, **GRADIENT) for body in bodies])


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


# Ids (9, 10) ----------------------------------------------------------------------------------------------------------


@attack("9")
def long_sampler_id(attacker: Attacker) -> Iterator[None]:
    """One request for 1,024 samples of a sampling session that does not exist, whose id has 2 MB."""
    body = json.dumps(sample_body("x" * 2_000_000, 0, num_samples=1024)).encode()
    yield
    attacker.send("asample", body, Content_Type="application/json")


@attack("10")
def long_model_ids(attacker: Attacker) -> Iterator[None]:
    """Three gradients for models that do not exist, whose ids have 200 MB."""
    bodies = [gradient_message(letter * 200_000_000, 1, [1, 2]).SerializeToString() for letter in "abc"]
    yield
    for body in bodies:
        attacker.send("forward_backward", body, **GRADIENT)


@attack("10")
def many_unknown_models(attacker: Attacker) -> Iterator[None]:
    """100 optimizer steps for models that do not exist, whose ids have 0.9 MB."""
    bodies = [
        json.dumps({"model_id": f"{number}" + "y" * 900_000, "seq_id": 1, "adam_params": {}}).encode()
        for number in range(100)
    ]
    yield
    for body in bodies:
        attacker.send("optim_step", body, Content_Type="application/json")


# Heads and connections (11) -------------------------------------------------------------------------------------------


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


# JSON (12) ------------------------------------------------------------------------------------------------------------


@attack("12", seconds=150)
def long_json(attacker: Attacker) -> Iterator[None]:
    """A prompt of 50,000,000 tokens: 100 MB of JSON."""
    sampler = attacker.tenant().sampler()
    body = (
        json.dumps(sample_body(sampler, 0, []))
        .encode()
        .replace(b'"tokens": []', b'"tokens": [%s1]' % (b"1," * 50_000_000))
    )
    yield
    attacker.send("asample", body, Content_Type="application/json")


@attack("12")
def deep_json(attacker: Attacker) -> Iterator[None]:
    """Four metadata of 0.9 MB: lists in lists, empty objects."""
    bodies = [
        b'{"user_metadata": {"a": %s}}' % (b"[" * 400_000 + b"]" * 400_000),
        b'{"user_metadata": {"a": [%s{}]}}' % (b"{}," * 300_000),
    ]
    yield
    for body in bodies * 2:
        attacker.send("create_session", body, Content_Type="application/json")


@attack("12")
def retrieved_ids(attacker: Attacker) -> Iterator[None]:
    """Two reports of 15 MB of ids that were read."""
    sampler = attacker.tenant().sampler()
    target = {"target": {"sampling_session_id": sampler}, "timeout": 0}
    ids = b",".join(b'"a"' for _ in range(3_800_000))
    body = json.dumps(target).encode()[:-1] + b', "retrieved_request_ids": [%s]}' % ids
    yield
    attacker.all_at_once([lambda: attacker.send("retrieve_futures", body, Content_Type="application/json")] * 2)


# Images (13) ----------------------------------------------------------------------------------------------------------


def flat_png(side: int, color: tuple[int, int, int]) -> bytes:
    """A PNG of one colour, which packs a thousandfold."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer, found = zlib.compressobj(9), io.BytesIO()
    row = b"\0" + bytes(color) * side
    for _ in range(side):
        found.write(packer.compress(row))
    found.write(packer.flush())
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", found.getvalue()) + part(b"IEND", b"")


def _huge_images(attacker: Attacker) -> Iterator[None]:
    import base64

    sampler, tenant = attacker.tenant().sampler(), attacker.tenant()
    bodies = []
    for number in range(5):
        # Not seen by an earlier attack, so that no cache answers.
        color = (os.getpid() % 251, time.time_ns() // 1000 % 241, number)
        image = {"type": "image", "data": base64.b64encode(flat_png(8192, color)).decode(), "format": "png"}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}, image]}
        bodies.append(json.dumps({**sample_body(sampler, tenant.next_sample()), "prompt": prompt}).encode())
    yield
    attacker.all_at_once(
        [functools.partial(attacker.send, "asample", body, Content_Type="application/json") for body in bodies]
    )


@attack("13", serving="vision", seconds=120)
def huge_images(attacker: Attacker) -> Iterator[None]:
    """Five PNGs of 196 KB and 64 megapixels each, in five samples."""
    yield from _huge_images(attacker)


@attack("13")
def huge_images_on_fakes(attacker: Attacker) -> Iterator[None]:
    """The same on fakes."""
    yield from _huge_images(attacker)


# Samples (14) ---------------------------------------------------------------------------------------------------------


def _long_samples(attacker: Attacker) -> Iterator[None]:
    tenant = attacker.tenant()
    sampler = tenant.sampler()
    bodies = [
        sample_body(sampler, number, num_samples=1024, sampling_params={"max_tokens": 2000, "seed": number, "stop": []})
        for number in range(64)
    ]
    yield
    for body in bodies:
        try:
            tenant.connection.post("asample", body)
            attacker.say("200 accepted")
        except (Refused, OSError) as error:
            attacker.say(str(error))
    time.sleep(30)
    try:
        tenant.connection.post(f"sessions/{tenant.session}/finish", {})
    except (Refused, OSError) as error:
        attacker.say(f"finish: {error}")


@attack("14", seconds=100)
def long_samples_on_fakes(attacker: Attacker) -> Iterator[None]:
    """64 requests of 1,024 sequences of 2,000 tokens; the session ends after 30 seconds."""
    yield from _long_samples(attacker)


@attack("14", serving="text", seconds=100)
def long_samples(attacker: Attacker) -> Iterator[None]:
    """The same on a real tiny model."""
    yield from _long_samples(attacker)


@attack("14")
def sampling_sessions(attacker: Attacker) -> Iterator[None]:
    """4,000 sampling sessions in one session, with eight samples each of eight of them."""
    tenant = attacker.tenant()
    yield
    samplers = []
    for _ in range(4000):
        try:
            samplers.append(tenant.sampler())
        except (Refused, OSError) as error:
            attacker.say(str(error))
            break
    attacker.say(f"{len(samplers)} sampling sessions")
    with contextlib.suppress(OSError, Refused):
        tenant.connection.post(f"sessions/{tenant.session}/finish", {})


# Sessions and keys (15, 16) -------------------------------------------------------------------------------------------


@attack("15", arguments=("--session-timeout", "20"), seconds=90)
def silent_sessions(attacker: Attacker) -> Iterator[None]:
    """7,000 sessions, each with a sampling session, that fall silent together."""
    tenants: list[Tenant] = []
    begin = time.monotonic()

    def some() -> None:
        while len(tenants) < 7000 and time.monotonic() < begin + 60:
            connection = Connection(attacker.url, attacker.key)
            with contextlib.closing(connection):
                for _ in range(100):
                    try:
                        session = connection.post("create_session", {"tags": [], "user_metadata": {}})["session_id"]
                    except (Refused, OSError) as error:
                        attacker.say(str(error))
                        return
                    tenants.append(session)

    threads = [threading.Thread(target=some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    attacker.say(f"about {round(len(tenants), -2)} sessions")
    yield
    time.sleep(35)


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


def main(name: str, url: str, key: str, base_model: str) -> None:
    """Run one program: say `armed`, wait for a line, attack, and print what was answered as JSON."""
    attacker = Attacker(url, key, base_model)
    running = ATTACKS[name].program(attacker)
    next(running)
    print("armed", flush=True)
    sys.stdin.readline()
    with contextlib.suppress(StopIteration):
        next(running)
    print(json.dumps(attacker.answers.most_common()), flush=True)
    os._exit(0)
