"""Quotas: what one owner may have at most. Beyond it the owner waits or is refused, and the others notice nothing."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from tinker_local.backend import BackendOptions
from tinker_local.backend.control.session_traces import SessionTraces
from tinker_local.backend.hosting.keys import Keys
from tinker_local.backend.http import connections
from tinker_local.backend.options import OwnerQuota
from tinker_local.backend.scheduling.quotas import Amounts, Owners, Quotas
from tinker_local.backend.storage import storage_quota

from tests.http.conftest import BASE, Api, StartApi
from tests.http.test_http_back_pressure_on_fakes import ADAM, Served, datum, served
from tests.http.test_http_owners_on_fakes import ADMIN, ALICE, BOB, key_file

__all__ = ["served"]

MIB = 2**20


def quotas(*given: str) -> tuple[OwnerQuota, ...]:
    return tuple(OwnerQuota.parse(text) for text in given)


@pytest.fixture
def start(start_api: StartApi, tmp_path: Path) -> Callable[..., Awaitable[Api]]:
    """A server with the keys of alice, bob and an admin: `start(*quotas, **options)`."""

    async def begin(*given: str, **options: Any) -> Api:
        keys = key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\nadmin {ADMIN}\n")
        return await start_api(api_keys=keys, quotas=quotas(*given), **options)

    return begin


def as_owner(api: Api, key: str) -> Api:
    """The same app for the owner of `key`."""
    http = httpx.AsyncClient(
        transport=api.http._transport, base_url="http://localhost", headers={"X-API-Key": key}, trust_env=False
    )
    return Api(api.backend, http, api.engines)


# What the limits are --------------------------------------------------------------------------------------------------


def test_one_owner_may_have_all_and_several_half_each_on_fakes() -> None:
    limits = Quotas(BackendOptions(max_adapters=5, max_adapter_bytes=100, max_queued_samples=10))
    limits.disk_bytes = 1000
    for owners in ((), ("local",), ("alice",), ("alice", "admin")):
        limits.owners = partial(Owners, owners)
        assert {limits.of(owner) for owner in ("local", "alice", "admin")} == {Amounts()}
    limits.owners = partial(Owners, ("alice", "local"))
    half = Amounts(3, 50, 4096, 2 * 2**30, 5, 500, 32 * 2**30)
    assert (limits.of("alice"), limits.of("local"), limits.of("admin")) == (half, half, Amounts())


def test_owners_are_counted_when_the_keys_change_and_not_for_each_request_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.backend.hosting.key_file.REREAD_SECONDS", 0.0)
    file = key_file(tmp_path, f"alice {ALICE}\nadmin {ADMIN}\n")
    keys, limits = Keys(file), Quotas(BackendOptions(max_adapters=4))
    limits.owners = keys.owners
    alone = keys.owners()
    assert keys.owners() is alone
    assert limits.of("alice").adapters == math.inf
    (tmp_path / "keys").write_text(f"alice {ALICE}\nbob {BOB}\nadmin {ADMIN}\n")
    assert [limits.of(owner).adapters for owner in ("alice", "bob", "admin")] == [2, 2, math.inf]
    assert keys.owners() is keys.owners()
    assert keys.owners().names == {"alice", "bob", "admin"}


def test_quotas_are_given_for_each_owner_and_for_one_by_name_on_fakes() -> None:
    given = quotas("alice:adapters=8,storage=none", "adapters=2,storage=1.5", "admin:samples=3", "bob:queued-memory=1")
    limits = Quotas(BackendOptions(quotas=given))
    assert limits.of("alice") == Amounts(adapters=8)
    assert limits.of("bob") == Amounts(adapters=2, storage_bytes=3 * 2**29, queued_bytes=2**30)
    assert limits.of("local") == Amounts(adapters=2, storage_bytes=3 * 2**29)
    assert limits.of("admin") == Amounts(samples=3)


@pytest.mark.parametrize(
    "text", ["", "adapters", "adapters=", "adapters=-1", "adapters=1.5", "disk=1", ":adapters=1", "storage=nan",
             "storage=inf", "samples=1e3", "alice:"],
)  # fmt: skip
def test_a_quota_that_is_none_is_refused_on_fakes(text: str) -> None:
    with pytest.raises(ValueError):
        OwnerQuota.parse(text)


# What happens beyond them ---------------------------------------------------------------------------------------------


async def test_adapters_beyond_the_quota_are_refused_with_what_to_end_on_fakes(start: Any) -> None:
    api = await start("adapters=2", max_adapters=4)
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    models = [await alice.model() for _ in range(2)]
    session = await alice.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    answer = await alice.post("create_model", body)
    assert answer.status_code == 400
    assert (
        "2 adapters of the owner 'alice' are alive, the most is 2 (--quota): finish a session"
        in answer.json()["detail"]
    )
    for model in models:
        assert f"{model} (last request at " in answer.json()["detail"]
    assert [await bob.model() for _ in range(2)]
    await alice.post(f"sessions/{models[0].partition(':')[0]}/finish", {})
    await alice.model(session)
    answer = await as_owner(api, ADMIN).post("create_model", {**body, "model_seq_id": 1})  # the session is alice's
    assert "the owner 'alice'" in answer.json()["detail"]


async def test_adapter_memory_has_a_quota_too_on_fakes(start: Any) -> None:
    api = await start("alice:adapter-memory=0.001")
    alice = as_owner(api, ALICE)
    await alice.model()
    body = {"session_id": await alice.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    assert (
        "MiB of the owner 'alice' are taken (--quota): finish"
        in (await alice.post("create_model", body)).json()["detail"]
    )
    await as_owner(api, BOB).model()


async def test_traces_of_one_owner_are_built_between_those_of_another_on_fakes(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start()
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    alices, bobs = [await alice.session() for _ in range(5)], await bob.session()
    for owner, session in [*((alice, session) for session in alices), (bob, bobs)]:
        await owner.model(session)
    go_on, write, built = threading.Event(), SessionTraces._write, []

    def slow(traces: Any, record: Any, *rest: Any) -> None:
        assert go_on.wait(60)
        built.append(record.session_id)
        write(traces, record, *rest)

    monkeypatch.setattr(SessionTraces, "_write", slow)
    asked = [asyncio.create_task(alice.get(f"sessions/{session}/trace_export")) for session in alices]
    await api.until(lambda: len(api.backend.traces._builds) == 5)
    asked.append(asyncio.create_task(bob.get(f"sessions/{bobs}/trace_export")))
    await api.until(lambda: len(api.backend.traces._builds) == 6)
    go_on.set()
    assert {(await each).json()["status"] for each in asked} <= {"ready", "pending"}
    await api.until(lambda: len(built) == 6)
    assert built.index(bobs) <= 2  # behind the one that was being built, and a turn of alice


async def test_queued_training_beyond_the_quota_waits_and_other_owners_do_not_on_fakes(start: Any) -> None:
    api = await start("queued-requests=3")
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    first, second, bobs = await alice.model(), await alice.model(), await bob.model()
    api.trainer.hold.clear()
    requests = [await alice.gradient(first, 1)]
    await api.until(lambda: api.trainer.entered)
    requests += [await alice.gradient(first, seq_id) for seq_id in (2, 3)]
    requests += [await alice.gradient(second, 1)]
    answer = await alice.gradient_answer(second, 2)
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after-ms"]) <= 1000
    assert "3 training requests of the owner 'alice' are queued, the most is 3" in answer.json()["detail"]
    bobs_requests = [await bob.gradient(bobs, seq_id) for seq_id in (1, 2, 3)]
    api.trainer.hold.set()
    for owner, ids in ((alice, requests), (bob, bobs_requests)):
        for request in ids:
            await owner.result(request)
    await alice.result(await alice.gradient(second, 2))


async def test_samples_beyond_the_quota_wait_and_other_owners_do_not_on_fakes(start: Any) -> None:
    api = await start("samples=2")
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    api.sampler.hold.clear()
    first, second = await alice.base_sampler(), await alice.base_sampler()
    requests = [await alice.sample(first, 0), await alice.sample(second, 0)]
    answer = await alice.post("asample", alice.sample_body(second, 1))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert "2 requests for samples of the owner 'alice' are in flight, the most is 2" in answer.json()["detail"]
    bobs = await bob.sample(await bob.base_sampler(), 0)
    api.sampler.hold.set()
    for owner, request in ((alice, requests[0]), (alice, requests[1]), (bob, bobs)):
        await owner.result(request)
    await api.until(lambda: not api.backend.sampling.in_flight)
    await alice.result(await alice.sample(second, 1))


async def test_samples_in_flight_are_bounded_in_bytes_too_on_fakes(start: Any) -> None:
    """10,000 requests of a session were allowed, whatever they held: an image may have 32 MiB."""
    api = await start(f"queued-memory={1000 / 2**30}")
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    api.sampler.hold.clear()
    first, second = await alice.base_sampler(), await alice.base_sampler()
    prompt = [5] * 150  # 600 bytes, and 128 for the sequence
    requests = [await alice.sample(first, 0, prompt)]
    answer = await alice.post("asample", alice.sample_body(second, 0, prompt))
    assert answer.status_code == 429
    assert (
        "requests for samples of 728 bytes of the owner 'alice' are in flight, with this one of 728 bytes they would "
        "exceed the most, 1000" in answer.json()["detail"]
    )
    requests += [await alice.sample(second, 0)]
    bobs = await bob.sample(await bob.base_sampler(), 0, [5] * 1000)  # alone, however large
    api.sampler.hold.set()
    for owner, request in ((alice, requests[0]), (alice, requests[1]), (bob, bobs)):
        await owner.result(request)
    await api.until(lambda: not api.backend.sampling.in_flight)
    await alice.result(await alice.sample(second, 1, prompt))


@pytest.mark.parametrize(("question", "size"), [("topk_prompt_logprobs", 8), ("prompt_alt_tokens_k", 12)])
async def test_what_requests_for_samples_will_be_answered_counts_on_fakes(start: Any, question: str, size: int) -> None:
    """A few hundred bytes asked for answers of 400 MB, as often as samples may be in flight."""
    api = await start(f"queued-memory={40000 / 2**30}")
    alice = as_owner(api, ALICE)
    api.sampler.hold.clear()
    sampler = await alice.base_sampler()
    request = await alice.sample(sampler, 0, [5] * 10, **{question: 256})
    answer = await alice.post("asample", {**alice.sample_body(sampler, 1, [5] * 10), question: 256})
    assert f"with this one of {168 + 2560 * size} bytes they would exceed" in answer.json()["detail"]
    api.sampler.hold.set()
    await alice.result(request)


async def test_one_owner_does_not_have_all_connections_on_fakes(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    api = await start()
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    sampler = await alice.base_sampler()
    api.sampler.hold.clear()
    request = await alice.sample(sampler, 0)
    polls = [asyncio.create_task(alice.poll(request)) for _ in range(2)]
    await asyncio.sleep(0.1)
    answer = await alice.get("sessions")
    assert (answer.status_code, answer.headers["connection"]) == (429, "close")
    assert "2 requests of the owner 'alice' are open, the most" in answer.json()["detail"]
    assert (await bob.get("sessions")).status_code == 200
    assert (await as_owner(api, ADMIN).get("sessions")).status_code == 200
    api.sampler.hold.set()
    assert [(await poll).status_code for poll in polls] == [200, 200]
    assert (await alice.get("sessions")).status_code == 200


def bytes_of(api: Api, owner: str) -> int:
    return api.backend.store.quota.used().get(owner, 0)


async def test_saves_beyond_the_storage_quota_fail_with_what_to_delete_and_training_goes_on_on_fakes(
    start: Any,
) -> None:
    api = await start()
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    model, bobs = await alice.model(), await bob.model()
    first = await alice.save(model, 1, "first")
    size = bytes_of(api, "alice")
    api.backend.quotas._given = (OwnerQuota("alice", (("storage_bytes", 2 * size + 100),)),)
    await alice.named(model, 2, "sampler")  # without the optimizer: a third of it
    body = {"model_id": model, "path": "later", "overwrite": False}
    for seq_id, route in enumerate(("save_weights", "save_weights"), 3):
        failure = await alice.failure(await alice.submit(route, {**body, "seq_id": seq_id}))
        assert failure.startswith("user: storage: the checkpoints of the owner 'alice' take ")
        assert f"the largest: {first} (" in failure
        assert f"exceed the most, {(2 * size + 100) / MIB:.1f} MiB: delete some" in failure
    copy = {"source_path": first, "destination_project_id": "local"}
    answer = await alice.post("copy_weights", copy)
    assert (answer.status_code, "the owner 'alice'" in answer.json()["detail"]) == (400, True)
    await bob.save(bobs, 1, "any")
    await alice.save(model, 5, "first", overwrite=True)  # it takes the place of the one before
    run, kind, name = first.removeprefix("tinker://").split("/")
    assert (await alice.delete(f"training_runs/{run}/checkpoints/{kind}/{name}")).status_code == 204
    await alice.save(model, 6, "later")
    await alice.result(await alice.gradient(model, 7))
    assert (await alice.result(await alice.step(model, 8)))["metrics"]["grad_norm"] > 0


async def test_saves_at_once_do_not_exceed_the_quota_together_on_fakes(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start()
    alice = as_owner(api, ALICE)
    models = [await alice.model() for _ in range(4)]
    await alice.save(models[0], 1, "size")
    size = bytes_of(api, "alice")
    api.backend.quotas._given = (OwnerQuota("alice", (("storage_bytes", 3 * size),)),)
    write, all_there = api.backend.store._folders.write, threading.Barrier(2)

    def write_together(*args: Any) -> Any:
        all_there.wait(30)  # two have been granted room before either is recorded
        return write(*args)

    monkeypatch.setattr(api.backend.store._folders, "write", write_together)
    requests = [
        await alice.submit("save_weights", {"model_id": model, "seq_id": 2, "path": "a", "overwrite": False})
        for model in models
    ]
    ends = [(await alice.outcome(request)).json() for request in requests]
    assert sorted("error" in end for end in ends) == [False, False, True, True]
    assert bytes_of(api, "alice") == 3 * size


async def autosaved(owner: Api) -> str:
    """A run of one step that the server has saved, because its program failed."""
    model = await owner.model()
    await owner.result(await owner.gradient(model, 1))
    await owner.result(await owner.step(model, 2))
    await owner.post(f"sessions/{model.partition(':')[0]}/finish", {"reason": {"type": "errored"}})
    return model


async def test_an_autosave_counts_and_is_not_refused_on_fakes(start: Any) -> None:
    api = await start("alice:storage=0")
    alice = as_owner(api, ALICE)
    model = await autosaved(alice)
    saved = (await alice.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in saved] == ["weights/autosave"]
    assert bytes_of(api, "alice") == saved[0]["size_bytes"]
    copy = {"source_path": saved[0]["tinker_path"], "destination_project_id": "local"}
    assert "storage: " in (await alice.post("copy_weights", copy)).json()["detail"]


async def test_an_owner_over_the_storage_quota_begins_no_new_run_on_fakes(start: Any) -> None:
    """Twelve runs of one step each once left 21 MB of autosaves, where 0.1 MB were allowed."""
    api = await start("alice:storage=0")
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    model = await autosaved(alice)
    new = {"session_id": await alice.session(), "model_seq_id": 0, "base_model": "fake/bigram"}
    failure = await alice.failure(await alice.submit("create_model", new))
    assert failure.startswith("user: create_model: the checkpoints of the owner 'alice' take ")
    assert f"before a new run; the largest: tinker://{model}/weights/autosave (" in failure
    await bob.model()
    answer = await alice.delete(f"training_runs/{model}/checkpoints/weights/autosave")
    assert answer.status_code == 204
    await alice.model()


# What is seen of them -------------------------------------------------------------------------------------------------


async def test_each_owner_sees_what_it_uses_and_may_use_and_an_admin_sees_all_on_fakes(start: Any) -> None:
    api = await start("alice:adapters=7,storage=1", "bob:samples=none", max_queued_samples=10)
    alice, bob, admin = (as_owner(api, key) for key in (ALICE, BOB, ADMIN))
    model = await alice.model()
    await alice.save(model, 1, "a")
    api.trainer.hold.clear()
    await alice.gradient(model, 2)
    await api.until(lambda: api.trainer.entered)
    await alice.gradient(model, 3)
    api.sampler.hold.clear()
    await bob.sample(await bob.base_sampler(), 0)
    told = {key: (await (as_owner(api, key)).get("usage")).json()["owners"] for key in (ALICE, BOB, ADMIN)}
    assert [[one["owner"] for one in told[key]] for key in (ALICE, BOB, ADMIN)] == [
        ["alice"], ["bob"], ["admin", "alice", "bob"]
    ]  # fmt: skip
    (found,) = told[ALICE]
    used, limits = found["used"], found["limits"]
    assert (used["adapters"], used["queued_requests"], used["samples"]) == (1, 1, 0)
    assert used["adapter_bytes"] > 0
    assert used["queued_bytes"] > 0
    assert used["storage_bytes"] == bytes_of(api, "alice") > 0
    assert (limits["adapters"], limits["storage_bytes"], limits["samples"]) == (7, 2**30, 5)
    assert (told[BOB][0]["used"]["samples"], told[BOB][0]["limits"]["samples"]) == (1, None)
    assert set(told[ADMIN][0]["limits"].values()) == {None}
    metrics: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families((await admin.http.get("/metrics")).text):
        for sample in family.samples:
            if "resource" in sample.labels:
                metrics[sample.name, sample.labels["owner"], sample.labels["resource"]] = sample.value
    for one in told[ADMIN]:
        for resource, value in one["used"].items():
            assert metrics.pop(("tinker_local_owner_used", one["owner"], resource)) == value
        for resource, value in one["limits"].items():
            if value is not None:
                assert metrics.pop(("tinker_local_owner_limit", one["owner"], resource)) == value
    assert not metrics
    assert (await alice.http.get("/metrics")).status_code == 403
    for end in (api.trainer.hold, api.sampler.hold):
        end.set()


async def test_without_a_key_file_the_one_owner_has_no_quota_on_fakes(api: Api) -> None:
    (found,) = (await api.get("usage")).json()["owners"]
    assert found["owner"] == "local"
    assert set(found["limits"].values()) == {None}
    assert asdict(api.backend.quotas.of("local")) == dict.fromkeys(asdict(Amounts()), math.inf)


# The official SDK -----------------------------------------------------------------------------------------------------


def test_sdk_beyond_the_quota_of_queued_requests_is_slowed_down_and_loses_nothing_on_fakes(served: Any) -> None:
    tight, wide = served(quotas=quotas("queued-requests=3")), served()
    losses = []
    for server in (tight, wide):
        with server.service() as service:
            client = service.create_lora_training_client(base_model="m", rank=2, seed=1).result()
            server.trainer.go.clear()
            futures = []
            for at in range(8):
                gradient = client.forward_backward([datum([5, 9, 20 + at, 31])], "cross_entropy")
                futures.append((gradient, client.optim_step(ADAM)))
            end = time.monotonic() + 60
            while server is tight and not server.refused:
                assert time.monotonic() < end
                time.sleep(0.01)
            server.trainer.go.set()
            for _, step in futures:
                assert step.result(timeout=120).metrics["grad_norm"] > 0
            losses.append([gradient.result(timeout=120).metrics["loss:sum"] for gradient, _ in futures])
    assert losses[0] == losses[1]
    assert wide.refused == 0


@pytest.mark.more
def test_sdk_beyond_the_quota_of_samples_waits_and_gets_all_on_fakes(served: Any) -> None:
    server: Served = served(quotas=quotas("samples=2"))
    refusals: list[str] = []
    check = server.backend.sampling.in_flight.check

    def counted(session_id: str, owner: str, size: int) -> None:
        try:
            check(session_id, owner, size)
        except Exception as error:
            refusals.append(str(error))
            raise

    server.backend.sampling.in_flight.check = counted  # type: ignore[method-assign]
    with server.service() as service:
        client = service.create_sampling_client(base_model="m")
        params = tinker.SamplingParams(max_tokens=64)
        prompt = tinker.ModelInput.from_ints([5, 9])
        futures = [client.sample(prompt, num_samples=8, sampling_params=params) for _ in range(12)]
        assert [len(future.result(timeout=120).sequences) for future in futures] == [8] * 12
    assert refusals
    assert all("the owner 'local'" in refusal for refusal in refusals)


def test_sdk_beyond_other_quotas_stops_at_once_and_goes_on_after_a_deletion_on_fakes(served: Any) -> None:
    server: Served = served(quotas=quotas(f"adapters=1,storage={0.7 / 1024}"))
    with server.service() as service:
        client = service.create_lora_training_client(base_model="m", rank=8).result()  # saved in 0.4 MiB
        with pytest.raises(tinker.BadRequestError, match=r"the most is 1 \(--quota\): finish a session; .*train:0"):
            service.create_lora_training_client(base_model="m", rank=8).result()
        first = client.save_state("first").result(timeout=60).path
        with pytest.raises(tinker.RequestFailedError, match=r"the largest: tinker://.*weights/first") as failed:
            client.save_state("second").result(timeout=60)
        assert failed.value.category is tinker.types.RequestErrorCategory.User
        client.forward_backward([datum([5, 9])], "cross_entropy").result(timeout=60)
        client.optim_step(ADAM).result(timeout=60)
        service.create_rest_client().delete_checkpoint_from_tinker_path(first).result(timeout=60)
        assert client.save_state("again").result(timeout=60).path


async def test_metadata_and_curves_count_in_the_storage_of_their_owner_on_fakes(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they fill the disk under any quota: they are kept for as long as the records of sessions are."""
    monkeypatch.setattr(storage_quota, "FREE_BYTES", 40_000)
    api = await start("alice:storage=0")
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    session = {"type": "create_session", "user_metadata": {f"k{at}": "x" * 4000 for at in range(3)}}
    codes = [(await alice.post("create_session", session)).status_code for _ in range(5)]
    assert codes == [200, 200, 200, 400, 400]
    told = (await alice.post("create_session", session)).json()["detail"]
    assert told.startswith("create_session: records of sessions, their metadata and curves of the owner 'alice' take ")
    assert (await bob.post("create_session", session)).status_code == 200
    model = await alice.model(await alice.session())
    line = {"metrics": {f"{at}{'m' * 100}": 1.0 for at in range(64)}}
    answer = await alice.post(f"training_runs/{model}/metrics", line)
    assert "or the storage of its owner" in answer.text
    api.backend.store.quota.recount()  # as after a restart
    assert (await alice.post("create_session", session)).status_code == 400


