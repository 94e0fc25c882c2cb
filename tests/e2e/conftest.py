"""Two ways in, one scenario: the official SDK over HTTP, and `InProcessBackend` on our types."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import openai
import pytest
import tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.types import (
    AdamParams,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    Datum,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinker_local.types.sdk import to_sdk

from tests.conftest import Server

T = TypeVar("T")


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="tml-any", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def service(real_server: Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=real_server.url, api_key="tml-local") as one:
        yield one


class Driver(Protocol):
    """What a scenario needs; data and results are our types, whichever way in is driven."""

    def create(self, base_model: str, config: LoraConfig) -> Any: ...
    def resume(self, path: str, *, optimizer: bool) -> Any: ...
    def gradient(self, model: Any, data: Sequence[Datum], loss_fn: str, *, forward_only: bool = False) -> Any: ...
    def step(self, model: Any, params: AdamParams) -> Any: ...
    def save(self, model: Any, name: str) -> str: ...
    def sampler(self, model: Any) -> Any: ...
    def named_sampler(self, model: Any, name: str) -> tuple[str, Any]: ...
    def base_sampler(self, base_model: str) -> Any: ...
    def sample(self, sampler: Any, prompt: ModelInput, count: int, params: SamplingParams) -> list[Any]: ...
    def score(self, sampler: Any, prompt: ModelInput) -> np.ndarray: ...


class SdkDriver:
    """The official SDK over HTTP."""

    def __init__(self, url: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-local")

    def create(self, base_model: str, config: LoraConfig) -> Any:
        return self.service.create_lora_training_client(
            base_model=base_model,
            rank=config.rank,
            seed=config.seed,
            train_unembed=config.train_unembed,
            train_mlp=config.train_mlp,
            train_attn=config.train_attn,
        )

    def resume(self, path: str, *, optimizer: bool) -> Any:
        if optimizer:
            return self.service.create_training_client_from_state_with_optimizer(path)
        return self.service.create_training_client_from_state(path)

    def gradient(self, model: Any, data: Sequence[Datum], loss_fn: str, *, forward_only: bool = False) -> Any:
        call = model.forward if forward_only else model.forward_backward
        output = call([to_sdk(datum) for datum in data], loss_fn).result()
        return [o["logprobs"].to_numpy() for o in output.loss_fn_outputs], output.metrics["loss:sum"]

    def step(self, model: Any, params: AdamParams) -> Any:
        return model.optim_step(to_sdk(params)).result().metrics

    def save(self, model: Any, name: str) -> str:
        return model.save_state(name).result().path

    def sampler(self, model: Any) -> Any:
        return model.save_weights_and_get_sampling_client()

    def named_sampler(self, model: Any, name: str) -> tuple[str, Any]:
        path = model.save_weights_for_sampler(name).result().path
        return path, self.service.create_sampling_client(model_path=path)

    def base_sampler(self, base_model: str) -> Any:
        return self.service.create_sampling_client(base_model=base_model)

    def sample(self, sampler: Any, prompt: ModelInput, count: int, params: SamplingParams) -> list[Any]:
        output = sampler.sample(to_sdk(prompt), count, to_sdk(params)).result()
        return [(s.tokens_np.tolist(), np.asarray(s.logprobs_np), s.stop_reason) for s in output.sequences]

    def score(self, sampler: Any, prompt: ModelInput) -> np.ndarray:
        values = sampler.compute_logprobs(to_sdk(prompt)).result()
        return np.array([np.nan if v is None else v for v in values], np.float32)


class InProcessDriver:
    """`InProcessBackend` in a thread's event loop."""

    def __init__(self, backend: InProcessBackend) -> None:
        self.backend = backend
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.run(backend.start())
        self.session = self.run(backend.sessions.create())
        self.models = 0
        self.samplers = 0
        self.sequence: dict[str, int] = {}

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # An hour: the test's own time limit ends what hangs.
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(3600)

    def close(self) -> None:
        self.run(self.backend.close())
        self.loop.call_soon_threadsafe(self.loop.stop)

    def result(self, submit: Coroutine[Any, Any, Any]) -> Any:
        async def both() -> Any:
            return await (await submit)

        return self.run(both())

    def next(self, owner: str, first: int = 1) -> int:
        self.sequence[owner] = self.sequence.get(owner, first - 1) + 1
        return self.sequence[owner]

    def create(self, base_model: str, config: LoraConfig) -> Any:
        self.models += 1
        request = CreateModelRequest(
            session_id=self.session, model_seq_id=self.models, base_model=base_model, lora_config=config
        )
        return self.result(self.backend.runs.create(request))["model_id"]

    def resume(self, path: str, *, optimizer: bool) -> Any:
        self.models += 1
        request = LoadWeightsRequest(session_id=self.session, model_seq_id=self.models, path=path, optimizer=optimizer)
        return self.result(self.backend.training.load_weights(request))["model_id"]

    def gradient(self, model: Any, data: Sequence[Datum], loss_fn: str, *, forward_only: bool = False) -> Any:
        request = ForwardBackwardRequest(
            model_id=model, seq_id=self.next(model), data=tuple(data), loss_fn=loss_fn, forward_only=forward_only
        )
        output = self.result(self.backend.training.forward_backward(request))
        return [o["logprobs"].to_numpy() for o in output.loss_fn_outputs], output.metrics["loss:sum"]

    def step(self, model: Any, params: AdamParams) -> Any:
        request = OptimStepRequest(model_id=model, seq_id=self.next(model), adam_params=params)
        return self.result(self.backend.training.optim_step(request)).metrics

    def save(self, model: Any, name: str) -> str:
        request = SaveWeightsRequest(model_id=model, seq_id=self.next(model), path=name)
        return self.result(self.backend.training.save_weights(request))["path"]

    def sampler(self, model: Any) -> Any:
        self.samplers += 1
        request = SaveWeightsForSamplerRequest(
            model_id=model, seq_id=self.next(model), sampling_session_seq_id=self.samplers
        )
        return self.result(self.backend.training.save_weights_for_sampler(request))["sampling_session_id"]

    def named_sampler(self, model: Any, name: str) -> tuple[str, Any]:
        request = SaveWeightsForSamplerRequest(model_id=model, seq_id=self.next(model), path=name)
        path = self.result(self.backend.training.save_weights_for_sampler(request))["path"]
        return path, self._open(model_path=path)

    def base_sampler(self, base_model: str) -> Any:
        return self._open(base_model=base_model)

    def _open(self, **of: str) -> str:
        self.samplers += 1
        request = CreateSamplingSessionRequest(session_id=self.session, sampling_session_seq_id=self.samplers, **of)
        return self.run(self.backend.sampling.create_session(request))

    def sample(self, sampler: Any, prompt: ModelInput, count: int, params: SamplingParams) -> list[Any]:
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=self.next(sampler, 0),
            prompt=prompt,
            num_samples=count,
            sampling_params=params,
        )
        output = self.result(self.backend.sampling.sample(request))
        return [(s.tokens.tolist(), s.logprobs, s.stop_reason) for s in output.sequences]

    def score(self, sampler: Any, prompt: ModelInput) -> np.ndarray:
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=self.next(sampler, 0),
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
        )
        return self.result(self.backend.sampling.sample(request)).prompt_logprobs


