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

import numpy as np
import openai
import pytest
from PIL import Image
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeSampler, FakeTrainer
from tinker_local.backend.http import connections
from tinker_local.backend.http.sampling_routes import body_limits
from tinker_local.backend.http.server import LoopbackServer
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import DrawnTokens, SampleWork
from tinker_local.backend.scheduling.memory_sharing import MemorySharing, WakingSampler
from tinker_local.types import InternalError, SampleOutput, SamplingParams

from tests.conftest import Server
from tests.http.conftest import StartApi

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


@pytest.mark.mutation(
    "tokens-of-processes-not-told",
    "process_sampler.py",
    "            elif work.drawn is not None:\n",
    "            elif False:\n",
)
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


@pytest.mark.mutation(
    "streams-begin-again", "memory_sharing.py", "        self.drawn = True\n", "        self.drawn = False\n"
)
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


@pytest.mark.mutation("unread-streams-go-on", "event_stream.py", "            self._close()\n", "            pass\n")
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
        (own,) = backend.completions._owners.values()
        eventually(lambda: not any(name.startswith(own.session_id) for name in list(backend.operations._by_id)))
    server.close()


def test_examples_of_the_page_run_on_fakes(
    fake_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code, with the address and the model of a server of fakes."""
    page = (ROOT / "docs" / "endpoints.md").read_text()
    page = page.replace("http://127.0.0.1:8000", fake_server.url).replace("Qwen/Qwen2.5-VL-3B-Instruct", MODEL)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32), "red").save("cat.png")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
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
