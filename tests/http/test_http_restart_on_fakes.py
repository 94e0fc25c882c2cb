"""`kill -9` and start again: what was acknowledged is there, and what is lost says so."""

from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput
from tinker_local.types.codec import encode_forward_backward_request
from tinker_local.types.sdk import to_sdk

pytestmark = pytest.mark.more

MODEL = ("--fake", "--model", "fake/bigram")
DATA = [Datum(model_input=ModelInput.from_ints([5, 9, 20]), loss_fn_inputs={"target_tokens": [9, 20, 31]})]
PROMPT = ModelInput.from_ints([5, 9, 20, 31])
ADAM = tinker.AdamParams(learning_rate=0.05, weight_decay=0.01)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/api/v1/{path}", json=body, timeout=60)


def train(client: Any, steps: int) -> list[float]:
    """Losses of `steps` steps."""
    losses = []
    for _ in range(steps):
        output = client.forward_backward([to_sdk(datum) for datum in DATA], "cross_entropy").result()
        losses.append(output.metrics["loss:sum"])
        client.optim_step(ADAM).result()
    return losses


def scores(sampler: Any) -> Any:
    return np.array(sampler.compute_logprobs(to_sdk(PROMPT)).result()[1:], np.float32)


@pytest.mark.mutation(
    "optimizer-not-saved",
    "Training.save_weights.run",
    "capture, model.model_id, optimizer=True)",
    "capture, model.model_id, optimizer=False)",
)
def test_named_checkpoints_survive_kill_9_with_optimizer_state_on_fakes(serve: Any) -> None:
    server = serve(*MODEL)
    service = tinker.ServiceClient(base_url=server.url)
    client = service.create_lora_training_client(base_model="fake/bigram", rank=4, seed=3)
    train(client, 3)
    saved = client.save_state("state", user_metadata={"step": "3"}).result().path
    named = client.save_weights_for_sampler("sampler").result().path
    sampler = service.create_sampling_client(model_path=named)
    nameless = client.save_weights_and_get_sampling_client()
    base = service.create_sampling_client(base_model="fake/bigram")
    want_scores, base_scores = scores(sampler), scores(base)
    assert np.array_equal(scores(nameless), want_scores)
    want = train(client, 3)
    unsaved = client.forward_backward([to_sdk(DATA[0])], "cross_entropy").result()
    assert unsaved
    server.kill()

    again = serve(*MODEL, "--port", server.url.rpartition(":")[2])
    assert again.url == server.url
    # Sampling sessions of named versions and of base models go on, those of nameless versions cannot.
    assert np.array_equal(scores(sampler), want_scores)
    assert np.array_equal(scores(base), base_scores)
    with pytest.raises(tinker.RequestFailedError, match="ephemeral save, and the server was restarted") as lost:
        scores(nameless)
    assert lost.value.category is tinker.types.RequestErrorCategory.Server
    # The model is lost; its client learns where to go on.
    with pytest.raises(tinker.RequestFailedError, match=saved) as lost:
        client.forward_backward([to_sdk(DATA[0])], "cross_entropy").result()
    assert lost.value.category is tinker.types.RequestErrorCategory.Server
    for optimizer in (True, False):
        fresh = tinker.ServiceClient(base_url=server.url)
        load = (
            fresh.create_training_client_from_state_with_optimizer
            if optimizer
            else fresh.create_training_client_from_state
        )
        found = train(load(saved), 3)
        assert found[0] == pytest.approx(want[0], rel=1e-6)
        if optimizer:
            assert found == pytest.approx(want, rel=1e-6)
        else:
            assert abs(found[2] - want[2]) > 1e-4
        assert np.array_equal(scores(fresh.create_sampling_client(model_path=named)), want_scores)
    rest = tinker.RestClient(base_url=server.url)
    listed = rest.list_checkpoints(saved.split("/")[2]).result().checkpoints
    assert {(c.checkpoint_id, (c.user_metadata or {}).get("step")) for c in listed} == {
        ("weights/state", "3"),
        ("sampler_weights/sampler", None),
    }


