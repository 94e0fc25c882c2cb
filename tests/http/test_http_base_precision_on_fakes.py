"""Of a run, a checkpoint and a sampler: in how many bits the base was on which it was trained, and what a server does
that has the base in others."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.storage.names import safe_segment
from tinker_local.backend.storage.store import DATABASE
from tinker_local.backend.weights.precision import parts_of, word_of
from tinker_local.types import NotFoundError

from tests.http.conftest import Api, StartApi, close_api

BEGAN = "tinker_local.began_on"


async def trained(api: Api, kind: str = "weights") -> str:
    """The path of a checkpoint after a step."""
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2))
    return await (api.save(model, 3, "a") if kind == "weights" else api.named(model, 3, "a"))


async def load(api: Api, path: str, *, optimizer: bool) -> str:
    """The request that makes a new run of `path`."""
    body = {"session_id": await api.session(), "model_seq_id": 0, "path": path, "optimizer": optimizer}
    return await api.submit("load_weights", body)


async def shown(api: Api, path: str) -> list[dict[str, Any]]:
    """A checkpoint wherever it is shown."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    listed = (await api.get("checkpoints")).json()["checkpoints"]
    of_run = (await api.get(f"training_runs/{run}")).json()
    last = "last_checkpoint" if kind == "weights" else "last_sampler_checkpoint"
    return [
        next(each for each in listed if each["tinker_path"] == path),
        (await api.get(f"training_runs/{run}/checkpoints/{kind}/{name}")).json(),
        await api.ok("weights_info", {"tinker_path": path}),
        of_run,
        of_run[last],
    ]


def options_of(chosen: str | None) -> dict[str, Any]:
    """Of a server: "int4+head-int8" has two options."""
    layers, head = parts_of(chosen)
    return {"base_precision": layers, "head_precision": head}


