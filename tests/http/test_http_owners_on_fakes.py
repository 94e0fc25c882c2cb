"""Many users of one server: each sees, trains, samples, publishes and deletes only its own."""

import base64
import hashlib
import io
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from PIL import Image
from tinker_local.backend.hosting.app import ANTHROPIC, OPENAI, create_app
from tinker_local.backend.hosting.key_file import KeyFile
from tinker_local.backend.http.client_routes import REFUSED
from tinker_local.types import ForwardBackwardRequest
from tinker_local.types.codec import encode_forward_backward_request

from tests.http.conftest import ADAM, BASE, PROTOBUF, Api, StartApi, datum

ALICE, BOB, ADMIN, NAMELESS = (f"tml-{word}-horse-battery" for word in ("alice", "bob", "admin", "nameless"))
UNKNOWN = "s-0000000000000000"
SAMPLE = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}

_FILE = io.BytesIO()
Image.new("RGB", (32, 32), "red").save(_FILE, "PNG")
PICTURE = _FILE.getvalue()

NAMES_NOTHING = {
    ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"),
    ("GET", "/api/v1/healthz"),
    ("GET", "/api/v1/livez"),
    ("GET", "/api/v1/get_server_capabilities"),
    ("GET", "/api/v1/usage"),  # of the caller alone: test_http_quotas_on_fakes.py
    ("GET", "/api/v1/status"),  # of the caller alone: test_http_progress_on_fakes.py
    ("POST", "/api/v1/check_weights"),  # for those who see all: the same
    ("GET", "/api/v1/logs"),  # of the caller's runs alone: test_watched_logs_on_fakes.py
    ("GET", "/api/v1/logs/{log_id}/curve"),
    *((method, "/api/v1/recorded_sessions") for method in ("GET", "POST")),  # test_recorded_sessions_on_fakes.py
    ("POST", "/api/v1/telemetry"),
    *((method, path) for method in ("GET", "HEAD") for path in ("/", "/console/{file}")),
    ("POST", "/api/v1/create_session"),
    *(("GET", path) for path in ("/api/v1/tokenizers", "/api/v1/tokenizers/{file}")),
    ("POST", "/api/v1/import_adapter"),  # of the caller: test_http_import_on_fakes.py
    *((method, f"/api/v1{path}") for method, path in REFUSED if "{" not in path),
}
"""Routes that take no id, and tell nothing of what anybody made."""

SIGNED = {
    (method, path)
    for method in ("GET", "HEAD")
    for path in ("/api/v1/external_weights/{run_id}/{name}/{file}", "/api/v1/session_traces/{session_id}")
}
"""Routes whose signature stands for the owner, who alone gets one."""


@dataclass(frozen=True)
class Call:
    """A request: `route` is the template of its path."""

    method: str
    route: str
    ids: Mapping[str, str]
    body: Any = None

    prefix: str = "/api/v1"

    async def send(self, api: Api, key: str) -> httpx.Response:
        headers, given = {"X-API-Key": key}, {}
        if isinstance(self.body, bytes):
            given = {"content": self.body}
            headers["Content-Type"] = PROTOBUF
        elif self.body is not None:
            given = {"json": self.body}
        path = f"{self.prefix}{self.route}".replace(":path}", "}").format(**self.ids)
        return await api.http.request(self.method, path, headers=headers, **given)


