"""Many samples of one client by one poll, and clients that are copied."""

import asyncio
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.control import sampling_clients
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.http import client_routes
from tinker_local.backend.models.load_engines import load_fake

from tests.http.conftest import Api, StartApi

pytestmark = pytest.mark.more

BLOCK = 10**9
PROMPT = tinker.ModelInput.from_ints([5, 9, 20])


def body(sampler: str, cursor: int = 0, client: int = 0, **fields: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
    return {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [], **fields}


async def test_poll_tells_what_ended_since_the_cursor_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    first = await api.sample(sampler, 0)
    poll = asyncio.create_task(api.ok("retrieve_futures", body(sampler)))
    await asyncio.sleep(0.05)
    assert not poll.done()
    assert await api.ok("retrieve_futures", body(sampler, timeout=0.0)) == {"completions": [], "cursor": 0}
    api.sampler.hold.set()
    answer = await asyncio.wait_for(poll, 60)
    assert answer["completions"] == [{"state": "finished", "request_id": first}]
    # Until the cursor is sent back, the answer may have been lost.
    assert await api.ok("retrieve_futures", body(sampler, timeout=0.0)) == answer
    bad = await api.sample(sampler, 1, [100_000])
    await api.result(await api.sample(sampler, 2))
    await api.failure(bad)
    later = await api.ok("retrieve_futures", body(sampler, answer["cursor"]))
    assert {(c["state"], c["request_id"]) for c in later["completions"]} <= {
        ("failed", bad),
        ("finished", f"{sampler}:2"),
    }
    everything = await api.ok("retrieve_futures", body(sampler, answer["cursor"], timeout=0.0))
    assert len(everything["completions"]) == 2
    assert everything["cursor"] > answer["cursor"]
    done = await api.ok("retrieve_futures", body(sampler, everything["cursor"], timeout=0.0))
    assert done == {"completions": [], "cursor": everything["cursor"]}


@pytest.mark.mutation(
    "copies-share-ids",
    "SamplingClients.join",
    "        self._joined += 1\n        while",
    "        self._joined = 1\n        while",
)
async def test_clients_of_one_session_hear_of_their_own_samples_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    join = {"sampling_session_id": sampler, "type": "join_sampling_session"}
    counters = [(await api.ok("join_sampling_session", join))["client_counter"] for _ in range(5)]
    assert len(set(counters)) == 5
    assert min(counters) >= 1
    for client in (0, counters[1], counters[4]):
        request = await api.sample(sampler, client * BLOCK + 7)
        answer = await api.ok("retrieve_futures", body(sampler, client=client))
        assert [c["request_id"] for c in answer["completions"]] == [request]
    other = await api.base_sampler(number=0)
    assert other != sampler
    assert (await api.post("join_sampling_session", {"sampling_session_id": "unknown"})).status_code == 404


async def test_number_that_a_copy_drew_by_itself_is_given_to_nobody_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    await api.result(await api.sample(sampler, 1 * BLOCK))
    found = await api.ok("join_sampling_session", {"sampling_session_id": sampler})
    assert found["client_counter"] == 2


async def test_cancelled_sample_is_told_as_failed_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    api.sampler.hold.clear()
    request = await api.sample(sampler, 0)
    poll = asyncio.create_task(api.ok("retrieve_futures", body(sampler)))
    await api.post("cancel_future", {"request_id": request})
    assert (await asyncio.wait_for(poll, 60))["completions"] == [{"state": "failed", "request_id": request}]


async def test_retrieved_results_are_dropped_and_nobody_elses_on_fakes(api: Api) -> None:
    sampler, other = await api.base_sampler(), await api.base_sampler()
    model = await api.model()
    ids = [await api.sample(sampler, seq_id) for seq_id in (0, 1, BLOCK)] + [await api.sample(other, 0)]
    for request in ids:
        await api.result(request)
    api.sampler.hold.clear()
    running = await api.sample(sampler, 2)
    theirs = [*ids, running, f"{model}:create", f"{sampler}:{'9' * 400}", f"{sampler}:x", "", "unknown:1"]
    await api.ok("retrieve_futures", body(sampler, timeout=0, retrieved_request_ids=[i for i in theirs if i != ids[1]]))
    known = [api.backend.operations.get(request) is not None for request in [*ids, running, f"{model}:create"]]
    assert known == [False, True, True, True, True, True]


async def test_what_nobody_asks_for_is_not_kept_longer_than_the_results_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await api.base_sampler()
    for seq_id in range(20):
        await api.result(await api.sample(sampler, seq_id))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + api.backend.options.result_retention)
    monkeypatch.setattr(sampling_clients, "time", later)
    await api.result(await api.sample(sampler, 20))
    await asyncio.sleep(0)
    assert len(api.backend.sampling._open[sampler].clients._logs[0]) == 1


