"""Steps and saves that would lose a run: refused, and what an older server saved so is listed as unusable."""

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.adapters import adapter_files

from tests.http.conftest import BASE, Api, StartApi, close_api, open_api


async def gradient_and_step(api: Api, model: str, seq_id: int, **adam: float) -> str:
    await api.result(await api.gradient(model, seq_id))
    return await api.step(model, seq_id + 1, **adam)


async def test_a_step_that_would_leave_what_is_not_finite_is_refused_on_fakes(api: Api) -> None:
    """The first gradient of A is 0: without eps, 0 / 0."""
    model = await api.model()
    before = api.trainer.capture(model, optimizer=True)
    message = await api.failure(await gradient_and_step(api, model, 1, eps=0.0))
    assert message.startswith("user: optim_step: with learning_rate=0.1 ")
    assert "lora_A.weight" in message
    assert "the step was not taken and the gradient was discarded" in message
    after = api.trainer.capture(model, optimizer=True)
    assert after.step == before.step == 0
    for name, array in before.tensors.items():
        np.testing.assert_array_equal(after.tensors[name], array)
    assert await api.ok("training_runs/progress", {}) if False else True
    run = api.backend.runs.live(model)
    assert run is not None
    assert (run.steps, run.queue.gradient, run.would_lose()) == (0, False, None)
    # The next step has its own gradient and loss alone.
    loss = (await api.result(await api.gradient(model, 3))).metrics["loss:sum"]
    assert (await api.result(await api.step(model, 4)))["metrics"]["grad_norm"] > 0
    assert run.progress.last is not None
    assert run.progress.last.loss == pytest.approx(loss / 3)


async def test_a_save_of_what_could_not_be_loaded_replaces_nothing_on_fakes(start_api: StartApi) -> None:
    """Also by itself: `autosave` stays what it was."""
    api = await start_api()
    model = await api.model()
    await api.result(await gradient_and_step(api, model, 1))
    path = await api.save(model, 3, "latest")
    run = api.backend.runs.live(model)
    assert run is not None
    await api.result(await gradient_and_step(api, model, 4))
    autosave = await api.backend.autosaves.save(run)
    assert autosave is not None
    await api.result(await gradient_and_step(api, model, 6))
    api.trainer._adapters[model].flat[3] = np.nan
    body = {"model_id": model, "seq_id": 8, "path": "latest", "overwrite": True}
    message = await api.failure(await api.submit("save_weights", body))
    assert "nothing was saved, because it could not be loaded: adapter_model.safetensors: base_model" in message
    said: list[str] = []
    await api.backend.autosaves.save_all([run], 30, said.append)
    assert len(said) == 1
    assert said[0].startswith(f"NOT saved: 1 optimizer step of {model} since {autosave.tinker_path}: nothing was saved")
    export = await api.submit("save_weights_external", {"model_id": model, "seq_id": 9, "path": "out"})
    run.base.scheduler.release(run.queue)  # `save_all` holds it
    assert "nothing was saved" in await api.failure(export)
    for kept in (path, autosave.tinker_path):
        body = {"session_id": await api.session(), "model_seq_id": 0, "path": kept, "optimizer": True}
        await api.result(await api.submit("load_weights", body))


async def test_unusable_saves_of_an_older_server_say_so_wherever_they_are_used_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await open_api(data_dir=tmp_path)
    model = await api.model()
    good = await api.save(model, 1, "good")
    with monkeypatch.context() as old:
        old.setattr(adapter_files, "_fault", lambda files: "")
        api.trainer._adapters[model].flat[3] = np.nan
        state = await api.save(model, 2, "state")
        body = {"model_id": model, "seq_id": 3, "path": "export"}
        export = (await api.result(await api.submit("save_weights_external", body)))["path"]
        sampler = await api.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "sampler"})
        assert "differ" in await api.failure(sampler)  # never was one
    await close_api(api)
    with sqlite3.connect(tmp_path / "metadata.sqlite3") as connection:
        connection.execute("UPDATE checkpoints SET unusable = NULL")
    connection.close()

    api = await open_api(data_dir=tmp_path)
    try:
        listed = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
        found: dict[str, Any] = {one["tinker_path"]: one.get("unusable") for one in listed}
        why = found[state]
        assert why.startswith("adapter_model.safetensors: base_model.model.")
        assert found == {good: None, state: why, export: why}
        everything = (await api.get("checkpoints")).json()["checkpoints"]
        assert {one["tinker_path"]: one.get("unusable") for one in everything} == found
        assert (await api.ok("weights_info", {"tinker_path": state}))["unusable"] == why
        assert "unusable" not in await api.ok("weights_info", {"tinker_path": good})
        assert (await api.get(f"training_runs/{model}")).json()["last_checkpoint"]["tinker_path"] == good
        body = {"session_id": await api.session(), "model_seq_id": 0, "path": state, "optimizer": False}
        assert f"checkpoint {state} cannot be loaded: {why}" in await api.failure(
            await api.submit("load_weights", body)
        )
        urls = await api.get(f"training_runs/{model}/checkpoints/external_weights/export/external_weights_urls")
        assert urls.status_code == 400, urls.text
        assert f"{export} cannot be used: {why}" in urls.text
        lost = await api.failure(await api.gradient(model, 5))
        assert f"Its last checkpoint is {good}" in lost
        copied = await api.ok("copy_weights", {"source_path": state, "destination_project_id": "local"})
        copy = (await api.get("checkpoints")).json()["checkpoints"]
        assert {one["tinker_path"]: one.get("unusable") for one in copy}[copied["tinker_path"]] == why
        assert BASE in {one["base_model"] for one in copy}
    finally:
        await close_api(api)
