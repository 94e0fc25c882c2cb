"""Streams through samplers in processes, of clients that do not read, within limits, and as `docs/endpoints.md` shows
them."""

import asyncio
import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeSampler, FakeTrainer
from tinker_local.backend.hosting import completions
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.http import connections
from tinker_local.backend.http.sampling_routes import body_limits
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import DrawnTokens, SampleWork
from tinker_local.backend.scheduling.memory_sharing import MemorySharing, WakingSampler
from tinker_local.types import InternalError, SampleOutput, SamplingParams, TooManyRequestsError

from tests.conftest import Server
from tests.http.conftest import StartApi, completions_of

ROOT = Path(__file__).parents[2]
MODEL = "fake/bigram"
HI: Any = [{"role": "user", "content": "hi"}]


def start(folder: Path, **options: Any) -> tuple[InProcessBackend, LoopbackServer]:
    backend = InProcessBackend([ModelSource(MODEL, MODEL)], BackendOptions(data_dir=folder, **options), load=load_fake)
    return backend, backend.serve_in_thread()


def client_of(server: LoopbackServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


@pytest.fixture(scope="module", params=[{"sampler": "process"}, {"sample_gpus": (0, 1)}], ids=["process", "replicas"])
def in_processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[InProcessBackend, LoopbackServer]]:
    backend, server = start(tmp_path_factory.mktemp("data"), **request.param)
    yield backend, server
    server.close()


def test_samplers_in_processes_stream_as_one_in_the_server_does_on_fakes(
    in_processes: tuple[InProcessBackend, LoopbackServer],
) -> None:
    _, server = in_processes
    asked: Any = {"model": MODEL, "messages": HI, "seed": 4, "n": 20, "logprobs": True, "top_logprobs": 1}
    with client_of(server) as client:
        whole = client.chat.completions.create(**asked)
        texts, logprobs = [""] * 20, [[] for _ in range(20)]  # type: ignore[var-annotated]
        for chunk in client.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += [] if choice.logprobs is None else choice.logprobs.content or []
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices if choice.logprobs is not None]


class EndingSampler(FakeSampler):
    """Its process ends after the first tokens; `begun`: how often a sample began."""

    begun = 0

    async def sample(self, work: SampleWork) -> SampleOutput:
        self.begun += 1
        if self.begun < 3:
            if work.drawn is not None:
                work.drawn(DrawnTokens(0, (5,), (-1.0,)))
            raise ProcessEndedError("the sampler's process ended")
        return await super().sample(work)


async def test_a_stream_whose_sampler_ends_after_its_first_tokens_fails_and_never_begins_again_on_fakes() -> None:
    model = FakeModel(MODEL)
    sampler, trainer = EndingSampler(model), FakeTrainer(model)
    sharing = MemorySharing(trainer, sampler)
    work = SampleWork(RenderedInput(np.array([5], np.int32)), None, SamplingParams(max_tokens=2))
    taken: list[DrawnTokens] = []
    with pytest.raises(InternalError, match="after its first tokens were given out"):
        await WakingSampler(sampler, sharing).sample(replace(work, drawn=taken.append))
    assert (sampler.begun, len(taken)) == (1, 1)
    assert (await WakingSampler(sampler, sharing).sample(work)).sequences
    assert sampler.begun == 3
    await sharing.close()
    await sampler.close()
    trainer.close()


