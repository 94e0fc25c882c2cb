"""`RestClient`, `AdminClient` and `tinker.auth`."""

import hashlib
import json
import struct
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import tinker

from tests.compatibility.world import World, same
from tests.compatibility.write_report import refused, works
from tests.traces.trace_reading import read_trace

DAY = timedelta(days=1)


def run_and_path(world: World) -> tuple[Any, str]:
    client = world.training()
    return client, client.save_state(world.name(), user_metadata={"epoch": "1"}).result().path


def checkpoint(world: World, path: str) -> Any:
    """The listing's entry of `path`; None if it has none."""
    listed = world.rest.list_user_checkpoints(limit=1000).result().checkpoints
    return next((each for each in listed if each.tinker_path == path), None)


@works(
    "RestClient.get_training_run",
    "RestClient.get_training_run_by_tinker_path",
    by="rank, base model, metadata as sent, and the last checkpoint",
)
def training_run(world: World) -> None:
    client = world.training(user_metadata={"idea": "7"})
    path = client.save_state(world.name()).result().path
    run_id = client.get_info().model_id
    found = [world.call(world.rest, "get_training_run", run_id)]
    found.append(world.call(world.rest, "get_training_run_by_tinker_path", path))
    for run in found:
        assert (run.training_run_id, run.base_model, run.lora_rank) == (run_id, world.model, 4)
        assert run.user_metadata == {"idea": "7"}
        assert run.last_checkpoint.tinker_path == path


@works("RestClient.get_weights_info_by_tinker_path", by="base model, rank and what is trained")
def weights_info(world: World) -> None:
    _, path = run_and_path(world)
    info = world.rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (world.model, True, 4)
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (True, True, True)


@works("RestClient.list_training_runs", by="a new run comes first, and pages do not overlap")
def list_runs(world: World) -> None:
    runs = [world.training().get_info().model_id for _ in range(2)]
    pages = [world.call(world.rest, "list_training_runs", limit=1, offset=at) for at in range(2)]
    assert [page.training_runs[0].training_run_id for page in pages] == runs[::-1]
    assert pages[0].cursor.total_count >= 2


@works(
    "RestClient.list_checkpoints", "RestClient.list_user_checkpoints", by="all that were saved, of both kinds, at once"
)
def list_checkpoints(world: World) -> None:
    client, path = run_and_path(world)
    sampler = client.save_weights_for_sampler(world.name()).result().path
    listed = world.call(world.rest, "list_checkpoints", client.get_info().model_id).checkpoints
    assert {each.tinker_path: each.checkpoint_type for each in listed} == {path: "training", sampler: "sampler"}
    newest = world.call(world.rest, "list_user_checkpoints", limit=2).checkpoints
    assert [each.tinker_path for each in newest] == [sampler, path]


@works(
    "RestClient.delete_checkpoint",
    "RestClient.delete_checkpoint_from_tinker_path",
    by="it is in no listing any more, and loading it is refused",
)
def delete(world: World) -> None:
    client, path = run_and_path(world)
    other = client.save_state(world.name()).result().path
    run_id = client.get_info().model_id
    world.call(world.rest, "delete_checkpoint", run_id, path.removeprefix(f"tinker://{run_id}/"))
    world.call(world.rest, "delete_checkpoint_from_tinker_path", other)
    assert world.rest.list_checkpoints(run_id).result().checkpoints == []
    with pytest.raises(tinker.TinkerError):
        world.service.create_training_client_from_state(path).result()


@works(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path",
    by="the listing says public, then no more",
)
def publish(world: World) -> None:
    _, path = run_and_path(world)
    world.call(world.rest, "publish_checkpoint_from_tinker_path", path)
    assert checkpoint(world, path).public
    world.call(world.rest, "unpublish_checkpoint_from_tinker_path", path)
    assert not checkpoint(world, path).public


@works("RestClient.set_checkpoint_ttl_from_tinker_path", by="the listing's expiry is that long from now, then none")
def ttl(world: World) -> None:
    _, path = run_and_path(world)
    world.call(world.rest, "set_checkpoint_ttl_from_tinker_path", path, 86400)
    assert abs(checkpoint(world, path).expires_at - datetime.now(UTC) - DAY) < timedelta(minutes=2)
    world.call(world.rest, "set_checkpoint_ttl_from_tinker_path", path, None)
    assert checkpoint(world, path).expires_at is None


@works(
    "RestClient.get_external_weights_urls",
    "TrainingClient.save_weights_external",
    by="plain GETs of the URLs give PEFT's two files, whose matrices have the rank that was trained",
)
def external_weights(world: World) -> None:
    client = world.training()
    path = world.call(client, "save_weights_external", world.name()).path
    answer = world.call(world.rest, "get_external_weights_urls", path)
    assert answer.expires > datetime.now(UTC)
    files = {name: urllib.request.urlopen(url, timeout=60).read() for name, url in answer.urls.items()}
    assert json.loads(files["adapter_config.json"])["r"] == 4
    weights = files["adapter_model.safetensors"]
    (size,) = struct.unpack("<Q", weights[:8])
    shapes = [each["shape"] for name, each in json.loads(weights[8 : 8 + size]).items() if "lora_A" in name]
    assert shapes
    assert all(rank == 4 for rank, _ in shapes)
    assert checkpoint(world, path).checkpoint_type == "external"