def calls(of: str, own: str) -> Iterator[Call]:
    """Requests of every route that takes an id, with those of the session `of`; the ones that end something are last.

    `own`: a session of the caller, for requests that name two.
    """
    run, sampler = f"{of}:train:0", f"{of}:sample:0"
    saved, named = f"tinker://{run}/weights/w", f"tinker://{run}/sampler_weights/s"
    forward = ForwardBackwardRequest(
        model_id=run, seq_id=6, data=(datum([5, 9, 20]),), loss_fn="cross_entropy", forward_only=True
    )
    in_run = {"model_id": run, "seq_id": 7}
    chat = {"model": named, "messages": [{"role": "user", "content": "hi"}]}
    for prefix in OPENAI:
        yield Call("POST", "/chat/completions", {}, chat, prefix)
        yield Call("POST", "/chat/completions", {}, {**chat, "model": f"{BASE};{named}"}, prefix)
        yield Call("POST", "/completions", {}, {"model": named, "prompt": "hi"}, prefix)
        yield Call("GET", "/models/{name:path}", {"name": named}, None, prefix)
    for prefix in ANTHROPIC:
        yield Call("POST", "/messages", {}, {**chat, "max_tokens": 2}, prefix)
        yield Call("POST", "/messages/count_tokens", {}, chat, prefix)
    yield Call("POST", "/tokenize", {}, chat, "")
    yield Call("POST", "/detokenize", {}, {"model": named, "tokens": [97]}, "")
    yield Call("POST", "/session_heartbeat", {}, {"session_id": of})
    yield Call("GET", "/sessions/{session_id}", {"session_id": of})
    yield Call("POST", "/create_model", {}, {"session_id": of, "model_seq_id": 1, "base_model": BASE})
    yield Call("POST", "/get_info", {}, {"model_id": run})
    yield Call("POST", "/forward_backward", {}, encode_forward_backward_request(forward))
    yield Call("POST", "/optim_step", {}, {**in_run, "adam_params": ADAM})
    yield Call("POST", "/optim_step", {}, {**in_run, "seq_id": 8, "adam_params": "none"})
    yield Call("POST", "/save_weights", {}, {**in_run, "seq_id": 9, "path": "later"})
    yield Call("POST", "/save_weights_for_sampler", {}, {**in_run, "seq_id": 10, "path": "later"})
    yield Call("POST", "/save_weights_external", {}, {**in_run, "seq_id": 11, "path": "later"})
    yield Call("POST", "/load_weights", {}, {**in_run, "seq_id": 12, "path": saved, "optimizer": False})
    for session, number in ((of, 2), (own, 3)):
        fresh = {"session_id": session, "model_seq_id": number}
        yield Call("POST", "/load_weights", {}, {**fresh, "path": saved, "optimizer": True})
        sampling = {"session_id": session, "sampling_session_seq_id": number}
        yield Call("POST", "/create_sampling_session", {}, {**sampling, "model_path": named})
        fresh = {"session_id": session, "model_seq_id": number + 10}
        yield Call("POST", "/copy_weights", {}, {**fresh, "source_path": saved})
    yield Call("POST", "/create_sampling_session", {}, {**sampling, "session_id": of, "base_model": BASE})
    yield Call("POST", "/copy_weights", {}, {"destination_project_id": "local", "source_path": saved})
    yield Call("POST", "/weights_info", {}, {"tinker_path": saved})
    yield Call("POST", "/join_sampling_session", {}, {"sampling_session_id": sampler})
    yield Call("POST", "/asample", {}, {"sampling_session_id": sampler, "seq_id": 1, **SAMPLE})
    yield Call("GET", "/samplers/{sampler_id}", {"sampler_id": sampler})
    yield Call("GET", "/samplers/{sampler_id}/weights_of_tokens", {"sampler_id": sampler})
    yield Call("POST", "/retrieve_future", {}, {"request_id": f"{sampler}:0"})
    yield Call("POST", "/retrieve_future", {}, {"request_id": f"{run}:create"})
    yield Call("POST", "/retrieve_futures", {}, {"target": {"sampling_session_id": sampler}, "timeout": 0})
    yield Call("POST", "/cancel_future", {}, {"request_id": f"{sampler}:1"})
    yield Call("GET", "/training_runs/{run_id}", {"run_id": run})
    yield Call("GET", "/training_runs/{run_id}/checkpoints", {"run_id": run})
    yield Call("GET", "/training_runs/{run_id}/curve", {"run_id": run})
    yield Call("POST", "/training_runs/{run_id}/metrics", {"run_id": run}, {"metrics": {"reward": 1}})
    yield Call("GET", "/sessions/{session_id}/trace_export", {"session_id": of})
    yield Call("PUT", "/sessions/{session_id}/project", {"session_id": of}, {"project_id": "p"})
    one = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    export, weights = ({"run_id": run, "kind": kind, "name": kind[0]} for kind in ("external_weights", "weights"))
    yield Call("GET", f"{one}/external_weights_urls", export)
    yield Call("GET", f"{one}/archive", export)
    yield Call("POST", f"{one}/publish", weights)
    yield Call("DELETE", f"{one}/publish", weights)
    yield Call("PUT", f"{one}/ttl", weights, {"ttl_seconds": 3600})
    yield Call("GET", one, weights)
    yield Call("DELETE", one, weights)
    for method, end in WITHOUT_KIND:
        yield Call(method, f"/training_runs/{{run_id}}/checkpoints/{{name}}{end}", weights)
    recorded, one = {"recorded": of}, "/recorded_sessions/{recorded}"
    tokens = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
    replied = {**tokens, "max_tokens": 2}
    below = "/session/{recorded}/v1"
    yield Call("POST", f"{below}/chat/completions", recorded, replied, "")
    yield Call("POST", f"{below}/messages", recorded, replied, "")
    yield Call("POST", f"{below}/messages/count_tokens", recorded, tokens, "")
    yield Call("GET", f"{below}/models", recorded, None, "")
    yield Call("GET", f"{below}/models/{{name:path}}", {**recorded, "name": BASE}, None, "")
    yield Call("GET", one, recorded)
    yield Call("GET", f"{one}/turns", recorded)
    yield Call("GET", f"{one}/pictures/{{picture}}", {**recorded, "picture": hashlib.sha256(PICTURE).hexdigest()})
    yield Call("POST", f"{one}/rewards", recorded, {"rewards": {}})
    yield Call("DELETE", one, recorded)
    yield Call("POST", "/sessions/{session_id}/finish", {"session_id": of}, {})


