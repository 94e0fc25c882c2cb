"""The access log and the audit log: what they say, what they leave out, and that no request depends on them."""

import errno
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.hosting import log_files
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.hosting.log_files import LogFile
from tinker_local.backend.hosting.request_logs import AUDITED, Logs

from tests.http.conftest import Api, Clock, StartApi
from tests.http.test_http_owners_on_fakes import ADMIN, ALICE, BOB, key_file, world


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Logged:
    """A server with logs, for alice: `access()` and `audit()` are the lines so far."""

    def __init__(self, api: Api, folder: Path, **paths: str) -> None:
        self.folder = folder
        self.files = [LogFile(paths.get(name, str(folder / name))) for name in ("access", "audit")]
        self.logs = Logs(*([file.write] for file in self.files))
        keys = key_file(folder, f"alice {ALICE}\nbob {BOB}\nadmin {ADMIN}\n")
        app = create_app(api.backend, api_keys=keys, logs=self.logs)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("10.1.2.3", 5))
        http = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers={"X-API-Key": ALICE}, trust_env=False
        )
        self.api = Api(api.backend, http, api.engines)

    def close(self) -> None:
        """Write what waits."""
        for file in self.files:
            file.close()

    def access(self) -> list[dict[str, Any]]:
        self.close()
        return lines(self.folder / "access")

    def audit(self) -> list[dict[str, Any]]:
        self.close()
        return lines(self.folder / "audit")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def logged(start_api: StartApi, tmp_path: Path, clock: Clock) -> AsyncIterator[Logged]:
    one = Logged(await start_api(clock=clock), tmp_path)
    yield one
    one.close()
    await one.api.http.aclose()


async def test_access_log_has_each_request_and_no_secret_on_fakes(logged: Logged) -> None:
    api, http = logged.api, logged.api.http
    model = await api.model()
    await api.result(await api.submit("save_weights_external", {"model_id": model, "seq_id": 1, "path": "e"}))
    signed = (await api.get(f"training_runs/{model}/checkpoints/external_weights/e/external_weights_urls")).json()
    for url in signed["urls"].values():
        assert (await http.get(url)).status_code == 200
    sampler = await api.base_sampler()
    await api.result(await api.sample(sampler, 0, tokens=(491, 492, 493)))
    await http.get("/api/v1/sessions", headers={"X-API-Key": "tml-a-wrong-secret"})
    await http.get("/api/v1/nothing/tml-in-a-path", headers={"X-Request-Id": "mine-1"})
    answer = await http.get("/api/v1/healthz", headers={"X-Request-Id": "no good\x7f"})
    found = logged.access()
    assert found[0].keys() == {
        "time", "method", "route", "status", "ms", "bytes_in", "bytes_out", "owner", "address", "request"
    }  # fmt: skip
    routes = [(line["method"], line["route"], line["status"], line["owner"]) for line in found]
    assert routes[0] == ("POST", "/api/v1/create_session", 200, "alice")
    assert ("GET", "/api/v1/external_weights/{run_id}/{name}/{file}", 200, None) in routes
    assert ("POST", "/api/v1/asample", 200, "alice") in routes
    assert routes[-3:] == [("GET", None, 401, None), ("GET", None, 404, "alice"), ("GET", "/api/v1/healthz", 200, None)]
    assert found[-2]["request"] == "mine-1"
    assert found[-1]["request"] == answer.headers["x-request-id"] != "no good\x7f"
    for line in found:
        assert line["ms"] >= 0
        assert line["address"] == "10.1.2.3"
    (asked,) = [line for line in found if line["route"] == "/api/v1/asample"]
    assert asked["bytes_in"] > 100 < asked["bytes_out"] + 100
    text = (logged.folder / "access").read_text() + (logged.folder / "audit").read_text()
    for secret in (
        ALICE,
        "tml-",
        "token=",
        "491, 492",
        "491,492",
        *(url.rpartition("token=")[2] for url in signed["urls"].values()),
    ):
        assert secret not in text