def recorded(chosen: str | None) -> str | None:
    """What records say of a base with these options."""
    return word_of(*parts_of(chosen))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "was trained on" in each.getMessage()]


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
async def test_a_checkpoint_says_in_how_many_bits_its_base_was_on_fakes(start_api: StartApi, kind: str) -> None:
    """A dense one as before: without a field."""
    packed = await start_api(base_precision="int4")
    path = await trained(packed, kind)
    assert [each["base_precision"] for each in await shown(packed, path)] == ["int4-curved"] * 5
    models = (await packed.get("get_server_capabilities")).json()["supported_models"]
    assert [each["base_precision"] for each in models] == ["int4-curved"]
    await close_api(packed)
    dense = await start_api()
    assert [each["base_precision"] for each in await shown(dense, path)] == ["int4-curved"] * 5
    own = await trained(dense, kind)
    assert not [each for each in await shown(dense, own) if "base_precision" in each]
    assert "base_precision" not in (await dense.get("get_server_capabilities")).text


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            "int4",
            None,
            "was trained on a base in 4 bits (int4-curved), and this server has a dense base, to whose gradients the "
            "state of its optimizer does not belong: serve the model "
            "with --base-precision int4, or load the weights alone",
        ),
        (
            None,
            "int8",
            "was trained on a dense base, or by a server that did not record it, and this server has a base in 8 bits "
            "(int8), to whose gradients the state of "
            "its optimizer does not belong: serve the model without --base-precision, or load the weights alone",
        ),
        ("int8", "int4", "serve the model with --base-precision int8, or load the weights alone"),
        (
            "int4+head-int8",
            "int4",
            "was trained on a base in 4 bits (int4-curved) with embedding and LM head in 8 bits (int8), and this "
            "server has a base in 4 bits (int4-curved), to whose gradients the state of its optimizer does not "
            "belong: serve the model with --base-precision int4 and with --head-precision int8, or load the weights "
            "alone",
        ),
        ("int4", "int4+head-int8", "with --base-precision int4 and without --head-precision, or load"),
        ("dense+head-int8", None, "serve the model with --head-precision int8, or load the weights alone"),
        (None, "dense+head-int8", "serve the model without --head-precision, or load the weights alone"),
        (None, "int4+head-int8", "without --base-precision and without --head-precision, or load the weights alone"),
    ],
    ids=[
        *("packed-dense", "dense-packed", "packed-packed", "head-without", "without-head", "head alone-dense"),
        *("dense-head alone", "dense-packed with head"),
    ],
)
async def test_training_with_its_optimizer_on_another_precision_is_refused_on_fakes(
    start_api: StartApi, caplog: pytest.LogCaptureFixture, before: Any, after: Any, sentence: str
) -> None:
    """Into a new run and into one that is there. The weights alone are loaded, which the log and all checkpoints of
    that run say."""
    first = await start_api(**options_of(before))
    path = await trained(first)
    await close_api(first)
    api = await start_api(**options_of(after))
    answer = await api.post(
        "load_weights", {"session_id": await api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    )
    assert answer.status_code == 400
    assert sentence in answer.json()["detail"]
    assert path in answer.json()["detail"]
    model = await api.model()
    into = {"model_id": model, "seq_id": 1, "path": path}
    assert sentence in await api.failure(await api.submit("load_weights", {**into, "optimizer": True}))
    assert not said(caplog)

    with caplog.at_level(logging.WARNING):
        alone = (await api.result(await load(api, path, optimizer=False)))["model_id"]
        other = await api.model()
        await api.result(await api.submit("load_weights", {**into, "model_id": other, "optimizer": False}))
    assert [each.partition(": ")[0] for each in said(caplog)] == [f"run {alone}", f"run {other}"]
    for number, run in ((1, alone), (2, other)):
        saved = await api.save(run, number, "later", user_metadata={"of": "mine"})
        [one, *_] = await shown(api, saved)
        assert one["user_metadata"] == {"of": "mine", BEGAN: recorded(before) or "dense"}
        assert one.get("base_precision") == recorded(after)
        # What is trained here goes on here, with its optimizer, and does not forget where it began.
        again = (await api.result(await load(api, saved, optimizer=True)))["model_id"]
        [one, *_] = await shown(api, await api.save(again, 1, "last"))
        assert one["user_metadata"] == {BEGAN: recorded(before) or "dense"}


async def test_runs_go_on_where_the_precision_is_theirs_on_fakes(
    start_api: StartApi, caplog: pytest.LogCaptureFixture
) -> None:
    first = await start_api(base_precision="int4")
    path, sampler = await trained(first), await trained(first, "sampler_weights")
    await close_api(first)
    with caplog.at_level(logging.WARNING):
        api = await start_api(base_precision="int4")
        model = (await api.result(await load(api, path, optimizer=True)))["model_id"]
        body = {"session_id": await api.session(), "sampling_session_seq_id": 0, "model_path": sampler}
        await api.ok("create_sampling_session", body)
        [one, *_] = await shown(api, await api.save(model, 1, "later"))
    assert one["user_metadata"] == {}
    assert not said(caplog)


async def test_samples_on_another_precision_are_said_once_on_fakes(
    start_api: StartApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a sampler that was there before the restart."""
    first = await start_api(base_precision="int4")
    path, session = await trained(first, "sampler_weights"), await first.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    earlier = (await first.ok("create_sampling_session", body))["sampling_session_id"]
    await close_api(first)
    for again in (earlier, None):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            api = await start_api()
            for number in range(2):
                created = {**body, "session_id": await api.session(), "sampling_session_seq_id": number}
                sampler = again or (await api.ok("create_sampling_session", created))["sampling_session_id"]
                assert (await api.result(await api.sample(sampler, number))).sequences
            assert (await api.result(await api.sample(await api.base_sampler(), 0))).sequences
        assert said(caplog) == [
            f"samples: {path} was trained on a base in 4 bits (int4-curved), and this server has a dense base"
        ]
        await close_api(api)


def lose_database(data: Path) -> None:
    for file in data.glob(f"{DATABASE}*"):
        file.unlink()


@pytest.mark.parametrize("word", ["int8", "int4+head-int8", "dense+head-int8"])
async def test_copies_and_checkpoints_without_a_record_keep_the_precision_on_fakes(
    start_api: StartApi, word: str
) -> None:
    api = await start_api(**options_of(word))
    path = await trained(api)
    copy = (await api.ok("copy_weights", {"source_path": path, "destination_project_id": "local"}))["tinker_path"]
    data = Path(api.backend.options.data_dir)
    await close_api(api)
    lose_database(data)
    api = await start_api()
    for each in (path, copy):
        assert [one["base_precision"] for one in await shown(api, each)] == [recorded(word)] * 5


async def test_4_bits_of_even_steps_are_another_base_on_fakes(
    start_api: StartApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier servers made such bases, and recorded them as `int4`."""
    api = await start_api(base_precision="int4")
    path, sampler = await trained(api), await trained(api, "sampler_weights")
    data = Path(api.backend.options.data_dir)
    await close_api(api)
    lose_database(data)
    for file in (data / "checkpoints").glob("*/*/*/checkpoint.json"):
        file.write_text(file.read_text().replace('"int4-curved"', '"int4"'))
    api = await start_api(base_precision="int4")
    for each in (path, sampler):
        assert [one["base_precision"] for one in await shown(api, each)] == ["int4"] * 5
    answer = await api.post(
        "load_weights", {"session_id": await api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    )
    assert answer.status_code == 400
    notice = (
        "was trained on a base in 4 bits of even steps (int4), as earlier servers made it, and this server has a base "
        "in 4 bits (int4-curved)"
    )
    assert answer.json()["detail"].startswith(
        f"path: {path} {notice}, to whose gradients the state of its optimizer does not belong: serve the model with "
        "--base-precision int4 of the version that made it, or load the weights alone"
    )
    with caplog.at_level(logging.WARNING):
        model = (await api.result(await load(api, path, optimizer=False)))["model_id"]
        body = {"session_id": await api.session(), "sampling_session_seq_id": 0, "model_path": sampler}
        created = (await api.ok("create_sampling_session", body))["sampling_session_id"]
        assert (await api.result(await api.sample(created, 0))).sequences
    assert said(caplog) == [f"run {model}: {path} {notice}", f"samples: {sampler} {notice}"]
    [one, *_] = await shown(api, await api.save(model, 1, "later"))
    assert one["user_metadata"] == {BEGAN: "int4"}
    assert one["base_precision"] == "int4-curved"


async def test_a_description_without_the_precision_is_of_a_dense_base_on_fakes(start_api: StartApi) -> None:
    """As those of before; one with something else than a word is left alone."""
    api = await start_api(base_precision="int8")
    paths = [await trained(api), await trained(api)]
    data = Path(api.backend.options.data_dir)
    await close_api(api)
    lose_database(data)
    for path, value in zip(paths, (None, ["int8"]), strict=True):
        run = safe_segment(path.removeprefix("tinker://").partition("/")[0])
        [file] = (data / "checkpoints" / run).glob("weights/*/checkpoint.json")
        described = json.loads(file.read_text())
        del described["base_precision"]
        del described["training_run"]["base_precision"]
        file.write_text(json.dumps(described if value is None else described | {"base_precision": value}))
    api = await start_api()
    assert not [one for one in await shown(api, paths[0]) if "base_precision" in one]
    with pytest.raises(NotFoundError):
        await api.backend.checkpoints.get(paths[1])
