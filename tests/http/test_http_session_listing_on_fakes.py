"""Sessions are listed, opened and searched, with what became of each."""

import asyncio
import threading
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa
import tinker.types as sdk

from tests.http.conftest import BASE, Api, StartApi


async def new_session(api: Api, **fields: Any) -> str:
    return str((await api.ok("create_session", {"tags": [], **fields}))["session_id"])


async def search(api: Api, **fields: Any) -> list[sdk.SessionSummary]:
    found = sdk.SessionSearchResponse.model_validate(await api.ok("sessions/search", fields))
    assert found.next_cursor is None
    return found.sessions


async def found_ids(api: Api, **fields: Any) -> list[str]:
    return [session.session_id for session in await search(api, **fields)]


async def test_sessions_are_listed_newest_first_in_pages_on_fakes(api: Api) -> None:
    made = [await new_session(api) for _ in range(25)][::-1]
    first = sdk.ListSessionsResponse.model_validate((await api.get("sessions")).json())
    assert first.sessions == made[:20]
    assert (await api.get("sessions", limit=3, offset=21)).json()["sessions"] == made[21:24]
    assert (await api.get("sessions", limit=100, offset=25)).json()["sessions"] == []
    for scope in ("owned", "accessible"):
        assert (await api.get("sessions", limit=100, access_scope=scope)).json()["sessions"] == made


@pytest.mark.parametrize(
    "path",
    [
        "sessions",
        "sessions/{session}",
        "training_runs",
        "training_runs/{model}",
        "checkpoints",
        "training_runs/{model}/checkpoints",
    ],
)
async def test_unknown_access_scope_is_refused_with_the_known_ones_on_fakes(api: Api, path: str) -> None:
    session = await api.session()
    model = await api.model(session)
    url = path.format(session=session, model=model)
    answers = [(await api.get(url, access_scope=scope)).json() for scope in ("owned", "accessible")]
    assert answers[0] == answers[1]
    refused = await api.get(url, access_scope="everybody")
    assert refused.status_code == 400
    for word in ("access_scope", "owned", "accessible", "everybody"):
        assert word in refused.json()["detail"]
    assert (await api.get(url, project_id="local")).json() == answers[0]


async def test_a_session_tells_its_runs_samplers_name_and_metadata_on_fakes(api: Api) -> None:
    session = await new_session(api, user_metadata={"recipe": "x", "é": "ß"}, display_name="mine")
    runs = [await api.model(session, number) for number in (1, 0)]
    samplers = [await api.nameless(runs[0], 1, 4), await api.base_sampler(session, 2)]
    other = await api.session()
    await api.model(other)
    found = sdk.GetSessionResponse.model_validate((await api.get(f"sessions/{session}")).json())
    assert found.training_run_ids == runs
    assert found.sampler_ids == samplers
    assert (found.user_metadata, found.display_name) == ({"recipe": "x", "é": "ß"}, "mine")
    await api.post(f"sessions/{session}/finish", {})
    assert sdk.GetSessionResponse.model_validate((await api.get(f"sessions/{session}")).json()) == found
    assert (await api.get(f"sessions/{other}")).json()["display_name"] == other
    missing = await api.get("sessions/s-none")
    assert missing.status_code == 404
    assert "s-none" in missing.json()["detail"]


async def test_search_finds_by_id_name_and_metadata_on_fakes(api: Api) -> None:
    first = await new_session(api, display_name="Big VISION run", user_metadata={"a": "1", "b": "2"})
    second = await new_session(api, display_name="small vision test", user_metadata={"a": "1"})
    third = await new_session(api, display_name="text", user_metadata={'k"e.y$': "v"})
    assert await found_ids(api) == [third, second, first]
    assert await found_ids(api, display_name="vision") == [second, first]
    assert await found_ids(api, display_name="RUN big") == [first]
    assert await found_ids(api, display_name="vision 100%") == []
    assert await found_ids(api, session_id=third) == [third]
    assert await found_ids(api, session_id="s-none") == []
    assert await found_ids(api, session_id=third, display_name="big") == [third, first]  # either one
    assert await found_ids(api, user_metadata={"a": "1"}) == [second, first]
    assert await found_ids(api, user_metadata={"a": "1", "b": "2"}) == [first]
    assert await found_ids(api, user_metadata={"a": "2"}) == []
    assert await found_ids(api, user_metadata={'k"e.y$': "v"}) == [third]
    assert await found_ids(api, user_metadata={"a": "1"}, display_name="small") == [second]
    summary = (await search(api, session_id=first))[0]
    assert (summary.display_name, summary.user_metadata) == ("Big VISION run", {"a": "1", "b": "2"})
    assert summary.created_at.tzinfo is not None


