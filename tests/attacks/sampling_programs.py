"""Attacks with images, samples and sessions."""

import contextlib
import io
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator

from tests.attacks.attacker import JSON, Attacker, attack
from tests.attacks.tenant import Connection, Refused, sample_body


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
    attacker.post_at_once("asample", bodies, **JSON)


@attack("13", serving="vision", seconds=120)
def huge_images(attacker: Attacker) -> Iterator[None]:
    """Five PNGs of 196 KB and 64 megapixels each, in five samples."""
    yield from _huge_images(attacker)


@attack("13")
def huge_images_on_fakes(attacker: Attacker) -> Iterator[None]:
    """The same on fakes."""
    yield from _huge_images(attacker)


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


def _many_stops(attacker: Attacker) -> Iterator[None]:
    tenant = attacker.tenant()
    sampler = tenant.sampler()
    stops = [f"stop {number}" for number in range(100_000)]
    params = {"max_tokens": 500, "stop": stops, "seed": 1}
    bodies = [
        json.dumps(sample_body(sampler, number, num_samples=8, sampling_params=params)).encode() for number in range(4)
    ]
    yield
    attacker.post_at_once("asample", bodies, **JSON)


@attack("14", serving="text", seconds=100)
def many_stops(attacker: Attacker) -> Iterator[None]:
    """Four requests of 100,000 stop strings each, on a real tiny model."""
    yield from _many_stops(attacker)


@attack("14")
def large_results(attacker: Attacker) -> Iterator[None]:
    """64 requests for the top 256 of 4,000 prompt positions, whose results are not fetched."""
    tenant = attacker.tenant()
    sampler = tenant.sampler()
    bodies = [
        sample_body(sampler, number, [1 + token % 100 for token in range(4000)], topk_prompt_logprobs=256)
        for number in range(64)
    ]
    yield
    for body in bodies:
        try:
            tenant.connection.post("asample", body)
            attacker.say("200 accepted")
        except (Refused, OSError) as error:
            attacker.say(str(error))
    time.sleep(20)


@attack("14")
def sampling_sessions(attacker: Attacker) -> Iterator[None]:
    """4,000 sampling sessions in one session."""
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


@attack("15", arguments=("--session-timeout", "40"), seconds=90)
def silent_sessions(attacker: Attacker) -> Iterator[None]:
    """7,000 sessions that fall silent together."""
    tenants: list[str] = []
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
    time.sleep(55)