WITHOUT_KIND = (
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/publish"),
    ("PUT", "/ttl"),
    ("GET", "/external_weights_urls"),
)
"""Requests of a checkpoint that do not say its kind."""

LISTINGS = (
    Call("GET", "/sessions", {}),
    Call("POST", "/sessions/search", {}, {}),
    Call("GET", "/training_runs", {}),
    Call("GET", "/checkpoints", {}),
    *(Call("GET", "/models", {}, None, prefix) for prefix in OPENAI),
)


def key_file(folder: Path, text: str) -> KeyFile:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return KeyFile(path)


@pytest.fixture
async def api(start_api: StartApi, tmp_path: Path) -> Api:
    """A server with the keys of two owners, an admin, and one without a name."""
    hashed = f"sha256:{hashlib.sha256(BOB.encode()).hexdigest()}"
    keys = key_file(tmp_path, f"# who\nalice {ALICE}\nbob {hashed}\nadmin {ADMIN}\n{NAMELESS}\n")
    return await start_api(api_keys=keys, record_sessions=True)


async def new_session(api: Api, key: str, **fields: Any) -> str:
    api.http.headers["x-api-key"] = key
    return str((await api.ok("create_session", fields))["session_id"])


async def world(api: Api, key: str) -> str:
    """A session with a run, a sampler, a sample and checkpoints of every kind."""
    session = await new_session(api, key)
    run = await api.model(session)
    body = {"model_id": run}
    for seq_id, route, name in (
        (1, "save_weights", "w"),
        (2, "save_weights_for_sampler", "s"),
        (3, "save_weights_external", "e"),
    ):
        await api.result(await api.submit(route, {**body, "seq_id": seq_id, "path": name}))
    sampler = await api.base_sampler(session)
    await api.submit("asample", {"sampling_session_id": sampler, "seq_id": 0, **SAMPLE})
    if api.backend.options.record_sessions:
        await record(api, session)
    del api.http.headers["x-api-key"]
    return session


