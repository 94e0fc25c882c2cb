"""Who is let in: keys, loopback, and what never reaches a log or the disk."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.hosting import keys

from tests.http.conftest import Api, StartApi

KEY = "tml-correct-horse-battery"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """What `serve` says to arguments that it refuses before it does anything."""

    def went_on(*_: Any) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", went_on)

    def run(*arguments: str) -> str:
        data = tmp_path / "data"
        common = ["serve", "--fake", "--model", "fake/bigram", "--port", "0", "--data-dir", str(data)]
        outcome = CliRunner().invoke(main, [*common, *arguments])
        assert outcome.exit_code == 2, outcome.output
        assert not data.exists()
        return outcome.output

    return run


@pytest.mark.mutation(
    "keys-not-checked",
    "Keys.caller",
    "return (callers or {}).get(fingerprint(given))",
    "return (callers or {}).get(fingerprint(given), LOCAL)",
)
async def test_request_without_a_key_is_401_before_its_body_is_read_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "FREE_WRONG_KEYS", 1000)
    api = await start_api(api_keys=[KEY, "tml-another-good-key"])
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += 1
            yield b" " * 1024

    for headers in (
        {},
        {"X-API-Key": ""},
        {"X-API-Key": KEY[:-1]},
        {"X-API-Key": KEY + "x"},
        {"X-API-Key": KEY.upper()},
        {"X-API-Key": f"{KEY},{KEY}"},
        {"Authorization": f"Bearer {KEY}"},
        {"X-API-Key": "tml-\xff\xfe".encode("latin-1")},
    ):
        for method, path in (
            ("POST", "forward_backward"),
            ("POST", "create_session"),
            ("GET", "training_runs"),
            ("GET", "nothing"),
            ("DELETE", "training_runs/a/checkpoints/weights/b"),
        ):
            content = endless() if method == "POST" else None
            answer = await api.http.request(method, f"/api/v1/{path}", headers=headers, content=content)
            assert answer.status_code == 401, (method, path, headers)
            assert int(answer.headers["content-length"]) == len(answer.content) > 0
            assert "X-API-Key" in answer.json()["detail"]
            assert KEY not in answer.text
    assert read == 0
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert (await api.http.get(path)).status_code == 401
    for key in (KEY, "tml-another-good-key"):
        assert (await api.http.post("/api/v1/create_session", headers={"x-api-key": key}, json={})).status_code == 200


async def test_health_needs_no_key_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=[KEY])
    assert (await api.get("healthz")).status_code == 200
    assert (await api.http.get("/api/v1/healthz/")).status_code == 401


async def test_without_keys_any_key_is_let_in_on_fakes(api: Api) -> None:
    assert (await api.post("create_session", {}, headers={"X-API-Key": "tml-whatever"})).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000"]
)
async def test_without_keys_this_machine_is_asked_by_its_own_names_on_fakes(api: Api, host: str) -> None:
    assert (await api.post("create_session", {}, headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "rebound.example:8000",
        "localhost.rebound.example",
        "127.0.0.1.rebound.example:8000",
        "me@127.0.0.1",
        "127.0.0.1:8000@rebound.example",
        "192.168.1.7:8000",
        "[fe80::1]:8000",
        "localhost:80:80",
        "",
    ],
)
async def test_without_keys_a_page_whose_name_was_made_to_lead_here_is_refused_on_fakes(api: Api, host: str) -> None:
    for method, path in (("POST", "/api/v1/create_session"), ("GET", "/api/v1/training_runs"), ("GET", "/metrics")):
        answer = await api.http.request(method, path, headers={"Host": host})
        assert answer.status_code == 403
        for word in (f"Host: {host!r}", "--api-key-file", "TINKER_API_KEY"):
            assert word in answer.json()["detail"]
    assert (await api.get("sessions")).json()["sessions"] == []


async def test_without_keys_web_pages_of_other_sites_are_refused_on_fakes(api: Api) -> None:
    # What a browser sends without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for origin in ("https://evil.example", "http://localhost.evil.example:8000", "null", "file://", "http://[", ""):
            headers = {"Content-Type": kind, "Origin": origin}
            answer = await api.http.post("/api/v1/create_session", content=b"{}", headers=headers)
            assert answer.status_code == 403
            assert f"Origin: {origin!r}" in answer.json()["detail"]
    assert (await api.get("sessions")).json()["sessions"] == []
    for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:8000"):
        assert (await api.post("create_session", {}, headers={"Origin": origin})).status_code == 200


async def test_with_keys_the_server_has_any_name_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=[KEY])
    headers = {"X-API-Key": KEY, "Host": "ai.example:8443", "Origin": "https://ai.example"}
    assert (await api.post("create_session", {}, headers=headers)).status_code == 200
    assert (await api.get("healthz")).status_code == 200


PAGE = "https://app.example.org"


@pytest.mark.parametrize("keys", [None, [KEY]])
async def test_web_pages_of_origins_that_are_named_may_use_the_server_on_fakes(
    start_api: StartApi, keys: list[str] | None
) -> None:
    api = await start_api(api_keys=keys, cors_origins=(PAGE, "http://localhost:3000"))
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    path, key = "/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
    body = {"model": "fake/bigram", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for origin, allowed in ((PAGE, True), ("http://localhost:3000", True), ("https://evil.example", False)):
        page = {"Origin": origin}
        before = await api.http.options(path, headers=page | asks)  # as browsers ask: without a key
        answers = [before, await api.http.post(path, json=body, headers=page | key)]
        if keys:  # what is refused can be read, too
            answers.append(await api.http.post(path, json=body, headers=page | {"Authorization": "Bearer tml-wrong"}))
            assert answers[-1].status_code == 401
        for answer in answers:
            assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
            assert "Access-Control-Allow-Credentials" not in answer.headers
        assert before.status_code == (200 if allowed else 400)
        assert answers[1].status_code == (200 if allowed or keys else 403)
        if allowed:
            assert "authorization" in before.headers["Access-Control-Allow-Headers"].lower()
    stream = await api.http.post(path, json=body | {"stream": True}, headers={"Origin": PAGE} | key)
    assert stream.headers["Access-Control-Allow-Origin"] == PAGE
    assert stream.text.endswith("data: [DONE]\n\n")


async def test_without_origins_no_page_of_another_site_reads_an_answer_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=[KEY])
    for method in ("OPTIONS", "GET"):
        answer = await api.http.request(
            method, "/v1/models", headers={"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
        )
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["*", "app.example.org", f"{PAGE}/", "https://*.example.org", "null", PAGE.upper(), f"{PAGE}:443", f"{PAGE}:99999"],
)
def test_what_is_no_origin_is_refused_at_the_start_on_fakes(refused: Any, origin: str) -> None:
    said = " ".join(refused("--cors-origin", origin).split())
    assert "an origin is http://HOST[:PORT] or https://HOST[:PORT]" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_address_that_others_reach_needs_a_key_file_on_fakes(refused: Any, host: str) -> None:
    assert "--api-key-file" in refused("--host", host)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "contains no key"),
        ("# a comment\n\n", "contains no key"),
        ("sk-not-of-this-kind\n", "key 1"),
        (f"{KEY}\ntml-short\n", "key 2"),
        ("tml-clé-of-letters-that-no-header-holds\n", "key 1"),
        (f"{KEY} {KEY}\n", "key 1"),
        (b"tml-\xff\xfe-not-a-text\n", "is not UTF-8 text"),
    ],
)
def test_key_file_that_is_none_is_refused_and_not_quoted_on_fakes(
    refused: Any, tmp_path: Path, content: str | bytes, words: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "keys").write_bytes(data)
    said = refused("--api-key-file", str(tmp_path / "keys"))
    assert words in said
    for line in data.decode(errors="ignore").split():
        assert len(line) < 5 or line not in said


def test_keys_reach_no_log_and_no_disk_on_fakes(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# of the team\n{KEY}\n")
    server = serve("--fake", "--model", "fake/bigram", "--api-key-file", str(tmp_path / "keys"), "-v")
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}, trust_env=False) as http:
        session = http.post("/create_session", json={"user_metadata": {"a": "b"}}).json()["session_id"]
        events = [{"event": "UNHANDLED_EXCEPTION", "traceback": f"headers: x-api-key: {KEY}"}]
        telemetry = http.post("/telemetry", json={"events": events, "session_id": session})
        assert telemetry.json() == {"status": "accepted"}
        http.post("/create_model", json={"session_id": session, "model_seq_id": -1, "base_model": "fake/bigram"})
        http.post("/forward_backward", content=b"\xff\xff")
        http.post("/retrieve_future", json={"request_id": "x"})
        wrong = http.post("/create_session", json={}, headers={"X-API-Key": "tml-the-wrong-secret"})
        assert wrong.status_code == 401
    assert KEY.encode() not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert server.stop() == 0
    for secret in (KEY, "tml-the-wrong-secret"):
        assert not [line for line in server.lines if secret in line]
        for folder, _, files in os.walk(server.data_dir):
            for name in files:
                assert secret.encode() not in Path(folder, name).read_bytes()


def test_loopback_server_of_a_program_lets_only_its_own_client_in_on_fakes(tmp_path: Path) -> None:
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
    from tinker_local.backend.models.load_engines import load_fake

    source = ModelSource("fake/bigram", "fake/bigram")
    keys = []
    for number in range(2):
        backend = InProcessBackend([source], BackendOptions(data_dir=tmp_path / str(number)), load=load_fake)
        server = backend.serve_in_thread()
        try:
            assert server.url.startswith("http://127.0.0.1:")
            for key, status in (("tml-local", 401), (server.api_key, 200)):
                answer = httpx.post(f"{server.url}/api/v1/create_session", json={}, headers={"X-API-Key": key})
                assert answer.status_code == status
        finally:
            server.close()
        keys.append(server.api_key)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/api/v1/healthz")
    assert keys[0] != keys[1]
    assert all(key.startswith("tml-") and len(key) > 30 for key in keys)


# Wrong keys -----------------------------------------------------------------------------------------------------------


def test_wrong_keys_of_an_address_wait_longer_and_longer_and_are_forgiven_on_fakes() -> None:
    now = 0.0
    wrong = keys.WrongKeys(lambda: now)
    assert [wrong.delay("10.0.0.1") for _ in range(10)] == [0.0] * 10
    assert [wrong.delay("10.0.0.1") for _ in range(3)] == [0.1, 0.2, 0.4]
    assert [wrong.delay("10.0.0.1") for _ in range(1000)][-1] == 5.0
    assert wrong.delay("10.0.0.2") == 0.0
    now = 2 * 10 * 6.0
    assert wrong.delay("10.0.0.1") == 0.0
    for host in range(12):
        last = wrong.delay(f"2001:db8:0:1::{host}")
    assert last > 0
    assert wrong.delay("2001:db8:0:2::1") == 0.0
    assert wrong.delay("::ffff:10.0.0.9") == wrong.delay("") == wrong.delay("a socket") == 0.0


def test_of_many_addresses_the_last_are_remembered_on_fakes() -> None:
    wrong = keys.WrongKeys()
    for number in range(keys.MOST_ADDRESSES + 100):
        wrong.delay(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(wrong._seen) == keys.MOST_ADDRESSES


async def test_a_right_key_waits_for_no_wrong_ones_of_its_address_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MOST_DELAYED", 2)
    monkeypatch.setattr(keys.WrongKeys, "delay", lambda self, address: 3600.0)
    api = await start_api(api_keys=[KEY])

    async def ask(key: str) -> httpx.Response:
        return await api.http.get("/api/v1/sessions", headers={"X-API-Key": key})

    first = asyncio.create_task(ask("tml-wrong-wrong"))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):  # it would be an hour
        assert (await ask(KEY)).status_code == 200
        done, waiting = await asyncio.wait(
            [first, *(asyncio.create_task(ask("tml-wrong-wrong")) for _ in range(2))],
            return_when=asyncio.FIRST_COMPLETED,
        )
    assert [(one.result().status_code, one.result().headers["connection"]) for one in done] == [(401, "close")]
    assert len(waiting) == 2
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


# Access tokens --------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of wrong keys and tokens, none of which waits."""
    seen: list[str] = []

    def delay(self: keys.WrongKeys, address: str) -> float:
        seen.append(address)
        return 0.0

    monkeypatch.setattr(keys.WrongKeys, "delay", delay)
    return seen


