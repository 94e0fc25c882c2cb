"""Every endpoint that a client of the basic loop uses, its answers read by the official SDK's own types."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker.types as sdk
from tinker.types.try_again_response import TryAgainResponse
from tinker_local.backend.http.client_routes import REFUSED
from tinker_local.backend.models.served_models import tokenizer_id

from tests.http.conftest import Api


async def test_start_up_is_answered_as_the_sdk_reads_it_on_fakes(api: Api) -> None:
    config = sdk.ClientConfigResponse.model_validate(await api.ok("client/config", {"sdk_version": "0.38.0"}))
    assert config.pjwt_auth_enabled is False
    assert config.parallel_fwdbwd_chunks is True
    dynamic = sdk.ClientDynamicConfigResponse.model_validate(
        await api.ok("client/dynamic_config", {"sdk_version": "0.38.0"})
    )
    assert dynamic.sample_cancel_enabled is True
    body = {
        "tags": ["a"],
        "user_metadata": {"recipe": "x"},
        "sdk_version": "0.38.0",
        "display_name": "mine",
        "type": "create_session",
    }
    session = sdk.CreateSessionResponse.model_validate(await api.ok("create_session", body))
    beat = {"session_id": session.session_id, "type": "session_heartbeat"}
    sdk.SessionHeartbeatResponse.model_validate(await api.ok("session_heartbeat", beat))
    capabilities = sdk.GetServerCapabilitiesResponse.model_validate((await api.get("get_server_capabilities")).json())
    assert [model.model_name for model in capabilities.supported_models] == ["fake/bigram"]
    assert capabilities.supported_models[0].max_context_length == 4096
    assert (await api.get("healthz")).json() == {"status": "ok"}
    telemetry = await api.ok("telemetry", {"events": [{"x-api-key": "tml-secret"}], "session_id": session.session_id})
    assert sdk.TelemetryResponse.model_validate(telemetry).status == "accepted"


async def test_models_and_checkpoints_are_answered_as_the_sdk_reads_them_on_fakes(api: Api) -> None:
    session = await api.session()
    promise = await api.ok(
        "create_model",
        {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "fake/bigram",
            "user_metadata": {"renderer_name": "role_colon"},
            "lora_config": {"rank": 4, "train_unembed": False, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        },
    )
    future = sdk.shared.UntypedAPIFuture.model_validate(promise)
    created = sdk.CreateModelResponse.model_validate(await api.result(future.request_id))
    assert created.model_id == f"{session}:train:0"
    info = sdk.GetInfoResponse.model_validate(
        await api.ok("get_info", {"model_id": created.model_id, "type": "get_info"})
    )
    assert (info.model_id, info.is_lora, info.lora_rank) == (created.model_id, True, 4)
    assert info.model_data.model_name == "fake/bigram"
    assert info.model_data.tokenizer_id
    model = created.model_id
    await api.result(await api.gradient(model, 1))
    metrics = sdk.OptimStepResponse.model_validate(await api.result(await api.step(model, 2))).metrics
    assert metrics is not None
    assert metrics["grad_norm"] > 0
    saving = {"model_id": model, "seq_id": 3, "path": "0001", "overwrite": False, "type": "save_weights"}
    saved = sdk.SaveWeightsResponse.model_validate(await api.result(await api.submit("save_weights", saving)))
    assert saved.path == f"tinker://{model}/weights/0001"
    saving = {"model_id": model, "seq_id": 4, "path": "0001", "kind": "snapshot", "ttl_seconds": 3600}
    named = sdk.SaveWeightsForSamplerResponse.model_validate(
        await api.result(await api.submit("save_weights_for_sampler", saving))
    )
    assert named.path == f"tinker://{model}/sampler_weights/0001"
    saving = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 7, "kind": "snapshot"}
    request = await api.submit("save_weights_for_sampler", saving)
    assert (await api.result(request))["sampling_session_id"] == f"{session}:sample:7"

    loading = {
        "session_id": session,
        "model_seq_id": 1,
        "path": saved.path,
        "optimizer": True,
        "user_metadata": {"renderer_name": "other"},
        "type": "load_weights",
    }
    sdk.LoadWeightsResponse.model_validate(await api.result(await api.submit("load_weights", loading)))
    loaded = sdk.GetInfoResponse.model_validate(await api.ok("get_info", {"model_id": f"{session}:train:1"}))
    assert loaded.lora_rank == 4

    weights = sdk.WeightsInfoResponse.model_validate(await api.ok("weights_info", {"tinker_path": named.path}))
    assert (weights.base_model, weights.lora_rank, weights.train_unembed) == ("fake/bigram", 4, False)

    run = sdk.TrainingRun.model_validate((await api.get(f"training_runs/{model}", access_scope="owned")).json())
    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert run.model_owner.startswith("tml:organization_user:")
    assert run.last_checkpoint is not None
    assert run.last_sampler_checkpoint is not None
    assert (run.last_checkpoint.checkpoint_id, run.last_sampler_checkpoint.checkpoint_id) == (
        "weights/0001",
        "sampler_weights/0001",
    )
    again = sdk.TrainingRun.model_validate((await api.get(f"training_runs/{session}:train:1")).json())
    assert again.user_metadata == {"renderer_name": "other"}
    assert again.last_checkpoint is None
    runs = sdk.TrainingRunsResponse.model_validate((await api.get("training_runs", limit=1, offset=1)).json())
    assert [r.training_run_id for r in runs.training_runs] == [model]
    assert (runs.cursor.offset, runs.cursor.limit, runs.cursor.total_count) == (1, 1, 2)

    listed = sdk.CheckpointsListResponse.model_validate((await api.get(f"training_runs/{model}/checkpoints")).json())
    assert {c.checkpoint_type for c in listed.checkpoints} == {"training", "sampler"}
    for checkpoint in listed.checkpoints:
        assert checkpoint.time.tzinfo is not None
        assert checkpoint.size_bytes is not None
        assert checkpoint.size_bytes > 0
        assert not checkpoint.public
    sampler = next(c for c in listed.checkpoints if c.checkpoint_type == "sampler")
    assert sampler.expires_at is not None
    assert sampler.expires_at - sampler.time == timedelta(seconds=3600)
    for path in (f"training_runs/{model}/checkpoints", "checkpoints"):  # which SDKs from 0.39 on read
        told = (await api.get(path)).json()["checkpoints"]
        assert [checkpoint["base_model"] for checkpoint in told] == ["fake/bigram", "fake/bigram"]
    told = (await api.get(f"training_runs/{model}")).json()
    assert told["last_checkpoint"]["base_model"] == told["last_sampler_checkpoint"]["base_model"] == "fake/bigram"
    everything = sdk.CheckpointsListResponse.model_validate((await api.get("checkpoints", limit=100)).json())
    assert [c.checkpoint_id for c in everything.checkpoints] == ["sampler_weights/0001", "weights/0001"]
    assert everything.cursor is not None
    assert everything.cursor.total_count == 2
    assert run.last_request_time.tzinfo is not None

    gone = await api.delete(f"training_runs/{model}/checkpoints/weights/0001")
    assert (gone.status_code, gone.content) == (204, b"")
    left = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [c["checkpoint_id"] for c in left] == ["sampler_weights/0001"]
    assert (await api.delete(f"training_runs/{model}/checkpoints/weights/0001")).status_code == 404


async def test_samplers_are_answered_as_the_sdk_reads_them_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    path = await api.named(model, 1, "mine")
    for number, of in enumerate([{"base_model": "fake/bigram"}, {"model_path": path}]):
        body = {"session_id": session, "sampling_session_seq_id": number, **of, "type": "create_sampling_session"}
        created = sdk.CreateSamplingSessionResponse.model_validate(await api.ok("create_sampling_session", body))
        found = sdk.GetSamplerResponse.model_validate((await api.get(f"samplers/{created.sampling_session_id}")).json())
        assert found.sampler_id == created.sampling_session_id == f"{session}:sample:{number}"
        assert found.base_model == "fake/bigram"
        assert found.model_path == of.get("model_path")
    nameless = sdk.GetSamplerResponse.model_validate(
        (await api.get(f"samplers/{await api.nameless(model, 2, 5)}")).json()
    )
    assert (nameless.base_model, nameless.model_path) == ("fake/bigram", None)
    promise = await api.ok("asample", api.sample_body(f"{session}:sample:1", 10**18, num_samples=3))
    future = sdk.shared.UntypedAPIFuture.model_validate(promise)
    assert len(set(promise["sample_sequence_ids"])) == 3
    answer = await api.poll(future.request_id)
    from tinker.proto.response_conv import deserialize_sample_response

    assert answer.headers["content-type"] == "application/x-protobuf"
    output = deserialize_sample_response(answer.content)
    assert len(output.sequences) == 3
    for sequence in output.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs)


async def test_gradients_are_answered_as_the_sdk_reads_them_on_fakes(api: Api, make_datum: Any) -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    model = await api.model()
    data = [make_datum([5, 9, 20, 31]), make_datum([7, 8])]
    answer = await api.poll(await api.gradient(model, 1, data))
    assert answer.headers["content-type"] == "application/x-protobuf"
    output = deserialize_forward_backward_output(answer.content)
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[3], [1]]
    assert all(re.fullmatch(r"[^:]+:(sum|mean|min|max|slack|hash2|unique)", key) for key in output.metrics)
    weighted = -sum(float(o["logprobs"].to_numpy().sum()) for o in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(weighted, rel=1e-5)


async def test_times_on_the_wire_have_a_zone_on_fakes(api: Api) -> None:
    model = await api.model()
    await api.save(model, 1, "a", ttl_seconds=3600)
    text = (await api.get(f"training_runs/{model}")).text
    times = re.findall(r'"(?:time|expires_at|last_request_time)":"([^"]+)"', text)
    assert len(times) == 3
    assert all(datetime.fromisoformat(time).tzinfo is not None for time in times)


async def test_not_yet_is_408_with_the_queue_state_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_local.backend.http.future_routes.LONG_POLL_SECONDS", 0.05)
    model = await api.model()
    api.trainer.hold.clear()
    request = await api.gradient(model, 1)
    answer = await api.poll(request)
    assert answer.status_code == 408
    waiting = TryAgainResponse.model_validate(answer.json())
    assert (waiting.request_id, waiting.queue_state) == (request, "active")


@pytest.mark.mutation(
    "failed-operation-is-500",
    "failure",
    'return JSONResponse({"error": message(error), "category": error.category})',
    'return JSONResponse({"error": message(error), "category": error.category}, error.status)',
)
async def test_failed_operation_is_200_with_error_and_category_on_fakes(api: Api) -> None:
    model = await api.model()
    answer = await api.poll(await api.gradient(model, 1, loss_fn="nonsense"))
    assert answer.status_code == 200
    failed = sdk.RequestFailedResponse.model_validate(answer.json())
    assert failed.category is sdk.RequestErrorCategory.User
    assert "nonsense" in failed.error


async def test_json_answers_come_whatever_the_client_accepts_on_fakes(api: Api) -> None:
    model = await api.model()
    for accept in ("application/x-protobuf", "application/json", "*/*"):
        body = {"request_id": f"{model}:create"}
        answer = await api.post("retrieve_future", body, headers={"Accept": accept})
        assert answer.status_code == 200
        assert answer.json()["model_id"] == model


@pytest.mark.parametrize(("method", "path"), [pytest.param(*key, id=" ".join(key)) for key in REFUSED])
async def test_endpoint_that_is_not_served_is_refused_by_name_with_advice_on_fakes(
    api: Api, method: str, path: str
) -> None:
    url = path.format(run_id="s:train:0", kind="weights", name="a", session_id="s")
    answer = await api.http.request(method, f"/api/v1{url}", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    detail = answer.json()["detail"]
    assert f"{method} /api/v1{path}" in detail
    assert len(detail.partition("not supported: ")[2]) > 15


async def test_unknown_route_and_method_are_answered_in_json_with_their_name_on_fakes(api: Api) -> None:
    for method, path, status in [
        ("GET", "/api/v1/nothing", 404),
        ("POST", "/nothing", 404),
        ("POST", "/", 405),
        ("POST", "/api/v1/forward", 404),
        ("GET", "/api/v1/training_runs/a/b/c", 404),
        ("GET", "/api/v1/asample", 405),
        ("PUT", "/api/v1/healthz", 405),
    ]:
        answer = await api.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["detail"]
        assert int(answer.headers["content-length"]) == len(answer.content)
    assert "POST /api/v1/forward" in (await api.post("forward", {})).json()["detail"]


async def test_every_client_error_has_a_body_and_its_length_on_fakes(api: Api) -> None:
    model = await api.model()
    calls = [
        await api.post("create_model", {"session_id": "x"}),
        await api.post("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "fake/bigram"}),
        await api.post("get_info", {"model_id": "none"}),
        await api.post("forward_backward", content=b"\xff\xff\xff"),
        await api.post("asample", api.sample_body("none", 0)),
        await api.post("retrieve_future", {"request_id": "none"}),
        await api.get("samplers/none"),
        await api.get("training_runs/none"),
        await api.get("training_runs/none/checkpoints"),
        await api.get("training_runs", limit=0),
        await api.delete(f"training_runs/{model}/checkpoints/weights/none"),
        await api.post("weights_info", {"tinker_path": "x"}),
        await api.post("session_heartbeat", {"session_id": "none"}),
        await api.post("sessions/none/finish", {}),
    ]
    for answer in calls:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.status_code != 409
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.content) > 0
        assert answer.json()["detail"]


async def test_finish_takes_the_bodies_that_the_sdk_sends_on_fakes(api: Api) -> None:
    for body in (
        {"reason": {"type": "success"}, "detail": None},
        {"reason": {"type": "errored"}, "detail": "ValueError: " + "x" * 100_000},
        {"reason": {"type": "interrupted"}, "detail": None},
    ):
        session = await api.session()
        assert (await api.post(f"sessions/{session}/finish", body)).status_code == 204
    session = await api.session()
    empty = await api.post(f"sessions/{session}/finish", headers={"Content-Type": "application/json"})
    assert empty.status_code == 204


async def test_checkpoint_ids_span_two_segments_and_run_ids_hold_colons_on_fakes(api: Api) -> None:
    model = await api.model()
    assert model.count(":") == 2
    for seq_id, name in enumerate(["a.b-c_d", "00", "-x", "_", "A" * 128], 1):
        path = await api.save(model, seq_id, name)
        assert path == f"tinker://{model}/weights/{name}"
        assert (await api.delete(f"training_runs/{model}/checkpoints/weights/{name}")).status_code == 204


async def test_training_runs_are_paged_newest_first_on_fakes(api: Api) -> None:
    session = await api.session()
    made = [await api.model(session, number) for number in range(5)]
    seen = []
    for offset in range(0, 6, 2):
        page = (await api.get("training_runs", limit=2, offset=offset)).json()
        assert page["cursor"] == {"offset": offset, "limit": 2, "total_count": 5}
        seen += [run["training_run_id"] for run in page["training_runs"]]
    assert seen == made[::-1]


async def test_what_is_not_honoured_is_refused_by_name_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session, 0)
    creation = {"session_id": session, "model_seq_id": 9, "base_model": "fake/bigram"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("create_session", {"colour": "red"}, "colour"),
        ("create_session", {"user_metadata": {"a": 1}}, "user_metadata['a']"),
        ("create_model", {**creation, "optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config"),
        ("create_model", {**creation, "optimizer_config": {"type": "adamw", "version": 2}}, "version"),
        ("create_model", {**creation, "lora_config": {"rank": 4, "alpha": 16}}, "lora_config.alpha"),
        ("create_model", {**creation, "user_metadata": {"a": None}}, "user_metadata['a']"),
        ("load_weights", {**creation, "path": "tinker://a/weights/b", "optimizer": True}, "path"),
    ]
    sampler = await api.base_sampler(session)
    for name, value in [
        ("base_model", "fake/bigram"),
        ("num_samples", 10**6),
    ]:
        cases.append(("asample", api.sample_body(sampler, 0, **{name: value}), name))
    for path, body, field in cases:
        answer = await api.post(path, body)
        assert 400 <= answer.status_code < 410, (path, answer.text)
        assert field in answer.json()["detail"]
    assert (await api.get("training_runs", access_scope="everything")).status_code == 400

    ordered: list[tuple[str, dict[str, Any], str]] = [
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "optimizer_params"),
        ("optim_step", {}, "adam_params"),
        ("optim_step", {"adam_params": {"learning_rate": 0.1, "amsgrad": True}}, "adam_params.amsgrad"),
        ("save_weights", {"path": "a", "ttl_seconds": 10}, "ttl_seconds"),
        ("save_weights", {"path": "a", "user_metadata": {"a": 1}}, "user_metadata['a']"),
        ("save_weights", {"path": "a", "compress": True}, "compress"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "path"),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 0, "ttl_seconds": 3600}, "ttl_seconds"),
        ("save_weights_for_sampler", {"path": "a", "user_metadata": {"a": []}}, "user_metadata['a']"),
        ("save_weights_for_sampler", {}, "path"),
        ("save_weights_for_sampler", {"path": "a", "sampling_session_seq_id": 0}, "path"),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}, "load_weights"),
    ]
    for seq_id, (path, body, field) in enumerate(ordered, 1):
        message = await api.failure(await api.submit(path, {"model_id": model, "seq_id": seq_id, **body}))
        assert message.startswith("user: ")
        assert field in message
    assert (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"] == []


async def test_load_into_a_model_takes_no_fields_of_a_load_that_creates_one_on_fakes(api: Api) -> None:
    session = await api.session()
    path = await api.save(await api.model(session, 0), 1, "a")
    fields = {"base_model": "fake/bigram", "user_metadata": {"a": "b"}, "optimizer_config": {"type": "adamw"}}
    for number, (field, value) in enumerate(fields.items(), 1):
        model = await api.model(session, number)
        body = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True, field: value}
        message = await api.failure(await api.submit("load_weights", body))
        assert field in message


def test_tokenizer_id_holds_no_colon_and_leads_to_the_model(tmp_path: Path) -> None:
    """The SDK cuts a tokenizer's name at its first colon."""
    data = tmp_path / "data"
    folders = [tmp_path / name for name in ("plain", "a:b", "a_b", "a:b:c", "a_b:c")]
    for folder in folders:
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    for folder in folders * 2:  # the second time after a restart
        ident = tokenizer_id(str(folder), data)
        assert ":" not in ident
        assert (Path(ident) / "name").read_text() == folder.name
    assert tokenizer_id("Qwen/Qwen3-8B", data) == "Qwen/Qwen3-8B"