async def test_audit_log_has_saves_whose_bodies_are_long_on_fakes(logged: Logged) -> None:
    """With 32 KiB of spaces after its body, a save once was in no log."""
    api = logged.api
    model = await api.model()
    for seq_id, route in enumerate(("save_weights", "save_weights_external", "save_weights_for_sampler"), 1):
        body = json.dumps({"model_id": model, "seq_id": seq_id, "path": "hidden"}) + " " * 40_000
        answer = await api.post(route, content=body, headers={"Content-Type": "application/json"})
        await api.result(answer.json()["request_id"])
    assert [line["path"] for line in logged.audit() if line["action"] == "save checkpoint"] == [
        f"tinker://{model}/{kind}/hidden" for kind in ("weights", "external_weights", "sampler_weights")
    ]


async def test_audit_log_has_who_did_what_and_how_it_ended_on_fakes(logged: Logged) -> None:
    api, http = logged.api, logged.api.http
    session = await world(api, ALICE)  # with a save of each kind
    http.headers["x-api-key"] = ALICE
    model = f"{session}:train:0"
    same = {"model_id": model, "seq_id": 1, "path": "w"}
    for seq_id in (1, 4):  # sent again; and another of that name, which fails
        await api.outcome(await api.submit("save_weights", {**same, "seq_id": seq_id}))
    await api.nameless(model, 5, 9)
    one = f"training_runs/{model}/checkpoints/weights/w"
    assert (await api.post(f"{one}/publish")).status_code == 204
    assert (await http.delete(f"/api/v1/{one}", headers={"X-API-Key": BOB})).status_code == 404
    copied = await api.ok("copy_weights", {"source_path": f"tinker://{model}/weights/w", "destination_project_id": "p"})
    assert (await http.delete(f"/api/v1/{one}", headers={"X-API-Key": ADMIN})).status_code == 204
    export = f"training_runs/{model}/checkpoints/external_weights/e/external_weights_urls"
    url = (await api.get(export)).json()["urls"]["adapter_config.json"]
    content = (await http.get(url)).content
    found = logged.audit()
    weights = f"tinker://{model}/weights/w"
    told = [(line["action"], line["by"], line.get("path"), line["outcome"]) for line in found]
    assert told == [
        ("create session", "alice", None, "ok"),
        ("create training run", "alice", None, "ok"),
        ("save checkpoint", "alice", weights, "ok"),
        ("save checkpoint", "alice", f"tinker://{model}/sampler_weights/s", "ok"),
        ("save checkpoint", "alice", f"tinker://{model}/external_weights/e", "ok"),
        ("create sampling session", "alice", None, "ok"),
        ("save checkpoint", "alice", weights, "failed"),
        ("publish checkpoint", "alice", weights, "ok"),
        ("delete checkpoint", "bob", weights, "refused"),
        ("copy checkpoint", "alice", copied["tinker_path"], "ok"),
        ("delete checkpoint", "admin", weights, "ok"),
        ("sign download", "alice", f"tinker://{model}/external_weights/e", "ok"),
        ("download", None, f"tinker://{model}/external_weights/e", "ok"),
    ]
    assert (found[0]["session_id"], found[1]["model_id"], found[8]["status"]) == (session, model, 404)
    assert (found[6]["category"], found[9]["source_path"]) == ("user", weights)
    assert (found[-1]["file"], found[-1]["bytes"]) == ("adapter_config.json", len(content))
    assert all(line["request"] and line["time"].startswith("20") for line in found)


