"""Training is not lost with its server or its session: autosaves."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.control import autosaves, training_runs
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.threads import DISK
from tinker_local.types import StorageFullError

from tests.http.conftest import Api, StartApi, close_api, open_api


async def trained(api: Api, model: str, seq_id: int = 1, steps: int = 1) -> int:
    """So many gradients and steps; the next `seq_id`."""
    for _ in range(steps):
        await api.result(await api.gradient(model, seq_id))
        await api.result(await api.step(model, seq_id + 1))
        seq_id += 2
    return seq_id


async def losses(api: Api, model: str, seq_id: int) -> list[float]:
    """Of three more steps."""
    found = []
    for at in range(seq_id, seq_id + 6, 2):
        output = await api.result(await api.gradient(model, at))
        found.append(float(output.metrics["loss:sum"]))
        await api.result(await api.step(model, at + 1))
    return found


async def continued(api: Api, path: str) -> str:
    """A new run from `path`, with its optimizer."""
    body = {"session_id": await api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    return str((await api.result(await api.submit("load_weights", body)))["model_id"])


def told(api: Api) -> list[str]:
    """What a stop says, from now on."""
    said: list[str] = []
    api.backend._progress = said.append
    return said


class HeldWrites:
    """Writes of checkpoints that wait for `go`; `begun`: the runs in the order in which they began."""

    def __init__(self, api: Api) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self._write = api.backend.store.write_checkpoint
        api.backend.store.write_checkpoint = self._held  # type: ignore[method-assign]

    def _held(self, record: CheckpointRecord, *args: Any, **kwargs: Any) -> CheckpointRecord:
        self.begun.append(record.training_run_id)
        assert self.go.wait(60)
        return self._write(record, *args, **kwargs)


async def test_training_goes_on_to_the_same_bits_from_what_a_stop_saved_on_fakes(tmp_path: Path) -> None:
    api = await open_api(data_dir=tmp_path)
    model, twin = await api.model(), await api.model()
    at = await trained(api, model, steps=3)
    await trained(api, twin, steps=3)
    expected = await losses(api, twin, at)
    said = told(api)
    await api.backend.stop()
    path = f"tinker://{model}/weights/autosave"
    assert f"saved {path} after 3 optimizer steps" in said
    how = f"Its last checkpoint is {path}; continue with create_training_client_from_state_with_optimizer"
    assert (
        await api.failure(await api.step(model, at)) == f"server: model {model} is gone: the server was stopped. {how}"
    )
    await close_api(api)
    api = await open_api(data_dir=tmp_path)
    try:
        lost = await api.failure(await api.step(model, at))
        assert lost == f"server: model {model} is gone: the server was restarted. {how}"
        assert await losses(api, await continued(api, path), 1) == expected
    finally:
        await close_api(api)


async def test_queued_training_is_answered_at_a_stop_and_what_runs_is_saved_on_fakes(api: Api) -> None:
    model = await api.model()
    at = await trained(api, model)
    api.trainer.hold.clear()
    running, step = await api.gradient(model, at), await api.step(model, at + 1)
    waits = await api.gradient(model, at + 3)  # for one that never comes
    await api.until(lambda: api.trainer.entered)
    stop = asyncio.create_task(api.backend.stop())
    await asyncio.sleep(0)
    assert (await api.get("healthz")).json()["detail"] == "the server is stopping"
    late = await api.step(model, at + 4)
    api.trainer.hold.set()
    await stop
    await api.result(running)
    for request in (step, waits, late):
        failure = await api.failure(request)
        assert "the server was stopped, and the gradient since the last optimizer step is lost" in failure
        assert f"tinker://{model}/weights/autosave" in failure
    assert api.trainer.calls[-1][0] == "forward_backward"


async def test_a_step_that_is_in_the_trainer_at_a_stop_is_saved_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    hold, entered, step = threading.Event(), threading.Event(), api.trainer.optim_step

    def slow(*args: Any) -> Any:
        entered.set()
        assert hold.wait(60)
        return step(*args)

    monkeypatch.setattr(api.trainer, "optim_step", slow)
    request = await api.step(model, 2)
    await api.until(entered.is_set)
    stop = asyncio.create_task(api.backend.stop())
    await asyncio.sleep(0.01)
    hold.set()
    await stop
    assert "metrics" in await api.result(request)
    (saved,) = api.backend.store.list_checkpoints(model)
    assert saved.user_metadata == {"optimizer_steps": "1"}


async def test_a_stop_saves_what_trained_last_first_and_names_what_it_could_not_save_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autosaves, "AT_ONCE", 1)
    api = await start_api(stop_timeout=4)
    models = [await api.model() for _ in range(3)]
    for model in (models[1], models[0], models[2]):
        await trained(api, model, steps=2)
    await api.save(models[1], 5, "mine")
    writes, said = HeldWrites(api), told(api)
    await api.backend.stop()
    writes.go.set()
    assert writes.begun == [models[2]]
    assert said == [
        "saving 2 training runs, for 2 s at most; a second signal skips this",
        f"NOT saved: 2 optimizer steps of {models[2]}, which has no checkpoint: there was no time left",
        f"NOT saved: 2 optimizer steps of {models[0]}, which has no checkpoint: there was no time left",
    ]
    assert "2 optimizer steps are lost that no checkpoint has" in await api.failure(await api.step(models[0], 5))


async def test_saving_at_a_stop_can_be_skipped_on_fakes(api: Api) -> None:
    model = await api.model()
    await trained(api, model)
    writes, said = HeldWrites(api), told(api)
    stop = asyncio.create_task(api.backend.stop())
    await api.until(lambda: bool(writes.begun))
    api.backend.skip_saving()
    await stop
    writes.go.set()
    assert said[1:] == [f"NOT saved: 1 optimizer step of {model}, which has no checkpoint: it was skipped"]


async def test_a_stop_writes_nothing_when_everything_is_saved_on_fakes(api: Api) -> None:
    fresh, saved = await api.model(), await api.model()
    await api.save(saved, await trained(api, saved), "mine")
    said = told(api)
    await api.backend.stop()
    assert said == []
    assert api.backend.store.list_checkpoints(fresh) == []
    assert [record.name for record in api.backend.store.list_checkpoints(saved)] == ["mine"]
    assert (await api.failure(await api.gradient(fresh, 1))).endswith("It has no saved checkpoint.")


@pytest.mark.mutation(
    "autosave-newer-than-its-content",
    "Autosaves.save",
    "await self._capture(run)\n",
    'await self._capture(run)\n            record = run.checkpoint("weights", AUTOSAVE, None, record.user_metadata)\n',
)
async def test_a_checkpoint_that_a_client_takes_during_an_autosave_is_the_newer_one_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the lost run named the autosave, which lacks a step."""
    model = await api.model()
    at = await trained(api, model)
    copied, go = asyncio.Event(), asyncio.Event()

    class Held:
        async def run(self, *work: Any) -> Any:
            copied.set()
            await go.wait()
            return await DISK.run(*work)

    monkeypatch.setattr(autosaves, "DISK", Held())
    run = api.backend.runs.live(model)
    assert run is not None
    autosave = asyncio.create_task(api.backend.autosaves.save(run))
    await copied.wait()
    at = await trained(api, model, at)
    await api.save(model, at, "mine")
    go.set()
    saved = await autosave
    assert saved is not None
    assert saved.user_metadata == {"optimizer_steps": "1"}
    await api.backend.stop()
    assert f"Its last checkpoint is tinker://{model}/weights/mine;" in await api.failure(await api.step(model, at + 1))


