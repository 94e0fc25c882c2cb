"""The official SDK as the witness: what its users see, over a server in this process."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.served_models import Engines

from tests.conftest import tinker_command

ADAM = tinker.AdamParams(learning_rate=0.05)
PROMPT = tinker.ModelInput.from_ints([5, 9, 20])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    """A backend of fakes behind HTTP in a thread; `.backend` can be looked into."""

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), FakeTrainer(model), FakeSampler(model), arch="fake", tolerance=1e-4)

    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
    backend = InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load)
    server = LoopbackServer(backend)
    server.backend = backend  # type: ignore[attr-defined]
    yield server
    server.close()


@pytest.fixture
def service(server: Any) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client:
        yield client


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},  # type: ignore[dict-item]
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def until_async(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


def test_batch_of_several_chunks_is_one_result_on_fakes(service: Any) -> None:
    """More datums than the SDK puts into one request: it sends chunks 2, 3, then 1, and adds up what comes back."""
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    data = [datum([i % 500, (i * 7) % 500 + 1]) for i in range(2500)]
    output = client.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    values = [float(o["logprobs"].to_numpy()[0]) for o in output.loss_fn_outputs]
    assert output.metrics["loss:sum"] == pytest.approx(-sum(values), rel=1e-5)
    alone = client.forward([data[at] for at in (0, 1300, 2499)], "cross_entropy").result()
    assert [float(o["logprobs"].to_numpy()[0]) for o in alone.loss_fn_outputs] == [values[at] for at in (0, 1300, 2499)]
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_bad_chunk_fails_its_future_and_leaves_the_client_usable_on_fakes(service: Any) -> None:
    """A chunk that is refused at its submit would hang the SDK's training client for ever."""
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    for bad in (0, 1500, 2400):
        data = [datum([5, 9]) for _ in range(2500)]
        data[bad] = datum([5, 9], weights=np.array([float("nan")], np.float32))
        gradient, step = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        for future in (gradient, step):
            with pytest.raises(tinker.RequestFailedError) as failed:
                future.result(timeout=60)
            assert failed.value.category is tinker.types.RequestErrorCategory.User
        assert client.forward_backward([datum([5, 9])], "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0
        client.optim_step(ADAM).result(timeout=60)


def test_gap_that_the_sdk_leaves_holds_nothing_up_on_fakes(service: Any) -> None:
    """An image pointer cannot be encoded: its seq_id is spent, and never sent."""
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    pointer = tinker.types.ImageAssetPointerChunk(location="a.png", format="png", expected_tokens=1)
    unsendable = tinker.Datum(
        model_input=tinker.ModelInput(chunks=[pointer]),
        loss_fn_inputs={"target_tokens": tinker.TensorData(data=[1], dtype="int64", shape=[1])},
    )
    with pytest.raises(ValueError):
        client.forward_backward([unsendable], "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="never arrived"):
        client.optim_step(ADAM).result(timeout=60)
    client.forward_backward([datum([5, 9])], "cross_entropy").result(timeout=60)
    client.optim_step(ADAM).result(timeout=60)


def test_bad_arguments_are_raised_at_once_on_fakes(service: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="base_model"):
        service.create_lora_training_client(base_model="unknown/model").result()
    with pytest.raises(tinker.BadRequestError, match=r"lora_config\.rank"):
        service.create_lora_training_client(base_model="fake/bigram", rank=4096).result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state("tinker://s:train:0/weights/none").result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_sampling_client(model_path="tinker://s:train:0/sampler_weights/none").result()
    with pytest.raises(tinker.BadRequestError, match="base_model"):
        service.create_sampling_client(base_model="unknown/model").result()
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    with pytest.raises(tinker.RequestFailedError, match="loss_fn: unknown loss 'mse'; known are"):
        client.forward_backward([datum([5, 9])], "mse").result(timeout=60)
    client.save_state("name").result()
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        client.save_state("name").result(timeout=60)  # no 409, which would be repeated for five minutes
    sampler = service.create_sampling_client(base_model="fake/bigram")
    with pytest.raises(tinker.BadRequestError, match="context window"):
        sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=5000)).result(timeout=60)
    with pytest.raises(tinker.RequestFailedError, match="topk_prompt_logprobs: 3000 is more than"):
        sampler.sample(PROMPT, 1, tinker.SamplingParams(), topk_prompt_logprobs=3000).result(timeout=60)


def test_refusal_to_sample_training_state_has_the_line_that_makes_a_sampler_version_of_it_on_fakes(
    service: tinker.ServiceClient,
) -> None:
    client = service.create_lora_training_client(base_model="fake/bigram", rank=4).result()
    client.forward_backward([datum([5, 9, 20, 3])], "cross_entropy").result()
    client.optim_step(ADAM).result()
    path = client.save_state("final").result().path
    with pytest.raises(tinker.BadRequestError, match="is training state") as refusal:
        service.create_sampling_client(model_path=path).result()
    line = refusal.value.body["detail"].partition("its path: ")[2]  # type: ignore[call-overload, index]
    sampler_path = eval(line, {"service": service})
    made = service.create_sampling_client(model_path=sampler_path).result()
    newest = client.save_weights_and_get_sampling_client().result()
    assert made.compute_logprobs(PROMPT).result() == newest.compute_logprobs(PROMPT).result()