async def test_sampling_sessions_count_in_the_storage_of_their_owner_and_ephemeral_saves_go_on_on_fakes(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_quota, "FREE_BYTES", 10 * storage_quota.RECORD_BYTES + 100)
    api = await start("alice:storage=0")
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    session = await alice.session()
    model = await alice.model(session)
    body = {"session_id": session, "base_model": "fake/bigram"}
    for seq_id in range(8):  # a session and a run are recorded, too
        assert (await alice.post("create_sampling_session", {**body, "sampling_session_seq_id": seq_id})).is_success
    for _ in range(2):
        answer = await alice.post("create_sampling_session", {**body, "sampling_session_seq_id": 8})
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith("sampling_session_seq_id: records of sessions, their metadata and")
        api.backend.store.quota.recount()  # as after a restart
    assert await bob.base_sampler()
    sampler = await alice.nameless(model, 1, 9)  # a loop of training does not end for want of a record
    assert await alice.result(await alice.sample(sampler, 0))


async def test_a_session_has_so_much_metadata_and_no_more_on_fakes(api: Api) -> None:
    session = {"type": "create_session", "user_metadata": {f"k{at}": "x" * 4000 for at in range(5)}}
    answer = await api.post("create_session", session)
    assert (answer.status_code, "characters in all are more than 16384" in answer.text) == (400, True)
