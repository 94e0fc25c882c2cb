"""What a run has done: its numbers, its curve, what programs add to that, and `tinker-local status`."""

import itertools
import math
import os
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import tinker
from click.testing import CliRunner
from tinker_local import client
from tinker_local.backend.cli import status_command
from tinker_local.backend.cli.main import main
from tinker_local.backend.http import progress_routes
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.storage import curves
from tinker_local.types import Datum, ModelInput, TensorData

from tests.conftest import Server
from tests.http.conftest import Api, StartApi
from tests.http.test_http_owners_on_fakes import ADMIN, ALICE, BOB, key_file, world


def datum(tokens: list[int], weights: list[float]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights}
    )


async def run_of(api: Api, model: str) -> dict[str, Any]:
    (found,) = [run for run in (await api.get("status")).json()["runs"] if run["training_run_id"] == model]
    return dict(found)


async def lines_of(api: Api, model: str, after: int = 0) -> list[dict[str, Any]]:
    return list((await api.get(f"training_runs/{model}/curve", after=after)).json()["lines"])


async def test_a_run_knows_its_steps_tokens_loss_and_learning_rate_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model = await api.model()
    assert (await run_of(api, model))["last"] is None
    data = [datum([5, 9, 20, 31], [1, 0, 1]), datum([7, 8], [2])]
    first = await api.result(await api.gradient(model, 1, data))
    await api.result(await api.gradient(model, 2, data))
    stepped = await api.result(await api.step(model, 3, learning_rate=0.25))
    second = await api.result(await api.gradient(model, 4, data[:1]))
    await api.result(await api.step(model, 5, learning_rate=0.5))
    found = await run_of(api, model)
    assert (found["steps"], found["unsaved_steps"], found["tokens"], found["owner"]) == (2, 2, 4 + 4 + 3, "local")
    assert found["last"]["learning_rate"] == 0.5
    assert found["last"]["loss"] == pytest.approx(second.metrics["loss:sum"] / 2)
    begun, ended = await lines_of(api, model)
    assert begun["loss"] == pytest.approx(2 * first.metrics["loss:sum"] / 8)
    assert begun["gradient_norm"] == pytest.approx(stepped["metrics"]["grad_norm"])
    assert (begun["step"], begun["tokens"], begun["learning_rate"]) == (1, 8, 0.25)
    assert ended == found["last"]


async def test_the_loss_shown_is_what_recipes_print_on_fakes(start_api: StartApi) -> None:
    """Weights that share 1 among the tokens of an answer made it 8.8 times lower."""
    api = await start_api()
    model, seq = await api.model(), itertools.count(1)

    async def shown(data: list[Datum], **fields: Any) -> tuple[Any, float | None]:
        output = await api.result(await api.gradient(model, next(seq), data, **fields))
        await api.result(await api.step(model, next(seq)))
        return output, (await run_of(api, model))["last"]["loss"]

    weights = [[0.125, 0.0, 0.125], [0.25]]
    data = [datum([5, 9, 20, 31], weights[0]), datum([7, 8], weights[1])]
    output, loss = await shown(data)
    logprobs = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
    nats = -sum(float(found @ np.array(given)) for found, given in zip(logprobs, weights, strict=True)) / 0.5
    assert loss == pytest.approx(nats, rel=1e-5)
    signed, loss = await shown([datum([5, 9, 20, 31], [2.0, 0.0, -2.0])])
    assert loss == pytest.approx(signed.metrics["loss:sum"] / 4)  # their sum is 0
    inputs = {
        "target_tokens": TensorData(data=[9, 20, 31], dtype="int64"),
        "logprobs": TensorData(data=[-1.0, -1.0, -1.0], dtype="float32"),
        "advantages": TensorData(data=[0.5, 0.0, -3.0], dtype="float32"),
    }
    rewarded = Datum(model_input=ModelInput.from_ints([5, 9, 20]), loss_fn_inputs=inputs)
    output, loss = await shown([rewarded], loss_fn="importance_sampling")
    assert loss == pytest.approx(output.metrics["loss:sum"] / 2)


async def test_forward_and_discarded_gradients_count_in_no_loss_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.failure(await api.gradient(model, 2, loss_fn="nonsense"))
    assert "discarded" in await api.failure(await api.step(model, 3))
    assert (await run_of(api, model))["steps"] == 0
    kept = await api.result(await api.gradient(model, 4))
    await api.result(await api.gradient(model, 5, [datum([1, 2], [5])], forward_only=True))
    await api.result(await api.step(model, 6))
    (line,) = await lines_of(api, model)
    assert line["loss"] == pytest.approx(kept.metrics["loss:sum"] / 3)