async def test_samples_lost_in_a_restart_are_told_and_not_waited_for_on_fakes(start_api: StartApi) -> None:
    """A 5xx, like a poll that is held, would be waited for without end."""
    api = await start_api()
    session = await api.session()
    sampler = await api.base_sampler(session)
    nameless = await api.nameless(await api.model(session), 1, 1)
    for owner in (sampler, nameless):
        await api.result(await api.sample(owner, 0))
    before = (await api.ok("join_sampling_session", {"sampling_session_id": sampler}))["client_counter"]
    cursor = (await api.ok("retrieve_futures", body(sampler)))["cursor"]
    await api.backend.close()
    again = await start_api()
    for path, sent in (
        ("retrieve_futures", body(sampler, cursor)),
        ("retrieve_futures", body(sampler)),
        ("retrieve_futures", body(nameless)),
        ("join_sampling_session", {"sampling_session_id": nameless}),
    ):
        answer = await again.post(path, sent)
        assert answer.status_code == 410, answer.text
        assert "restarted" in answer.json()["detail"]
    joined = (await again.ok("join_sampling_session", {"sampling_session_id": sampler}))["client_counter"]
    assert joined > before + 2**30  # far from all that were given before
    await again.result(await again.sample(sampler, joined * BLOCK + 10**6))


async def test_polls_end_with_the_server_and_with_the_session_on_fakes(api: Api) -> None:
    session = await api.session()
    samplers = [await api.base_sampler(session, number) for number in range(2)]
    api.sampler.hold.clear()
    for sampler in samplers:
        await api.sample(sampler, 0)
    ended, stopped = (asyncio.create_task(api.post("retrieve_futures", body(sampler))) for sampler in samplers)
    await asyncio.sleep(0.05)
    api.backend.stop_waiting()
    assert (await asyncio.wait_for(stopped, 60)).json() == {"completions": [], "cursor": 0}
    await api.post(f"sessions/{session}/finish", {})
    await asyncio.wait_for(ended, 60)
    assert (await api.post("retrieve_futures", body(samplers[0]))).status_code == 410


@pytest.mark.parametrize(
    "fields",
    [
        {"prev_cursor": -1},
        {"timeout": -1},
        {"timeout": "x"},
        {"target": {"type": "model", "sampling_session_id": "x"}},
        {"retrieved_request_ids": "x"},
        {"more": 1},
    ],
)
async def test_poll_that_makes_no_sense_is_refused_on_fakes(api: Api, fields: dict[str, Any]) -> None:
    answer = await api.post("retrieve_futures", {**body(await api.base_sampler()), **fields})
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["detail"]


