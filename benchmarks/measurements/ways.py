"""Two clients of one backend with the same methods: in process, and the official SDK over HTTP."""

import itertools
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import numpy as np
from tinker_local.types import (
    AdamParams,
    CreateModelRequest,
    Datum,
    ForwardBackwardRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    SaveWeightsForSamplerRequest,
)
from tinker_local.types.sdk import to_sdk

ADAM = AdamParams(learning_rate=1e-5)
DONE = "sdk measurement done"
"""What the SDK's process prints after a measurement."""


class Way(Protocol):
    """A client. `name` ends the names of lines; runs and samplers are handles that only the client itself reads."""

    name: str

    async def create(self, rank: int) -> Any:
        """A fresh adapter without the LM head."""

    def prepared(self, data: Sequence[Datum]) -> Any:
        """`data` as a user of this client holds it; sending makes requests from it."""

    async def send(self, run: Any, data: Any) -> Sequence[Awaitable[object]]:
        """Send `forward_backward` and `optim_step` together; returns the results to wait for."""

    async def sampler(self, run: Any) -> Any:
        """Save an ephemeral version of the weights and open a sampler of it."""

    async def sample(self, sampler: Any, prompt: Sequence[int], max_tokens: int) -> int:
        """Sample exactly `max_tokens`; return how many came, each with its logprob."""


async def step(way: Way, run: Any, data: Any) -> None:
    """One optimizer step, from sending it to its results."""
    await results(await way.send(run, data))


async def results(sent: Sequence[Awaitable[object]]) -> None:
    """Wait for what `send` returned."""
    for result in sent:
        await result


class InProcess:
    """The methods of `InProcessBackend`, on its own event loop."""

    name = "in_process"

    def __init__(self, backend: Any, session: str, model: str) -> None:
        self._backend = backend
        self._session = session
        self._model = model
        self._numbers = itertools.count(1)
        self._next: dict[str, int] = {}

    def _seq_id(self, owner: str, first: int) -> int:
        self._next[owner] = self._next.get(owner, first - 1) + 1
        return self._next[owner]

    async def create(self, rank: int) -> str:
        request = CreateModelRequest(
            session_id=self._session,
            model_seq_id=next(self._numbers),
            base_model=self._model,
            lora_config=LoraConfig(rank=rank, train_unembed=False),
        )
        return str((await (await self._backend.runs.create(request)))["model_id"])

    def prepared(self, data: Sequence[Datum]) -> tuple[Datum, ...]:
        return tuple(data)

    async def send(self, run: str, data: tuple[Datum, ...]) -> Sequence[Awaitable[object]]:
        request = ForwardBackwardRequest(model_id=run, seq_id=self._seq_id(run, 1), data=data, loss_fn="cross_entropy")
        gradient = await self._backend.training.forward_backward(request)
        update = await self._backend.training.optim_step(
            OptimStepRequest(model_id=run, seq_id=self._seq_id(run, 1), adam_params=ADAM)
        )
        return gradient, update

    async def sampler(self, run: str) -> str:
        request = SaveWeightsForSamplerRequest(
            model_id=run, seq_id=self._seq_id(run, 1), sampling_session_seq_id=next(self._numbers)
        )
        saved = await self._backend.training.save_weights_for_sampler(request)
        return str((await saved)["sampling_session_id"])

    async def sample(self, sampler: str, prompt: Sequence[int], max_tokens: int) -> int:
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=self._seq_id(sampler, 0),
            prompt=ModelInput.from_ints(list(prompt)),
            sampling_params=SamplingParams(max_tokens=max_tokens, stop=()),
        )
        (sequence,) = (await (await self._backend.sampling.sample(request))).sequences
        assert np.isfinite(sequence.logprobs).all()
        return len(sequence.tokens)


class Sdk:
    """The official SDK against the server at `url`."""

    name = "sdk"

    def __init__(self, url: str, model: str) -> None:
        import tinker

        self._service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        self._model = model

    async def create(self, rank: int) -> Any:
        return await self._service.create_lora_training_client(base_model=self._model, rank=rank, train_unembed=False)

    def prepared(self, data: Sequence[Datum]) -> list[Any]:
        return [to_sdk(datum) for datum in data]

    async def send(self, run: Any, data: list[Any]) -> Sequence[Awaitable[object]]:
        gradient = run.forward_backward(data, "cross_entropy")
        update = run.optim_step(to_sdk(ADAM))
        return gradient, update

    async def sampler(self, run: Any) -> Any:
        return await run.save_weights_and_get_sampling_client()

    async def sample(self, sampler: Any, prompt: Sequence[int], max_tokens: int) -> int:
        params = to_sdk(SamplingParams(max_tokens=max_tokens, stop=()))
        output = await sampler.sample(to_sdk(ModelInput.from_ints(list(prompt))), 1, params)
        (sequence,) = output.sequences
        assert np.isfinite(sequence.logprobs_np).all()
        return len(sequence.tokens_np)
