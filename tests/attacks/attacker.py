"""Who attacks: a program in its own process against a server on loopback, bounded in count and time.

A program prepares what it will send, yields once, and attacks when it is resumed. It says what it was answered.
"""

import contextlib
import functools
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.attacks.tenant import Connection, Refused, Tenant

Serving = Literal["fake", "text", "vision"]
"""What the server serves: the fakes, or a tiny real model."""

JSON = {"Content_Type": "application/json"}


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

    def post_at_once(self, path: str, bodies: Sequence[bytes], **headers: str) -> None:
        """`send` each of `bodies` on another connection."""
        self.all_at_once([functools.partial(self.send, path, body, **headers) for body in bodies])

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


def programs() -> dict[str, Attack]:
    """All attacks by their names."""
    from tests.attacks import body_programs, connection_programs, sampling_programs  # noqa: F401

    return ATTACKS


def main(name: str, url: str, key: str, base_model: str) -> None:
    """Run one program: say `armed`, wait for a line, attack, and print what was answered as JSON."""
    attacker = Attacker(url, key, base_model)
    running = programs()[name].program(attacker)
    next(running)
    print("armed", flush=True)
    sys.stdin.readline()
    with contextlib.suppress(StopIteration):
        next(running)
    print(json.dumps(attacker.answers.most_common()), flush=True)
    os._exit(0)