async def test_a_curve_is_read_in_pieces_and_outlives_the_server_on_fakes(start_api: StartApi, tmp_path: Path) -> None:
    api = await start_api(data_dir=tmp_path / "d")
    model = await api.model()
    for seq_id in (1, 3):
        await api.result(await api.gradient(model, seq_id))
        await api.result(await api.step(model, seq_id + 1))
    first = (await api.get(f"training_runs/{model}/curve")).json()
    assert [line["step"] for line in first["lines"]] == [1, 2]
    assert (await api.get(f"training_runs/{model}/curve", after=first["next"])).json()["lines"] == []
    answer = await api.post(f"training_runs/{model}/metrics", {"metrics": {"reward": 0.5}, "step": 2})
    assert answer.status_code == 200
    (line,) = await lines_of(api, model, first["next"])
    assert (line["metrics"], line["step"]) == ({"reward": 0.5}, 2)
    await api.backend.close()
    again = await start_api(data_dir=tmp_path / "d")
    assert len(await lines_of(again, model)) == 3
    assert (await again.get("training_runs/s-1:train:0/curve")).status_code == 404


async def test_a_full_disk_or_a_full_curve_stops_no_step_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api()
    model = await api.model()

    async def train(seq_id: int) -> None:
        await api.result(await api.gradient(model, seq_id))
        await api.result(await api.step(model, seq_id + 1))

    await train(1)
    assert len(await lines_of(api, model)) == 1
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:7]))
    await train(3)
    await api.until(lambda: api.backend.curves._warned > 0)
    monkeypatch.undo()
    await train(5)
    assert [line["step"] for line in await lines_of(api, model)] == [1, 3]
    monkeypatch.setattr(curves, "MOST_BYTES", 400)
    for seq_id in range(7, 15, 2):
        await train(seq_id)
    assert len(await lines_of(api, model)) < 4
    answer = await api.post(f"training_runs/{model}/metrics", {"metrics": {"reward": 1}})
    assert answer.status_code == 400
    assert "its curve is full" in answer.json()["detail"]
    assert (await api.get(f"training_runs/{model}/curve")).json()["full"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"metrics": {}}, "0 numbers"),
        ({"metrics": {str(at): 1.0 for at in range(65)}}, "65 numbers"),
        ({"metrics": {"x" * 129: 1.0}}, "129 characters"),
        ({"metrics": {"reward": "high"}}, "metrics.reward"),
        ({"metrics": {"reward": 1}, "step": 2**60}, "step"),
        ({"metrics": {"reward": 1}, "stepp": 2}, "stepp"),
    ],
)
async def test_metrics_that_cannot_be_recorded_are_refused_by_name_on_fakes(
    start_api: StartApi, body: dict[str, Any], words: str
) -> None:
    api = await start_api()
    model = await api.model()
    answer = await api.post(f"training_runs/{model}/metrics", body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert await lines_of(api, model) == []


@pytest.mark.mutation("everybodys-runs", "progress_routes.status", "caller.admin or run.owner == caller.owner", "True")
async def test_an_owner_sees_its_own_runs_and_not_how_busy_others_are_on_fakes(
    start_api: StartApi, tmp_path: Path
) -> None:
    api = await start_api(api_keys=key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\nadmin {ADMIN}\n"))
    await world(api, ALICE)
    seen = {}
    for key in (ALICE, BOB, ADMIN):
        answer = await api.http.get("/api/v1/status", headers={"X-API-Key": key})
        seen[key] = answer.json()
    assert {run["owner"] for run in seen[ALICE]["runs"]} == {"alice"}
    assert seen[BOB]["runs"] == []
    assert {run["owner"] for run in seen[ADMIN]["runs"]} == {"alice"}
    for key in (ALICE, BOB):
        assert seen[key].keys() == {"version", "time", "problems", "runs", "models"}
        assert all(model.keys() == {"names"} for model in seen[key]["models"])
        answer = await api.http.post("/api/v1/check_weights", headers={"X-API-Key": key})
        assert answer.status_code == 403
        assert answer.json()["detail"].startswith("only an admin may have the weights checked")
    answer = await api.http.post("/api/v1/check_weights", headers={"X-API-Key": ADMIN})
    assert len(answer.json()["weights"]) == 1
    assert seen[ADMIN]["memory_bytes"] > 2**20
    assert seen[ADMIN]["models"][0].keys() == {"names", "start", *progress_routes.OF_MODELS}


def test_log_metrics_and_status_work_on_a_running_server_on_fakes(fake_server: Server) -> None:
    service = client.ServiceClient(base_url=fake_server.url)
    run = service.create_lora_training_client("fake/bigram", rank=4)
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=[2, 3], dtype="int64"),
                "weights": tinker.TensorData(data=[1.0, 1.0], dtype="float32"),
            },
        )
    ]
    run.forward_backward(data, "cross_entropy").result()
    run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    client.log_metrics(run, {"reward": 0.25, "lost": math.inf}, 1, base_url=fake_server.url)
    with pytest.raises(tinker.APIStatusError, match="there is no training run"):
        client.log_metrics("s-0:train:0", {"reward": 1}, base_url=fake_server.url)
    shown = CliRunner().invoke(main, ["status", "--url", fake_server.url], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert run.model_id in shown.output
    assert " 1         1        2 " in shown.output  # steps, unsaved, tokens
    checked = CliRunner().invoke(main, ["status", "--url", fake_server.url, "--check-weights"])
    assert checked.exit_code == 0
    assert "trainer and sampler have a copy each" in checked.output
    assert run.model_id in CliRunner().invoke(main, ["status", "--base-url", fake_server.url]).output
    lost = httpx.post(f"{fake_server.url}/chat/completions", json={})
    assert (lost.status_code, "but /v1/chat/completions" in lost.text) == (404, True)
    assert "leave out one /v1" in httpx.get(f"{fake_server.url}/v1/v1/models").text
    with pytest.raises(tinker.NotFoundError, match="leave out /v1 of the base_url"):
        tinker.ServiceClient(base_url=f"{fake_server.url}/v1").create_lora_training_client(
            "fake/bigram", rank=4
        ).result()
    narrow = CliRunner().invoke(main, ["status", "--url", fake_server.url], env={"COLUMNS": "80"}).output.splitlines()
    at = next(at for at, line in enumerate(narrow) if line.startswith(f"{run.model_id}  fake/bigram, rank 4"))
    assert narrow[at + 1].startswith("  1 step (1 unsaved), 2 tokens, loss ")
    assert any("training idle, sampling idle, KV cache 0%" in line for line in narrow)
    for url, words in (
        ("http://127.0.0.1:1", "no server answers at"),
        ("nonsense", "--url"),
        (f"{fake_server.url}/v1", "leave out /v1"),
    ):
        outcome = CliRunner().invoke(main, ["status", "--url", url])
        assert outcome.exit_code != 0
        assert words in outcome.output


async def test_the_frozen_weights_are_checked_when_an_admin_asks_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def checked() -> dict[str, Any]:
        (check,) = (await api.ok("check_weights", {}))["weights"]
        return cast(dict[str, Any], check)

    apart = await checked()
    assert status_command._weights(apart) == (
        "frozen weights: trainer and sampler have a copy each, and are compared at a start alone"
    )
    monkeypatch.setattr(api.trainer, "check_weights", lambda: (43, ""))
    assert status_command._weights(await checked()).startswith(
        "frozen weights: 43 shared matrices are what was written (0."
    )

    changed = "the frozen weights have changed in memory: lm_head.weight"
    monkeypatch.setattr(api.trainer, "check_weights", lambda: (43, changed))
    assert status_command._weights(await checked()) == (
        "fake/bigram: the frozen weights have changed in memory: lm_head.weight; start the server again"
    )

    def ended() -> Any:
        raise ProcessEndedError("the trainer's process was ended by SIGKILL")

    monkeypatch.setattr(api.trainer, "check_weights", ended)
    assert (await checked())[
        "problem"
    ] == "fake/bigram: the frozen weights were not checked: the trainer's process was ended by SIGKILL"


def test_status_says_where_a_start_went_and_what_of_a_gpu_is_cache() -> None:
    model = {"names": ["tiny"], "kv_cache_bytes": 16 * 2**30, "trainer_cached_bytes": 3 * 2**29}
    model["start"] = {"server": {"imports": 0.01}, "sampler": {"weights": 3.21, "graphs": 12.0}}
    assert status_command._start(model) == "tiny started with sampler: weights 3.2 s, graphs 12.0 s"
    assert status_command._start({"names": ["tiny"]}) == ""
    now = {"models": [model], "gpus": [{"gpu": 0, "used_bytes": 1, "bytes": 2}]}
    said = "16.0 GiB of each GPU are KV cache; the trainers hold 1.5 GiB for later use"
    assert status_command._caches(now) == said
    assert status_command._caches({**now, "models": [{"names": ["of an older server"]}]}) == ""
    assert status_command._caches({"models": [model], "gpus": []}) == ""