def test_a_stream_that_its_client_does_not_read_is_ended_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    backend, server = start(tmp_path / "data")
    (model,) = backend.models.distinct()
    asked = {"model": MODEL, "messages": HI, "stream": True, "n": 1024, "max_tokens": 200}
    body = json.dumps({**asked, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.api_key}\r\n"
    address = urlsplit(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: model.counts.samples_accepted == 1 or model.counts.samples > 0)
        eventually(lambda: model.counts.samples_accepted == 0)
        (own,) = completions_of(server)._owners.values()
        eventually(lambda: not any(name.startswith(own.session_id) for name in list(backend.operations._by_id)))
    server.close()


def unread(server: LoopbackServer, **asked: Any) -> socket.socket:
    """A connection that has sent a request for completions, and whose answer waits to be read."""
    body = json.dumps({"model": MODEL, "prompt": "hi", **asked}).encode()
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {server.api_key}\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    return b"".join(iter(lambda: connection.recv(2**20), b""))


HUGE: Any = {"n": 200, "max_tokens": 100, "logprobs": 20, "seed": 1}
"""Megabytes, of which the system keeps a part."""


def test_a_stream_that_waits_for_its_client_beyond_the_bound_ends_with_an_error_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MOST_WAITING", 64 * 1024)
    backend, server = start(tmp_path / "data")
    (model,) = backend.models.distinct()
    with unread(server, stream=True, **HUGE) as slow, client_of(server) as client:
        eventually(lambda: (model.counts.failures.get("user", 0), model.counts.samples_accepted) == (1, 0))
        unread_bytes = completions_of(server)._unread.bytes
        assert unread_bytes.total == 0
        # Those that read notice nothing, and this one reads why.
        whole = client.completions.create(model=MODEL, prompt="hi", n=20, max_tokens=100, seed=1)
        streamed = client.completions.create(model=MODEL, prompt="hi", n=20, max_tokens=100, seed=1, stream=True)
        assert sum(1 for _ in streamed) == whole.usage.completion_tokens  # type: ignore[union-attr]
        last = rest_of(slow).decode().split("data: ")[-1]
    assert "the client reads more slowly than tokens are drawn" in last
    assert "65536 bytes" in last
    assert "rate_limit_error" in last
    server.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_counts_for_its_owner_until_its_client_has_read_it_on_fakes(tmp_path: Path, streamed: bool) -> None:
    backend, server = start(tmp_path / "data")
    (model,) = backend.models.distinct()
    with unread(server, stream=streamed, **HUGE) as slow, httpx.Client(base_url=server.url) as http:
        eventually(lambda: model.counts.samples > 0 and model.counts.samples_accepted == 0)

        def samples() -> int:
            (own,) = http.get("/api/v1/usage", headers={"X-API-Key": server.api_key}).json()["owners"]
            return int(own["used"]["samples"])

        assert samples() == 1
        assert len(rest_of(slow)) > 2**21
        eventually(lambda: samples() == 0)
    assert not backend.sampling.in_flight._bytes_by_owner
    assert completions_of(server)._unread.bytes.total == 0
    server.close()


async def test_unread_streams_of_an_owner_leave_room_for_those_of_others_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api()
    monkeypatch.setattr(completions, "MOST_UNREAD", 4000)
    unread = completions.Unread()
    answers = [completions.Answer(api.backend.operations, owner, unread) for owner in ("alice", "alice", "bob", "bob")]
    token = DrawnTokens(0, (5,), (-1.0,), (((5, -1.0), (6, -2.0)),))  # 24 bytes
    for _ in range(50):
        for answer in answers[:3]:
            answer.take(0, token)
    with pytest.raises(TooManyRequestsError, match="an owner as many as others leave of 4000"):
        [_ async for _ in answers[0].drawings()]
    for each in answers[1:3]:
        assert [drawing.tokens async for drawings in each.drawings() for drawing in drawings] == [token] * 50
    assert unread.bytes.total == 0
    for answer in answers:
        answer.close()
        answer.take(0, token)  # of an engine that has not heard of the end
    assert unread.bytes.total == 0


def test_tokens_wait_as_arrays_and_come_back_one_by_one_on_fakes() -> None:
    waiting = completions.WaitingTokens(3)
    rng = np.random.default_rng(0)
    logprobs = rng.normal(size=(10_000, 21)).astype(np.float32).tolist()
    ids = rng.integers(2**31 - 1, size=(10_000, 21)).tolist()
    given = [
        DrawnTokens(3, (row[0],), (values[0],), (tuple(zip(row[1:], values[1:], strict=True)),))
        for row, values in zip(ids, logprobs, strict=True)
    ]
    taken = []
    for at, each in enumerate(given):
        waiting.add(each)
        if at % 3 == 2:  # the reader is slower
            taken.append(waiting.next())
    arrays = (waiting._tokens, waiting._logprobs, waiting._ids, waiting._values)
    assert sum(one.itemsize * len(one) for one in arrays) == 8 * 21 * 10_000
    waiting.add(DrawnTokens(3, (), (), (), "stop"))
    while len(waiting):
        taken.append(waiting.next())
    assert taken[:-1] == given[:-1]
    assert taken[-1] == replace(given[-1], stop_reason="stop")
    assert waiting.next() == DrawnTokens(3, (), (), (), "stop")
    assert sum(one.itemsize * len(one) for one in arrays) < 8 * 21 * 5_000


def test_examples_of_the_page_run_on_fakes(
    fake_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code, with the address and the model of a server of fakes."""
    page = (ROOT / "docs" / "endpoints.md").read_text()
    page = page.replace("http://127.0.0.1:8000", fake_server.url).replace("Qwen/Qwen2.5-VL-3B-Instruct", MODEL)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32), "red").save("cat.png")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3  # the last is run by tests/e2e/test_token_ids_on_real_models.py
    for block in blocks:
        exec(compile(block, "docs/endpoints.md", "exec"), {})
        capsys.readouterr()
    (command,) = re.findall(r"^    (curl .*?\n.*?)\n$", page, re.MULTILINE | re.DOTALL)
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.endswith("data: [DONE]\n\n")


async def test_limits_of_samples_are_those_of_endpoints_on_fakes(start_api: StartApi) -> None:
    api = await start_api(max_queued_samples_per_session=1)
    body = {"model": MODEL, "messages": HI, "max_tokens": 2}
    api.sampler.hold.clear()
    first = asyncio.create_task(api.http.post("/v1/chat/completions", json=body))
    await api.until(lambda: api.sampler.running == 1)
    assert (await api.get("usage")).json()["owners"][0]["used"]["samples"] == 1
    for path, shape in (("/v1/chat/completions", "rate_limit_exceeded"), ("/v1/messages", "rate_limit_error")):
        refused = await api.http.post(path, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert shape in refused.text
    api.sampler.hold.set()
    assert (await first).status_code == 200
    assert (await api.http.post("/v1/messages", json=body)).status_code == 200
    most, values = body_limits(api.backend)
    for content, reason in ((b" " * (most + 1), f"{most + 1} bytes"), (b"," * (values + 1), f"{values} JSON values")):
        for path in ("/v1/chat/completions", "/oai/api/v1/completions", "/v1/messages", "/v1/messages/count_tokens"):
            refused = await api.http.post(path, content=content)
            assert refused.status_code == 400
            assert reason in refused.json()["error"]["message"]
