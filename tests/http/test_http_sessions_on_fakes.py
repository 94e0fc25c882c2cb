"""Sessions end by `finish` or by lost heartbeats, free everything, and answer clearly afterwards."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tinker_local.backend.control import sessions
from tinker_local.backend.control.ephemeral_versions import EphemeralVersion
from tinker_local.backend.storage.versions import UNWRITTEN

from tests.http.conftest import Api, StartApi


def version_folders(api: Api) -> list[Path]:
    """Folders of nameless versions, in memory or on disk, once they are written."""
    api.backend.folders.flush()
    return list((api.backend.options.data_dir / "ephemeral").glob("*.link"))


async def test_finish_frees_adapters_and_nameless_versions_and_nobody_elses_on_fakes(api: Api) -> None:
    mine, other = await api.session(), await api.session()
    for session in (mine, other):
        for number in range(2):
            model = await api.model(session, number)
            await api.nameless(model, 1, 2 * number)
            await api.nameless(model, 2, 2 * number + 1)
    kept = await api.named(f"{mine}:train:0", 3, "kept")
    assert (len(api.trainer.adapters), len(version_folders(api))) == (4, 8)
    assert len(api.sampler.versions) == 9
    assert (await api.post(f"sessions/{mine}/finish", {"reason": {"type": "success"}})).status_code == 204
    assert api.trainer.adapters == {f"{other}:train:0", f"{other}:train:1"}
    assert len(version_folders(api)) == 4
    assert len([name for name in api.sampler.versions if mine in name and "kept" not in name]) == 0
    assert api.backend.runs.count() == 2
    await api.score(f"{other}:sample:0", 0)
    # Named checkpoints outlive their session.
    body = {"session_id": other, "sampling_session_seq_id": 9, "model_path": kept}
    await api.score((await api.ok("create_sampling_session", body))["sampling_session_id"], 0)


async def test_finish_twice_and_of_nobody_on_fakes(api: Api) -> None:
    session = await api.session()
    for reason in ("errored", "success", "interrupted"):
        body = {"reason": {"type": reason}, "detail": "ValueError: bad luck"}
        assert (await api.post(f"sessions/{session}/finish", body)).status_code == 204
    detail = (await api.post("session_heartbeat", {"session_id": session})).json()["detail"]
    assert "errored: ValueError: bad luck" in detail  # the first reason wins
    assert (await api.post("sessions/s-none/finish", {})).status_code == 404
    assert (await api.post("session_heartbeat", {"session_id": "s-none"})).status_code == 404
    wrong = await api.post(f"sessions/{await api.session()}/finish", {"reason": {"type": "bored"}})
    assert wrong.status_code == 400


async def test_operations_on_an_ended_session_answer_at_once_and_say_why_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    saved = await api.save(model, 1, "last")
    base, nameless = await api.base_sampler(session, 0), await api.nameless(model, 2, 1)
    waiting = await api.gradient(model, 4)  # 3 is missing
    polls = [asyncio.create_task(api.poll(waiting)) for _ in range(3)]
    api.sampler.hold.clear()
    sampling = await api.sample(base, 0)
    polls.append(asyncio.create_task(api.poll(sampling)))
    await asyncio.sleep(0.05)
    assert (await api.post(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})).status_code == 204
    for poll in polls:
        answer = await poll
        assert (answer.status_code, answer.json()["category"]) == (200, "user")
        assert session in answer.json()["error"]
    assert 'create_sampling_client(base_model="fake/bigram")' in answer.json()["error"]  # of the sample, the last poll
    gone = [
        await api.post("session_heartbeat", {"session_id": session}),
        await api.post("create_model", {"session_id": session, "model_seq_id": 5, "base_model": "fake/bigram"}),
        await api.post("load_weights", {"session_id": session, "model_seq_id": 5, "path": saved, "optimizer": True}),
        await api.post(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 5, "base_model": "fake/bigram"},
        ),
        await api.post("asample", api.sample_body(base, 1)),
        await api.post("asample", api.sample_body(nameless, 1)),
        await api.get(f"samplers/{nameless}"),
        await api.post("get_info", {"model_id": model}),
    ]
    for answer in gone:
        assert answer.status_code == 410, answer.text
        assert "has ended (interrupted)" in answer.json()["detail"]
    futures = [
        await api.gradient(model, 5),
        await api.step(model, 6),
        await api.submit("save_weights", {"model_id": model, "seq_id": 7, "path": "b"}),
        await api.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 7}),
    ]
    for request in futures:
        message = await api.failure(request)
        assert "has ended (interrupted)" in message
        assert saved in message  # where to go on from


async def test_lost_heartbeats_end_the_session_and_kept_ones_do_not_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: seconds))
    api = await start_api(session_timeout=0.4)
    kept, lost = await api.session(), await api.session()
    here = await api.backend.sessions.create()  # of a program of this process, which sends none
    models = [await api.model(session) for session in (kept, lost, here)]
    await api.nameless(models[1], 1, 0)
    seconds = 0.3
    await api.ok("session_heartbeat", {"session_id": kept, "type": "session_heartbeat"})
    seconds = 0.5
    await api.until(lambda: models[1] not in api.trainer.adapters)
    await asyncio.sleep(0.5)
    assert api.trainer.adapters == {models[0], models[2]}
    assert not version_folders(api)
    answer = await api.post("session_heartbeat", {"session_id": lost})
    assert answer.status_code == 410
    assert "heartbeats_lost" in answer.json()["detail"]
    for model in (models[0], models[2]):
        await api.result(await api.gradient(model, 1))
    seconds = 0.8
    await api.until(lambda: models[0] not in api.trainer.adapters)


async def test_thousands_of_silent_sessions_end_a_few_at_a_time_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven thousand that ended together took every thread from the others, and the event loop for nine seconds."""
    api = await start_api()
    control, ending, most = api.backend.sessions, 0, 0
    ids = [await api.session() for _ in range(30)]
    samplers = [await api.base_sampler(session) for session in ids]
    free = control._on_end

    async def freed(session_id: str, end: sessions.SessionEnd) -> None:
        nonlocal ending, most
        ending += 1
        most = max(most, ending)
        await asyncio.sleep(0.01)
        await free(session_id, end)
        ending -= 1

    monkeypatch.setattr(control, "_on_end", freed)
    for session in control._live.values():
        session.last_heartbeat -= 1000
    await control.end_silent()
    assert most == sessions.MOST_ENDING
    assert not any(control.is_live(session) for session in ids)
    assert samplers
    assert not api.backend.sampling._open
    assert not api.backend.sampling._of_session