def test_what_was_lost_in_a_restart_says_so_on_fakes(serve: Any) -> None:
    server = serve(*MODEL)
    session = post(server.url, "create_session", {}).json()["session_id"]
    creation = {"session_id": session, "model_seq_id": 0, "base_model": "fake/bigram"}
    model = f"{session}:train:0"
    post(server.url, "create_model", creation)
    assert post(server.url, "retrieve_future", {"request_id": f"{model}:create"}).json()["model_id"] == model
    request = ForwardBackwardRequest(model_id=model, seq_id=2, data=tuple(DATA), loss_fn="cross_entropy")
    hanging = httpx.post(
        f"{server.url}/api/v1/forward_backward", content=encode_forward_backward_request(request)
    ).json()["request_id"]
    for number, fields in enumerate([{"base_model": "fake/bigram"}, {}]):
        body = {"session_id": session, "sampling_session_seq_id": number, **fields}
        if not fields:
            save = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 1}
            saving = post(server.url, "save_weights_for_sampler", save).json()["request_id"]
            assert "sampling_session_id" in post(server.url, "retrieve_future", {"request_id": saving}).json()
        else:
            post(server.url, "create_sampling_session", body)
    server.kill()
    again = serve(*MODEL)
    url = again.url

    for request_id in (hanging, f"{model}:4", f"{model}:create", f"{session}:train:1:create", f"{session}:sample:1:0"):
        answer = post(url, "retrieve_future", {"request_id": request_id})
        assert answer.status_code == 200
        assert answer.json()["category"] == "server"
        assert "the server was restarted" in answer.json()["error"]
    assert "no saved checkpoint" in post(url, "retrieve_future", {"request_id": hanging}).json()["error"]
    # A sample can simply be drawn again: 410 makes the SDK do that.
    assert post(url, "retrieve_future", {"request_id": f"{session}:sample:0:7"}).status_code == 410

    step = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.1}}
    failed = post(url, "retrieve_future", {"request_id": post(url, "optim_step", step).json()["request_id"]}).json()
    assert failed["category"] == "server"
    assert "the server was restarted" in failed["error"]
    # Nothing that is lost for ever is a 5xx, which the SDK would repeat for minutes.
    for path, body in (
        ("session_heartbeat", {"session_id": session}),
        ("create_model", {**creation, "model_seq_id": 1}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "base_model": "fake/bigram"}),
        ("get_info", {"model_id": model}),
    ):
        answer = post(url, path, body)
        assert answer.status_code == 410, answer.text
        assert "the server was restarted" in answer.json()["detail"]
    assert httpx.get(f"{url}/api/v1/samplers/{session}:sample:1").status_code == 410
    assert httpx.get(f"{url}/api/v1/samplers/{session}:sample:0").json()["base_model"] == "fake/bigram"
    assert post(url, f"sessions/{session}/finish", {}).status_code == 204
    assert "success" in post(url, "session_heartbeat", {"session_id": session}).json()["detail"]
    assert post(url, "session_heartbeat", {"session_id": "s-never"}).status_code == 404
    assert httpx.get(f"{url}/api/v1/training_runs/{model}").json()["training_run_id"] == model


def test_clients_ride_out_a_restart_while_they_wait_on_fakes(serve: Any) -> None:
    """A sample of a named version that is in flight when the server dies is drawn again after the restart."""
    server = serve(*MODEL)
    service = tinker.ServiceClient(base_url=server.url)
    client = service.create_lora_training_client(base_model="fake/bigram", rank=4)
    sampler = service.create_sampling_client(model_path=client.save_weights_for_sampler("a").result().path)
    params = tinker.SamplingParams(max_tokens=1500, stop=[], temperature=1.0)
    futures = [sampler.sample(to_sdk(PROMPT), 8, params) for _ in range(2)]
    server.kill()
    serve(*MODEL, "--port", server.url.rpartition(":")[2])
    for future in futures:
        output = future.result(timeout=120)
        assert [len(sequence.tokens) for sequence in output.sequences] == [1500] * 8


def test_data_folder_has_one_server_on_fakes(serve: Any) -> None:
    import subprocess
    import sys

    server = serve(*MODEL)
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", *MODEL, "--port", "0"]
    second = subprocess.run(
        [*command, "--data-dir", str(server.data_dir)], capture_output=True, text=True, timeout=280, check=False
    )
    assert second.returncode != 0
    assert "in use by another tinker-local server" in second.stderr
    assert str(server.process.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert "ready" not in second.stdout
    assert server.healthy()
    server.kill()
    assert serve(*MODEL).healthy()  # the lock of a killed process blocks no one
