"""The SDK's RestClient, plain and `_async`, and the `tinker` commands on runs, checkpoints and sessions.

Every value that comes back is compared with what was done, or with what another call says.
"""

import asyncio
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.served_models import Engines

from tests.conftest import tinker_command
from tests.traces.trace_reading import read_trace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), FakeTrainer(model), FakeSampler(model), arch="fake", tolerance=1e-4)

    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
    server = LoopbackServer(InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load))
    yield server
    server.close()


@pytest.fixture
def service(server: Any) -> Iterator[tinker.ServiceClient]:
    metadata = {"recipe": "x", "number": "7"}
    with tinker.ServiceClient(
        base_url=server.url, api_key=server.api_key, display_name="A Test of Rest", user_metadata=metadata
    ) as client:
        yield client


@dataclass
class Rest:
    """A RestClient whose methods are called plainly, or by their deprecated `_async` twins."""

    client: tinker.RestClient
    twins: bool

    async def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.twins and hasattr(self.client, f"{method}_async"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return await getattr(self.client, f"{method}_async")(*args, **kwargs)
        return await getattr(self.client, method)(*args, **kwargs)


@pytest.fixture(params=["plain", "async twins"])
def rest(request: pytest.FixtureRequest, server: Any) -> Rest:
    return Rest(tinker.RestClient(base_url=server.url, api_key=server.api_key), request.param != "plain")


def trained(service: Any, **fields: Any) -> tuple[Any, str]:
    client = service.create_lora_training_client(base_model="fake/bigram", rank=2, **fields)
    return client, client.get_info().model_id


async def test_checkpoints_through_the_rest_client_on_fakes(service: Any, rest: Rest) -> None:
    client, run_id = trained(service)
    path = client.save_state("a", ttl_seconds=7200, user_metadata={"step": "3"}).result().path
    sampler = client.save_weights_for_sampler("a").result().path
    external = client.save_weights_external("a").result()
    exported = external if isinstance(external, str) else external.path

    async def found(of: str = path) -> types.Checkpoint:
        of_run = (await rest("list_checkpoints", run_id)).checkpoints
        everywhere = (await rest("list_user_checkpoints", limit=1000)).checkpoints
        of_user = [checkpoint for checkpoint in everywhere if checkpoint.tinker_path.startswith(f"tinker://{run_id}/")]
        assert of_run == of_user
        return next(checkpoint for checkpoint in of_run if checkpoint.tinker_path == of)

    assert {(c.tinker_path, c.checkpoint_type) for c in (await rest("list_checkpoints", run_id)).checkpoints} == {
        (path, "training"),
        (sampler, "sampler"),
        (exported, "external"),
    }
    assert (await found()).user_metadata == {"step": "3"}
    listed = await found()
    assert listed.expires_at is not None
    assert listed.expires_at - listed.time == timedelta(seconds=7200)
    page = await rest("list_user_checkpoints", limit=2, offset=1)
    assert [c.tinker_path for c in page.checkpoints] == [sampler, path]
    assert (page.cursor.offset, page.cursor.limit) == (1, 2)

    for each in (path, sampler, exported):
        info = await rest("get_weights_info_by_tinker_path", each)
        assert (info.base_model, info.lora_rank, info.is_lora) == ("fake/bigram", 2, True)
    await rest("publish_checkpoint_from_tinker_path", path)
    assert (await found()).public
    assert not (await found(sampler)).public
    # 400, not 409, which the SDK would send again.
    with pytest.raises(tinker.BadRequestError, match="public already"):
        await rest("publish_checkpoint_from_tinker_path", path)
    await rest("unpublish_checkpoint_from_tinker_path", path)
    assert not (await found()).public
    with pytest.raises(tinker.BadRequestError, match="private already"):
        await rest("unpublish_checkpoint_from_tinker_path", path)
    await rest("set_checkpoint_ttl_from_tinker_path", path, 86400)
    expires_at = (await found()).expires_at
    assert expires_at is not None
    assert timedelta(hours=23, minutes=59) < expires_at - datetime.now(UTC) <= timedelta(hours=24)
    await rest("set_checkpoint_ttl_from_tinker_path", path, None)
    assert (await found()).expires_at is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds: 3599"):
        await rest("set_checkpoint_ttl_from_tinker_path", path, 3599)

    await rest("delete_checkpoint", run_id, "sampler_weights/a")
    await rest("delete_checkpoint_from_tinker_path", exported)
    assert [c.tinker_path for c in (await rest("list_checkpoints", run_id)).checkpoints] == [path]
    for call in ("get_weights_info_by_tinker_path", "publish_checkpoint_from_tinker_path"):
        with pytest.raises(tinker.NotFoundError):
            await rest(call, sampler)


async def test_runs_through_the_rest_client_on_fakes(service: Any, rest: Rest) -> None:
    client, run_id = trained(service, user_metadata={"renderer_name": "role_colon"})
    paths = [client.save_state(name).result().path for name in ("b", "a")]
    last = client.save_weights_for_sampler("c").result().path
    run = await rest("get_training_run", run_id)
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (run_id, "fake/bigram", True, 2)
    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (paths[1], last)
    assert abs(datetime.now(UTC) - run.last_request_time) < timedelta(minutes=2)
    assert await rest("get_training_run_by_tinker_path", paths[0]) == run
    _, newer = trained(service)
    listed = await rest("list_training_runs", limit=2)
    assert [each.training_run_id for each in listed.training_runs] == [newer, run_id]
    assert listed.training_runs[1] == run
    second = await rest("list_training_runs", limit=1, offset=1, access_scope="accessible")
    assert second.training_runs == [run]
    assert (second.cursor.offset, second.cursor.limit) == (1, 1)
    assert second.cursor.total_count == listed.cursor.total_count >= 2
    with pytest.raises(tinker.NotFoundError):
        await rest("get_training_run", "s-none:train:0")
    assert (await rest("list_training_runs", project_id="proj-1")).training_runs == []


async def test_sessions_through_the_rest_client_on_fakes(service: Any, rest: Rest) -> None:
    client, run_id = trained(service)
    for name in ("a", "b"):
        client.save_state(name).result()
    size = sum(c.size_bytes for c in (await rest("list_checkpoints", run_id)).checkpoints)
    client.save_weights_and_get_sampling_client().result()
    session = run_id.split(":")[0]
    found = await rest("get_session", session)
    assert (found.training_run_ids, found.display_name) == ([run_id], "A Test of Rest")
    assert found.sampler_ids == [f"{session}:sample:0"]
    assert found.user_metadata == {"recipe": "x", "number": "7"}
    sampler = await rest("get_sampler", found.sampler_ids[0])
    assert (sampler.sampler_id, sampler.base_model, sampler.model_path) == (found.sampler_ids[0], "fake/bigram", None)
    assert (await rest("list_sessions", limit=1)).sessions == [session]
    assert session not in (await rest("list_sessions", limit=100, offset=1)).sessions

    async def search(**fields: Any) -> list[types.SessionSummary]:
        request = types.SessionSearchRequest(user_metadata={"number": "7"}, **fields)
        return list((await rest.client.search_sessions(request)).sessions)

    summary = (await search(display_name="rest TEST", statuses=[types.ActiveSessionStatusQuery()]))[0]
    assert (summary.session_id, summary.display_name) == (session, "A Test of Rest")
    assert (summary.checkpoints_count, summary.checkpoint_storage_bytes) == (2, size)
    assert isinstance(summary.status, types.SessionActive)
    service.close("errored", "ValueError: bad luck")
    wanted = types.ClientFinishedSessionStatusQuery(reasons=["errored"])
    until = time.monotonic() + 30
    while not (ended := await search(session_id=session, statuses=[wanted])):
        assert time.monotonic() < until
    summary = ended[0]
    assert isinstance(summary.status, types.ClientSessionFinished)
    assert isinstance(summary.status.reason, types.ClientSessionFinishErrored)
    assert summary.status.detail == "ValueError: bad luck"
    first = await rest.client.search_sessions(types.SessionSearchRequest(limit=1))
    assert first.sessions[0].session_id == session
    if first.next_cursor is not None:
        second = await rest.client.search_sessions(types.SessionSearchRequest(limit=1, cursor=first.next_cursor))
        assert second.sessions[0].session_id != session
    with pytest.raises(tinker.BadRequestError, match=r"is not supported: .*TINKER_PROJECT_ID"):
        await rest("assign_session_project", session, "proj-1")


async def test_copies_through_the_sdk_on_fakes(server: Any, service: Any, rest: Rest) -> None:
    client, _ = trained(service)
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([5, 9, 20]),
            loss_fn_inputs={"target_tokens": types.TensorData(data=[9, 20, 31], dtype="int64", shape=[3])},
        )
    ]
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    source = client.save_state("a", user_metadata={"k": "v"}).result().path
    wanted = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    copy = await rest("copy_weights", source, "local", ttl_seconds=3600)
    listed = (await rest("list_checkpoints", copy.split("/")[2])).checkpoints
    assert [(c.tinker_path, c.checkpoint_id, c.user_metadata) for c in listed] == [(copy, "weights/a", {"k": "v"})]
    assert listed[0].expires_at - listed[0].time == timedelta(seconds=3600)
    loaded = service.create_training_client_from_state(copy)
    assert loaded.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(wanted, rel=1e-9)
    assert await rest("copy_weights", source, "local") != copy
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key, project_id="local") as there:
        path = there.copy_weights(copy).result()
    assert path.endswith("/weights/a")
    assert (await rest("copy_weights", source, "proj-1")).endswith("/weights/a")
    opened = await rest("copy_weights", source, "local", weights_access_token=server.api_key)
    assert opened.endswith("/weights/a")
    assert service.create_training_client_from_state(opened, weights_access_token=server.api_key)
    with pytest.raises(tinker.PermissionDeniedError, match="X-Tinker-Weights-Access-Token"):
        await rest("copy_weights", source, "local", weights_access_token="t")
    with pytest.raises(tinker.PermissionDeniedError, match="weights_access_token"):
        service.create_training_client_from_state(copy, weights_access_token="t").result()