async def test_heartbeats_that_wait_while_the_server_is_stopped_are_read_before_sessions_end_on_fakes(
    start_api: StartApi,
) -> None:
    """As by SIGSTOP, `docker pause`, or a virtual machine that moves: the server was silent, not its clients."""
    api = await start_api(session_timeout=100)
    control = api.backend.sessions
    ids = [await api.session() for _ in range(3)]
    await control.end_silent(5)
    control._looked_at -= 1000  # it was stopped for so long
    for session in control._live.values():
        session.last_heartbeat -= 1004
    control._live[ids[2]].last_heartbeat -= 110  # it was silent before
    await control.end_silent(5)
    assert [control.is_live(session) for session in ids] == [True, True, False]
    await api.ok("session_heartbeat", {"session_id": ids[0], "type": "session_heartbeat"})
    control._live[ids[1]].last_heartbeat -= 100
    await control.end_silent(5)
    assert [control.is_live(session) for session in ids] == [True, False, False]


def limit_versions(api: Api, size: int) -> None:
    """Let the ephemeral versions of a session have `size` bytes."""
    api.backend.quotas.session = replace(api.backend.quotas.session, ephemeral_bytes=size)


def version_of(api: Api, sampler: str) -> EphemeralVersion:
    version = api.backend.sampling._open[sampler].ephemeral
    assert version is not None
    return version