async def test_training_whose_checkpoint_was_deleted_is_saved_again_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.save(model, await trained(api, model), "mine")
    assert (await api.delete(f"training_runs/{model}/checkpoints/weights/mine")).status_code == 204
    await api.backend.stop()
    assert [record.name for record in api.backend.store.list_checkpoints(model)] == ["autosave"]


async def test_a_disk_that_is_full_at_a_stop_is_told_on_fakes(api: Api) -> None:
    model = await api.model()
    await trained(api, model)

    def full(*_: Any, **__: Any) -> Any:
        raise StorageFullError("no space left in /data")

    api.backend.store.write_checkpoint = full  # type: ignore[method-assign]
    said = told(api)
    await api.backend.stop()
    assert said[1:] == [f"NOT saved: 1 optimizer step of {model}, which has no checkpoint: no space left in /data"]


@pytest.mark.mutation(
    "silent-session-loses-training", "ControlPlane._end_session.end_runs", "if not end.clean:", "if False:"
)
async def test_a_session_that_ends_because_its_heartbeats_stopped_is_saved_on_fakes(api: Api) -> None:
    """A laptop that slept."""
    session = await api.session()
    model = await api.model(session)
    at = await trained(api, model)
    waits = await api.gradient(model, at + 1)
    api.backend.sessions._live[session].last_heartbeat -= 1000
    await api.backend.sessions.end_silent()
    path = f"tinker://{model}/weights/autosave"
    how = f"Its last checkpoint is {path}; continue with create_training_client_from_state_with_optimizer"
    assert (await api.failure(waits)).endswith(f"the session {session} has ended. {how}")
    failure = await api.failure(await api.step(model, at))
    assert failure.endswith(f"its session has ended (heartbeats_lost: none for 300 s). {how}")
    assert api.trainer.adapters == set()
    await trained(api, await continued(api, path))