Command = Callable[..., Any]


@pytest.fixture
def command(server: Any, tmp_path: Path) -> Command:
    """`command(*arguments)`: what `tinker -f json` prints, parsed if it is JSON; with `fails`, its error."""

    def run(*arguments: str, fails: bool = False, table: bool = False) -> Any:
        form = "table" if table else "json"
        done = tinker_command("-f", form, *arguments, url=server.url, api_key=server.api_key, home=tmp_path)
        assert (done.returncode != 0) == fails, (arguments, done.stdout, done.stderr)
        if fails or table:
            return done.stdout + done.stderr
        return json.loads(done.stdout) if done.stdout.strip()[:1] in ("{", "[") else done.stdout

    return run


@pytest.mark.more
@pytest.mark.timeout(900)  # a process for each command
def test_commands_on_checkpoints_and_runs_on_fakes(service: Any, server: Any, command: Command) -> None:
    client, run_id = trained(service, user_metadata={"renderer_name": "x"})
    path = client.save_state("state", ttl_seconds=7200).result().path
    other = client.save_weights_for_sampler("sampler").result().path
    rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)

    def now_of(of: str = path) -> types.Checkpoint:
        return next(c for c in rest.list_checkpoints(run_id).result().checkpoints if c.tinker_path == of)

    (run,) = command("run", "list", "--limit", "1")["runs"]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (run_id, "fake/bigram", 2)
    info = command("run", "info", run_id)
    assert (info["training_run_id"], info["user_metadata"]) == (run_id, {"renderer_name": "x"})
    assert info["last_checkpoint"]["tinker_path"] == path
    listed = command("checkpoint", "list", "--run-id", run_id)["checkpoints"]
    assert {(c["tinker_path"], c["checkpoint_type"], c["public"]) for c in listed} == {
        (path, "training", False),
        (other, "sampler", False),
    }
    everywhere = command("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert {path, other} <= {c["tinker_path"] for c in everywhere}
    command("checkpoint", "publish", path)
    assert now_of().public
    assert "public already" in command("checkpoint", "publish", path, fails=True)
    command("checkpoint", "unpublish", path)
    assert not now_of().public
    command("checkpoint", "set-ttl", path, "--ttl", "86400")
    expires_at = now_of().expires_at
    assert expires_at is not None
    assert timedelta(hours=23) < expires_at - datetime.now(UTC) <= timedelta(hours=24)
    assert "Never" not in command("checkpoint", "info", path, table=True)
    command("checkpoint", "set-ttl", path, "--remove")
    assert now_of().expires_at is None
    assert "3600" in command("checkpoint", "set-ttl", path, "--ttl", "5", fails=True)
    shown = command("checkpoint", "info", path)
    assert path in json.dumps(shown)
    command("checkpoint", "delete", "--run-id", run_id, "--type", "sampler", "-y")
    assert [c.tinker_path for c in rest.list_checkpoints(run_id).result().checkpoints] == [path]
    command("checkpoint", "delete", "-y", path)
    assert rest.list_checkpoints(run_id).result().checkpoints == []


async def test_trace_of_a_session_through_the_sdk_on_fakes(service: Any, rest: Rest) -> None:
    session = service.holder.get_session_id()
    with pytest.raises(RuntimeError, match="it has made no request since the server started"):
        await rest("export_session_trace", session)
    _, run_id = trained(service)
    url = await rest("export_session_trace", session)
    answer = await asyncio.to_thread(httpx.get, url)
    assert answer.status_code == 200
    assert read_trace(answer.content).of(f"{run_id}:create").name == "create_model"
    with pytest.raises(tinker.NotFoundError, match="s-unknown"):
        await rest("export_session_trace", "s-unknown")


def test_command_writes_the_trace_of_a_session_on_fakes(
    service: Any, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, run_id = trained(service)
    session = service.holder.get_session_id()
    written = command("session", "export-trace", session)
    content = (tmp_path / f"{session}.pftrace").read_bytes()
    assert written["file_size_bytes"] == len(content)
    assert read_trace(content).of(f"{run_id}:create").name == "create_model"
    url = command("session", "export-trace", session, "--url-only")["url"]
    assert httpx.get(url).content == content