async def record(api: Api, session: str) -> None:
    """A recorded session of the same name, with a picture."""
    await api.ok("recorded_sessions", {"name": session})
    url = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    chat = {"model": BASE, "messages": shown, "max_tokens": 2}
    sent = await api.http.post(f"/session/{session}/v1/chat/completions", json=chat)
    assert sent.status_code == 200, sent.text


async def opened(api: Api, session: str, path: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 9, "model_path": path}
    return str((await api.ok("create_sampling_session", body))["sampling_session_id"])


async def seen(api: Api, key: str) -> list[Any]:
    return [(await call.send(api, key)).json() for call in LISTINGS]


@pytest.mark.mutation(
    "ids-of-others-in-paths",
    "check_own_path",
    "        await check_ids(request, request.path_params)",
    "        pass",
)
@pytest.mark.mutation(
    "ids-of-others-in-bodies",
    "check_own_body",
    "    if caller_of(request).admin or isinstance(",
    "    if True or isinstance(",
)
async def test_what_another_owner_has_does_not_exist_on_any_route_on_fakes(api: Api) -> None:
    alices, bobs = await world(api, ALICE), await world(api, BOB)
    before = await seen(api, ALICE)
    for of_alice, of_unknown in zip(calls(alices, bobs), calls(UNKNOWN, bobs), strict=True):
        answers = [await call.send(api, BOB) for call in (of_alice, of_unknown)]
        assert [answer.status_code for answer in answers] == [404, 404], (of_alice, answers[0].text)
        assert answers[0].text.replace(alices, UNKNOWN) == answers[1].text, of_alice
    assert await seen(api, ALICE) == before
    for listing in LISTINGS:
        assert alices not in (await listing.send(api, BOB)).text, listing
        assert bobs in (await listing.send(api, BOB)).text, listing
    metrics = await api.http.get("/metrics", headers={"X-API-Key": BOB})
    assert metrics.status_code == 403
    for call in calls(alices, alices):  # they exist, for their owner
        assert (await call.send(api, ALICE)).status_code not in (401, 403, 404), call