def test_samplers_of_an_ended_session_fail_at_once_and_say_how_to_make_a_new_one_on_fakes(server: Any) -> None:
    """And not after retries. What the error says to run, runs."""
    service = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
    training = service.create_lora_training_client(base_model="fake/bigram", rank=2).result()
    path = training.save_weights_for_sampler("last").result().path
    named, base = (
        service.create_sampling_client(**made).result()
        for made in ({"model_path": path}, {"base_model": "fake/bigram"})
    )
    nameless = training.save_weights_and_get_sampling_client().result()
    samplers = {path: named, "fake/bigram": base, "ephemeral save": nameless}
    params = tinker.SamplingParams(max_tokens=4)
    session = path.removeprefix("tinker://").partition(":")[0]
    headers = {"X-API-Key": server.api_key}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as http:
        finish = http.post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}})
    assert finish.status_code == 204
    later: list[Any] = [each.sample(PROMPT, 1, params) for each in samplers.values()]
    later += [each.compute_logprobs(PROMPT) for each in samplers.values()]
    for future, named_there in zip(later, [*samplers] * 2, strict=True):
        with pytest.raises(tinker.TinkerError) as ended:
            future.result(timeout=60)
        message = str(ended.value)
        assert "has ended" in message, message
        assert session in message
        assert named_there in message
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as again:
        assert len(again.create_sampling_client(model_path=path).result().compute_logprobs(PROMPT).result()) == 3


def test_metrics_that_are_not_finite_are_told_apart_on_fakes(
    server: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = server.backend.models.get("fake/bigram")
    monkeypatch.setattr(
        base.engines.trainer, "optim_step", lambda *_: {"a": float("nan"), "b": float("-inf"), "c": 1.5}
    )
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    metrics = client.optim_step(ADAM).result(timeout=60).metrics
    assert metrics == {"a_is_nan": 1.0, "b_is_inf": -1.0, "c": 1.5}


def test_ones_beside_a_policy_loss_are_accepted_and_a_mask_is_refused_on_fakes(service: Any) -> None:
    """As programs send them, with the SDK's conversions."""
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    given = datum([5, 9, 20])
    length = given.model_input.length
    policy: dict[str, Any] = {"target_tokens": given.loss_fn_inputs["target_tokens"]}
    policy |= {name: np.full(length, -0.5, np.float32) for name in ("logprobs", "advantages")}
    for name in ("weights", "mask"):
        for ones in (np.ones(length, np.float32), np.ones(length, np.int64)):
            sent = tinker.Datum(model_input=given.model_input, loss_fn_inputs=policy | {name: ones})
            for loss_fn in ("importance_sampling", "ppo", "cispo", "dro"):
                client.forward_backward([sent], loss_fn).result(timeout=60)
        mask = np.where(np.arange(length) < length - 1, ones, 0)
        masked = tinker.Datum(model_input=given.model_input, loss_fn_inputs=policy | {name: mask})
        with pytest.raises(
            tinker.RequestFailedError, match=rf"data\[1\].loss_fn_inputs.{name}: 0.* position {length - 1}"
        ):
            client.forward_backward([sent, masked], "ppo").result(timeout=60)


def test_custom_loss_of_the_client_works_on_fakes(service: Any) -> None:
    torch = pytest.importorskip("torch")
    session = service
    plain = session.create_lora_training_client(base_model="fake/bigram", rank=2, seed=3)
    custom = session.create_lora_training_client(base_model="fake/bigram", rank=2, seed=3)
    data = [datum([5, 9, 20]), datum([7, 8])]

    def negative_sum(_: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {"mine:sum": 1.0}

    want = plain.forward_backward(data, "cross_entropy").result()
    got = custom.forward_backward_custom(data, negative_sum).result()
    assert got.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=1e-5)
    norms = [client.optim_step(ADAM).result().metrics["grad_norm"] for client in (plain, custom)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


async def test_abandoned_sample_frees_its_slot_on_fakes(server: Any, service: Any) -> None:
    sampler = await service.create_sampling_client(base_model="fake/bigram")
    params = tinker.SamplingParams(max_tokens=4000, stop=[])

    async def wait(future: Any) -> Any:
        return await future

    waiting = [asyncio.create_task(wait(sampler.sample(PROMPT, 200, params))) for _ in range(4)]
    await until_async(lambda: len(server.backend.sampling.in_flight) == 4)
    await asyncio.sleep(1)  # the SDK cancels what it polls, not what it submits
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until_async(lambda: not server.backend.sampling.in_flight)
    short = await sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=2))
    assert len(short.sequences[0].tokens) <= 2


def test_closing_the_client_frees_its_models_on_fakes(server: Any) -> None:
    backend = server.backend
    before = backend.runs.count()
    for status in ("success", "errored"):
        service = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
        clients = [service.create_lora_training_client(base_model="fake/bigram", rank=2) for _ in range(2)]
        for client in clients:
            client.save_weights_and_get_sampling_client()
        assert backend.runs.count() == before + 2
        service.close(status)
        until(lambda: backend.runs.count() == before)
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError, RuntimeError)):
            clients[0].forward_backward([datum([5, 9])], "cross_entropy").result(timeout=60)
    assert not list((backend.options.data_dir / "ephemeral").glob("*.link"))


