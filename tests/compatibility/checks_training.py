"""`ServiceClient` and `TrainingClient`."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tinker
import torch

from tests.compatibility.world import ADAM, TOKENS, World, datum, differs, same
from tests.compatibility.write_report import works


@works("ServiceClient.holder", by="the server knows the session that it names")
def holder(world: World) -> None:
    session = world.service.holder.get_session_id()
    assert session in world.rest.list_sessions(limit=100).result().sessions


@works("ServiceClient.get_console_url", "TrainingClient.get_console_url", by="made by the SDK; it names the session")
def console_url(world: World) -> None:
    session = world.service.holder.get_session_id()
    assert session in world.service.get_console_url()
    assert session in world.training().get_console_url()


@works(
    "ServiceClient.get_server_capabilities",
    "RestClient.get_server_capabilities",
    by="the served model, trainable and sampleable, with its context length",
)
def capabilities(world: World) -> None:
    answers = [world.call(world.service, "get_server_capabilities"), world.rest.get_server_capabilities().result()]
    for answer in answers:
        (found,) = [model for model in answer.supported_models if model.model_name == world.model]
        assert found.trainable
        assert found.sampleable
        assert found.max_context_length == 8192


@works(
    "ServiceClient.create_lora_training_client", by="a new adapter has the base model's logprobs, and the rank asked"
)
def create(world: World) -> None:
    client = world.call(world.service, "create_lora_training_client", base_model=world.model, rank=4)
    same(world.learner(client), world.base())
    run = world.rest.get_training_run(client.get_info().model_id).result()
    assert run.lora_rank == 4


@works(
    "ServiceClient.create_training_client_from_state",
    by="the saved logprobs, with fresh moments: its next step is not the one of the run that was saved",
)
def resume_weights(world: World) -> None:
    client = world.training()
    path = client.save_state(world.name()).result().path
    resumed = world.call(world.service, "create_training_client_from_state", path)
    same(world.learner(resumed), world.learner(client))
    for each in (client, resumed):
        world.steps(each, 1)
    assert np.abs(world.learner(resumed) - world.learner(client)).max() > 1e-3


@works(
    "ServiceClient.create_training_client_from_state_with_optimizer",
    by="the saved logprobs, and its next steps are those of the run that was saved",
)
def resume_all(world: World) -> None:
    client = world.training()
    path = client.save_state(world.name()).result().path
    resumed = world.call(world.service, "create_training_client_from_state_with_optimizer", path)
    same(world.learner(resumed), world.learner(client))
    for each in (client, resumed):
        world.steps(each, 2)
    same(world.learner(resumed), world.learner(client))


@works(
    "ServiceClient.create_sampling_client",
    "TrainingClient.create_sampling_client",
    by="a saved path and the base model give the trainer's logprobs",
)
def create_sampling(world: World) -> None:
    client = world.training()
    path = client.save_weights_for_sampler(world.name()).result().path
    for owner in (world.service, client):
        same(world.sampler(world.call(owner, "create_sampling_client", model_path=path)), world.learner(client))
    base = world.call(world.service, "create_sampling_client", base_model=world.model)
    same(world.sampler(base), world.base())
    differs(world.base(), world.learner(client))


@works(
    "ServiceClient.create_custom_loss", by="kept by the SDK (nothing is uploaded); its value is that of the function"
)
def custom_loss(world: World) -> None:
    handle = world.service.create_custom_loss(square_loss, {"logprobs": 1}).result()
    client = world.training()
    expected = float((world.learner(client) ** 2).sum())
    output = client.forward_backward_custom([datum(TOKENS)], handle).result()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def square_loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (logprobs**2).sum(), {}


@works("ServiceClient.create_rest_client", by="it lists the runs of the client it was made by")
def create_rest(world: World) -> None:
    run = world.training().get_info().model_id
    found = world.service.create_rest_client().list_training_runs(limit=100).result()
    assert run in [each.training_run_id for each in found.training_runs]


@works("ServiceClient.close", by="its session has ended: what is asked of its runs is refused")
def close(world: World) -> None:
    service = tinker.ServiceClient(base_url=world.url, api_key=world.api_key)
    session = service.holder.get_session_id()
    service.create_lora_training_client(base_model=world.model, rank=4).result()
    service.close("success").result()
    request = tinker.types.SessionSearchRequest(session_id=session)
    (found,) = world.rest.search_sessions(request).result().sessions
    assert isinstance(found.status, tinker.types.ClientSessionFinished)
    assert found.status.reason.type == "success"


@works(
    *(f"{owner}.get_telemetry" for owner in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")),
    "AdminClient.get_telemetry",
    by="local to the SDK; TINKER_TELEMETRY=0 turns it off, and what comes is thrown away unread",
)
def telemetry(world: World) -> None:
    client = world.training()
    sampler = client.save_weights_and_get_sampling_client().result()
    for owner in (world.service, client, sampler, world.rest, tinker.AdminClient(base_url=world.url)):
        assert owner.get_telemetry() is None


@works("TrainingClient.forward", by="logprobs equal the sampler's, and it leaves no gradient: a step has norm 0")
def forward(world: World) -> None:
    client = world.service.create_lora_training_client(base_model=world.model, rank=4).result()
    output = world.call(client, "forward", [datum(TOKENS)], "cross_entropy")
    same(output.loss_fn_outputs[0]["logprobs"].to_numpy(), world.base())
    metrics = client.optim_step(ADAM).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] == 0


@works("TrainingClient.forward_backward", by="the loss is minus the sum of the logprobs, and a step lowers it")
def forward_backward(world: World) -> None:
    client = world.training()
    output = world.call(client, "forward_backward", [datum(TOKENS), datum(TOKENS[2:])], "cross_entropy")
    logprobs = [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]
    assert [len(each) for each in logprobs] == [7, 5]
    assert output.metrics["loss:sum"] == pytest.approx(-sum(float(each.sum()) for each in logprobs), rel=1e-4)
    client.optim_step(ADAM).result()
    assert world.learner(client).sum() > logprobs[0].sum()


@works("TrainingClient.forward_backward_custom", by="the gradient norm is that of the same loss as built-in weights")
def forward_backward_custom(world: World) -> None:
    norms = []
    for custom in (True, False):
        client = world.training()
        logprobs = world.learner(client)
        if custom:
            output = world.call(client, "forward_backward_custom", [datum(TOKENS)], all_squares)
            assert output.metrics["loss:sum"] == pytest.approx(float((logprobs**2).sum()), rel=1e-4)
        else:
            weights = (-2 * logprobs).astype(np.float32)  # d(l^2) = 2 l dl
            client.forward_backward([datum(TOKENS, weights=weights)], "cross_entropy").result()
        metrics = client.optim_step(ADAM).result().metrics
        assert metrics is not None
        norms.append(metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def all_squares(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return sum(((each**2).sum() for each in logprobs), torch.zeros(())), {}


@works("TrainingClient.optim_step", by="with a learning rate of 0 nothing moves, with another the loss falls")
def optim_step(world: World) -> None:
    client = world.training()
    before = world.learner(client)
    client.forward_backward([datum(TOKENS)], "cross_entropy").result()
    assert world.call(client, "optim_step", tinker.AdamParams(learning_rate=0.0)).metrics["grad_norm"] > 0
    same(world.learner(client), before)
    client.forward_backward([datum(TOKENS)], "cross_entropy").result()
    world.call(client, "optim_step", ADAM)
    assert world.learner(client).sum() > before.sum()


@works("TrainingClient.save_state", by="the listing has its path, kind and metadata")
def save_state(world: World) -> None:
    client = world.training()
    path = world.call(client, "save_state", world.name(), user_metadata={"epoch": "3"}).path
    (found,) = world.rest.list_checkpoints(client.get_info().model_id).result().checkpoints
    assert (found.tinker_path, found.checkpoint_type, found.user_metadata) == (path, "training", {"epoch": "3"})


@works(
    "TrainingClient.load_state",
    "TrainingClient.load_state_with_optimizer",
    by="a new client has the saved logprobs, and with the optimizer the saved run's next step",
)
def load_state(world: World) -> None:
    client = world.training()
    path = client.save_state(world.name()).result().path
    saved = world.learner(client)
    world.steps(client, 1)
    for name in ("load_state", "load_state_with_optimizer"):
        loaded = world.service.create_lora_training_client(base_model=world.model, rank=4).result()
        world.call(loaded, name, path)
        same(world.learner(loaded), saved)
        world.steps(loaded, 1)
        distance = np.abs(world.learner(loaded) - world.learner(client)).max()
        assert (distance < 2e-4) == name.endswith("optimizer")


@works("TrainingClient.save_weights_for_sampler", by="a sampler of its path has the trainer's logprobs of that moment")
def save_for_sampler(world: World) -> None:
    client = world.training()
    expected = world.learner(client)
    path = world.call(client, "save_weights_for_sampler", world.name()).path
    world.steps(client, 1)
    same(world.sampler(world.service.create_sampling_client(model_path=path).result()), expected)


@works(
    "TrainingClient.save_weights_and_get_sampling_client",
    by="the sampler has the trainer's logprobs, and an older one keeps its own",
)
def nameless(world: World) -> None:
    client = world.training()
    expected, samplers = [], []
    for _ in range(2):
        expected.append(world.learner(client))
        samplers.append(world.call(client, "save_weights_and_get_sampling_client"))
        world.steps(client, 1)
    for sampler, logprobs in zip(samplers, expected, strict=True):
        same(world.sampler(sampler), logprobs)


@works("TrainingClient.get_info", by="the model's name, and the rank asked for")
def get_info(world: World) -> None:
    client = world.training()
    info = world.call(client, "get_info")
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (world.model, 4, True)


@works("TrainingClient.get_tokenizer", by="the served model's own tokenizer: text comes back whole")
def get_tokenizer(world: World) -> None:
    tokenizer = world.training().get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a cat")) == "a cat"


@works(
    "SamplingClient.get_tokenizer",
    by="the same, of the model's name as transformers finds it (hub, its cache, a folder): the SDK asks for no other",
)
def get_samplers_tokenizer(world: World) -> None:
    folder = world.training().get_info().model_data.tokenizer_id
    sampler = world.service.create_sampling_client(base_model=world.model).result()
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        link = Path(scratch) / world.model
        link.parent.mkdir()
        link.symlink_to(str(folder))
        patch.chdir(scratch)
        tokenizer = sampler.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a cat")) == "a cat"