@pytest.mark.mutation(
    "versions-dropped-under-samples", "EphemeralVersions._drop_one", "if not each.samples and each", "if each"
)
async def test_ephemeral_versions_beyond_the_limit_drop_the_least_recently_used_on_fakes(start_api: StartApi) -> None:
    """A thousand steps of a long run would fill the disk. What is being sampled from is never dropped."""
    api = await start_api()
    model, other = await api.model(), await api.model()
    foreign = await api.nameless(other, 1, 0)
    first = await api.nameless(model, 1, 0)
    size = api.backend.folders.size(f"{model}/1#2")
    limit_versions(api, 3 * size)
    samplers = [first, *[await api.nameless(model, seq_id, seq_id) for seq_id in (2, 3)]]
    await api.score(first, 0)  # now the second is the least recently used
    api.sampler.hold.clear()
    held = await api.sample(samplers[2], 0)
    await api.until(lambda: api.sampler.running == 1)
    api.backend.sampling.ephemeral._drop(version_of(api, first))
    api.sampler.hold.set()
    await api.result(held)
    samplers.append(await api.nameless(model, 4, 4))
    answer = await api.post("asample", api.sample_body(samplers[1], 0))
    assert answer.status_code == 404
    assert "was dropped: the ephemeral versions of its session have more than" in answer.json()["detail"]
    for sampler in (foreign, first, *samplers[2:]):
        await api.score(sampler, 9)
    await api.until(lambda: len(version_folders(api)) == 4)
    assert len(api.sampler.versions) == 4
    metrics = api.backend.metrics()["fake/bigram"]
    assert (metrics.ephemeral_bytes, metrics.versions_dropped) == (4 * size, 1)

    # All three are sampled from: the next is beyond the limit until one of them has ended.
    api.sampler.hold.clear()
    live = [first, *samplers[2:]]
    held_back = [await api.sample(sampler, 20) for sampler in live]
    for sampler in live:
        session = api.backend.sampling._open[sampler]
        await api.until(lambda session=session: bool(session.running))  # type: ignore[misc]
    limit_versions(api, size)
    api.backend.sampling.ephemeral._drop(version_of(api, samplers[3]))
    assert api.backend.metrics()["fake/bigram"].versions_dropped == 1
    api.sampler.hold.set()
    for request in held_back:
        assert await api.result(request)
    await api.until(lambda: api.backend.metrics()["fake/bigram"].versions_dropped == 3)
    assert api.backend.metrics()["fake/bigram"].ephemeral_bytes == 2 * size


async def test_adapter_limit_is_told_with_the_numbers_and_lifted_by_finish_on_fakes(start_api: StartApi) -> None:
    api = await start_api(max_adapters=3)
    session = await api.session()
    for number in range(3):
        await api.model(session, number)
    other = await api.session()
    body = {"session_id": other, "model_seq_id": 0, "base_model": "fake/bigram"}
    answer = await api.post("create_model", body)
    assert answer.status_code == 400
    assert "3 adapters are alive" in answer.json()["detail"]
    await api.post(f"sessions/{session}/finish", {})
    await api.model(other, 0)


async def test_a_strict_server_refuses_what_the_hosted_service_does_on_fakes(start_api: StartApi) -> None:
    strict = await start_api(strict_hosted=True, train_vision=True)
    session = await strict.session()
    body = {"session_id": session, "base_model": "fake/bigram"}
    for config, words in (
        (
            {"rank": 12},
            "lora_config.rank: 12 must be a power of 2, as on the hosted service (--strict-hosted): choose 8",
        ),
        ({"rank": 8, "train_vision": True}, "lora_config.train_vision: the hosted service never trains"),
    ):
        answer = await strict.post("create_model", {**body, "model_seq_id": 0, "lora_config": config})
        assert answer.status_code == 400
        assert words in answer.json()["detail"]
    for number, rank in enumerate((1, 2, 32)):
        await strict.model(session, number, lora_config={"rank": rank})