def test_metadata_and_listings_round_trip_on_fakes(server: Any, service: Any) -> None:
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2, user_metadata={"renderer_name": "x"})
    path = client.save_state("a", ttl_seconds=3600, user_metadata={"loss": "0.5"}).result().path
    loaded = service.create_training_client_from_state(path, user_metadata={"renderer_name": "y"})
    plain = service.create_training_client_from_state_with_optimizer(path)
    rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
    for model, metadata in ((client, {"renderer_name": "x"}), (loaded, {"renderer_name": "y"}), (plain, {})):
        run = rest.get_training_run(model.get_info().model_id).result()
        assert (run.user_metadata or {}) == metadata
        assert (run.base_model, run.lora_rank, run.is_lora) == ("fake/bigram", 2, True)
    found = rest.get_training_run_by_tinker_path(path).result()
    assert found.last_checkpoint is not None
    assert found.last_checkpoint.user_metadata == {"loss": "0.5"}
    assert found.last_checkpoint.expires_at is not None
    assert path in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank) == ("fake/bigram", 2)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()


@pytest.mark.more
@pytest.mark.timeout(900)  # a process for each command
def test_command_line_of_the_sdk_works_on_fakes(
    server: Any, service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its tables compare times with a zone, and crash on others."""
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2)
    path = client.save_state("for-the-table", ttl_seconds=7200).result().path
    run = client.get_info().model_id

    def printed(*arguments: str) -> str:
        done = tinker_command(*arguments, url=server.url, api_key=server.api_key, home=tmp_path)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    assert "fake/bigram" in printed("-f", "json", "model", "list")
    runs = json.loads(printed("-f", "json", "run", "list", "--limit", "0"))
    assert run in json.dumps(runs)
    assert run in printed("run", "info", run)
    assert "for-the-table" in printed("checkpoint", "list", "--run-id", run)
    assert path in printed("-f", "json", "checkpoint", "list", "--limit", "0")
    assert "for-the-table" in printed("checkpoint", "info", path)
    printed("auth", "status")
    printed("checkpoint", "delete", "-y", path)
    assert path not in printed("-f", "json", "checkpoint", "list", "--limit", "0")


BAD = datum([5, 9, 20], weights=np.ones(7, np.float32))


def weights_of(server: Any, client: tinker.TrainingClient) -> dict[str, Any]:
    """And how many steps were taken."""
    (engines,) = {model.engines for model in server.backend.models.distinct()}
    state = engines.trainer.capture(client.model_id, optimizer=True)
    return {**state.tensors, **(state.optimizer or {}), "step": state.step}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [1, 3])
def test_a_failed_call_is_caught_and_sent_again_and_nothing_of_it_stays_on_fakes(
    count: int, server: Any, service: tinker.ServiceClient
) -> None:
    """Also of one that the SDK sends as three requests, of which the second fails."""
    client, twin = (service.create_lora_training_client("fake/bigram", rank=4, seed=1).result() for _ in range(2))
    data = [datum([5 + at % 90, 9, 20]) for at in range(1024 * (count - 1) + 10)]
    assert len(client._chunked_requests(data)) == count
    client, twin = (service.create_lora_training_client("fake/bigram", rank=4, seed=1).result() for _ in range(2))
    bad = data.copy()
    bad[1500 if count == 3 else 3] = BAD
    for _ in range(1 if count == 3 else 2):
        with pytest.raises(tinker.RequestFailedError, match="no gradient is left since the last optimizer step"):
            client.forward_backward(bad, "cross_entropy").result()
        for each in (client, twin):
            each.forward_backward(data, "cross_entropy").result()
            each.optim_step(ADAM).result()
        assert_same(weights_of(server, client), weights_of(server, twin))


def test_steps_that_were_submitted_with_a_call_that_fails_fail_on_fakes(
    server: Any, service: tinker.ServiceClient
) -> None:
    """The SDK pipelines them: a step on the rest of a batch would be silent."""
    client = service.create_lora_training_client("fake/bigram", rank=4, seed=1).result()
    before = weights_of(server, client)
    good = [datum([5 + at % 90, 9, 20]) for at in range(200)]
    for calls in ([[BAD]], [[BAD], good], [good, [BAD]], [[BAD], [BAD], good], [[BAD], good, good]):
        futures = [client.forward_backward(data, "cross_entropy") for data in calls]
        step = client.optim_step(ADAM)
        with pytest.raises(tinker.RequestFailedError, match="the optimizer step was not taken and the gradient was"):
            step.result()
        for future, data in zip(futures, calls, strict=True):
            if data is good:
                assert len(future.result().loss_fn_outputs) == 200
            else:
                with pytest.raises(tinker.RequestFailedError, match="weights"):
                    future.result()
        assert_same(weights_of(server, client), before)
    client.forward_backward(good, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics
