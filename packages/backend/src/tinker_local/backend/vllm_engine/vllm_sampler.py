"""`VLLMSampler`: samples from one base model and immutable adapter versions on it, with vLLM."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.sampling.process_sampler import SamplerSeat
from tinker_local.backend.sampling.prompt_scores import prompt_questions
from tinker_local.backend.sampling.sampler import (
    EngineClock,
    MovingWeights,
    SampleWork,
    scores_alone,
    token_budget,
    without_tokens,
)
from tinker_local.backend.spare_memory import give_back_at_rest
from tinker_local.backend.training.module_outputs import ModuleOutputs, watching
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.vllm_engine import sleep_mode
from tinker_local.backend.vllm_engine.build_engine import EngineOptions, build_engine
from tinker_local.backend.vllm_engine.compat_vllm import (
    default_dtype,
    kv_cache_used,
    masks_of,
    sequences_running,
    served_model,
    why_not_in_flight,
)
from tinker_local.backend.vllm_engine.engine_inputs import (
    TokenStream,
    engine_params,
    engine_prompt,
    sample_output,
    with_own_features,
    without_last,
)
from tinker_local.backend.vllm_engine.engine_positions import engine_rotations
from tinker_local.backend.vllm_engine.engine_thread import Engine, EngineRequest, EngineThread
from tinker_local.backend.vllm_engine.grammar_process import GrammarProcess, Matcher
from tinker_local.backend.vllm_engine.moved_sequences import Move, compute_again, moves, salt, with_moves
from tinker_local.backend.vllm_engine.patches import EngineEvents
from tinker_local.backend.vllm_engine.rank_leader import Leader
from tinker_local.backend.vllm_engine.release_engine import release_engine
from tinker_local.backend.vllm_engine.shared_weights import bytes_in
from tinker_local.backend.vllm_engine.vllm_adapters import VLLMAdapters
from tinker_local.backend.vllm_engine.whole_images import sees_images
from tinker_local.backend.weights.memory_holder import tell
from tinker_local.types import ApiError, InternalError, InvalidRequestError, SampleOutput


class VLLMSampler:
    """Implements `sampling.sampler.Sampler` on a vLLM engine that `thread` steps.

    vLLM keeps the most recent versions in memory and reads others again from their folder (`VLLMAdapters`). Each sample
    of a request is a separate vLLM request: seeds are independent, and only the first computes prompt logprobs. They
    share one prefill through the prefix cache; `prompt_cache_hit_tokens` does not count these hits.

    `can_sleep`: the options ask for it, and it works here. `asleep`: only the engine thread writes it.
    `startup_seconds`: the time to build the engine, with the import of vLLM if it was the first.
    """

    def __init__(self, options: EngineOptions, thread: EngineThread, seat: SamplerSeat | None = None) -> None:
        """Build the engine; blocks until it can sample. `seat`: rank 0 of `options.ranks`, if that is more than one."""
        started = time.monotonic()
        self._thread = thread
        self._leader = None if seat is None else Leader(seat)
        self._adapters = VLLMAdapters(options.max_rank, self._leader)
        self._images_encoded = 0  # only the engine thread writes it
        self.can_sleep = self.asleep = False
        self._spare_bytes = options.spare_bytes
        self._moves_keys = options.moves_keys
        build = partial(self._build, options)
        self._engine: Engine = thread.add_engine(
            options.model,
            build,
            self._release,
            lambda engine: masks_of(engine).settle(),
            self._rest,
        ).result()
        config = thread.call(self._engine, lambda engine: engine.model_config).result()
        self.max_context_length: int = config.max_model_len
        self.adapter_dtype = options.dtype or default_dtype()
        self.why_not_in_flight = why_not_in_flight(options.adapters_per_step)
        self._vocab_size: int = config.get_vocab_size()
        self.routed: RoutedLayers | None = thread.call(self._engine, lambda engine: engine.routed).result()
        self._sees_images = sees_images(config)
        self._grammars = GrammarProcess(options.model, self._vocab_size)
        self.startup_seconds = time.monotonic() - started

    def _build(self, options: EngineOptions) -> Any:
        """Called again after a failure of the engine. RuntimeError if building changed what a trainer has lent."""
        if self._leader is not None:
            self._leader.join()
        events = EngineEvents(self._note_encoded, self._note_begun, self._note_preempted, self._adapters.load)
        engine = build_engine(options, events)
        if options.shared_weights is not None:
            try:
                engine.lent.matrices.verify()
                tell(options.shared_weights, (bytes_in(engine, engine.lent.matrices), engine.lent.whole))
            except RuntimeError:
                release_engine(engine)
                raise
        engine.compute_again = partial(compute_again, engine)
        if self._leader is not None:
            self._leader.lead(engine)
        self._adapters.attach(engine)
        self.can_sleep, self.asleep = sleep_mode.can_sleep(engine), False
        return engine

    def _release(self, engine: Any) -> None:
        self._adapters.detach()
        release_engine(engine)

    def _rest(self) -> None:
        """Nothing is sampled."""
        if not self.asleep:
            if self._leader is not None:
                self._leader.rest()
            give_back_at_rest(self._spare_bytes)

    def _note_encoded(self, images: int) -> None:
        self._images_encoded += images

    def _note_begun(self, request_id: str) -> None:
        group = self._engine.in_flight.get(request_id)
        if group is not None:
            group.begin()

    def _note_preempted(self, request_id: str) -> None:
        group = self._engine.in_flight.get(request_id)
        if group is not None:
            group.clock.preemptions += 1

    @property
    def images_encoded(self) -> int:
        """How many images vLLM's vision tower has encoded."""
        return self._images_encoded

    @property
    def versions_loaded(self) -> int:
        """How many versions are verified; vLLM may have to read some of them again from their folder."""
        return len(self._adapters)

    @property
    def sequences_waiting(self) -> int:
        """How many sequences in flight vLLM has not begun, or has preempted."""
        return max(0, len(self._engine.in_flight) - sequences_running(self._engine.built))

    @property
    def kv_cache_used(self) -> float:
        """Share of vLLM's KV cache that sequences hold."""
        return kv_cache_used(self._engine.built)

    async def load_version(self, version: AdapterVersion) -> None:
        """Load the adapter into vLLM and verify that all of it was taken."""
        with _as_api_errors():
            prepared = await self._adapters.prepare(version)

            def load(engine: Any) -> None:
                self._check_awake()
                self._adapters.request(version, engine, prepared)

            await asyncio.wrap_future(self._thread.call(self._engine, load))

    async def remove_version(self, version: AdapterVersion) -> None:
        """Wait until no sample of `version` runs, then remove it."""
        await asyncio.wrap_future(self._thread.when_idle(self._engine, version.name))
        await asyncio.wrap_future(self._thread.call(self._engine, partial(self._adapters.forget, version.name)))

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        """See `Sampler.publish`."""
        with _as_api_errors():
            prepared = await self._adapters.prepare_target(target, version, number)

            def change(engine: Any) -> Callable[[Sequence[str]], Sequence[Move]] | None:
                self._check_awake()
                if not self._adapters.move(target, version, number, engine, prepared):
                    return None
                return partial(self._moved, engine, number)

            await asyncio.wrap_future(self._thread.move(self._engine, target, change))

    def _moved(self, engine: Any, number: int, request_ids: Sequence[str]) -> Sequence[Move]:
        """What going on to version `number` is for sequences of a target."""
        found = moves(engine, number, request_ids, again=self._moves_keys)
        if self._moves_keys:
            engine.compute_again(list(request_ids), number)
        return found

    async def end_target(self, target: str) -> None:
        """Wait until no sample of `target` runs, then forget it."""
        await asyncio.wrap_future(self._thread.when_idle(self._engine, target))
        await asyncio.wrap_future(self._thread.call(self._engine, partial(self._adapters.end_target, target)))

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Cancelling this aborts the samples in vLLM."""
        if work.grammar is None:
            return await self._sample(work, None)
        opened = await self._grammars.open(work.grammar, work.num_samples, work.who)
        try:
            return await self._sample(work, opened.matcher)
        finally:
            opened.close()

    async def _sample(self, whole: SampleWork, matcher: Matcher | None) -> SampleOutput:
        questions = prompt_questions(whole, self._vocab_size)
        full = self._fills_context(whole)
        work = without_last(whole) if full else whole
        params = engine_params(work, self.max_context_length, self._vocab_size, questions, matcher)
        prompt, clock = engine_prompt(work.prompt), EngineClock()
        with _as_api_errors("" if work.grammar is None else f"{work.grammar.field}: "):
            prepared = await self._prepared(work)
            clock.load_since(clock.submitted)
            moved: Sequence[list[Move]] = [[] for _ in params]

            def make(engine: Any) -> EngineRequest:
                self._check_awake()
                if work.version is None:
                    return EngineRequest(prompt, params, None)
                if work.moving is not None:
                    return self._moving(work.moving, prompt, params, engine, moved)
                lora = self._adapters.request(work.version, engine, prepared)
                own = self._adapters.changes_tower(work.version)
                return EngineRequest(with_own_features(prompt, work.version.name) if own else prompt, params, lora)

            on_output = None if work.drawn is None else TokenStream(work).output
            submitted = self._thread.submit(self._engine, make, work.begun, work.ended, on_output, clock)
            outputs = await asyncio.wrap_future(submitted)
        output = sample_output(outputs, work, questions, clock)
        if work.moving is not None:
            cached = [0 if self._moves_keys else each.num_cached_tokens or 0 for each in outputs]
            output = with_moves(output, work.moving, moved, cached)
        return without_tokens(output) if full else output

    async def _prepared(self, work: SampleWork) -> Any:
        """What the engine's thread loads for `work`."""
        if work.version is None:
            return None
        if work.moving is None:
            return await self._adapters.prepare(work.version)
        await self.publish(work.moving.target, work.version, work.moving.number)  # as to a new process
        return None

    def _moving(
        self, moving: MovingWeights, prompt: Any, params: tuple[Any, ...], engine: Any, moved: Sequence[list[Move]]
    ) -> EngineRequest:
        """A request whose weights move. Its keys, values and image features are under the client's namespace."""
        lora, number, changes_tower = self._adapters.moving(moving.target, engine)
        for each in moved:
            each[:] = [Move(number)]
        namespace = salt(moving.namespace, number) if self._moves_keys else moving.namespace
        if changes_tower:
            prompt = with_own_features(prompt, namespace)
        return EngineRequest(prompt | {"cache_salt": namespace}, params, lora, moved)

    def _fills_context(self, work: SampleWork) -> bool:
        """Whether `work` has room for no token, and needs none. Not if it ends with an image whose positions see the
        last one, which the engine does not get."""
        whole_image = self._sees_images and work.prompt.ends_with_image
        scored = scores_alone(work, work.params.max_tokens) and not whole_image
        return not token_budget(work.prompt.length, work.params.max_tokens, self.max_context_length, scored=scored)

    async def sleep(self) -> None:
        """Move weights to host memory and drop the KV cache; takes a few seconds."""
        with _as_api_errors():
            await asyncio.wrap_future(self._thread.call(self._engine, self._fall_asleep))

    async def wake(self) -> None:
        """Move weights back; the KV cache is empty."""
        with _as_api_errors():
            await asyncio.wrap_future(self._thread.call(self._engine, self._wake_up))

    async def rotations(
        self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
    ) -> Rotations:
        """See `Sampler.rotations`; on all ranks, since some norms add up over heads of all."""
        with _as_api_errors():
            return await asyncio.wrap_future(
                self._thread.call(self._engine, lambda engine: self._rotations(engine, layers, positions))
            )

    async def module_outputs(self, work: SampleWork) -> ModuleOutputs:
        """See `Sampler.module_outputs`; of rank 0."""
        hooks, length = contextlib.ExitStack(), work.prompt.length
        with _as_api_errors():
            try:
                found = await asyncio.wrap_future(
                    self._thread.call(
                        self._engine, lambda engine: hooks.enter_context(watching(served_model(engine), length))
                    )
                )
                await self.sample(work)
            finally:  # in the same thread, behind it, also if the first one was not waited for
                await asyncio.wrap_future(self._thread.call(self._engine, lambda _: hooks.close()))
        return found

    def _rotations(self, engine: Any, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        self._check_awake()
        if self._leader is None:
            return engine_rotations(engine, layers, positions)
        found: list[Rotations] = []
        self._leader.together(
            "rotate", lambda: found.append(engine_rotations(engine, layers, positions)), layers, positions
        )
        return found[0]

    async def pulse(self) -> None:
        """Return between two steps."""
        await asyncio.wrap_future(self._thread.between_steps())

    def _fall_asleep(self, engine: Any) -> None:
        if not self.can_sleep or self.asleep or self._engine.in_flight:
            raise InternalError(
                f"the sampling engine cannot sleep now: can_sleep is {self.can_sleep}, asleep {self.asleep}, "
                f"and {len(self._engine.in_flight)} sequences are in flight"
            )
        try:
            self._on_all_ranks("put_to_sleep", engine)
        finally:
            self.asleep = sleep_mode.is_asleep(engine)

    def _wake_up(self, engine: Any) -> None:
        if not self.asleep:  # it may have been rebuilt
            return
        try:
            self._on_all_ranks("wake", engine)
        finally:
            self.asleep = sleep_mode.is_asleep(engine)

    def _on_all_ranks(self, change: str, engine: Any) -> None:
        """Run a function of `sleep_mode`."""
        call = partial(getattr(sleep_mode, change), engine)
        if self._leader is None:
            call()
        else:
            self._leader.together(change, call)

    def _check_awake(self) -> None:
        """Raise InternalError; touching memory that is asleep would end the process's CUDA context."""
        if self.asleep:
            raise InternalError("the sampling engine sleeps")

    async def close(self) -> None:
        """Fail what is in flight and release the engine; other engines of the thread are not affected."""
        await asyncio.gather(
            asyncio.wrap_future(self._thread.remove_engine(self._engine)), in_daemon_thread(self._grammars.close)
        )


@contextlib.contextmanager
def _as_api_errors(field: str = "") -> Iterator[None]:
    """Turn what vLLM raises into errors that a client may see. `field`: what it refuses, if it refuses anything."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        from vllm.exceptions import VLLMValidationError

        if isinstance(error, VLLMValidationError):
            raise InvalidRequestError(f"{field}{error}") from error
        raise InternalError(f"the sampling engine failed: {type(error).__name__}: {error}") from error
