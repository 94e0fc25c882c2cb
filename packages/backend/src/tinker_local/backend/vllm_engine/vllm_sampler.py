"""`VLLMSampler`: samples from one base model and immutable adapter versions on it, with vLLM."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from tinker_local.backend.sampling.interface import AdapterVersion, SampleWork
from tinker_local.backend.sampling.prompt_scores import prompt_questions
from tinker_local.backend.vllm_engine import vllm_begun, vllm_compat, vllm_release, vllm_sleep
from tinker_local.backend.vllm_engine.engine import Engine, EngineRequest
from tinker_local.backend.vllm_engine.engine_inputs import engine_params, engine_prompt, sample_output
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_adapters import VLLMAdapters
from tinker_local.types import ApiError, InternalError, InvalidRequestError, SampleOutput


class VLLMSampler:
    """Keeps `sampling.interface.Sampler` on a vLLM engine that `thread` steps.

    vLLM keeps the versions used last in memory; others are read again from their folder on use (`VLLMAdapters`).
    Each sample of a request is a vLLM request of its own (seeds are independent, and only the first computes prompt
    logprobs); the prefix cache lets them share one prefill, whose hits `prompt_cache_hit_tokens` does not count.

    `can_sleep`: asked for by the options, and possible here. `asleep`: the engine thread alone writes it.
    `startup_seconds`: what it took to build the engine, importing vLLM included if it was the first.
    """

    def __init__(self, options: vllm_compat.EngineOptions, thread: EngineThread) -> None:
        """Builds the engine and blocks until it can sample."""
        started = time.monotonic()
        self._thread = thread
        self._adapters = VLLMAdapters(options.max_rank)
        self._images_encoded = 0  # the engine thread alone writes it
        self.can_sleep = self.asleep = False
        build = partial(self._build, options)
        self._engine: Engine = thread.add_engine(options.model, build, self._release).result()
        config = thread.call(self._engine, lambda engine: engine.model_config).result()
        self.max_context_length: int = config.max_model_len
        self.adapter_dtype = options.dtype or vllm_compat.default_dtype()
        self._vocab_size: int = config.get_vocab_size()
        self.startup_seconds = time.monotonic() - started

    def _build(self, options: vllm_compat.EngineOptions) -> Any:
        """An engine whose images are counted; called again after a failure, and the count goes on."""
        engine = vllm_compat.build_engine(options)
        vllm_compat.on_images_encoded(engine, self._note_encoded)
        vllm_begun.on_sequences_begun(engine, self._note_begun)
        self._adapters.attach(engine)
        self.can_sleep, self.asleep = vllm_sleep.can_sleep(engine), False
        return engine

    def _release(self, engine: Any) -> None:
        self._adapters.detach()
        vllm_release.release_engine(engine)

    def _note_encoded(self, images: int) -> None:
        self._images_encoded += images

    def _note_begun(self, request_id: str) -> None:
        group = self._engine.in_flight.get(request_id)
        if group is not None:
            group.begin()

    @property
    def images_encoded(self) -> int:
        """How many images went through vLLM's vision tower so far."""
        return self._images_encoded

    @property
    def versions_loaded(self) -> int:
        """How many versions were verified and not removed, in memory or read again from their folder on use."""
        return len(self._adapters)

    @property
    def sequences_waiting(self) -> int:
        """How many sequences in flight vLLM has not begun, or has put off."""
        return max(0, len(self._engine.in_flight) - vllm_compat.sequences_running(self._engine.built))

    async def load_version(self, version: AdapterVersion) -> None:
        """Hand the adapter to vLLM, verify that all of it was taken, and keep it ready."""
        with _as_api_errors():
            prepared = await self._adapters.prepare(version)

            def load(engine: Any) -> None:
                self._check_awake()
                self._adapters.request(version, engine, prepared)

            await asyncio.wrap_future(self._thread.call(self._engine, load))

    async def remove_version(self, version: AdapterVersion) -> None:
        """Wait until no sample of `version` runs, then forget it."""
        await asyncio.wrap_future(self._thread.when_idle(self._engine, version.name))
        await asyncio.wrap_future(self._thread.call(self._engine, partial(self._adapters.forget, version.name)))

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Sample; cancelling this aborts the samples in vLLM."""
        questions = prompt_questions(work, self._vocab_size)
        params = engine_params(work, self.max_context_length, self._vocab_size, questions)
        prompt = engine_prompt(work.prompt)
        with _as_api_errors():
            prepared = None if work.version is None else await self._adapters.prepare(work.version)

            def make(engine: Any) -> EngineRequest:
                self._check_awake()
                lora = None if work.version is None else self._adapters.request(work.version, engine, prepared)
                return EngineRequest(prompt, params, lora)

            outputs = await asyncio.wrap_future(self._thread.submit(self._engine, make, work.begun))
        return sample_output(outputs, work, questions)

    async def sleep(self) -> None:
        """Weights go to host memory, the KV cache is dropped; a second or a few."""
        with _as_api_errors():
            await asyncio.wrap_future(self._thread.call(self._engine, self._fall_asleep))

    async def wake(self) -> None:
        """Weights come back; the KV cache is empty."""
        with _as_api_errors():
            await asyncio.wrap_future(self._thread.call(self._engine, self._wake_up))

    def _fall_asleep(self, engine: Any) -> None:
        if not self.can_sleep or self.asleep or self._engine.in_flight:
            raise InternalError(
                f"the sampling engine cannot sleep now: can_sleep is {self.can_sleep}, asleep {self.asleep}, "
                f"and {len(self._engine.in_flight)} sequences are in flight"
            )
        try:
            vllm_sleep.put_to_sleep(engine)
        finally:
            self.asleep = vllm_sleep.is_asleep(engine)

    def _wake_up(self, engine: Any) -> None:
        if not self.asleep:  # built anew, say
            return
        try:
            vllm_sleep.wake(engine)
        finally:
            self.asleep = vllm_sleep.is_asleep(engine)

    def _check_awake(self) -> None:
        """InternalError rather than an access to memory that is not there, which would end the process's work."""
        if self.asleep:
            raise InternalError("the sampling engine sleeps")

    async def close(self) -> None:
        """Fail what runs and release the engine; other engines of the thread go on."""
        await asyncio.wrap_future(self._thread.remove_engine(self._engine))


@contextlib.contextmanager
def _as_api_errors() -> Iterator[None]:
    """Turns what vLLM raises into errors that a client may see."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        from vllm.exceptions import VLLMValidationError

        if isinstance(error, VLLMValidationError):
            raise InvalidRequestError(str(error)) from error
        raise InternalError(f"the sampling engine failed: {type(error).__name__}: {error}") from error