@pytest.mark.parametrize(("reason", "saves"), [("success", False), ("errored", True), ("interrupted", True)])
async def test_training_is_saved_when_its_program_failed_but_not_when_it_finished_on_fakes(
    api: Api, reason: str, saves: bool
) -> None:
    session = await api.session()
    model = await api.model(session)
    await trained(api, model)
    answer = await api.post(f"sessions/{session}/finish", {"reason": {"type": reason}})
    assert answer.status_code == 204
    found = [record.name for record in api.backend.store.list_checkpoints(model)]
    assert found == (["autosave"] if saves else [])


async def test_the_autosave_of_a_run_is_replaced_by_the_next_and_expires_on_fakes(start_api: StartApi) -> None:
    api = await start_api(autosave=0.001)
    store, model = api.backend.store, await api.model()

    async def saved(steps: int) -> CheckpointRecord:
        wanted = {"optimizer_steps": str(steps)}
        await api.until(lambda: [dict(c.user_metadata) for c in store.list_checkpoints(model)] == [wanted])
        return store.list_checkpoints(model)[0]

    at = await trained(api, model)
    first = await saved(1)
    assert first.expires_at is not None
    assert timedelta(days=6.9) < first.expires_at - datetime.now(UTC) <= timedelta(days=7)
    await trained(api, model, at)
    second = await saved(2)
    await api.until(lambda: not store.checkpoint_folder(first).exists())
    assert store.checkpoint_folder(second).exists()
    listed = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [entry["checkpoint_id"] for entry in listed] == ["weights/autosave"]
    assert store.session_storage([api.backend.runs.all_live()[0].record.session_id]) == {
        model.partition(":")[0]: (1, second.size_bytes)
    }


async def test_steps_do_not_wait_while_an_autosave_is_written_on_fakes(start_api: StartApi) -> None:
    api = await start_api(autosave=0.001)
    writes, model = HeldWrites(api), await api.model()
    at = await trained(api, model)
    await api.until(lambda: bool(writes.begun))
    await trained(api, model, at, steps=3)
    assert writes.begun == [model]
    writes.go.set()