async def test_rank_and_memory_limits_are_told_with_the_numbers_on_fakes(start_api: StartApi) -> None:
    per_rank = 3 * (1024 + 512) * 8 * 4
    api = await start_api(max_rank=64, max_adapter_bytes=20 * per_rank)
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
    for rank, words in ((0, "lora_config.rank"), (-4, "lora_config.rank"), (4096, "4096 is outside 1 to 64")):
        answer = await api.post("create_model", {**body, "lora_config": {"rank": rank}})
        assert answer.status_code == 400
        assert words in answer.json()["detail"]
    off = {"rank": 4, "train_unembed": False, "train_mlp": False, "train_attn": False}
    assert "at least one" in (await api.post("create_model", {**body, "lora_config": off})).json()["detail"]
    tower = {"rank": 4, "train_vision": True}
    assert "--train-vision" in (await api.post("create_model", {**body, "lora_config": tower})).json()["detail"]
    first = await api.model(session, 0, lora_config={"rank": 16})
    answer = await api.post("create_model", {**body, "model_seq_id": 1, "lora_config": {"rank": 8}})
    assert answer.status_code == 400
    for number in (8 * per_rank, 16 * per_rank, 20 * per_rank):
        assert f"{number / 2**20:.1f}" in answer.json()["detail"]
    # A load is held to the same limits.
    path = await api.save(first, 1, "a")
    load = {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": True}
    assert "MiB" in (await api.post("load_weights", load)).json()["detail"]
    await api.model(session, 3, lora_config={"rank": 4})
    assert api.trainer.adapters == {f"{session}:train:0", f"{session}:train:3"}


async def test_failed_creation_leaves_nothing_and_may_be_repeated_elsewhere_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    original = api.trainer.create_adapter

    def no_memory(adapter_id: str, config: Any, optimizer: str) -> None:
        original(adapter_id, config, optimizer)
        raise MemoryError("none left")

    monkeypatch.setattr(api.trainer, "create_adapter", no_memory)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
    message = await api.failure(await api.submit("create_model", body))
    assert message == "server: MemoryError: none left"
    monkeypatch.setattr(api.trainer, "create_adapter", original)
    await api.until(lambda: not api.trainer.adapters)
    assert api.backend.runs.count() == 0
    assert (await api.get("training_runs")).json()["training_runs"] == []
    assert (await api.post("get_info", {"model_id": f"{session}:train:0"})).status_code == 404
    await api.model(session, 1)


async def test_session_that_ends_during_a_creation_leaves_no_adapter_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await api.session()
    path = await api.save(await api.model(source), 1, "a")
    reading, go_on = threading.Event(), threading.Event()
    original = api.backend.store.read_checkpoint

    def slow(*args: Any, **kwargs: Any) -> Any:
        reading.set()
        assert go_on.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(api.backend.store, "read_checkpoint", slow)
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    created = await api.submit("load_weights", body)
    target = await api.model(session, 1)
    loaded = await api.submit("load_weights", {"model_id": target, "seq_id": 1, "path": path, "optimizer": True})
    await api.until(reading.is_set)
    assert (await api.post(f"sessions/{session}/finish", {})).status_code == 204
    go_on.set()
    for request in (created, loaded):
        assert "ended" in await api.failure(request)
    await api.until(lambda: api.trainer.adapters == {f"{source}:train:0"})
    assert await api.healthy()


async def test_session_that_ends_while_a_checkpoint_is_looked_up_gets_no_model_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    paths = {"load_weights": await api.save(model, 1, "a"), "create_sampling_session": await api.named(model, 2, "a")}
    original = api.backend.store.get_checkpoint
    for name, path in paths.items():
        reading, go_on = threading.Event(), threading.Event()

        def slow(*args: Any, reading: Any = reading, go_on: Any = go_on) -> Any:
            reading.set()
            assert go_on.wait(30)
            return original(*args)

        monkeypatch.setattr(api.backend.store, "get_checkpoint", slow)
        session = await api.session()
        fields = {
            "load_weights": {"model_seq_id": 0, "path": path, "optimizer": True},
            "create_sampling_session": {"sampling_session_seq_id": 0, "model_path": path},
        }[name]
        call = asyncio.create_task(api.post(name, {"session_id": session, **fields}))
        await api.until(reading.is_set)
        await api.post(f"sessions/{session}/finish", {})
        go_on.set()
        assert (await call).status_code == 410
    await api.until(lambda: api.trainer.adapters == {model} and not api.backend.sampling._open)


async def test_saves_in_flight_are_finished_when_their_session_ends_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    model = await api.model(session)
    writing, go_on = threading.Event(), threading.Event()
    original = api.backend.store.write_checkpoint

    def slow(*args: Any, **kwargs: Any) -> Any:
        writing.set()
        assert go_on.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(api.backend.store, "write_checkpoint", slow)
    save = await api.submit("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    await api.until(writing.is_set)
    # The model's order is not held up by the disk.
    await api.result(await api.gradient(model, 2))
    finish = asyncio.create_task(api.post(f"sessions/{session}/finish", {}))
    await asyncio.sleep(0.1)
    go_on.set()
    assert (await finish).status_code == 204
    path = (await api.result(save))["path"]
    assert (await api.ok("weights_info", {"tinker_path": path}))["lora_rank"] == 4


async def test_nameless_save_that_outlives_its_session_leaves_nothing_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    model = await api.model(session)
    loading, go_on = asyncio.Event(), asyncio.Event()
    original = api.sampler.load_version

    async def slow(version: Any) -> None:
        loading.set()
        await go_on.wait()
        await original(version)

    monkeypatch.setattr(api.sampler, "load_version", slow)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    save = await api.submit("save_weights_for_sampler", body)
    await loading.wait()
    finish = asyncio.create_task(api.post(f"sessions/{session}/finish", {}))
    await asyncio.sleep(0.1)
    go_on.set()
    await finish
    assert "has ended (success)" in await api.failure(save)
    assert not version_folders(api)
    assert not api.sampler.versions
    assert not api.trainer.adapters


async def test_engine_that_fails_to_free_keeps_no_session_alive_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.nameless(model, 1, 0)

    async def broken(version: Any) -> None:
        raise RuntimeError("stuck")

    monkeypatch.setattr(api.sampler, "remove_version", broken)
    assert (await api.post(f"sessions/{session}/finish", {})).status_code == 204
    assert not api.trainer.adapters
    assert not version_folders(api)
    assert (await api.post("session_heartbeat", {"session_id": session})).status_code == 410


@pytest.mark.more
async def test_client_that_vanishes_in_the_middle_hurts_nobody_on_fakes(serve: Any) -> None:
    """Half a body, polls that are dropped, a connection that is reset: the server goes on, and logs no exception."""
    import socket

    server = serve("--fake", "--model", "fake/bigram")
    host, port = server.url.removeprefix("http://").split(":")
    async with httpx.AsyncClient(base_url=server.url) as http:
        session = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
        request = (await http.post("/api/v1/create_model", json=body)).json()["request_id"]
        for text in (
            f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{'x' * 1000}",
            "POST /api/v1/optim_step HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
            "GET /api/v1/healthz HTTP/1.1\r\nHo",
            "nonsense\r\n\r\n",
        ):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(text.encode())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset at close
        poll = {"request_id": f"{session}:train:0:create"}
        for _ in range(20):
            with pytest.raises(httpx.ReadTimeout):
                await http.post(
                    "/api/v1/retrieve_future", json={"request_id": await hanging(http, session)}, timeout=0.05
                )
        assert (await http.post("/api/v1/retrieve_future", json=poll)).json()["model_id"] == request[: -len(":create")]
    assert server.healthy()
    assert server.stop() == 0
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line], server.lines


async def hanging(http: httpx.AsyncClient, session: str) -> str:
    """A gradient that waits for one that never comes."""
    from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput
    from tinker_local.types.codec import encode_forward_backward_request

    data = (Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]}),)
    request = ForwardBackwardRequest(model_id=f"{session}:train:0", seq_id=2, data=data, loss_fn="cross_entropy")
    answer = await http.post("/api/v1/forward_backward", content=encode_forward_backward_request(request))
    return str(answer.json()["request_id"])


async def test_many_ephemeral_saves_at_once_leave_threads_to_finish_them_on_fakes(api: Api) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    session = await api.session()
    models = [await api.model(session, number) for number in range(8)]
    api.sampler.hold.clear()  # none is verified before the others wait for room
    bodies = [{"model_id": model, "seq_id": 1, "sampling_session_seq_id": n} for n, model in enumerate(models)]
    saves = [await api.submit("save_weights_for_sampler", body) for body in bodies]
    await api.until(lambda: api.sampler.running >= UNWRITTEN)
    await asyncio.sleep(0.2)
    api.sampler.hold.set()
    await asyncio.wait_for(asyncio.gather(*(api.result(save) for save in saves)), 40)