async def test_end_of_what_was_accepted_is_told_after_its_checkpoint_was_deleted_on_fakes(api: Api) -> None:
    model = await api.model()
    path = await api.named(model, 1, "a")
    asked = {"session_id": await api.session(), "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await api.ok("create_sampling_session", asked))["sampling_session_id"]
    api.sampler.hold.clear()
    request_id = await api.sample(sampler, 0)
    await api.until(lambda: api.sampler.running > 0)
    assert (await api.delete(f"training_runs/{model}/checkpoints/sampler_weights/a")).status_code == 204
    api.sampler.hold.set()
    await api.result(request_id)
    told = await api.ok("retrieve_futures", body(sampler))
    assert told["completions"] == [{"state": "finished", "request_id": request_id}]
    # Nothing more is taken, not even when there is another checkpoint of that name.
    await api.named(model, 2, "a")
    for path, more in (("asample", api.sample_body(sampler, 1)), ("create_sampling_session", asked)):
        assert (await api.post(path, more)).status_code == 404


@pytest.mark.parametrize("count", [10**12, 2**70])
async def test_samples_without_number_are_refused_before_anything_is_made_of_them_on_fakes(
    api: Api, count: int
) -> None:
    sampler = await api.base_sampler()
    async with asyncio.timeout(60):
        answer = await api.post("asample", api.sample_body(sampler, 0, num_samples=count))
    assert (answer.status_code, str(count) in answer.text) == (400, True)


@pytest.fixture(scope="module", params=[False, True], ids=["a poll each", "one poll"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_routes, "SAMPLE_USE_RETRIEVE_FUTURES", request.param)
        options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
        server = LoopbackServer(InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load_fake))
        with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client:
            yield client
        server.close()


def sample_elsewhere(pickled: bytes, count: int) -> list[str]:
    """In another process: the ids of what a copy of a sampling client samples."""
    sampler = pickle.loads(pickled)
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(count)]
    return [str(sequence.sequence_id) for future in futures for sequence in future.result(timeout=600).sequences]


def test_copies_of_a_sampling_client_give_no_id_twice_on_fakes(service: Any) -> None:
    sampler = service.create_sampling_client(base_model="fake/bigram").result()
    pickled = pickle.dumps(sampler)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        copies = [pool.apply_async(sample_elsewhere, (pickled, 5)) for _ in range(2)]
        here = [pickle.loads(pickled), sampler]
        futures = [one.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=2)) for one in here for _ in range(5)]
        ids = [str(sequence.sequence_id) for future in futures for sequence in future.result(timeout=600).sequences]
        for copy in copies:
            ids += copy.get(timeout=600)
    assert len(set(ids)) == len(ids) == 20
    clients = {int(sequence_id.split(":")[-2]) // BLOCK for sequence_id in ids}
    assert clients == {0, 1, 2, 3}


def test_hundreds_of_samples_at_once_are_all_answered_either_way_on_fakes(
    service: Any,
) -> None:
    sampler = service.create_sampling_client(base_model="fake/bigram").result()
    params = tinker.SamplingParams(max_tokens=1, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(300)]
    bad = sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=10**6))
    assert all(len(future.result(timeout=600).sequences[0].tokens) == 1 for future in futures)
    with pytest.raises(tinker.BadRequestError, match="context window"):
        bad.result(timeout=600)


async def test_completions_that_no_client_asks_for_are_bounded_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_clients, "MOST_UNSEEN", 3)
    monkeypatch.setattr(sampling_clients, "MOST_LOGS", 2)
    sampler = await api.base_sampler()
    for number in range(5):
        await api.result(await api.sample(sampler, number))
    late = await api.post("retrieve_futures", body(sampler, cursor=1, timeout=0.0))
    assert late.status_code == 410
    assert "the newest 3 are known, after cursor 2" in late.json()["detail"]
    answer = await api.ok("retrieve_futures", body(sampler, cursor=2, timeout=0.0))
    assert [each["request_id"] for each in answer["completions"]] == [f"{sampler}:{number}" for number in (2, 3, 4)]
    # Of three clients, the two that sampled last are known.
    await api.result(await api.sample(sampler, BLOCK))
    await api.result(await api.sample(sampler, 5))
    await api.result(await api.sample(sampler, 2 * BLOCK))
    for client, status in ((0, 200), (1, 410), (2, 200)):
        cursor = 5 if client == 0 else 0
        poll = await api.post("retrieve_futures", body(sampler, cursor=cursor, client=client, timeout=0.0))
        assert poll.status_code == status, (client, poll.text)
