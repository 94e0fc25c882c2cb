"""What the server tells its operator: a line each for sessions, runs, checkpoints and failures, and numbers while
something happens."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker_local.backend.cli.terminal_log import as_text
from tinker_local.backend.hosting import listening, notices, server
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.hosting.log_files import LogFile
from tinker_local.backend.hosting.notices import NOTICES, Notices, tell_change, tell_request
from tinker_local.backend.hosting.request_logs import Logs

from tests.http.conftest import Api, StartApi


class Told:
    """An API whose notices are in `caplog`."""

    def __init__(self, api: Api, caplog: pytest.LogCaptureFixture) -> None:
        self.notices = Notices(api.backend)
        app = create_app(api.backend, logs=Logs([tell_request], [tell_change]))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", trust_env=False)
        self.api = Api(api.backend, http, api.engines)
        self._caplog = caplog
        caplog.set_level(logging.INFO, NOTICES.name)

    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == NOTICES.name]

    def records(self) -> list[Any]:
        return [record for record in self._caplog.records if record.name == NOTICES.name]


@pytest.fixture
async def told(start_api: StartApi, caplog: pytest.LogCaptureFixture) -> Told:
    return Told(await start_api(), caplog)


async def test_sessions_runs_checkpoints_and_failures_are_a_line_each_on_fakes(told: Told) -> None:
    api = told.api
    model = await api.model()
    session = model.partition(":")[0]
    await api.result(await api.submit("save_weights", {"model_id": model, "seq_id": 1, "path": "first"}))
    failure = await api.failure(await api.gradient(model, 2, loss_fn="nonsense"))
    refused = {"session_id": session, "model_seq_id": 7, "base_model": "fake/other", "lora_config": {"rank": 4}}
    assert (await api.post("create_model", json=refused)).status_code == 400
    await api.post(f"sessions/{session}/finish", json={})
    found = told.lines()
    path = f"tinker://{model}/weights/first"
    for line in (
        f"create session: {session}",
        f"create training run: {model} of fake/bigram",
        f"save checkpoint: {path}",
        f"forward_backward failed ({failure.partition(':')[0]}): {failure.partition(': ')[2]}",
        f"finish session: {session}",
    ):
        assert found.count(line) == 1, (line, found)
    assert [line for line in found if "refused (400): base_model: 'fake/other' is not served here" in line]
    for record in told.records():
        assert record.owner == "local"
        assert record.request


async def test_a_program_that_only_fails_does_not_fill_the_log_on_fakes(told: Told) -> None:
    api = told.api
    model = await api.model()
    for seq_id in range(1, notices.MOST_FAILURES + 6):
        await api.failure(await api.gradient(model, seq_id, loss_fn="nonsense"))
    assert sum("forward_backward failed" in line for line in told.lines()) == notices.MOST_FAILURES
    numbers = asyncio.create_task(told.notices.tell_numbers(0.05))
    await api.until(lambda: any("5 more failures" in line for line in told.lines()), 60)
    await api.failure(await api.gradient(model, notices.MOST_FAILURES + 6, loss_fn="nonsense"))
    numbers.cancel()
    assert sum("forward_backward failed" in line for line in told.lines()) == notices.MOST_FAILURES + 1


async def test_what_a_client_cancels_is_no_failure_on_fakes(told: Told) -> None:
    api = told.api
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    request_id = await api.sample(sampler, 0)
    api.backend.operations.cancel(request_id)
    api.sampler.hold.set()
    assert "cancelled" in await api.failure(request_id)
    assert await api.healthy()  # the event loop has gone on
    assert not [line for line in told.lines() if "failed" in line]


async def test_numbers_are_told_while_something_happens_and_not_else_on_fakes(told: Told) -> None:
    api = told.api
    numbers = asyncio.create_task(told.notices.tell_numbers(0.05))
    await asyncio.sleep(0.5)
    assert not [line for line in told.lines() if line.startswith("status")]
    model = await api.model()
    for at in range(1, 7, 2):
        await api.result(await api.gradient(model, at))
        await api.result(await api.step(model, at + 1))
    await api.until(lambda: any(" steps/s" in line for line in told.lines()), 60)
    line = next(line for line in told.lines() if " steps/s" in line)
    assert re.match(r"status: 1 run, \S+ steps/s, \S+ trained tokens/s", line)
    assert re.search(r"memory \d+\.\d GiB", line)
    numbers.cancel()


def test_what_clients_send_neither_ends_a_line_nor_moves_the_cursor_on_fakes() -> None:
    line = {"time": time.time(), "level": "INFO", "logger": "x", "message": "a\nb\x1b[2J\u2028c é", "owner": "\x07"}
    text = as_text(line).decode()
    assert text[9:] == "a\\nb\\x1b[2J\\u2028c é [\\x07]\n"


def test_a_log_of_objects_has_time_level_owner_request_and_what_happened_on_fakes(tmp_path: Path) -> None:
    """In a process, as `serve --log-json` sets it up."""
    program = """
import logging
from tinker_local.backend.cli.serve import open_logs
logs = open_logs({"--access-log": None, "--audit-log": None}, verbose=False, as_objects=True)
notices = logging.getLogger("tinker_local.notices")
import logging.config
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as vLLM; it closes all handlers
notices.info("run %s", 7, extra={"owner": "alice", "request": "r-1"})
notices.debug("not asked for")
logging.getLogger("other").info("not asked for")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("other").exception("it failed")
logs.close()
logging.getLogger("other").warning("after the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=280)
    *lines, last = done.stderr.splitlines()
    first, second = map(json.loads, lines)
    assert last == "after the end"
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO", "logger": "tinker_local.notices", "message": "run 7", "owner": "alice", "request": "r-1"
    }  # fmt: skip
    assert second["level"] == "ERROR"
    assert "ZeroDivisionError" in second["error"]


def test_a_terminal_that_does_not_go_on_stops_nothing_on_fakes() -> None:
    """As after Ctrl-S: the pipe is full and is not read."""
    reading, writing = os.pipe()
    log = LogFile(writing)
    start = time.monotonic()
    for _ in range(2000):
        log.write({"time": time.time(), "text": "x" * 100})
    assert time.monotonic() - start < 60
    os.set_blocking(reading, False)
    while log._waiting.qsize():
        try:
            os.read(reading, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    log.flush()
    os.close(reading)
    os.close(writing)


def test_a_limit_of_open_files_below_the_connections_is_told_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 1024)]
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda kind, value: limits.append(value))
    said = server.allow_many_connections()
    assert said is not None
    assert said.startswith("the limit of open files, 1024, leaves 768 connections of 16384")
    limits.append((1024, 65536))
    assert server.allow_many_connections() is None
    assert limits[-1] == (65536, 65536)


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")])
def test_ready_names_an_address_that_a_client_can_use_on_fakes(host: str, url: str) -> None:
    with listening.bind(host, 0) as bound:
        assert listening.url_of(bound) == f"{url}{bound.getsockname()[1]}"
