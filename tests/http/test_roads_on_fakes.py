"""The roads that CONTRIBUTING.md tells: which files a second request enters, and in which order, on fakes."""

import asyncio
import gc
import re
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tinker_local.backend.threads import Threads
from tinker_local.types import ForwardBackwardRequest
from tinker_local.types.codec import encode_forward_backward_request

ROOT = Path(__file__).parents[2]
NAMESPACE = "/src/tinker_local/"

LONGEST = {"a `forward_backward`": 27, "a sample": 30, "a save": 39}
"""Files of each road. They were 40, 35 and 44 when each step had a module."""

WATCHES = ("stalls", "housekeeping", "autosaves", "examination")
"""Tasks that run now and then beside requests."""


def told(road: str) -> list[str]:
    """The files that CONTRIBUTING.md names on the way, each where it is named first; not those of a real model."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split(f"### The road of {road}\n")[1].split("\n#")[0].split("On a real model")[0]
    backend = ROOT / "packages/backend/src/tinker_local/backend"
    named = dict.fromkeys(re.findall(r"`([\w/]+/\w+\.py|\w+\.py)`", section))
    return [name for name in named if name.startswith("types/") or (backend / name).exists()]


class Road:
    """Notes each file of the packages when its code is first entered. Garbage of earlier tests is collected before:
    finalizers run in whatever code is there when it is collected."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and NAMESPACE in (name := frame.f_code.co_filename):
            self.files.setdefault(name.split(NAMESPACE)[1].removeprefix("backend/"))

    def __enter__(self) -> "Road":
        gc.collect()
        gc.disable()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


@pytest.fixture
async def no_watches(api: Any) -> None:
    """End the watches: each would enter its files on the road that is travelled at its time."""
    watches = [task for task in asyncio.all_tasks() if task.get_name() in WATCHES]
    assert {"stalls", "housekeeping"} <= {task.get_name() for task in watches}
    for task in watches:
        task.cancel()


@pytest.fixture
async def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what is meant for a thread at once instead, so that there is one order."""
    loop = asyncio.get_running_loop()

    def run_at_once(_: Executor | None, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = loop.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    monkeypatch.setattr(loop, "run_in_executor", run_at_once)
    monkeypatch.setattr(Threads, "_begin", Threads._work)


async def travelled(api: Any, path: str, **content: Any) -> list[str]:
    """The files between the bytes of a request and those of its result."""
    with Road() as road:
        answer = await api.post(path, **content)
        assert answer.status_code == 200, answer.text
        request_id = answer.json()["request_id"]
        await api.backend.operations.get(request_id)  # a poll beside the work would enter its files at any time
        result = await api.poll(request_id)
    assert result.status_code == 200
    assert b'"error"' not in result.content
    return list(road.files)


async def test_roads_in_contributing_are_those_of_a_second_request_on_fakes(
    api: Any, one_thread: None, no_watches: None, make_datum: Any
) -> None:
    session = await api.session()
    model = await api.model(session)
    found = {}
    for seq_id in (1, 2):
        request = ForwardBackwardRequest(
            model_id=model, seq_id=seq_id, data=(make_datum([5, 9, 20, 31]),), loss_fn="cross_entropy"
        )
        body = encode_forward_backward_request(request)
        found["a `forward_backward`"] = await travelled(api, "forward_backward", content=body)
    for seq_id in (3, 4):
        save = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id, "kind": "snapshot"}
        found["a save"] = await travelled(api, "save_weights_for_sampler", json=save)
    api.backend.folders.flush()  # its background thread writes versions to disk
    for seq_id in (0, 1):
        body = api.sample_body(f"{session}:sample:4", seq_id)
        found["a sample"] = await travelled(api, "asample", json=body)
    for road, files in found.items():
        assert told(road) == files, f"{road}: {' '.join(files)}"
        assert len(files) <= LONGEST[road]
