"""`VLLMSampler`: samples from one base model and immutable adapter versions on it, with vLLM."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from tinker_local.backend.sampling import vllm_compat
from tinker_local.backend.sampling.adapter_files import check_adapter_folder, check_adapter_taken
from tinker_local.backend.sampling.engine_inputs import engine_params, engine_prompt, sample_output
from tinker_local.backend.sampling.engine_thread import Engine, EngineRequest, EngineThread
from tinker_local.backend.sampling.interface import AdapterVersion, SampleWork
from tinker_local.types import ApiError, InternalError, InvalidRequestError, SampleOutput


class VLLMSampler:
    """Keeps `sampling.interface.Sampler` on a vLLM engine that `thread` steps.

    Every version gets a LoRA id of its own that is never used again, so neither weights nor prefix cache of two
    versions can mix. vLLM keeps the versions used last in memory; others are read again from their folder on use.
    Each sample of a request is a vLLM request of its own (seeds are independent, and only the first computes prompt
    logprobs); the prefix cache lets them share one prefill, whose hits `prompt_cache_hit_tokens` does not count.

    `startup_seconds`: what it took to build the engine, importing vLLM included if it was the first.
    """

    def __init__(self, options: vllm_compat.EngineOptions, thread: EngineThread) -> None:
        """Builds the engine and blocks until it can sample."""
        started = time.monotonic()
        self._thread = thread
        self._max_rank = options.max_rank
        self._lora_ids = itertools.count(1)
        self._versions: dict[str, Any] = {}  # name → LoRARequest, verified; the engine thread alone touches it
        self._images_encoded = 0  # the engine thread alone writes it
        build = partial(self._build, options)
        self._engine: Engine = thread.add_engine(options.model, build, vllm_compat.release_engine).result()
        config = thread.call(self._engine, lambda engine: engine.model_config).result()
        self.max_context_length: int = config.max_model_len
        self._vocab_size: int = config.get_vocab_size()
        self.startup_seconds = time.monotonic() - started

    def _build(self, options: vllm_compat.EngineOptions) -> Any:
        """An engine whose images are counted; called again after a failure, and the count goes on."""
        engine = vllm_compat.build_engine(options)
        vllm_compat.on_images_encoded(engine, self._note_encoded)
        return engine

    def _note_encoded(self, images: int) -> None:
        self._images_encoded += images

    @property
    def images_encoded(self) -> int:
        """How many images went through vLLM's vision tower so far."""
        return self._images_encoded

    @property
    def versions_loaded(self) -> int:
        """How many versions were verified and not removed, in memory or read again from their folder on use."""
        return len(self._versions)

    async def load_version(self, version: AdapterVersion) -> None:
        """Read the adapter from its folder, verify that vLLM took all of it, and keep it ready."""
        with _as_api_errors():
            await asyncio.wrap_future(self._thread.call(self._engine, partial(self._lora_request, version)))

    async def remove_version(self, version: AdapterVersion) -> None:
        """Wait until no sample of `version` runs, then forget it."""
        await asyncio.wrap_future(self._thread.when_idle(self._engine, version.name))

        def forget(engine: Any) -> None:
            request = self._versions.pop(version.name, None)
            if request is not None:
                engine.remove_lora(request.lora_int_id)

        await asyncio.wrap_future(self._thread.call(self._engine, forget))

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Sample; cancelling this aborts the samples in vLLM."""
        params = engine_params(work, self.max_context_length, self._vocab_size)
        prompt = engine_prompt(work.prompt)

        def make(engine: Any) -> EngineRequest:
            lora = None if work.version is None else self._lora_request(work.version, engine)
            return EngineRequest(prompt, params, lora)

        with _as_api_errors():
            outputs = await asyncio.wrap_future(self._thread.submit(self._engine, make))
        return sample_output(outputs, work)

    async def close(self) -> None:
        """Fail what runs and release the engine; other engines of the thread go on."""
        await asyncio.wrap_future(self._thread.remove_engine(self._engine))

    def _lora_request(self, version: AdapterVersion, engine: Any) -> Any:
        """vLLM's handle of `version`, which is loaded when this returns. Runs on the engine thread."""
        request = self._versions.get(version.name)
        if request is not None and request.lora_int_id in engine.list_loras():
            return request
        # A request whose adapter cannot be loaded would fail the whole step, so it is loaded, and checked, before.
        shape = check_adapter_folder(version, self._max_rank)
        if request is None:
            from vllm.lora.request import LoRARequest

            request = LoRARequest(version.name, next(self._lora_ids), str(version.path))
        try:
            engine.add_lora(request)
            check_adapter_taken(version, shape, request.lora_int_id, vllm_compat.lora_manager(engine))
        except Exception as error:
            engine.remove_lora(request.lora_int_id)
            if isinstance(error, (ApiError, torch.OutOfMemoryError)):
                raise
            raise InvalidRequestError(
                f"sampler version {version.name}: vLLM cannot serve it: {type(error).__name__}: {error}"
            ) from error
        self._versions[version.name] = request
        return request


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
