"""The HTTP app over a backend of fakes, in the test's own event loop, and engines that can be watched and held up."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.control.sessions import now
from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeRenderer, FakeSampler, FakeText, FakeTrainer
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.hosting.completions import Completions
from tinker_local.backend.hosting.key_file import KeyFile
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.scheduling.run_queue import GradientCommand
from tinker_local.backend.weights.precision import word_of
from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput
from tinker_local.types.codec import (
    decode_forward_backward_output,
    decode_sample_output,
    encode_forward_backward_request,
)

BASE = "fake/bigram"
ADAM = {
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
PROTOBUF = "application/x-protobuf"


def completions_of(server: LoopbackServer) -> Completions:
    """What answers OpenAI's and Anthropic's clients, after their first request."""
    app: Any = server._server.config.app
    found: Completions = app.state.completions
    return found


def datum(tokens: Sequence[int], **inputs: Any) -> Datum:
    """`tokens` to be learnt: each predicts the next."""
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


class WatchedTrainer(FakeTrainer):
    """Keeps a list of what it did; `hold` (an event that is set) can be cleared to make gradients wait."""

    def __init__(self, model: FakeModel, memory: FakeMemory | None = None) -> None:
        super().__init__(model, memory)
        self.calls: list[tuple[str, Any]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = False

    @property
    def adapters(self) -> set[str]:
        return set(self._adapters)

    def forward_backward(self, work: Any) -> Any:
        self.entered = True
        assert self.hold.wait(60)
        self.entered = False
        self.calls.append(("forward_backward", [(item.adapter_id, len(item.data), item.loss_fn) for item in work]))
        return super().forward_backward(work)

    def optim_step(self, adapter_id: str, params: Any) -> dict[str, float]:
        self.calls.append(("optim_step", adapter_id))
        return super().optim_step(adapter_id, params)

    def discard_gradients(self, adapter_id: str) -> None:
        self.calls.append(("discard_gradients", adapter_id))
        super().discard_gradients(adapter_id)


class WatchedSampler(FakeSampler):
    """`hold` as of the trainer; `running`: samples that have begun and not ended; `wakes`: how often it was woken."""

    def __init__(self, model: FakeModel, memory: FakeMemory | None = None) -> None:
        super().__init__(model, memory)
        self.hold = threading.Event()
        self.hold.set()
        self.begun = 0
        self.running = 0
        self.wakes = 0

    @property
    def versions(self) -> set[str]:
        return set(self._versions)

    async def wake(self) -> None:
        self.wakes += 1
        await super().wake()

    async def sample(self, work: Any) -> Any:
        self.begun += 1
        self.running += 1
        try:
            return await super().sample(work)
        finally:
            self.running -= 1

    def _sample(self, work: Any, weights: Any, cancelled: threading.Event, clock: Any) -> Any:
        def begun() -> None:
            work.begun()
            while not self.hold.wait(0.01) and not cancelled.is_set():
                pass

        return super()._sample(replace(work, begun=begun), weights, cancelled, clock)


@dataclass
class Clock:
    """A time that can be moved."""

    ahead: timedelta = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


@dataclass
class Api:
    """One app and its backend. `post`, `get`, `put` and `delete` take paths below /api/v1."""

    backend: InProcessBackend
    http: httpx.AsyncClient
    engines: dict[str, Engines] = field(default_factory=dict)

    @property
    def trainer(self) -> WatchedTrainer:
        return self.engines[BASE].trainer  # type: ignore[return-value]

    @property
    def sampler(self) -> WatchedSampler:
        return self.engines[BASE].sampler  # type: ignore[return-value]

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return await self.http.post(f"/api/v1/{path}", **kwargs)

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.http.get(f"/api/v1/{path}", params=params)

    async def put(self, path: str, body: Any) -> httpx.Response:
        return await self.http.put(f"/api/v1/{path}", json=body)

    async def delete(self, path: str) -> httpx.Response:
        # As the SDK: a JSON content type over an empty body.
        return await self.http.delete(f"/api/v1/{path}", headers={"Content-Type": "application/json"})

    async def ok(self, path: str, body: Any) -> dict[str, Any]:
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def submit(self, path: str, body: Any) -> str:
        return str((await self.ok(path, body))["request_id"])

    async def session(self) -> str:
        return str((await self.ok("create_session", {"tags": [], "user_metadata": {}}))["session_id"])

    async def model(self, session: str | None = None, number: int = 0, **fields: Any) -> str:
        body = {"session_id": session or await self.session(), "model_seq_id": number, "base_model": BASE, **fields}
        body.setdefault("lora_config", {"rank": 4, "seed": 1})
        created = await self.result(await self.submit("create_model", body))
        return str(created["model_id"])

    async def gradient_answer(
        self,
        model: str,
        seq_id: int,
        data: Sequence[Datum] | None = None,
        loss_fn: str = "cross_entropy",
        **fields: Any,
    ) -> httpx.Response:
        request = ForwardBackwardRequest(
            model_id=model, seq_id=seq_id, data=tuple(data or [datum([5, 9, 20, 31])]), loss_fn=loss_fn, **fields
        )
        return await self.send_gradient(encode_forward_backward_request(request))

    async def send_gradient(self, body: bytes, **headers: str) -> httpx.Response:
        return await self.post("forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})

    async def gradient(self, *args: Any, **kwargs: Any) -> str:
        answer = await self.gradient_answer(*args, **kwargs)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    async def step(self, model: str, seq_id: int, **adam: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "adam_params": {**ADAM, **adam}, "type": "optim_step"}
        return await self.submit("optim_step", body)

    async def base_sampler(self, session: str | None = None, number: int = 0) -> str:
        body = {
            "session_id": session or await self.session(),
            "sampling_session_seq_id": number,
            "base_model": BASE,
        }
        return str((await self.ok("create_sampling_session", body))["sampling_session_id"])

    async def nameless(self, model: str, seq_id: int, number: int, kind: str = "snapshot") -> str:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number, "kind": kind}
        saved = await self.result(await self.submit("save_weights_for_sampler", body))
        return str(saved["sampling_session_id"])

    async def named(self, model: str, seq_id: int, name: str, **fields: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
        return str((await self.result(await self.submit("save_weights_for_sampler", body)))["path"])

    async def save(self, model: str, seq_id: int, name: str, **fields: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "path": name, "overwrite": False, **fields}
        return str((await self.result(await self.submit("save_weights", body)))["path"])

    def sample_body(self, sampler: str, seq_id: int, tokens: Sequence[int] = (5, 9), **fields: Any) -> dict[str, Any]:
        return {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
            "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 3},
            "num_samples": 1,
            "type": "sample",
            **fields,
        }

    async def sample(self, sampler: str, seq_id: int, tokens: Sequence[int] = (5, 9), **fields: Any) -> str:
        return await self.submit("asample", self.sample_body(sampler, seq_id, tokens, **fields))

    async def score(self, sampler: str, seq_id: int, tokens: Sequence[int] = (5, 9, 20)) -> list[float]:
        found = await self.result(await self.sample(sampler, seq_id, tokens, prompt_logprobs=True))
        return [float(value) for value in found.prompt_logprobs[1:]]

    async def poll(self, request_id: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})

    async def outcome(self, request_id: str) -> httpx.Response:
        """The answer when the operation is done."""
        async with asyncio.timeout(60):
            while (answer := await self.poll(request_id)).status_code == 408:
                pass
        return answer

    async def result(self, request_id: str) -> Any:
        """The result of an operation that succeeds, decoded."""
        answer = await self.outcome(request_id)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == PROTOBUF:
            is_sample = ":sample:" in request_id
            return decode_sample_output(answer.content) if is_sample else decode_forward_backward_output(answer.content)
        assert "error" not in answer.json(), answer.text
        return answer.json()

    async def failure(self, request_id: str) -> str:
        """The message of an operation that fails; HTTP 200 with `error` and `category`."""
        answer = await self.outcome(request_id)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.json().keys() == {"error", "category"}
        return f"{answer.json()['category']}: {answer.json()['error']}"

    async def all_prepared(self) -> None:
        """Wait until the trainer is busy (it is held up) and everything queued behind is ready to run."""
        await self.until(lambda: self.trainer.entered and not self._unprepared())

    async def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until `condition` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came true"
            await asyncio.sleep(0.005)

    def _unprepared(self) -> bool:
        pending = [c for model in self.backend.runs._live.values() for c in model.queue.commands.pending()]
        return any(isinstance(command, GradientCommand) and not command.ready for command in pending)

    async def healthy(self) -> bool:
        """Whether training and sampling still work, for somebody new."""
        session = await self.session()
        model = await self.model(session)
        assert (await self.result(await self.gradient(model, 1))).metrics["loss:sum"] > 0
        assert "grad_norm" in (await self.result(await self.step(model, 2)))["metrics"]
        assert (await self.result(await self.sample(await self.base_sampler(session), 0))).sequences
        assert (await self.post(f"sessions/{session}/finish", {})).status_code == 204
        return (await self.get("healthz")).status_code == 200


StartApi = Callable[..., Awaitable[Api]]


async def open_api(
    models: Sequence[str] = (BASE,),
    api_keys: Sequence[str] | KeyFile | None = None,
    memory: FakeMemory | None = None,
    clock: Callable[[], datetime] = now,
    **options: Any,
) -> Api:
    """An app on fakes; `options` are fields of `BackendOptions`. `memory` is shared by trainer and sampler; by `clock`
    checkpoints expire."""
    engines: dict[str, Engines] = {}

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        engines[source.name] = Engines(
            FakeRenderer(model),
            WatchedTrainer(model, memory),
            WatchedSampler(model, memory if options.sampler_sleeps else None),
            arch="fake",
            tolerance=1e-4,
            text=FakeText(model),
            base_precision=word_of(options.base_precision, options.head_precision),
        )
        return engines[source.name]

    sources = [ModelSource.parse(name) for name in models]
    # The `clock` of a test jumps, and its requests come one after the other.
    chosen = BackendOptions(**{"expiry_grace": 0.0, "failure_pause": 0.0, **options})
    backend = InProcessBackend(sources, chosen, load=load, clock=clock)
    await backend.start()
    for started in engines.values():
        started.sampler.begun = 0  # type: ignore[attr-defined]  # those of the probes
    transport = httpx.ASGITransport(create_app(backend, api_keys=api_keys), raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)
    return Api(backend, http, engines)


async def close_api(api: Api) -> None:
    for engines in api.engines.values():
        engines.trainer.hold.set()  # type: ignore[attr-defined]
        engines.sampler.hold.set()  # type: ignore[attr-defined]
    await api.http.aclose()
    await api.backend.close()


@pytest.fixture
async def start_api(tmp_path: Path) -> AsyncIterator[StartApi]:
    """Start an app on fakes: `start_api(models=(...), api_keys=None, memory=None, clock=now, **options)`.

    The options are fields of `BackendOptions`.
    """
    started: list[Api] = []

    async def start(**options: Any) -> Api:
        started.append(await open_api(**{"data_dir": tmp_path / "data", **options}))
        return started[-1]

    yield start
    for api in started:
        await close_api(api)


@pytest.fixture(scope="module")
def loopback_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    """A server on fakes in this process, for clients that need a URL."""
    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
    server = InProcessBackend([ModelSource(BASE, BASE)], options, load=load_fake).serve_in_thread()
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(loopback_server: LoopbackServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, of that server."""
    with openai.OpenAI(base_url=f"{loopback_server.url}/v1", api_key=loopback_server.api_key, max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def claude(loopback_server: LoopbackServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, of that server."""
    with anthropic.Anthropic(base_url=loopback_server.url, api_key=loopback_server.api_key, max_retries=0) as one:
        yield one


@pytest.fixture
async def api(start_api: StartApi) -> Api:
    """An app on fakes with the default options."""
    return await start_api()


@pytest.fixture(scope="module")
def api_in_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, asyncio.AbstractEventLoop]]:
    """An app on fakes, and the event loop that it lives in: for tests that are not coroutines."""
    loop = asyncio.new_event_loop()
    api = loop.run_until_complete(open_api(data_dir=tmp_path_factory.mktemp("data"), record_sessions=True))
    yield api, loop
    loop.run_until_complete(close_api(api))
    loop.close()


@pytest.fixture
def make_datum() -> Callable[..., Datum]:
    return datum