async def test_search_finds_by_owner_and_project_on_fakes(api: Api) -> None:
    session = await api.session()
    (summary,) = await search(api)
    run = (await api.get(f"training_runs/{await api.model(session)}")).json()
    assert summary.owner == run["model_owner"]
    for owner in (
        {"type": "own"},
        {"type": "accessible"},
        {"type": "user", "owner_urns": ["tml:organization_user:x", summary.owner]},
    ):
        assert await found_ids(api, owner=owner) == [session]
    assert await found_ids(api, owner={"type": "user", "owner_urns": ["tml:organization_user:x"]}) == []
    assert await found_ids(api, project_ids=[summary.project_id]) == [session]
    assert await found_ids(api, project_ids=["proj-1"]) == []
    labelled = await new_session(api, project_id="proj-1")
    assert await found_ids(api, project_ids=["proj-1"]) == [labelled]
    assert await found_ids(api, project_ids=["proj-1", "local"]) == [labelled, session]


async def test_search_tells_what_became_of_each_session_on_fakes(start_api: StartApi) -> None:
    api = await start_api(session_timeout=0.4)
    running = await api.backend.sessions.create()
    lost = await api.session()
    ended = {}
    for reason, detail in (("success", None), ("errored", "ValueError: bad luck"), ("interrupted", "")):
        ended[reason] = await api.backend.sessions.create()
        body = {"reason": {"type": reason}, "detail": detail}
        assert (await api.post(f"sessions/{ended[reason]}/finish", body)).status_code == 204
    # The first reason wins; the second finish is ignored.
    assert (await api.post(f"sessions/{ended['errored']}/finish", {})).status_code == 204
    await api.until(lambda: not api.backend.sessions.is_live(lost))
    statuses = {session.session_id: session.status for session in await search(api)}
    assert isinstance(statuses[running], sdk.SessionActive)
    cancelled = statuses[lost]
    assert isinstance(cancelled, sdk.SessionCancelled)
    assert cancelled.detail == "heartbeats_lost: none for 0.4 s"
    details = {}
    for reason, session in ended.items():
        finished = statuses[session]
        assert isinstance(finished, sdk.ClientSessionFinished)
        assert finished.reason.type == reason
        details[reason] = finished.detail
    assert (details["errored"], details["success"]) == ("ValueError: bad luck", None)

    async def having(*queries: Any) -> set[str]:
        return set(await found_ids(api, statuses=list(queries)))

    assert await having({"type": "active"}) == {running}
    assert await having({"type": "cancelled"}) == {lost}
    assert await having({"type": "failed"}) == set()
    assert await having({"type": "client_finished"}) == set(ended.values())
    wanted = {"type": "client_finished", "reasons": ["errored", "interrupted"]}
    assert await having(wanted, {"type": "active"}) == {running, ended["errored"], ended["interrupted"]}


async def test_a_session_that_ends_during_a_search_has_a_status_in_it_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    original, reading, go_on = api.backend.store.sessions_before, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        found = original(*args)
        reading.set()
        assert go_on.wait(30)
        return found

    monkeypatch.setattr(api.backend.store, "sessions_before", slow)
    searching = asyncio.create_task(search(api))
    await api.until(reading.is_set)
    assert (await api.post(f"sessions/{session}/finish", {})).status_code == 204
    go_on.set()
    (summary,) = await searching
    assert isinstance(summary.status, sdk.SessionActive)  # as it was when the search began


async def test_a_session_that_a_restart_lost_has_no_status_until_it_is_finished_on_fakes(
    start_api: StartApi, tmp_path: Any
) -> None:
    first = await start_api()
    session = await first.session()
    await first.http.aclose()
    await first.backend.close()
    api = await start_api()
    (summary,) = await search(api)
    assert (summary.session_id, summary.status) == (session, None)
    for kind in ("active", "cancelled", "failed", "client_finished"):
        assert await found_ids(api, statuses=[{"type": kind}]) == []
    await api.post(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})
    (summary,) = await search(api)
    assert isinstance(summary.status, sdk.ClientSessionFinished)
    assert summary.status.reason.type == "interrupted"


async def test_search_counts_the_checkpoints_of_each_session_on_fakes(api: Api) -> None:
    full, empty = await api.session(), await api.session()
    models = [await api.model(full, number) for number in (0, 1)]
    await api.save(models[0], 1, "a")
    await api.named(models[1], 1, "b")
    sizes = [c["size_bytes"] for c in (await api.get("checkpoints")).json()["checkpoints"]]
    found = {s.session_id: (s.checkpoints_count, s.checkpoint_storage_bytes) for s in await search(api)}
    assert found == {full: (2, sum(sizes)), empty: (0, 0)}


