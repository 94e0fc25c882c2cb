"""Recorded sessions over HTTP, on fakes: what programs sample below a session's URL, and what its owner gets back."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.models.load_engines import load_fake

from tests.http.conftest import BASE, Clock

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Recorder:
    """One app on fakes that records sessions. Each of `post` and `get` takes whole paths."""

    http: httpx.AsyncClient
    data_dir: Path
    clock: Clock = field(default_factory=Clock)

    async def make(self, name: str = "s", **fields: Any) -> dict[str, Any]:
        answer = await self.http.post("/api/v1/recorded_sessions", json={"name": name, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def chat(self, messages: list[Any], name: str = "s", headers: Any = None, **fields: Any) -> Any:
        body = {"model": BASE, "messages": messages, "max_tokens": 6, "seed": 1, **fields}
        answer = await self.http.post(f"/session/{name}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json() if not fields.get("stream") else answer.text

    async def turns(self, name: str = "s") -> list[dict[str, Any]]:
        answer = await self.http.get(f"/api/v1/recorded_sessions/{name}/turns")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
async def recorder(tmp_path: Path) -> AsyncIterator[Recorder]:
    clock = Clock()
    async with Served(tmp_path, clock) as one:
        yield one


class Served:
    """A server on fakes over `data_dir`, which records sessions unless told otherwise."""

    def __init__(self, data_dir: Path, clock: Clock, record: bool = True) -> None:
        options = BackendOptions(data_dir=data_dir, record_sessions=record)
        self._backend = InProcessBackend([ModelSource(BASE, BASE)], options, load=load_fake, clock=clock)
        self._data_dir, self._clock = data_dir, clock

    async def __aenter__(self) -> Recorder:
        await self._backend.start()
        app = create_app(self._backend)
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1")
        return Recorder(self._http, self._data_dir, self._clock)

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._backend.close()


def ids(turn: dict[str, Any]) -> list[int]:
    return [token for chunk in turn["prompt"] for token in chunk["tokens"]]


def reply_of(answer: Any) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


async def test_a_next_request_continues_exactly_what_was_sampled_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    first = await recorder.chat(HELLO, return_token_ids=True, logprobs=True)
    again = [*HELLO, reply_of(first), {"role": "user", "content": "and?"}]
    second = await recorder.chat(again, return_token_ids=True)
    one, two = await recorder.turns()
    assert one["parent"] is None
    assert two["parent"] == one["turn"]
    assert one["tokens"] == first["choices"][0]["token_ids"]
    assert one["logprobs"] == pytest.approx([each["logprob"] for each in first["choices"][0]["logprobs"]["content"]])
    assert ids(two)[: len(ids(one)) + len(one["tokens"])] == [*ids(one), *one["tokens"]]
    assert ids(two) == second["prompt_token_ids"]  # what the model saw


async def test_without_the_option_nothing_is_recorded_on_fakes(tmp_path: Path) -> None:
    async with Served(tmp_path, Clock(), record=False) as one:
        for answer in (
            await one.http.post("/api/v1/recorded_sessions", json={}),
            await one.http.post("/session/s/v1/chat/completions", json={"model": BASE, "messages": HELLO}),
        ):
            assert answer.status_code == 400
            assert "--record-sessions" in answer.text
        assert not (tmp_path / "recorded").exists()


async def test_calls_are_compared_as_json_and_their_tokens_stay_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    first = await recorder.chat(HELLO, tools=[TOOL], tool_choice="required", max_tokens=64)
    message = reply_of(first)
    for call in message["tool_calls"]:  # as a framework writes it again
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=4)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in message["tool_calls"]]
    await recorder.chat([*HELLO, message, *results], tools=[TOOL], max_tokens=64)
    one, two = await recorder.turns()
    assert two["parent"] == one["turn"]
    assert two["branch"] is None
    assert ids(two)[: len(ids(one)) + len(one["tokens"])] == [*ids(one), *one["tokens"]]
    assert one["reply"]["calls"]
    assert [each["role"] for each in two["messages"]] == ["tool"] * len(results)


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda messages: messages[0].update(content="hullo"), 0, "text"),
        (lambda messages: messages[1].update(content="else"), 1, "text"),
        (lambda messages: messages[0].update(role="system"), 0, "role"),
    ],
)
async def test_a_changed_message_is_a_branch_that_names_it_on_fakes(
    recorder: Recorder, change: Any, where: int, what: str
) -> None:
    await recorder.make()
    messages = [*map(dict, HELLO), reply_of(await recorder.chat(HELLO)), {"role": "user", "content": "and?"}]
    change(messages)
    await recorder.chat(messages)
    one, two = await recorder.turns()
    assert two["parent"] is None
    assert two["branch"] == {"turn": one["turn"], "message": where, "differs": what}


async def test_a_stream_is_recorded_before_its_end_is_sent_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    whole = await recorder.chat(HELLO)
    text = await recorder.chat(HELLO, stream=True)
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    one, two = await recorder.turns()
    assert said == whole["choices"][0]["message"]["content"]
    assert (one["tokens"], one["reply"]) == (two["tokens"], two["reply"])
    assert one["logprobs"] == pytest.approx(two["logprobs"])


async def test_a_request_that_the_client_repeats_leaves_the_first_abandoned_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    await recorder.chat(HELLO)
    await recorder.chat(HELLO, headers={"x-stainless-retry-count": "1"})
    await recorder.chat(HELLO)
    assert [turn["abandoned"] for turn in await recorder.turns()] == [True, False, False]


async def test_files_are_the_owners_alone_and_go_when_the_session_does_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    await recorder.chat(HELLO)
    files = [path for path in (recorder.data_dir / "recorded").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert len(files) == 2
    assert (await recorder.http.delete("/api/v1/recorded_sessions/s")).status_code == 204
    assert not any(path.exists() for path in files)


async def test_an_expired_and_an_unknown_session_have_the_same_sentence_on_fakes(recorder: Recorder) -> None:
    await recorder.make(lifetime_hours=1.0)
    recorder.clock.ahead = timedelta(hours=2)
    for route in ("/api/v1/recorded_sessions/{}", "/api/v1/recorded_sessions/{}/turns"):
        expired, unknown = [await recorder.http.get(route.format(name)) for name in ("s", "t")]
        assert expired.status_code == unknown.status_code == 404
        assert expired.text.replace("'s'", "'t'") == unknown.text


async def test_a_full_session_says_how_full_it_is_on_fakes(recorder: Recorder) -> None:
    await recorder.make(max_bytes=100)
    await recorder.chat(HELLO)
    body = {"model": BASE, "messages": HELLO, "max_tokens": 2}
    answer = await recorder.http.post("/session/s/v1/chat/completions", json=body)
    size = (await recorder.http.get("/api/v1/recorded_sessions/s")).json()["bytes"]
    assert answer.status_code == 400
    assert f"{size} bytes of 100" in answer.json()["error"]["message"]


async def test_a_session_goes_on_after_a_restart_on_fakes(tmp_path: Path) -> None:
    async with Served(tmp_path, Clock()) as one:
        await one.make()
        first = await one.chat(HELLO)
        before = await one.turns()
    async with Served(tmp_path, Clock()) as one:
        await one.chat([*HELLO, reply_of(first), {"role": "user", "content": "and?"}])
        turns = await one.turns()
    assert turns[:1] == before
    assert turns[1]["parent"] == before[0]["turn"]


async def test_anthropics_messages_and_openais_find_each_other_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    body: dict[str, Any] = {"model": BASE, "messages": HELLO, "max_tokens": 6}
    first = (await recorder.http.post("/session/s/v1/messages", json=body)).json()
    said = {"role": "assistant", "content": first["content"]}
    again = {**body, "messages": [*HELLO, said, {"role": "user", "content": "and?"}]}
    assert (await recorder.http.post("/session/s/v1/messages", json=again)).status_code == 200
    text = first["content"][0]["text"]
    await recorder.chat([*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "so?"}])
    one, two, three = await recorder.turns()
    assert two["parent"] == three["parent"] == one["turn"]


async def test_rewards_are_kept_for_turns_that_are_there_on_fakes(recorder: Recorder) -> None:
    await recorder.make()
    await recorder.chat(HELLO)
    path = "/api/v1/recorded_sessions/s/rewards"
    assert (await recorder.http.post(path, json={"rewards": {"0": 0.5}})).status_code == 204
    refused = await recorder.http.post(path, json={"rewards": {"7": 0.5}})
    assert refused.status_code == 400
    assert "no turn 7" in refused.text
    assert [turn["reward"] for turn in await recorder.turns()] == [0.5]
