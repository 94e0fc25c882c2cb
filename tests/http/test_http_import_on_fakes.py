"""Adapters come in over HTTP: both checkpoints are the adapter, belong to the caller, and nothing stays of a refused
one."""

import asyncio
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tinker_local.backend.cli.main import main
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses
from tinker_local.backend.control.restore_runs import RestoreRuns
from tinker_local.backend.exporting import import_adapter
from tinker_local.backend.fakes import FakeModel
from tinker_local.backend.hosting.key_file import KeyFile
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.types import InternalError, InvalidRequestError

from tests.http.conftest import BASE, Api, StartApi

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATH = "base_model.model.model.layers.0.self_attn.o_proj"


def archive(folder: Path, **other: bytes) -> bytes:
    """The tar archive of an adapter's folder, with `other` content by file (`config`, `weights`)."""
    content = {CONFIG: (folder / CONFIG).read_bytes(), WEIGHTS: (folder / WEIGHTS).read_bytes()}
    content |= {{"config": CONFIG, "weights": WEIGHTS}[name]: data for name, data in other.items()}
    return tar(content)


def tar(content: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as opened:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), kind
            opened.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def send(api: Api, body: bytes, **params: Any) -> Any:
    return await api.http.post("/api/v1/import_adapter", params={"base_model": BASE, **params}, content=body)


async def trained(api: Api) -> tuple[str, Path]:
    """A model with a step, and the folder of its training checkpoint."""
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2))
    path = await api.save(model, 3, "first")
    record = await api.backend.checkpoints.get(path)
    return model, api.backend.store.checkpoint_folder(record)


async def sampler_of(api: Api, path: str) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0, "model_path": path}
    return str((await api.ok("create_sampling_session", body))["sampling_session_id"])


async def nothing_left(api: Api, before: int) -> None:
    """No checkpoint, adapter, file or live session is there that was not before."""
    assert len((await api.get("checkpoints")).json()["checkpoints"]) == before
    assert not list(api.backend.options.data_dir.glob("imports/*"))
    assert len(api.trainer.adapters) == len(api.backend.runs.all_live())
    found = (await api.ok("sessions/search", {"display_name": "import", "statuses": [{"type": "active"}]}))["sessions"]
    assert found == []


async def test_an_imported_adapter_samples_and_trains_as_it_did_on_fakes(api: Api) -> None:
    model, folder = await trained(api)
    expected = await api.score(await api.nameless(model, 4, 0), 0)
    answer = await send(api, archive(folder), name="mine")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["notes"] == []
    run = told["path"].split("/")[2]
    assert (told["path"], told["sampler_path"]) == (
        f"tinker://{run}/weights/mine",
        f"tinker://{run}/sampler_weights/mine",
    )
    assert await api.score(await sampler_of(api, told["sampler_path"]), 0) == pytest.approx(expected, abs=1e-6)
    body = {"session_id": await api.session(), "model_seq_id": 0, "path": told["path"], "optimizer": True}
    resumed = str((await api.result(await api.submit("load_weights", body)))["model_id"])
    assert await api.score(await api.nameless(resumed, 1, 0), 0) == pytest.approx(expected, abs=1e-6)
    for again in (model, resumed):
        await api.result(await api.gradient(again, 5 if again == model else 2))
        await api.result(await api.step(again, 6 if again == model else 3))
    info = await api.ok("weights_info", {"tinker_path": told["path"]})
    assert (info["lora_rank"], info["train_attn"], info["train_unembed"]) == (4, True, True)
    await nothing_left(api, 3)


async def test_an_adapter_of_some_modules_and_another_alpha_is_told_on_fakes(api: Api, tmp_path: Path) -> None:
    _, folder = await trained(api)
    tensors = {name: array for name, array in load_file(folder / WEIGHTS).items() if name.startswith(PATH)}
    save_file(tensors, tmp_path / "w")
    config = json.loads((folder / CONFIG).read_text()) | {"lora_alpha": 8, "target_modules": ["o_proj"]}
    body = archive(folder, config=json.dumps(config).encode(), weights=(tmp_path / "w").read_bytes())
    told = (await send(api, body)).json()
    assert told["notes"] == ["the adapter's scale is 2, and 32 / r = 8 here: B was multiplied by 0.25, exactly"]
    for path in (told["path"], told["sampler_path"]):
        assert (await api.backend.checkpoints.get(path)).user_metadata == {"import": told["notes"][0]}
    record = await api.backend.checkpoints.get(told["sampler_path"])
    found = load_file(api.backend.store.checkpoint_folder(record) / WEIGHTS)
    assert found.keys() == tensors.keys()
    assert np.array_equal(found[f"{PATH}.lora_A.weight"], tensors[f"{PATH}.lora_A.weight"])
    assert np.array_equal(found[f"{PATH}.lora_B.weight"], tensors[f"{PATH}.lora_B.weight"] / 4)


