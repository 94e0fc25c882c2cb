"""Session traces: what is in them, whose URL fetches them, and what is said where there is none."""

import asyncio
import threading
import time
from datetime import datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tinker_local.backend.control import session_traces
from tinker_local.backend.control.sessions import now
from tinker_local.backend.scheduling import operations

from tests.http.conftest import Api, StartApi
from tests.traces.trace_reading import ReadTrace, Slice, read_trace


async def export(api: Api, session: str) -> dict[str, Any]:
    answer = await api.get(f"sessions/{session}/trace_export")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def url_of(api: Api, session: str) -> str:
    found = await export(api, session)
    assert (found["status"], found["error"]) == ("ready", None), found
    return str(found["url"])


async def trace_of(api: Api, session: str) -> ReadTrace:
    answer = await api.http.get(await url_of(api, session))
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert f"{session}.pftrace" in answer.headers["content-disposition"]
    return read_trace(answer.content)


def seconds(part: Slice, stage: str) -> float:
    """Of all stages of that name."""
    return sum((each.end or 0) - each.begin for each in part.within if each.name == stage) / 1e9


async def test_each_request_of_a_session_has_a_slice_with_its_stages_on_fakes(api: Api) -> None:
    session = await api.session()
    began = time.time_ns()
    model = await api.model(session)
    gradient = await api.gradient(model, 1)
    await api.result(gradient)
    step = await api.step(model, 2)
    await api.result(step)
    await api.save(model, 3, "a")
    await api.named(model, 4, "b")
    sampler = await api.nameless(model, 5, 0)
    sample = await api.sample(sampler, 7, num_samples=3)
    output = await api.result(sample)
    trace = await trace_of(api, session)
    assert [(each.arguments["request_id"], each.name) for each in trace.operations] == [
        (f"{model}:create", "create_model"),
        (gradient, "forward_backward"),
        (step, "optim_step"),
        (f"{model}:3", "save_weights"),
        (f"{model}:4", "save_weights_for_sampler"),
        (f"{model}:5", "save_weights_for_sampler"),
        (sample, "sample"),
    ]
    assert all(each.arguments["outcome"] == "ok" for each in trace.operations)
    assert [each.arguments.get("seq_id") for each in trace.operations] == [None, 1, 2, 3, 4, 5, 7]
    assert trace.of(gradient).stages == ["waiting", "preparing", "waiting", "running", "finishing"]
    assert trace.of(step).stages == ["waiting", "running"]
    assert trace.of(f"{model}:3").stages == ["waiting", "running", "writing"]
    assert trace.of(f"{model}:4").stages == ["waiting", "running", "writing", "loading"]
    sampled = [stage for stage in trace.of(sample).stages if stage != "loading"]  # takes long or not
    assert sampled == ["waiting", "preparing", "waiting", "queued", "prefill", "decode"]
    known = trace.of(gradient).arguments
    assert (known["datums"], known["tokens"], known["images"]) == (1, 3, 0)
    known = trace.of(sample).arguments
    tokens = sum(len(each.tokens) for each in output.sequences)
    assert (known["num_samples"], known["prompt_tokens"], known["sampled_tokens"]) == (3, 2, tokens)
    assert (known["cached_prompt_tokens"], known["preemptions"], known["replica"]) == (0, 0, 0)
    for each in trace.operations:
        assert each.end is not None
        assert began <= each.begin <= each.end <= time.time_ns()
        assert (each.within[0].begin, each.within[-1].end) == (each.begin, each.end)
        assert all(stage.end == following.begin for stage, following in pairwise(each.within))
    (root,) = (name for name, parent in trace.tracks.items() if parent is None)
    assert session in root
    assert set(trace.tracks.values()) == {None, root}
    assert trace.of(gradient).track == "training run 0: fake/bigram, rank 4"
    assert trace.of(sample).track == "sampler 0: fake/bigram, weights without a name"
    assert any("all 7 requests" in note for note in trace.notes)