async def test_steps_run_between_the_parts_of_an_autosave_which_is_as_before_them_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autosaves, "PART", 1000)
    api = await start_api(autosave=1000)
    model = await api.model()
    at = await trained(api, model)
    (run,) = api.backend.runs.all_live()
    trainer = run.base.engines.trainer
    expected = trainer.capture(model, optimizer=True)
    read, calls = type(trainer).read_adapter, list[str]()
    call, stepped = run.base.scheduler.call, asyncio.Event()

    def read_and_tell(self: Any, adapter_id: str, vector: str, start: int, stop: int) -> Any:
        calls.append(vector)
        return read(self, adapter_id, vector, start, stop)

    async def third_after_the_steps(function: Any, *args: Any, **kwargs: Any) -> Any:
        if len(calls) == 2 and function == trainer.read_adapter:
            await stepped.wait()
        return await call(function, *args, **kwargs)

    monkeypatch.setattr(type(trainer), "read_adapter", read_and_tell)
    monkeypatch.setattr(run.base.scheduler, "call", third_after_the_steps)
    saving = asyncio.create_task(api.backend.autosaves.save(run))
    await api.until(lambda: len(calls) == 2)
    await trained(api, model, at, steps=2)
    stepped.set()
    record = await saving
    assert record is not None
    assert record.user_metadata == {"optimizer_steps": "1"}
    assert len(calls) > 3
    assert set(calls) == {"weights", "exp_avg", "exp_avg_sq"}
    written = api.backend.store.read_checkpoint(record, optimizer=True)
    assert written.optimizer is not None
    assert expected.optimizer is not None
    for found, wanted in ((written.tensors, expected.tensors), (written.optimizer, expected.optimizer)):
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert run.unsaved_steps == 2
    await api.until(lambda: api.trainer.adapters == {model})


async def test_a_client_cannot_take_the_name_of_autosaves_on_fakes(api: Api) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "autosave", "overwrite": True}
    failure = await api.failure(await api.submit("save_weights", body))
    assert failure == "user: path: 'autosave' is the name of what the server saves by itself"


async def test_a_backend_that_is_left_by_an_exception_saves_and_one_that_is_closed_does_not_on_fakes(
    tmp_path: Path,
) -> None:
    for error, saved in ((None, []), (KeyError(), ["autosave"])):
        api = await open_api(data_dir=tmp_path / str(error))
        await trained(api, await api.model())
        await api.backend.__aexit__(None if error is None else type(error), error, None)
        await api.http.aclose()
        folders = await asyncio.to_thread(weights_in, tmp_path / str(error))
        assert [folder.name.partition("@")[0] for folder in folders] == saved


def weights_in(data_dir: Path) -> list[Path]:
    """The folders of training checkpoints."""
    return list(data_dir.glob("checkpoints/*/weights/*@*"))


async def test_a_run_that_is_lost_after_the_clock_was_set_back_names_its_later_save_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the error, and first in each listing; and the run that was used last is not the one to end first."""
    begun = datetime(2026, 5, 1, tzinfo=UTC)

    class SetBack(datetime):
        """An hour earlier each time that it is asked."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            nonlocal begun
            begun -= timedelta(hours=1)
            return begun

    monkeypatch.setattr(training_runs, "datetime", SetBack)
    session = await api.session()
    model = await api.model(session)
    at = 1
    for name in ("a", "b", "c"):
        at = await trained(api, model, at)
        await api.save(model, at, name)
        at += 1
    path = f"tinker://{model}/weights/c"
    listed = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["weights/c", "weights/b", "weights/a"]
    times = [each["time"] for each in listed]
    assert times == sorted(times)  # as the clock had it: the first is the earliest
    everything = (await api.get("checkpoints")).json()["checkpoints"]
    assert everything[0]["tinker_path"] == path
    run = (await api.get(f"training_runs/{model}")).json()
    assert run["last_checkpoint"]["tinker_path"] == path
    another = await api.model(session, 1)
    for live in api.backend.runs.all_live():
        api.backend.runs.touch(live)
    last_used = api.backend.runs.live(model)
    assert last_used is not None
    api.backend.runs.touch(last_used)
    said = training_runs._least_used(api.backend.runs.all_live())
    assert said.index(another) < said.index(model)
    await api.post(f"sessions/{session}/finish", {})
    failure = await api.failure(await api.step(model, at))
    assert f"Its last checkpoint is {path};" in failure