async def test_an_adapter_on_a_packed_base_is_told_to_be_from_elsewhere_on_fakes(start_api: StartApi) -> None:
    """Its checkpoints are of that base, as what follows will be, and their optimizer is fresh."""
    api = await start_api(base_precision="int4")
    _, folder = await trained(api)
    told = (await send(api, archive(folder), name="imported")).json()
    note = "it was trained elsewhere, and this server has a base in 4 bits (int4-curved)"
    assert told["notes"] == [note]
    for path in (told["path"], told["sampler_path"]):
        record = await api.backend.checkpoints.get(path)
        assert record.base_precision == "int4-curved"
        assert record.user_metadata == {"import": note, "tinker_local.began_on": "elsewhere"}


async def test_an_adapter_that_names_another_base_model_is_refused_unless_told_on_fakes(api: Api) -> None:
    _, folder = await trained(api)
    config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": "Qwen/Qwen3-8B"}
    body = archive(folder, config=json.dumps(config).encode())
    answer = await send(api, body)
    assert answer.status_code == 400
    assert (
        "the adapter is of 'Qwen/Qwen3-8B', and 'fake/bigram' is served from 'fake/bigram'" in answer.json()["detail"]
    )
    await nothing_left(api, 1)
    assert (await send(api, body, other_base=True)).status_code == 200


@pytest.mark.parametrize(
    ("body", "params", "status", "message"),
    [
        pytest.param(b"x" * 2000, {}, 400, "body: is not a tar archive", id="no-archive"),
        pytest.param(b"", {}, 400, f"lacks {CONFIG} and {WEIGHTS}", id="empty"),
        pytest.param(tar({CONFIG: b"{}"}), {}, 400, f"lacks {WEIGHTS}", id="one-file"),
        pytest.param(tar({"../../x": b"1"}), {}, 400, "'../../x' of the tar archive", id="another-file"),
        pytest.param(tar({CONFIG: b""}, tarfile.SYMTYPE), {}, 400, "as a plain file", id="link"),
        pytest.param(tar({CONFIG: b"{}"})[:513], {}, 400, "ends 1 bytes early", id="cut-off"),
        pytest.param(tar({CONFIG: b"{}"}) + tar({CONFIG: b"{}"}), {}, 400, "once each", id="twice"),
        pytest.param(None, {"base_model": "none"}, 400, "base_model", id="base"),
        pytest.param(None, {"name": "a/b"}, 400, "name: 'a/b' cannot name a checkpoint", id="name"),
        pytest.param(None, {"name": "autosave"}, 400, "'autosave' is the name", id="autosave"),
    ],
)
async def test_what_is_no_adapter_leaves_nothing_on_fakes(
    api: Api, body: bytes | None, params: dict[str, str], status: int, message: str
) -> None:
    _, folder = await trained(api)
    answer = await send(api, archive(folder) if body is None else body, **params)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]
    await nothing_left(api, 1)
    assert await api.healthy()


async def test_a_rank_above_the_servers_and_too_many_bytes_are_refused_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    _, folder = await trained(api)
    body = archive(folder)
    small = await start_api(max_rank=2, data_dir=folder.parent / "small")
    answer = await send(small, body)
    assert (answer.status_code, answer.json()["detail"]) == (
        400,
        "lora_config.rank: 4 is outside 1 to 2, the largest rank of this server",
    )
    answer = await send(small, body + bytes(2**23))
    assert answer.status_code == 400
    assert f"body: {len(body) + 2**23} bytes are more than" in answer.json()["detail"]
    await nothing_left(small, 0)


async def test_an_import_whose_second_checkpoint_fails_leaves_none_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = await trained(api)

    async def fail(request: Any) -> Any:
        raise InternalError("no")

    monkeypatch.setattr(api.backend.training, "save_weights", fail)
    assert (await send(api, archive(folder))).status_code == 500
    await nothing_left(api, 1)