@works("RestClient.get_session", by="its runs, samplers and metadata")
def get_session(world: World) -> None:
    client = world.training()
    session = world.service.holder.get_session_id()
    found = world.call(world.rest, "get_session", session)
    assert client.get_info().model_id in found.training_run_ids
    assert found.user_metadata == {"of": "compatibility"}


@works("RestClient.list_sessions", by="the newest comes first")
def list_sessions(world: World) -> None:
    service = tinker.ServiceClient(base_url=world.url, api_key=world.api_key)
    session = service.holder.get_session_id()
    assert world.call(world.rest, "list_sessions", limit=1).sessions == [session]
    service.close("success").result()


@works("RestClient.search_sessions", by="found by its metadata alone, with its status")
def search_sessions(world: World) -> None:
    mark = {"mark": hashlib.sha256(world.name().encode()).hexdigest()[:12] + world.url[-5:]}
    service = tinker.ServiceClient(base_url=world.url, api_key=world.api_key, user_metadata=mark)
    session = service.holder.get_session_id()
    request = tinker.types.SessionSearchRequest(user_metadata=mark)
    (found,) = world.rest.search_sessions(request).result().sessions
    assert isinstance(found.status, tinker.types.SessionActive)
    assert (found.session_id, found.user_metadata) == (session, mark)
    service.close("errored", "a reason").result()
    (found,) = world.rest.search_sessions(request).result().sessions
    assert isinstance(found.status, tinker.types.ClientSessionFinished)
    assert (found.status.reason.type, found.status.detail) == ("errored", "a reason")


@works("RestClient.get_sampler", by="the base model, and the path it was made of")
def get_sampler(world: World) -> None:
    path = world.training().save_weights_for_sampler(world.name()).result().path
    sampler = world.service.create_sampling_client(model_path=path).result()
    same(world.sampler(sampler), world.sampler(sampler))
    session = world.rest.get_session(world.service.holder.get_session_id()).result()
    found = [world.call(world.rest, "get_sampler", each) for each in session.sampler_ids[-3:]]
    assert (world.model, path) in [(each.base_model, each.model_path) for each in found]


@works("ServiceClient.copy_weights", "RestClient.copy_weights", by="a copy of another run that has the same logprobs")
def copy_weights(world: World) -> None:
    client, path = run_and_path(world)
    copied = world.call(world.rest, "copy_weights", path, "local")
    assert copied != path
    same(world.learner(world.service.create_training_client_from_state(copied).result()), world.learner(client))


@refused("RestClient.whoami", saying="whoami requires JWT auth")
def whoami(world: World) -> None:
    world.rest.whoami().result()


@refused("RestClient.assign_session_project", saying="project")
def project(world: World) -> None:
    world.call(world.rest, "assign_session_project", world.service.holder.get_session_id(), "p1")


@works("RestClient.export_session_trace", by="a slice with its time in the trainer for every request made")
def trace(world: World) -> None:
    run_id = world.training().get_info().model_id
    url = world.call(world.rest, "export_session_trace", world.service.holder.get_session_id())
    with urllib.request.urlopen(url, timeout=60) as answer:
        check_trace(answer.read(), run_id)


def check_trace(content: bytes, run_id: str) -> None:
    """`content` tells of a run of two steps."""
    found = [each for each in read_trace(content).operations if each.arguments["request_id"].startswith(f"{run_id}:")]
    assert [(each.arguments["request_id"].rpartition(":")[2], each.name) for each in found] == [
        ("create", "create_model"),
        ("1", "forward_backward"),
        ("2", "optim_step"),
        ("3", "forward_backward"),
        ("4", "optim_step"),
    ]
    assert all(each.end and "running" in each.stages and each.arguments["outcome"] == "ok" for each in found)


def admin(world: World) -> Any:
    return tinker.AdminClient(base_url=world.url, api_key=world.api_key)


def hours() -> tuple[datetime, datetime]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return now - DAY, now


def refused_by_both(method: str, *args: Any, saying: str) -> None:
    """Both clients are refused: the administrator's gets what every client gets."""
    clients: dict[str, Callable[[World], Any]] = {"RestClient": lambda world: world.rest, "AdminClient": admin}
    for name, client in clients.items():

        @refused(f"{name}.{method}", saying=saying)
        def ask(world: World, client: Callable[[World], Any] = client) -> None:
            world.call(client(world), method, *args)


refused_by_both("get_audit_log", saying="audit log")
refused_by_both("get_billing_usage", *hours(), saying="no billing")
refused_by_both("get_current_checkpoint_storage_usage", saying="no billing")


@works("tinker.auth.get_tinker_token", "tinker.auth.tinker_has_credentials", by="the key of the environment; local")
def token(world: World) -> None:
    assert tinker.auth.get_tinker_token()
    assert tinker.auth.tinker_has_credentials()


@works("tinker.auth.raise_if_tinker_not_accessible", by="silent for this server, and raises where there is none")
def accessible(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", world.url)
        tinker.auth.raise_if_tinker_not_accessible()