async def test_audit_log_has_the_first_use_of_a_model_at_an_endpoint_and_those_refused_on_fakes(logged: Logged) -> None:
    body = {"model": "fake/bigram", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/chat/completions", "/v1/messages", "/oai/api/v1/chat/completions"):
        assert (await logged.api.http.post(path, json=body)).status_code == 200
    for bad in ({**body, "model": "other"}, {**body, "model": "tinker://unknown:train:0/sampler_weights/a"}):
        assert (await logged.api.http.post("/v1/chat/completions", json=bad)).status_code == 404
    found = [line for line in logged.audit() if line["action"] == "use model at an endpoint"]
    assert [(line["by"], line["outcome"], line["status"]) for line in found] == [
        ("alice", "ok", 200),
        ("alice", "refused", 404),
        ("alice", "refused", 404),
    ]
    assert [line["model"] for line in found] == ["fake/bigram", "other", bad["model"]]
    assert found[0]["session_id"]
    assert found[0]["request"]


async def test_audit_log_has_what_the_server_saves_and_deletes_by_itself_on_fakes(logged: Logged, clock: Clock) -> None:
    from datetime import timedelta

    api = logged.api
    model = await api.model()
    await api.save(model, 1, "short", ttl_seconds=3600)
    await api.result(await api.gradient(model, 2))
    await api.result(await api.step(model, 3))
    await api.post(f"sessions/{model.partition(':')[0]}/finish", {"reason": {"type": "errored"}})
    clock.ahead = timedelta(hours=2)
    await api.backend.checkpoints.sweep()
    own = [(line["action"], line["path"]) for line in logged.audit() if line["by"] is None]
    assert own == [
        ("save checkpoint", f"tinker://{model}/weights/autosave"),
        ("delete checkpoint", f"tinker://{model}/weights/short"),
    ]


async def test_every_audited_route_exists_on_fakes(api: Api) -> None:
    from fastapi.routing import APIRoute

    routes = [route for route in create_app(api.backend).routes if isinstance(route, APIRoute)]
    assert AUDITED.keys() <= {(method, route.path) for route in routes for method in route.methods or ()}


# Files ----------------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def line(number: int) -> dict[str, object]:
    return {"time": 0.0, "n": number}


def numbers(path: Path) -> list[Any]:
    return [one.get("n", one.get("lost_lines")) for one in lines(path)]


def test_a_log_that_was_renamed_is_made_anew_on_fakes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(str(path))
    log.write(line(1))
    until(lambda: numbers(path) == [1])
    path.rename(tmp_path / "log.1")
    log.write(line(2))
    log.close()
    assert (numbers(tmp_path / "log.1"), numbers(path)) == ([1], [2])
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_loses_lines_counts_them_and_tears_none_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write, full = tmp_path / "log", os.write, False

    def on_a_full_disk(descriptor: int, content: bytes) -> int:
        if not full or descriptor != log._descriptor:
            return write(descriptor, content)
        if len(content) < 20:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(descriptor, content[:-10])  # the rest does not fit

    log = LogFile(str(path))
    monkeypatch.setattr(os, "write", on_a_full_disk)
    log.write(line(1))
    until(lambda: path.read_text().count("\n") == 1)
    full = True
    log.write(line(2))
    until(lambda: log._lost == 1)
    log.write(line(3))
    until(lambda: log._lost == 2)
    full = False
    log.write(line(4))
    log.close()
    text = path.read_text().splitlines()
    whole = [json.loads(one) for one in text if one.endswith("}")]
    assert [one.get("n", one.get("lost_lines")) for one in whole] == [1, 2, 4]
    assert "lost_lines" in whole[1]
    assert len([record for record in caplog.records if "lines are lost" in record.message]) == 1


async def test_a_log_that_cannot_be_written_or_hangs_fails_and_delays_no_request_on_fakes(
    start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MOST_WAITING", 20)
    monkeypatch.setattr(log_files, "CLOSE_SECONDS", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    logged = Logged(await start_api(), tmp_path, access=str(pipe), audit="/dev/full")
    access = logged.files[0]
    for _ in range(2000):  # more than the pipe and the queue hold; each would wait for ever
        access.write({"time": 0.0, "text": "x" * 200})
    assert access._lost > 0
    for _ in range(50):
        assert (await logged.api.post("create_session", {})).status_code == 200
    assert await logged.api.healthy()
    logged.close()
    os.close(reader)
    await logged.api.http.aclose()


# The command ----------------------------------------------------------------------------------------------------------


def test_logs_of_the_command_are_written_and_bad_paths_refused_at_once_on_fakes(serve: Any, tmp_path: Path) -> None:
    common = ["--fake", "--model", "fake/bigram"]
    outcome = CliRunner().invoke(
        main, ["serve", *common, "--port", "0", "--data-dir", str(tmp_path / "d"), "--audit-log", "/no/such/file"]
    )
    assert outcome.exit_code == 2
    assert "--audit-log" in outcome.output
    path = tmp_path / "requests"
    server = serve(*common, "--access-log", str(path), "--audit-log", str(path))
    with httpx.Client(base_url=f"{server.url}/api/v1", trust_env=False) as http:
        session = http.post("/create_session", json={}).json()["session_id"]
    assert server.stop() == 0
    found = lines(path)
    assert [one["session_id"] for one in found if "action" in one] == [session]
    assert "/api/v1/create_session" in [one.get("route") for one in found]