async def test_every_route_is_one_of_those_above_on_fakes(api: Api) -> None:
    app = create_app(api.backend)
    routes = {
        (method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods or ()
    }
    named = {(call.method, f"{call.prefix}{call.route}") for call in [*calls("a", "b"), *LISTINGS]}
    assert routes == named | NAMES_NOTHING | (SIGNED & routes) | {("GET", "/metrics")}


async def test_an_admin_sees_all_and_keys_without_a_name_are_one_owner_on_fakes(api: Api) -> None:
    alices, ours = await world(api, ALICE), await world(api, NAMELESS)
    for listing in LISTINGS:
        assert {alices, ours} <= {s for s in (alices, ours) if s in (await listing.send(api, ADMIN)).text}
        assert alices not in (await listing.send(api, NAMELESS)).text
    owners = {session["session_id"]: session["owner"] for session in (await seen(api, ADMIN))[1]["sessions"]}
    expected = {alices: "tml:organization_user:alice", ours: "tml:organization_user:local"}
    assert owners.items() >= expected.items()  # the endpoints have sessions, too
    for call in calls(alices, alices):
        if "recorded" in call.ids:  # what programs said is for their owner alone
            assert (await call.send(api, ADMIN)).status_code == 404, call
            continue
        assert (await call.send(api, ADMIN)).status_code not in (401, 403, 404), call
    assert (await api.http.get("/metrics", headers={"X-API-Key": ADMIN})).status_code == 200


async def test_published_checkpoints_are_everybodys_to_load_and_their_owners_to_change_on_fakes(api: Api) -> None:
    alices, bobs = await world(api, ALICE), await world(api, BOB)
    checkpoints = [
        {"run_id": f"{alices}:train:0", "kind": kind, "name": kind[0]} for kind in ("weights", "sampler_weights")
    ]
    one = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    for ids in checkpoints:
        assert (await Call("POST", f"{one}/publish", ids).send(api, ALICE)).status_code == 204
    loads = [
        call
        for call in calls(alices, bobs)
        if call.route in ("/weights_info", "/load_weights", "/create_sampling_session", "/copy_weights")
        and alices not in json.dumps({**call.body, "path": "", "model_path": "", "source_path": "", "tinker_path": ""})
    ]
    assert {call.route for call in loads} == {
        "/weights_info", "/load_weights", "/create_sampling_session", "/copy_weights"
    }  # fmt: skip
    for call in loads:
        answer = await call.send(api, BOB)
        assert answer.status_code == 200, (call, answer.text)
        if call.route == "/load_weights":
            api.http.headers["x-api-key"] = BOB
            assert (await api.result(answer.json()["request_id"]))["model_id"] == f"{bobs}:train:3"
            del api.http.headers["x-api-key"]
    for ids in checkpoints:
        for method, route, body in (
            ("DELETE", f"{one}/publish", None),
            ("PUT", f"{one}/ttl", {"ttl_seconds": 3600}),
            ("DELETE", one, None),
        ):
            assert (await Call(method, route, ids, body).send(api, BOB)).status_code == 404
            assert (await Call(method, route, ids, body).send(api, ALICE)).status_code == 204


@pytest.mark.parametrize("old_data", [False, True])
async def test_an_unpublished_checkpoint_is_sampled_by_its_owner_alone_on_fakes(
    start_api: StartApi, tmp_path: Path, old_data: bool
) -> None:
    """At once, and after a restart; `old_data`: the session was recorded by a server that did not write why."""
    keys = key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\nadmin {ADMIN}\n")
    api = await start_api(api_keys=keys, record_sessions=True)
    alices = await world(api, ALICE)
    path = f"tinker://{alices}:train:0/sampler_weights/s"
    publish = f"training_runs/{alices}:train:0/checkpoints/sampler_weights/s/publish"
    samplers: dict[str, str] = {}

    async def sample(api: Api, key: str, number: int) -> int:
        body = {"sampling_session_id": samplers[key], "seq_id": number, **SAMPLE}
        answer = await api.post("asample", body, headers={"X-API-Key": key})
        assert answer.status_code in (200, 404), answer.text
        if answer.status_code == 404:
            assert answer.json()["detail"] == f"model_path: there is no checkpoint {path}"
        return answer.status_code

    assert (await api.post(publish, headers={"X-API-Key": ALICE})).status_code == 204
    for key in (ALICE, BOB, ADMIN):
        session = await new_session(api, key)
        samplers[key] = await opened(api, session, path)
    shared = await new_session(api, BOB)
    api.http.headers["x-tinker-weights-access-token"] = ALICE
    samplers["tml-token"] = await opened(api, shared, path)
    for name in ("x-tinker-weights-access-token", "x-api-key"):
        del api.http.headers[name]
    assert [await sample(api, key, 1) for key in (ALICE, BOB, ADMIN)] == [200, 200, 200]
    assert (await api.http.delete(f"/api/v1/{publish}", headers={"X-API-Key": ALICE})).status_code == 204
    assert [await sample(api, key, 2) for key in (ALICE, BOB, ADMIN)] == [200, 404, 200]
    samplers[BOB], unpublished = samplers["tml-token"], samplers[BOB]
    assert await sample(api, BOB, 2) == 200  # alice gave it to bob, whatever is published
    samplers[BOB] = unpublished
    await api.backend.close()
    if old_data:
        with sqlite3.connect(api.backend.options.data_dir / "metadata.sqlite3") as database:
            database.execute("UPDATE sampling_sessions SET read_as_public = NULL")
    again = await start_api(api_keys=keys, record_sessions=True)
    assert [await sample(again, key, 3) for key in (ALICE, BOB, ADMIN)] == [200, 404, 200]
    assert (await again.post(publish, headers={"X-API-Key": ALICE})).status_code == 204
    assert await sample(again, BOB, 4) == 200
    assert (await again.http.delete(f"/api/v1/{publish}", headers={"X-API-Key": ALICE})).status_code == 204
    assert await sample(again, BOB, 5) == 404


async def test_a_key_of_the_owner_opens_a_checkpoint_to_another_on_fakes(api: Api) -> None:
    alices, bobs = await world(api, ALICE), await world(api, BOB)
    path = f"tinker://{alices}:train:0/weights/w"
    body = {"session_id": bobs, "model_seq_id": 1, "path": path, "optimizer": True}
    for token, status in ((None, 404), (NAMELESS, 404), ("tml-of-no-one-at-all", 404), (ALICE, 200)):
        answer = await Call("POST", "/load_weights", {}, {**body, "weights_access_token": token}).send(api, BOB)
        assert answer.status_code == status, (token, answer.text)


async def test_idempotency_keys_are_each_owners_own_on_fakes(api: Api) -> None:
    copies = []
    for key in (ALICE, BOB, NAMELESS):
        session = await world(api, key)
        body = {"source_path": f"tinker://{session}:train:0/weights/w", "destination_project_id": "local"}
        headers = {"X-API-Key": key, "X-Idempotency-Key": "the same"}
        answers = [await api.post("copy_weights", body, headers=headers) for _ in range(2)]
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json() == answers[1].json()
        copies.append(answers[0].json()["tinker_path"])
        assert copies[-1] in json.dumps((await seen(api, key))[3])
    assert len(set(copies)) == 3


async def test_owners_are_kept_over_a_restart_on_fakes(start_api: StartApi, tmp_path: Path) -> None:
    keys = key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\n")
    api = await start_api(api_keys=keys, record_sessions=True)
    alices, bobs = await world(api, ALICE), await world(api, BOB)
    await api.backend.close()
    again = await start_api(api_keys=keys, record_sessions=True)
    assert alices in json.dumps(await seen(again, ALICE))
    assert alices not in json.dumps(await seen(again, BOB))
    for of_alice, of_unknown in zip(calls(alices, bobs), calls(UNKNOWN, bobs), strict=True):
        answers = [await call.send(again, BOB) for call in (of_alice, of_unknown)]
        assert [answer.status_code for answer in answers] == [404, 404], (of_alice, answers[0].text)


async def test_a_key_is_revoked_and_another_let_in_without_a_restart_on_fakes(
    start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.backend.hosting.key_file.REREAD_SECONDS", 0.0)
    keys = key_file(tmp_path, f"alice {ALICE}\n")
    api = await start_api(api_keys=keys, record_sessions=True)
    session = await new_session(api, ALICE)
    (tmp_path / "keys").write_text(f"alice {BOB}\n")
    assert (await api.get(f"sessions/{session}")).status_code == 401
    api.http.headers["x-api-key"] = BOB
    assert (await api.get(f"sessions/{session}")).status_code == 200
    (tmp_path / "keys").write_text("neither a key nor a name\n")  # half an edit locks no one out
    assert (await api.get(f"sessions/{session}")).status_code == 200


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o600])
def test_a_key_file_that_others_read_is_warned_about_unless_it_is_hashed_on_fakes(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    for key, clear in ((ALICE, True), (f"sha256:{hashlib.sha256(ALICE.encode()).hexdigest()}", False)):
        path.write_text(f"alice {key}\n")
        path.chmod(mode)
        caplog.clear()
        KeyFile(path)
        assert ("chmod 600" in caplog.text) == (clear and mode != 0o600)
        assert ALICE not in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"alice bob {ALICE}\n", "key 1"),
        (f"al/ice {ALICE}\n", "key 1"),
        (f"alice {ALICE}\nbob {ALICE}\n", "also one of the owner 'alice'"),
        ("alice sha256:12ab\n", "key 1"),
    ],
)
def test_a_line_that_is_no_key_of_an_owner_is_refused_on_fakes(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        key_file(tmp_path, text)
    assert ALICE not in str(refused.value)