async def test_search_pages_by_its_cursor_through_everything_once_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.backend.control.sessions.BATCH", 4)
    made = [await new_session(api, display_name=f"n{index % 3}") for index in range(13)]
    wanted = [session for index, session in enumerate(made) if index % 3 == 0][::-1]
    for limit in (1, 2, 5, 200):
        found, cursor, pages = [], None, 0
        while True:
            body = {"display_name": "n0", "limit": limit, "cursor": cursor}
            page = await api.ok("sessions/search", body)
            found += [session["session_id"] for session in page["sessions"]]
            cursor, pages = page["next_cursor"], pages + 1
            if cursor is None:
                break
            assert len(page["sessions"]) == limit
            assert datetime.fromisoformat(cursor["last_created_at"]).tzinfo is not None
        assert (found, pages) == (wanted, -(-5 // limit))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"limit": 0}, ("limit",)),
        ({"limit": 201}, ("limit", "200")),
        ({"statuses": []}, ("statuses",)),
        ({"statuses": [{"type": "asleep"}]}, ("statuses",)),
        ({"statuses": [{"type": "client_finished", "reasons": ["bored"]}]}, ("reasons",)),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, ("reasons",)),
        ({"display_name": ""}, ("display_name",)),
        ({"owner": {"type": "user", "owner_urns": []}}, ("owner_urns",)),
        ({"owner": {"type": "user", "owner_urns": ["x"] * 11}}, ("owner_urns", "10")),
        ({"owner": {"type": "team"}}, ("owner",)),
        ({"user_metadata": {"a": 1}}, ("user_metadata",)),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "s"}}, ("last_created_at",)),
        ({"name": "x"}, ("name",)),
    ],
)
async def test_search_that_is_malformed_is_refused_by_field_on_fakes(
    api: Api, body: dict[str, Any], words: tuple[str, ...]
) -> None:
    answer = await api.post("sessions/search", body)
    assert answer.status_code == 400
    for word in words:
        assert word in answer.json()["detail"]


async def test_a_project_is_a_label_to_filter_by_on_fakes(api: Api) -> None:
    path = await api.save(await api.model(await new_session(api, project_id="local")), 1, "a")
    session = await new_session(api, project_id="proj-1")
    run = await api.model(session)
    body = {"source_path": path, "destination_project_id": "proj-1"}
    copy = (await api.post("copy_weights", body)).json()["tinker_path"].split("/")[2]
    for project, runs in (("local", {path.split("/")[2]}), ("proj-1", {run, copy}), ("proj-2", set())):
        listed = (await api.get("training_runs", project_id=project)).json()
        assert {found["training_run_id"] for found in listed["training_runs"]} == runs
        assert listed["cursor"]["total_count"] == len(runs)
        saved = (await api.get("checkpoints", project_id=project)).json()["checkpoints"]
        assert {found["tinker_path"].split("/")[2] for found in saved} == runs - {run}
    assert (await api.get("sessions", project_id="proj-1")).json()["sessions"] == [copy.partition(":")[0], session]
    moved = await api.put(f"sessions/{session}/project", {"project_id": "proj-2"})
    assert moved.status_code == 400
    assert "TINKER_PROJECT_ID" in moved.json()["detail"]
    too_long = await api.post("create_session", {"project_id": "p" * 257})
    assert too_long.status_code == 400
    assert "project_id: 257" in too_long.json()["detail"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("display_name", "x" * 257, "display_name: 257 characters are more than 256"),
        ("tags", ["t"] * 65, "tags: 65 entries are more than 64"),
        ("tags", ["t", "x" * 257], "tags[1]: 257 characters are more than 256"),
        ("user_metadata", {"k": "x" * 4097}, "user_metadata['k']: 4097 characters are more than 4096"),
        ("user_metadata", {"k" * 257: "x"}, f"user_metadata: the key {'k' * 40!r}: 257 characters are more than 256"),
        ("user_metadata", {f"k{n}": "" for n in range(65)}, "user_metadata: 65 entries are more than 64"),
    ],
)
async def test_what_a_session_is_called_has_a_length_on_fakes(api: Api, field: str, value: Any, words: str) -> None:
    answer = await api.post("create_session", {"tags": [], field: value})
    assert (answer.status_code, answer.json()["detail"]) == (400, words)
    if field == "user_metadata":
        session = await api.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}, field: value}
        answer = await api.post("create_model", body)
        assert (answer.status_code, answer.json()["detail"]) == (400, words)


async def test_a_listing_of_many_runs_asks_the_database_as_often_as_one_of_few_on_fakes(api: Api) -> None:
    session = await api.session()
    for number in range(6):
        model = await api.model(session, number)
        await api.save(model, 1, "a")
        await api.save(model, 2, "b")
    statements: list[str] = []
    sa.event.listen(
        api.backend.store._engine,
        "before_cursor_execute",
        lambda c, cursor, statement, *rest: statements.append(statement),
    )
    counts = []
    for limit in (1, 6):
        statements.clear()
        runs = (await api.get("training_runs", limit=limit)).json()["training_runs"]
        assert [run["last_checkpoint"]["checkpoint_id"] for run in runs] == ["weights/b"] * limit
        counts.append(len(statements))
    assert counts[0] == counts[1]
