"""Every route with every kind of large body, by the table of bodies, which a test of the fuzzing compares with routes:
none is walked on the event loop, and none is an error of the server."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from tests.fuzz.mutate import places, replaced
from tests.http.test_http_fuzz_on_fakes import BODIES, check, filled, fuzzed, send_to

__all__ = ["fuzzed"]

LARGE: dict[str, Any] = {
    "numbers": [1] * 200_000,
    "objects": [{}] * 120_000,
    "texts": ["a"] * 100_000,
    "names": {f"n{at}": 1 for at in range(30_000)},
    "text": "a" * 1_000_000,
    "commas": ",[{" * 250_000,
    "deep": json.loads("[" * 400 + "]" * 400),
}

MORE_FIELDS: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"structured_outputs": {"json": {"enum": [1] * 250_000}}},
        {"structured_outputs": {"choice": ["a"] * 100_000}},
        {"structured_outputs": {"json": json.dumps({"enum": ["a" * 1_000_000]})}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 90_000] * 10}}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 200_000}}}] * 3},
        {"messages": [{"role": "user", "content": ""}] * 100_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}]},
    ],
    "/v1/completions": [
        {"structured_outputs": {"json": {"enum": [1] * 250_000}}, "prompt": "a"},
        {"prompt": ["a"] * 100_000},
        {"prompt": "a" * 130_000},
        {"prompt": [1] * 200_000},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": ""}] * 100_000},
        {"tools": [{"name": "f", "input_schema": {"enum": [1] * 200_000}}] * 3},
        {"output_config": {"format": {"type": "json_schema", "schema": {"enum": [1] * 250_000}}}},
    ],
    "create_session": [{"user_metadata": {f"k{at}": "x" * 4096 for at in range(64)}}],
}
"""Of routes whose entries of `BODIES` have not all fields."""

HEAVY = ("/v1/chat/completions", "/v1/completions", "/v1/messages")

CALLS, CPU_SECONDS = 20_000, 0.5
"""Of functions in one step of the event loop, and what its thread computes in one. Waits for other threads and programs
do not count."""


class LoopSteps:
    """The most calls of functions in one step of the event loop, and the most seconds that its thread computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.seconds = 0, 0.0
        run, calls = asyncio.events.Handle._run, 0

        def count(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call"

        def counted(handle: asyncio.Handle) -> None:
            nonlocal calls
            calls, begin = 0, time.thread_time()
            sys.setprofile(count)
            try:
                run(handle)
            finally:
                sys.setprofile(None)
                self.calls, self.seconds = max(self.calls, calls), max(self.seconds, time.thread_time() - begin)

        monkeypatch.setattr(asyncio.events.Handle, "_run", counted)


def large_bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """Each field with each kind of large value, lists with what they have again and again, and other bodies."""
    body = BODIES[path]
    for kind, value in LARGE.items():
        yield kind, json.dumps(value).encode()
        yield f"{kind} in a field that is not known", json.dumps({**body, "other": value}).encode()
        for place in places(body):
            if place and len(place) == 1:
                yield f"{kind} at {place}", json.dumps(replaced(body, place, value)).encode()
    for name, value in body.items():
        if isinstance(value, list) and value:
            yield f"{name} again and again", json.dumps({**body, name: value * (500_000 // len(str(value)))}).encode()
    for more in MORE_FIELDS.get(path, []):
        yield f"{list(more)} of {str(more)[:60]}", json.dumps({**body, **more}).encode()


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path in HEAVY[:1] else pytest.mark.more) for path in BODIES]
)
def test_no_large_body_is_walked_on_the_event_loop_on_fakes(
    fuzzed: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, run, names = fuzzed
    steps, slow = LoopSteps(monkeypatch), []
    for what, content in large_bodies(path):
        text = filled(content.decode(), names).encode()
        steps.calls, steps.seconds = 0, 0.0
        check(run(send_to(api, filled(path, names), text, **{"Content-Type": "application/json"})))
        if steps.calls > CALLS or steps.seconds > CPU_SECONDS:
            slow.append((what, len(text), steps.calls, steps.seconds))
    assert not slow
    run(api.ok("session_heartbeat", {"session_id": names["session"]}))