async def test_time_is_where_it_was_spent_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.session()
    model, sampler = await api.model(session), await api.base_sampler(session)
    renderer = api.engines["fake/bigram"].renderer
    render = renderer.render

    def slow(*given: Any) -> Any:
        time.sleep(0.2)
        return render(*given)

    monkeypatch.setattr(renderer, "render", slow)
    api.trainer.hold.clear()
    api.sampler.hold.clear()
    sent = time.monotonic()
    gradients = [await api.gradient(model, seq_id) for seq_id in (1, 2)]
    step = await api.step(model, 3)
    sample = await api.sample(sampler, 0)
    await api.until(lambda: api.trainer.entered and api.sampler.running == 1)
    entered = time.monotonic()
    await asyncio.sleep(0.5)
    api.trainer.hold.set()
    api.sampler.hold.set()
    released = time.monotonic()
    for request in (*gradients, step, sample):
        await api.outcome(request)
    done = time.monotonic()
    trace = await trace_of(api, session)
    first, last, waits, sampled = (trace.of(request) for request in (gradients[0], gradients[1], step, sample))
    assert 0.2 <= seconds(first, "preparing") <= entered - sent
    assert seconds(first, "running") >= 0.4
    assert seconds(waits, "waiting") >= 0.5
    assert seconds(waits, "running") <= done - released
    assert seconds(sampled, "prefill") >= 0.4  # it is held before its first token
    assert seconds(sampled, "preparing") >= 0.2
    assert {first.track, last.track, waits.track} == {"training run 0: fake/bigram, rank 4"}
    held = next(each for each in first.within if each.name == "running")
    waiting = trace.counters["training: requests that wait"]
    assert [value for at, value in waiting if at < (held.end or 0)][-1] in (1, 2)  # the step, and maybe a gradient
    assert waiting[-1][1] == 0
    assert max(value for _, value in trace.counters["sampling: requests that run"]) == 1
    ran = seconds(sampled, "prefill") + seconds(sampled, "decode")
    rates = [value for _, value in trace.counters["sampling: tokens per second"]]
    assert rates == [pytest.approx(sampled.arguments["sampled_tokens"] / ran, abs=1e-3), 0.0]


async def test_sample_waits_until_the_sampler_has_a_place_for_it_on_fakes(api: Api) -> None:
    session = await api.session()
    sampler = await api.base_sampler(session)
    api.sampler.hold.clear()
    samples = [await api.sample(sampler, seq_id) for seq_id in range(3)]  # it has two threads
    stages: list[str] = []
    while sorted(stages) != ["queued", "running", "running"]:  # the test's time limit ends this
        await asyncio.sleep(0.01)
        trace = await trace_of(api, session)
        stages = [(trace.of(sample).stages or [""])[-1] for sample in samples]
    await asyncio.sleep(0.3)
    api.sampler.hold.set()
    for sample in samples:
        await api.result(sample)
    assert seconds((await trace_of(api, session)).of(samples[stages.index("queued")]), "queued") >= 0.3


async def test_failed_and_cancelled_requests_say_why_on_fakes(api: Api, make_datum: Any) -> None:
    session = await api.session()
    model, sampler = await api.model(session), await api.base_sampler(session)
    bad = await api.gradient(model, 1, [make_datum([5, 9, 10**6, 31])])
    message = await api.failure(bad)
    refused = await api.step(model, 2)
    await api.failure(refused)
    api.sampler.hold.clear()
    stopped = await api.sample(sampler, 0)
    await api.until(lambda: api.sampler.running == 1)
    unended = await trace_of(api, session)
    assert unended.of(stopped).end is None
    assert unended.of(stopped).arguments["outcome"] == "not ended"
    api.backend.operations.cancel(stopped)
    api.sampler.hold.set()
    trace = await trace_of(api, session)
    assert trace.of(bad).arguments["outcome"] == "user"
    assert message == f"user: {trace.of(bad).arguments['error']}"
    assert "gradient was discarded" in trace.of(refused).arguments["error"]
    assert trace.of(stopped).arguments["error"] == "the request was cancelled"
    assert trace.of(stopped).end is not None


async def test_trace_is_of_its_session_alone_and_outlives_it_on_fakes(api: Api) -> None:
    sessions = [await api.session() for _ in range(2)]
    models = [await api.model(session) for session in sessions]
    await asyncio.gather(*(api.backend.sessions.finish(session) for session in sessions))
    for session, model in zip(sessions, models, strict=True):
        trace = await trace_of(api, session)
        assert [each.arguments["request_id"] for each in trace.operations] == [f"{model}:create"]


async def test_url_of_a_session_gives_its_newest_trace_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    first = await url_of(api, session)
    assert len(read_trace((await api.http.get(first)).content).operations) == 1
    await api.result(await api.step(model, 1))
    await url_of(api, session)
    assert len(read_trace((await api.http.get(first)).content).operations) == 2


async def test_file_is_deleted_when_its_last_url_expired_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.session()
    await api.model(session)
    url = await url_of(api, session)
    folder = api.backend.options.data_dir / "traces"
    await api.backend.traces.forget_old()
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(session_traces, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3601))
    await api.backend.traces.forget_old()
    assert list(folder.iterdir()) == []
    assert (await api.http.get(url)).status_code == 404
    monkeypatch.undo()
    assert len((await trace_of(api, session)).operations) == 1