async def test_an_import_that_is_cancelled_while_a_checkpoint_is_written_leaves_none_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = await trained(api)
    write, begun, go_on = api.backend.store.write_checkpoint, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(10)
        return write(*args, **kwargs)

    monkeypatch.setattr(api.backend.store, "write_checkpoint", slowly)
    running = asyncio.create_task(api.backend.imports.add(folder, BASE, "cancelled"))
    await begun.wait()
    running.cancel()
    await asyncio.sleep(0.1)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.3)
    await nothing_left(api, 1)


async def test_an_import_whose_trainer_is_lost_does_not_go_on_with_a_fresh_adapter_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without steps is otherwise created again in the new trainer."""
    _, folder = await trained(api)
    save = api.backend.training.save_weights
    restore = RestoreRuns(api.backend.models.get(BASE), api.backend.store, api.backend.runs, CheckpointUses())

    async def lose_the_trainer_first(request: Any) -> Any:
        api.trainer._adapters.clear()
        await restore.lost("the trainer's process ended")
        await restore.restore()
        return await save(request)

    monkeypatch.setattr(api.backend.training, "save_weights", lose_the_trainer_first)
    answer = await send(api, archive(folder))
    assert answer.status_code == 500
    assert "the trainer's process ended, and the adapter is lost that was being imported" in answer.json()["detail"]
    assert [one["checkpoint_id"] for one in (await api.get("checkpoints")).json()["checkpoints"]] == ["weights/first"]


async def test_an_import_belongs_to_its_caller_who_has_one_at_a_time_on_fakes(
    start_api: StartApi, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("ada tml-ada-ada-ada\nbob tml-bob-bob-bob\n")
    (tmp_path / "keys").chmod(0o600)
    local = await start_api()
    _, folder = await trained(local)
    api = await start_api(api_keys=KeyFile(tmp_path / "keys"), data_dir=tmp_path / "shared")
    ada, bob = ({"X-API-Key": f"tml-{name}-{name}-{name}"} for name in ("ada", "bob"))
    whole, begun, go_on = archive(folder), asyncio.Event(), asyncio.Event()

    async def slowly() -> Any:
        yield whole[:100]
        begun.set()
        await go_on.wait()
        yield whole[100:]

    def post(key: dict[str, str], content: Any) -> Any:
        return api.http.post("/api/v1/import_adapter", params={"base_model": BASE}, content=content, headers=key)

    first = asyncio.create_task(post(ada, slowly()))
    await begun.wait()
    refused = await post(ada, whole)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert (await post(bob, whole)).status_code == 200
    go_on.set()
    path = (await first).json()["path"]
    for key, status in ((ada, 200), (bob, 404)):
        answer = await api.http.post("/api/v1/weights_info", json={"tinker_path": path}, headers=key)
        assert answer.status_code == status


def test_the_command_and_the_function_import_a_folder_on_fakes(loopback_server: LoopbackServer, tmp_path: Path) -> None:
    rng, fake = np.random.default_rng(1), FakeModel(BASE)
    shapes = {"A": (2, fake.num_features), "B": (fake.vocab_size, 2)}
    save_file(
        {f"{PATH}.lora_{each}.weight": rng.normal(size=shapes[each]).astype(np.float32) for each in "AB"},
        tmp_path / WEIGHTS,
    )
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 16, "lora_dropout": 0.1}))
    server = ["--url", loopback_server.url, "--api-key", loopback_server.api_key]
    done = CliRunner().invoke(main, ["import", str(tmp_path), "--model", BASE, "--name", "a", *server])
    assert done.exit_code == 0, done.output
    assert "lora_dropout 0.1 is not applied" in done.output
    assert "/weights/a\n" in done.stdout
    imported = import_adapter(tmp_path, model=BASE, url=loopback_server.url, api_key=loopback_server.api_key)
    assert imported.sampler_path.endswith("/sampler_weights/imported")
    assert len(imported.notes) == 2
    (tmp_path / CONFIG).write_text("{}")
    done = CliRunner().invoke(main, ["import", str(tmp_path), "--model", BASE, *server])
    assert (done.exit_code, done.output) == (1, "Error: adapter_config.json: peft_type: None is not one of ['LORA']\n")
    done = CliRunner().invoke(main, ["import", str(tmp_path), "--model", BASE, "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: no server answers at http://127.0.0.1:9")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(InvalidRequestError, match=r"has no adapter_model\.safetensors"):
        import_adapter(tmp_path, model=BASE, url=loopback_server.url)
