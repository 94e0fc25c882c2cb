"""What becomes of a checkpoint: public or private, its time, its end, its copies, and who may still use it."""

import asyncio
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker.types as sdk
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.types import CopyWeightsRequest, UnsupportedError

from tests.http.conftest import Api, Clock, StartApi

YEAR = 365 * 86400
KINDS = ["weights", "sampler_weights", "external_weights"]


async def saved(api: Api, model: str, seq_id: int, kind: str, name: str = "a", **fields: Any) -> str:
    if kind == "weights":
        return str(await api.save(model, seq_id, name, **fields))
    if kind == "sampler_weights":
        return str(await api.named(model, seq_id, name, **fields))
    body = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
    return str((await api.result(await api.submit("save_weights_external", body)))["path"])


def url(path: str, *more: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return "/".join(["training_runs", run, "checkpoints", kind, name, *more])


def on_disk(api: Api) -> list[Path]:
    return [path for path in (api.backend.options.data_dir / "checkpoints").glob("*/*/*") if path.name[0] != "."]


async def listed(api: Api, path: str) -> sdk.Checkpoint:
    found = sdk.CheckpointsListResponse.model_validate((await api.get("checkpoints")).json())
    return next(checkpoint for checkpoint in found.checkpoints if checkpoint.tinker_path == path)


async def sampler_of(api: Api, path: str, number: int = 50) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": number, "model_path": path}
    return str((await api.ok("create_sampling_session", body))["sampling_session_id"])


@pytest.mark.parametrize("kind", KINDS)
async def test_published_is_public_in_every_listing_until_it_is_unpublished_on_fakes(api: Api, kind: str) -> None:
    model = await api.model()
    path, other = await saved(api, model, 1, kind), await saved(api, model, 2, kind, "other")

    async def public() -> list[bool]:
        of_run = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
        flags = {c["tinker_path"]: c["public"] for c in of_run}
        assert not flags[other]
        return [flags[path], (await listed(api, path)).public]

    assert await public() == [False, False]
    # 400 and not 409, which the SDK would repeat for five minutes.
    twice = await api.delete(url(path, "publish"))
    assert twice.status_code == 400
    assert "private already" in twice.json()["detail"]
    empty = {"Content-Type": "application/json"}  # as the SDK sends it
    published = await api.post(url(path, "publish"), headers=empty)
    assert (published.status_code, published.content) == (204, b"")
    assert await public() == [True, True]
    twice = await api.post(url(path, "publish"), headers=empty)
    assert twice.status_code == 400
    assert "public already" in twice.json()["detail"]
    assert (await api.delete(url(path, "publish"))).status_code == 204
    assert await public() == [False, False]
    for answer in (await api.post(url(f"{path}x", "publish")), await api.delete(url(f"{path}x", "publish"))):
        assert answer.status_code == 404


async def test_publication_survives_a_restart_on_fakes(start_api: StartApi) -> None:
    first = await start_api()
    path = await saved(first, await first.model(), 1, "weights")
    assert (await first.post(url(path, "publish"))).status_code == 204
    await first.http.aclose()
    await first.backend.close()
    assert (await listed(await start_api(), path)).public


@pytest.mark.parametrize("kind", KINDS)
async def test_ttl_counts_from_now_and_null_takes_it_away_on_fakes(start_api: StartApi, kind: str) -> None:
    clock = Clock()
    api = await start_api(clock=clock)
    path = await saved(api, await api.model(), 1, kind, ttl_seconds=7200)
    clock.ahead = timedelta(seconds=3600)
    before = clock()
    answer = await api.put(url(path, "ttl"), {"ttl_seconds": 5000})
    assert (answer.status_code, answer.content) == (204, b"")
    expires_at = (await listed(api, path)).expires_at
    assert expires_at is not None
    assert before <= expires_at - timedelta(seconds=5000) <= clock()
    assert (await api.put(url(path, "ttl"), {"ttl_seconds": None})).status_code == 204
    assert (await listed(api, path)).expires_at is None
    clock.ahead = timedelta(days=100 * 365)
    await api.ok("weights_info", {"tinker_path": path})


@pytest.mark.parametrize("seconds", [0, -1, 3599, 10 * YEAR + 1, 2**70])
async def test_ttl_out_of_range_is_refused_with_the_range_on_fakes(api: Api, seconds: int) -> None:
    path = await saved(api, await api.model(), 1, "weights")
    copying = {"source_path": path, "destination_project_id": "local", "ttl_seconds": seconds}
    for answer in (await api.put(url(path, "ttl"), {"ttl_seconds": seconds}), await api.post("copy_weights", copying)):
        assert answer.status_code == 400
        for word in ("ttl_seconds", str(seconds), "3600", str(10 * YEAR)):
            assert word in answer.json()["detail"]
    assert (await listed(api, path)).expires_at is None


async def test_ttl_of_nothing_or_of_no_number_is_refused_on_fakes(api: Api) -> None:
    path = await saved(api, await api.model(), 1, "weights")
    for edge in (3600, 10 * YEAR):
        assert (await api.put(url(path, "ttl"), {"ttl_seconds": edge})).status_code == 204
    assert (await api.put(url(f"{path}x", "ttl"), {"ttl_seconds": 3600})).status_code == 404
    for body in ({}, {"ttl_seconds": "3600"}, {"ttl_seconds": 3600.5}, {"ttl": 3600}):
        answer = await api.put(url(path, "ttl"), body)
        assert answer.status_code == 400
        assert "ttl" in answer.json()["detail"]
    assert (await api.put(url("tinker://r/full_weights/a", "ttl"), {"ttl_seconds": 3600})).status_code == 400


async def test_a_checkpoint_without_its_kind_is_refused_with_the_three_that_it_may_be_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.save(model, 1, "x")
    run = f"/api/v1/training_runs/{model}/checkpoints"
    for method, path in (
        ("GET", "x"),
        ("DELETE", "x"),
        ("POST", "x/publish"),
        ("PUT", "x/ttl"),
        ("GET", "x/external_weights_urls"),
    ):
        answer = await api.http.request(method, f"{run}/{path}")
        assert answer.status_code == 400, (method, path)
        assert answer.json()["detail"] == (
            "checkpoint_id: 'x' lacks its kind: give weights/x, sampler_weights/x or external_weights/x, as the "
            "run's listing has it"
        )
    listed = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [(await api.http.get(f"{run}/{one['checkpoint_id']}")).json() for one in listed] == listed
    assert (await api.http.get(f"{run}/sampler_weights/x")).status_code == 404
    assert (await api.delete(f"training_runs/{model}/checkpoints/weights/x")).status_code == 204


async def test_an_expired_path_is_404_at_once_before_anybody_sweeps_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    api = await start_api(clock=clock)
    monkeypatch.setattr(api.backend.store, "forget_expired", lambda: [])  # nothing sweeps
    session = await api.session()
    model = await api.model(session)
    paths = {kind: await saved(api, model, n, kind, ttl_seconds=3600) for n, kind in enumerate(KINDS, 1)}
    sampler = await sampler_of(api, paths["sampler_weights"])
    await api.score(sampler, 0)
    clock.ahead = timedelta(seconds=3601)
    assert len(on_disk(api)) == 3
    load = {"session_id": session, "model_seq_id": 9, "path": paths["weights"], "optimizer": True}
    opened = {"session_id": session, "sampling_session_seq_id": 9, "model_path": paths["sampler_weights"]}
    answers = [
        await api.post("load_weights", load),
        await api.post("create_sampling_session", opened),
        await api.post("asample", api.sample_body(sampler, 1)),
        await api.get(f"samplers/{sampler}"),
        await api.get(url(paths["external_weights"], "external_weights_urls")),
    ]
    for path in paths.values():
        answers += [
            await api.post("weights_info", {"tinker_path": path}),
            await api.put(url(path, "ttl"), {"ttl_seconds": None}),
            await api.post(url(path, "publish")),
            await api.delete(url(path)),
            await api.post("copy_weights", {"source_path": path, "destination_project_id": "local"}),
        ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    assert (await api.get("checkpoints")).json()["cursor"]["total_count"] == 0
    assert (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"] == []
    run = (await api.get(f"training_runs/{model}")).json()
    assert "last_checkpoint" not in run
    assert "last_sampler_checkpoint" not in run
    # The names are free.
    for number, kind in enumerate(KINDS, 4):
        assert await saved(api, model, number, kind) == paths[kind]


async def test_expired_checkpoints_leave_the_disk_and_the_engine_by_themselves_on_fakes(start_api: StartApi) -> None:
    clock = Clock()
    api = await start_api(clock=clock, session_timeout=0.4)
    model = await api.model(await api.backend.sessions.create())
    for number, kind in enumerate(KINDS, 1):
        await saved(api, model, number, kind, ttl_seconds=3600)
    kept = await saved(api, model, 4, "weights", "kept", ttl_seconds=7200)
    assert (len(on_disk(api)), len(api.sampler.versions)) == (4, 1)
    clock.ahead = timedelta(seconds=3601)
    await api.until(lambda: len(on_disk(api)) == 1 and not api.sampler.versions)
    assert (await api.get("checkpoints")).json()["checkpoints"][0]["tinker_path"] == kept


async def test_what_expired_while_the_server_was_down_is_gone_when_it_is_ready_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start_api()
    await saved(first, await first.model(), 1, "weights", ttl_seconds=3600)
    assert len(on_disk(first)) == 1
    await first.http.aclose()
    await first.backend.close()
    monkeypatch.setattr(ControlPlane, "_keep_house", lambda self: asyncio.sleep(600))
    api = await start_api(clock=Clock(timedelta(seconds=3601)))
    await api.until(lambda: not on_disk(api))
    assert api.backend.store.forget_expired() == []


@pytest.mark.parametrize("end", ["deleted", "expired"])
async def test_a_checkpoint_that_is_sampled_from_stays_until_the_samples_are_done_on_fakes(
    start_api: StartApi, end: str
) -> None:
    clock = Clock()
    api = await start_api(clock=clock, session_timeout=0.4)
    session = await api.backend.sessions.create()
    model = await api.model(session)
    path = await saved(api, model, 1, "sampler_weights", ttl_seconds=3600)
    body = {"session_id": session, "sampling_session_seq_id": 5, "model_path": path}
    sampler = (await api.ok("create_sampling_session", body))["sampling_session_id"]
    expected = await api.score(sampler, 0)
    api.sampler.hold.clear()
    running = [await api.sample(sampler, number, (5, 9, 20), prompt_logprobs=True) for number in (1, 2)]
    if end == "deleted":
        assert (await api.delete(url(path))).status_code == 204
    else:
        clock.ahead = timedelta(seconds=3601)
    await api.until(lambda: api.backend.store.get_checkpoint(model, "sampler_weights", "a") is None)
    assert (await api.post("asample", api.sample_body(sampler, 3))).status_code == 404
    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    await asyncio.sleep(0.5)  # the housekeeping comes by several times
    assert len(on_disk(api)) == 1
    api.sampler.hold.set()
    for request in running:
        output = await api.result(request)
        assert [float(value) for value in output.prompt_logprobs[1:]] == expected
    await api.until(lambda: not on_disk(api) and not api.sampler.versions)


@pytest.mark.mutation(
    "folder-deleted-under-its-users", "Checkpoints._remove.remove", "            await self._uses.unused(record)\n", ""
)
async def test_a_checkpoint_that_is_being_loaded_stays_until_it_is_read_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    api = await start_api(clock=clock)
    session = await api.session()
    model = await api.model(session)
    path = await saved(api, model, 1, "weights", ttl_seconds=3600)
    reading, go_on = threading.Event(), threading.Event()
    original = api.backend.store.read_checkpoint

    def slow(*args: Any, **kwargs: Any) -> Any:
        reading.set()
        assert go_on.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(api.backend.store, "read_checkpoint", slow)
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    loading = await api.submit("load_weights", load)
    await api.until(reading.is_set)
    clock.ahead = timedelta(seconds=3601)
    await api.backend.checkpoints.sweep()
    assert (await api.post("weights_info", {"tinker_path": path})).status_code == 404
    await asyncio.sleep(0.1)
    assert len(on_disk(api)) == 1
    go_on.set()
    assert (await api.result(loading))["model_id"] == f"{session}:train:1"
    await api.until(lambda: not on_disk(api))


async def test_a_longer_ttl_reaches_the_samplers_that_are_open_on_fakes(start_api: StartApi) -> None:
    clock = Clock()
    api = await start_api(clock=clock)
    path = await saved(api, await api.model(), 1, "sampler_weights", ttl_seconds=3600)
    sampler = await sampler_of(api, path)
    assert (await api.put(url(path, "ttl"), {"ttl_seconds": 7200})).status_code == 204
    clock.ahead = timedelta(seconds=3601)
    await api.score(sampler, 0)
    clock.ahead = timedelta(seconds=7201)
    assert (await api.post("asample", api.sample_body(sampler, 1))).status_code == 404


async def test_an_overwritten_checkpoint_is_private_and_has_the_new_expiry_on_fakes(api: Api) -> None:
    model = await api.model()
    path = await saved(api, model, 1, "weights", ttl_seconds=3600, user_metadata={"k": "v"})
    await api.post(url(path, "publish"))
    assert await saved(api, model, 2, "weights", overwrite=True) == path
    found = await listed(api, path)
    assert (found.public, found.expires_at, found.user_metadata) == (False, None, {})


async def test_a_server_that_stops_while_a_deleted_checkpoint_is_sampled_from_leaves_no_folder_on_fakes(
    start_api: StartApi,
) -> None:
    api = await start_api()
    path = await saved(api, await api.model(), 1, "sampler_weights")
    sampler = await sampler_of(api, path)
    api.sampler.hold.clear()
    await api.sample(sampler, 0)
    await api.until(lambda: api.sampler.running == 1)
    assert (await api.delete(url(path))).status_code == 204
    assert len(on_disk(api)) == 1
    await api.http.aclose()
    await api.backend.close()
    again = await start_api()
    assert not on_disk(again)


async def copied(api: Api, path: str, key: str | None = None, **fields: Any) -> str:
    body = {"source_path": path, **({} if "session_id" in fields else {"destination_project_id": "local"}), **fields}
    answer = await api.post("copy_weights", body, headers={} if key is None else {"X-Idempotency-Key": key})
    assert answer.status_code == 200, answer.text
    return sdk.CopyWeightsResponse.model_validate(answer.json()).tinker_path


@pytest.mark.parametrize("kind", KINDS)
async def test_a_copy_keeps_kind_name_and_metadata_and_has_its_own_life_on_fakes(
    start_api: StartApi, kind: str
) -> None:
    clock = Clock()
    api = await start_api(clock=clock)
    model = await api.model()
    metadata = {} if kind == "external_weights" else {"user_metadata": {"k": "v"}}
    path = await saved(api, model, 1, kind, ttl_seconds=3600, **metadata)
    await api.post(url(path, "publish"))
    source = await listed(api, path)
    copy = await listed(api, await copied(api, path, ttl_seconds=9000))
    assert (copy.checkpoint_id, copy.checkpoint_type) == (source.checkpoint_id, source.checkpoint_type)
    assert (copy.size_bytes, copy.user_metadata, copy.public) == (source.size_bytes, source.user_metadata, False)
    assert copy.expires_at is not None
    assert copy.expires_at - copy.time == timedelta(seconds=9000)
    forever = await listed(api, await copied(api, path))
    assert forever.expires_at is None
    info = [await api.ok("weights_info", {"tinker_path": c.tinker_path}) for c in (source, copy)]
    assert info[0] == info[1]
    files = [next(folder.glob("adapter_model.safetensors")).stat().st_ino for folder in on_disk(api)]
    assert len(files) == 3
    assert len(set(files)) == 1  # hard links share their bytes
    clock.ahead = timedelta(seconds=3601)  # the source's time is over, not theirs
    await api.backend.checkpoints.sweep()
    await api.until(lambda: len(on_disk(api)) == 2)
    if kind == "external_weights":
        urls = (await api.get(url(forever.tinker_path, "external_weights_urls"))).json()["urls"]
        assert (await api.http.get(urls["adapter_model.safetensors"])).content


async def test_a_copy_trains_and_samples_as_its_source_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.gradient(model, 1)
    await api.result(await api.step(model, 2))
    state, sampler = await api.save(model, 3, "s"), await api.named(model, 4, "s")
    state_copy, sampler_copy = await copied(api, state), await copied(api, sampler)
    for path in (state, sampler):
        assert (await api.delete(url(path))).status_code == 204
    load = {"session_id": session, "model_seq_id": 1, "path": state_copy, "optimizer": True}
    loaded = (await api.result(await api.submit("load_weights", load)))["model_id"]
    losses = []
    for run, seq_id in ((model, 5), (loaded, 1)):
        await api.gradient(run, seq_id)
        await api.result(await api.step(run, seq_id + 1))
        losses.append((await api.result(await api.gradient(run, seq_id + 2))).metrics["loss:sum"])
    assert losses[0] == losses[1]
    opened = await sampler_of(api, sampler_copy)
    assert await api.score(opened, 0) != await api.score(await api.base_sampler(session, 9), 0)


async def test_the_run_of_a_copy_is_listed_and_cannot_be_trained_on_on_fakes(api: Api) -> None:
    path = await api.save(await api.model(), 1, "a")
    copy = await copied(api, path)
    run_id = copy.split("/")[2]
    run = sdk.TrainingRun.model_validate((await api.get(f"training_runs/{run_id}")).json())
    assert run.last_checkpoint is not None
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("fake/bigram", 4, copy)
    session = sdk.GetSessionResponse.model_validate((await api.get(f"sessions/{run_id.split(':')[0]}")).json())
    assert (session.training_run_ids, session.display_name) == ([run_id], f"copy of {path}")
    found = await api.ok("sessions/search", {"session_id": run_id.split(":")[0]})
    assert (found["sessions"][0]["status"], found["sessions"][0]["checkpoints_count"]) == (None, 1)
    for request in (await api.gradient(run_id, 1), await api.step(run_id, 2)):
        message = await api.failure(request)
        assert message.startswith("user: ")
        for word in ("cannot be trained on", path, "create_training_client_from_state"):
            assert word in message
    info = await api.post("get_info", {"model_id": run_id})
    assert info.status_code == 400
    assert "cannot be trained on" in info.json()["detail"]


async def test_one_idempotency_key_is_one_copy_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model = await api.model()
    path, other = await api.save(model, 1, "a"), await api.save(model, 2, "b")
    first = await copied(api, path, "k", ttl_seconds=3600)
    again = await asyncio.gather(*(copied(api, path, "k", ttl_seconds=3600) for _ in range(4)))
    assert set(again) == {first}
    together = await asyncio.gather(*(copied(api, path, "at once") for _ in range(4)))
    assert len(set(together)) == 1
    assert await copied(api, path, "l", ttl_seconds=3600) != first
    assert await copied(api, path) != await copied(api, path)  # without a key each is another copy
    for changed in ({"source_path": other, "ttl_seconds": 3600}, {"source_path": path, "ttl_seconds": 3601}):
        body = {"destination_project_id": "local", **changed}
        answer = await api.post("copy_weights", body, headers={"X-Idempotency-Key": "k"})
        assert answer.status_code == 400
        assert "X-Idempotency-Key" in answer.json()["detail"]
    count = (await api.get("training_runs", limit=100)).json()["cursor"]["total_count"]
    assert count == 1 + 5
    long = await api.post(
        "copy_weights",
        {"source_path": path, "destination_project_id": "local"},
        headers={"X-Idempotency-Key": "x" * 256},
    )
    assert long.status_code == 400
    # Even when the source is gone, and after a restart.
    await api.delete(url(path))
    await api.http.aclose()
    await api.backend.close()
    assert await copied(await start_api(), path, "k", ttl_seconds=3600) == first


@pytest.mark.parametrize("end", ["deleted", "expired"])
async def test_a_copy_that_is_gone_is_neither_promised_nor_made_again_under_its_key_on_fakes(
    start_api: StartApi, end: str
) -> None:
    clock = Clock()
    api = await start_api(clock=clock)
    session = await api.session()
    path = await api.save(await api.model(session), 1, "a")
    asked: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
        ({"destination_project_id": "local"}, {"X-Idempotency-Key": "k"}, "X-Idempotency-Key", "k"),
        ({"session_id": session, "model_seq_id": 7}, {}, "model_seq_id", f"{session}:train:7"),
    ]
    for where, headers, field, name in asked:
        body = {"source_path": path, "ttl_seconds": 3600, **where}
        copy = (await api.post("copy_weights", body, headers=headers)).json()["tinker_path"]
        if end == "deleted":
            await api.delete(url(copy))
        else:
            clock.ahead += timedelta(seconds=3601)
        answer = await api.post("copy_weights", body, headers=headers)
        assert answer.status_code == 410
        for word in (f"{field}: ", repr(name), copy, "give another"):
            assert word in answer.json()["detail"]
    assert await copied(api, path, "another key") != copy


async def test_a_copy_into_a_session_takes_the_place_of_a_model_on_fakes(api: Api) -> None:
    session = await api.session()
    path = await api.save(await api.model(session, 0), 1, "a")
    place = {"session_id": session, "model_seq_id": 1}
    copy = await copied(api, path, **place)
    assert copy == f"tinker://{session}:train:1/weights/a"
    assert await copied(api, path, **place) == copy
    assert await copied(api, path, "a key", session_id=session, model_seq_id=2) != copy
    assert (await api.get(f"sessions/{session}")).json()["training_run_ids"][1:] == [
        f"{session}:train:1",
        f"{session}:train:2",
    ]
    refused = [
        await api.post("create_model", {**place, "base_model": "fake/bigram"}),
        await api.post("load_weights", {**place, "path": path, "optimizer": True}),
        await api.post("copy_weights", {"source_path": path, **place, "model_seq_id": 0}),
        await api.post("copy_weights", {"source_path": path, **place, "ttl_seconds": 3600}),
        await api.post("copy_weights", {"source_path": path, **place, "destination_project_id": "local"}),
        await api.post("copy_weights", {"source_path": path, "session_id": session}),
        await api.post("copy_weights", {"source_path": path}),
        await api.post("copy_weights", {"source_path": "weights/a", "destination_project_id": "local"}),
    ]
    for answer in refused:
        assert answer.status_code == 400, answer.text
    await api.post(f"sessions/{session}/finish", {})
    assert (await api.post("copy_weights", {"source_path": path, **place, "model_seq_id": 7})).status_code == 410
    gone = await api.post("copy_weights", {"source_path": f"{path}x", "destination_project_id": "local"})
    assert gone.status_code == 404
    assert await copied(api, path)  # checkpoints outlive their session


async def test_an_access_token_is_a_key_of_the_server_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=["tml-one", "tml-two"])
    api.http.headers["x-api-key"] = "tml-one"
    session = await api.session()
    path = await api.save(await api.model(session), 1, "a")
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    copying = {"source_path": path, "destination_project_id": "local"}
    for name, body in (("load_weights", load), ("copy_weights", copying)):
        for wrong in ("tml-three", "", "tml-onetml-two"):
            inside = await api.post(name, {**body, "weights_access_token": wrong})
            header = await api.post(name, body, headers={"X-Tinker-Weights-Access-Token": wrong})
            for answer, field in ((inside, "weights_access_token"), (header, "X-Tinker-Weights-Access-Token")):
                assert answer.status_code == 403
                assert answer.json()["detail"].startswith(f"{field}: it is not a key of this server")
    assert len((await api.get("training_runs")).json()["training_runs"]) == 1
    headers = {"X-Tinker-Weights-Access-Token": "tml-two"}
    copy = (await api.post("copy_weights", copying, headers=headers)).json()["tinker_path"]
    assert copy.endswith("/weights/a")
    promised = await api.ok("load_weights", {**load, "path": copy, "weights_access_token": "tml-two"})
    assert (await api.result(promised["request_id"]))["path"] == copy


async def test_a_wrong_access_token_fails_in_its_place_in_the_models_order_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=["tml-one"])
    api.http.headers["x-api-key"] = "tml-one"
    path = await api.save(await api.model(), 1, "a")
    model = await api.model()
    load = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True, "weights_access_token": "tml-three"}
    failed = await api.failure((await api.ok("load_weights", load))["request_id"])
    assert failed.startswith("user: weights_access_token: it is not a key of this server")
    assert await api.result(await api.gradient(model, 2))
    with pytest.raises(UnsupportedError, match="this process reads every checkpoint without one"):
        await api.backend.checkpoints.copy(
            CopyWeightsRequest(source_path=path, destination_project_id="local", weights_access_token="tml-one")
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_info_knows_every_kind_on_fakes(api: Api, kind: str) -> None:
    config = {"rank": 8, "train_mlp": False, "train_unembed": True, "train_attn": True}
    path = await saved(api, await api.model(lora_config=config), 1, kind)
    info = sdk.WeightsInfoResponse.model_validate(await api.ok("weights_info", {"tinker_path": path}))
    assert (info.base_model, info.is_lora, info.lora_rank) == ("fake/bigram", True, 8)
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (True, False, True)


async def test_runs_tell_their_last_checkpoints_of_each_kind_on_fakes(api: Api) -> None:
    model = await api.model(user_metadata={"recipe": "x", "é": ""})
    for number, name in enumerate(("b", "a"), 1):
        await api.save(model, 2 * number - 1, name)
        await api.named(model, 2 * number, name)
    await saved(api, model, 5, "external_weights", "z")
    for run in (
        (await api.get(f"training_runs/{model}")).json(),
        (await api.get("training_runs")).json()["training_runs"][0],
    ):
        found = sdk.TrainingRun.model_validate(run)
        assert found.user_metadata == {"recipe": "x", "é": ""}
        assert found.last_checkpoint is not None
        assert found.last_sampler_checkpoint is not None
        assert found.last_checkpoint.checkpoint_id == "weights/a"
        assert found.last_sampler_checkpoint.checkpoint_id == "sampler_weights/a"


async def test_torn_optimizer_state_costs_the_optimizer_and_not_the_weights_on_fakes(api: Api) -> None:
    path = await api.save(await api.model(), 1, "a")
    [folder] = on_disk(api)
    (folder / "optimizer.safetensors").write_bytes(b"torn")
    assert (await api.ok("weights_info", {"tinker_path": path}))["optimizer_config"] == {"type": "adamw"}
    body = {"session_id": await api.session(), "model_seq_id": 0, "path": path}
    refused = await api.post("load_weights", {**body, "optimizer": True})
    assert refused.status_code == 400  # and not 5xx, which the SDK would repeat for five minutes
    assert f"{path}: its optimizer state cannot be read" in refused.json()["detail"]
    target = await api.model()
    request = await api.submit("load_weights", {"model_id": target, "seq_id": 1, "path": path, "optimizer": True})
    assert (await api.failure(request)).startswith("user: ")
    assert (await api.result(await api.submit("load_weights", {**body, "optimizer": False})))["path"] == path