async def test_trace_of_a_session_that_lost_its_place_to_others_is_of_what_it_did_since_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    sampler = await api.base_sampler(session)
    await api.result(await api.sample(sampler, 1))
    assert "all 1 requests since" in (await trace_of(api, session)).notes[0]
    monkeypatch.setattr(operations, "MOST_TIMELINES", 1)
    await api.model()  # of another session
    monkeypatch.undo()
    began = now()
    await api.result(await api.sample(sampler, 2))
    trace = await trace_of(api, session)
    assert [each.arguments["seq_id"] for each in trace.operations] == [2]
    told = trace.notes[0].partition(" since ")[2].partition(" UTC")[0]
    assert datetime.fromisoformat(f"{told}+00:00") >= began.replace(microsecond=0)


async def test_url_needs_no_key_and_a_forged_or_expired_one_is_403_on_fakes(start_api: StartApi) -> None:
    late = timedelta()
    api = await start_api(api_keys=["tml-secret"], clock=lambda: now() + late)
    api.http.headers["x-api-key"] = "tml-secret"
    sessions = [await api.session() for _ in range(2)]
    for session in sessions:
        await api.model(session)
    url, other = [await url_of(api, session) for session in sessions]
    query = dict(httpx.URL(url).params)
    async with httpx.AsyncClient(transport=api.http._transport) as stranger:
        assert (await stranger.get(f"http://test/api/v1/sessions/{sessions[0]}/trace_export")).status_code == 401
        assert (await stranger.get(url)).status_code == 200
        for bad in (
            httpx.URL(url).copy_merge_params({**query, "token": "0" * 64}),
            httpx.URL(url).copy_merge_params({**query, "token": "ä"}),
            httpx.URL(url).copy_merge_params({**query, "token": query["token"][1:]}),
            httpx.URL(other).copy_merge_params(query),
        ):
            answer = await stranger.get(bad)
            assert answer.status_code == 403, bad
            assert "sign" in answer.json()["detail"]
        assert (await stranger.get(url.partition("?")[0])).status_code == 400
        late = timedelta(seconds=3601)
        answer = await stranger.get(url)
        assert answer.status_code == 403
        assert "expired" in answer.json()["detail"]


async def test_signature_of_an_export_is_none_of_a_trace_on_fakes(api: Api) -> None:
    session = await api.session()
    await api.model(session)
    url = httpx.URL(await url_of(api, session))
    traces = api.backend.traces
    token = traces._signatures.sign("external_weights", session)
    answer = await api.http.get(url.copy_set_param("token", token))
    assert answer.status_code == 403


async def test_unknown_session_is_404_and_one_without_requests_says_what_is_recorded_on_fakes(
    start_api: StartApi,
) -> None:
    api = await start_api()
    answer = await api.get("sessions/s-unknown/trace_export")
    assert answer.status_code == 404
    assert "s-unknown" in answer.json()["detail"]
    session = await api.session()
    found = await export(api, session)
    assert (found["status"], found["url"]) == ("failed", None)
    assert "it has made no request since the server started" in found["error"]
    model = await api.model(session)
    url = await url_of(api, session)
    await api.backend.close()
    again = await start_api()
    found = await export(again, model.partition(":")[0])
    assert found["status"] == "failed"
    assert "in memory only" in found["error"]
    answer = await again.http.get(url)
    assert answer.status_code == 404
    assert "in memory only" in answer.json()["detail"]


async def test_slow_build_is_pending_and_then_given_out_although_more_happened_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    model = await api.model(session)
    monkeypatch.setattr(session_traces, "PATIENCE", 0.05)
    go_on, built = threading.Event(), vars(session_traces)["packets"]
    monkeypatch.setattr(session_traces, "packets", lambda trace: (go_on.wait(60), built(trace))[1])
    assert await export(api, session) == {"status": "pending", "url": None, "error": None}
    await api.result(await api.step(model, 1))
    go_on.set()
    monkeypatch.setattr(session_traces, "PATIENCE", 60)
    trace = await trace_of(api, session)
    assert [each.name for each in trace.operations] == ["create_model"]
    go_on.clear()
    monkeypatch.setattr(session_traces, "PATIENCE", 0.05)
    assert (await export(api, session))["status"] == "pending"
    go_on.set()


async def test_build_that_fails_says_so_and_is_tried_again_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.session()
    await api.model(session)

    def full(trace: Any) -> Any:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(session_traces, "packets", full)
        found = await export(api, session)
    assert found == {"status": "failed", "url": None, "error": "OSError: no space left on device"}
    await url_of(api, session)


async def test_requests_of_unknown_models_are_recorded_for_nobody_on_fakes(api: Api) -> None:
    session = await api.session()
    await api.failure(await api.step(f"{session}:train:9", 1))
    await api.failure(await api.step("s-0:train:9", 1))
    assert (await export(api, session))["status"] == "failed"
    assert len(api.backend.traces._recorder) == 0