async def test_a_wrong_access_token_counts_as_a_wrong_key_on_every_route_on_fakes(
    start_api: StartApi, counted: list[str]
) -> None:
    api = await start_api(api_keys=[KEY, "tml-another-good-key"])
    routes = [
        ("GET", "/api/v1/sessions"),
        ("POST", "/api/v1/create_session"),
        ("GET", "/api/v1/nothing"),
        ("GET", "/v1/models"),
        ("POST", "/v1/messages"),
        ("POST", "/oai/api/v1/chat/completions"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
    ]
    token = "X-Tinker-Weights-Access-Token"
    for method, path in routes:
        for wrong in ("tml-wrong-wrong", ""):
            answer = await api.http.request(method, path, headers={"X-API-Key": KEY, token: wrong}, json={})
            assert answer.status_code == 403, (path, answer.text)
            assert token in answer.text
            assert "tml-wrong" not in answer.text
    assert len(counted) == 2 * len(routes)
    for right in (KEY, "tml-another-good-key"):
        answer = await api.http.post("/api/v1/create_session", headers={"X-API-Key": KEY, token: right}, json={})
        assert answer.status_code == 200
    # With a wrong key, no token is looked at.
    for given in (KEY, "tml-wrong-wrong"):
        answer = await api.http.get("/api/v1/sessions", headers={"X-API-Key": "tml-wrong-wrong", token: given})
        assert answer.status_code == 401
    assert len(counted) == 2 * len(routes) + 2


async def test_open_routes_take_no_access_token_and_no_key_on_fakes(start_api: StartApi, counted: list[str]) -> None:
    api = await start_api(api_keys=[KEY])
    signed = "/api/v1/external_weights/s-0:train:0/a/f.safetensors?version=1&token=t"
    for path in (
        "/api/v1/livez",
        "/api/v1/healthz",
        "/",
        "/console/main.js",
        signed,
        "/api/v1/session_traces/s?token=t",
    ):
        answers = []
        for secret in (None, KEY, "tml-wrong-wrong"):
            names = ("X-Tinker-Weights-Access-Token", "X-API-Key", "Authorization")
            headers = {} if secret is None else dict.fromkeys(names, secret)
            answer = await api.http.get(path, headers=headers)
            answers.append((answer.status_code, answer.content))
        assert answers[0] == answers[1] == answers[2], path
    assert not counted


async def test_a_wrong_access_token_in_a_body_counts_as_a_wrong_key_on_fakes(
    start_api: StartApi, counted: list[str]
) -> None:
    api = await start_api(api_keys=[KEY])
    api.http.headers["x-api-key"] = KEY
    session = await api.session()
    path = await api.save(await api.model(session), 1, "a")
    copying = {"source_path": path, "destination_project_id": "local"}
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    for route, body in (("copy_weights", copying), ("load_weights", load)):
        assert (await api.post(route, {**body, "weights_access_token": "tml-wrong-wrong"})).status_code == 403
    assert len(counted) == 2
    assert (await api.post("copy_weights", {**copying, "weights_access_token": KEY})).status_code == 200
    assert len(counted) == 2