@pytest.fixture(scope="session")
def real_sdk(real_server: Any) -> SdkDriver:
    return SdkDriver(real_server.url)


@pytest.fixture(scope="session", params=["inline", "process"])
def real_in_process(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcessDriver]:
    """With the trainer in the same process, and with one in a separate process."""
    sources = [ModelSource(name, str(path)) for name, path in tiny_models.items()]
    folder = tmp_path_factory.mktemp("in_process")
    options = BackendOptions(data_dir=folder, kv_cache_bytes=2**28, max_rank=32, trainer=request.param)
    driver = InProcessDriver(InProcessBackend(sources, options))
    yield driver
    driver.close()


@pytest.fixture
def start_in_process() -> Iterator[Callable[[InProcessBackend], InProcessDriver]]:
    """Start a backend that ends with the test."""
    started: list[InProcessDriver] = []

    def start(backend: InProcessBackend) -> InProcessDriver:
        started.append(InProcessDriver(backend))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.fixture(scope="session")
def fake_sdk(fake_server: Any) -> SdkDriver:
    return SdkDriver(fake_server.url)


@pytest.fixture(scope="session", params=["inline", "process"])
def fake_in_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcessDriver]:
    """With both engines in the same process, and with each in a separate process."""
    from tinker_local.backend.models.load_engines import load_fake

    folder = tmp_path_factory.mktemp("fake_in_process")
    options = BackendOptions(data_dir=folder, trainer=request.param, sampler=request.param)
    driver = InProcessDriver(InProcessBackend([ModelSource("fake/bigram", "fake/bigram")], options, load=load_fake))
    yield driver
    driver.close()
