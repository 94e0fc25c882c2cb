"""Samples: from a request to the sampler and back. They run side by side, in no order."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tinker_local.backend.control import paths
from tinker_local.backend.control.checkpoint_uses import CheckpointUses
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.sampling_sessions import SamplingSession, SamplingSessions
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.rendering.image_assets import ImageAssets, names_images
from tinker_local.backend.rendering.interface import RenderedInput
from tinker_local.backend.sampling.interface import AdapterVersion, SampleWork, token_budget
from tinker_local.backend.scheduling.operations import Operation, Operations, Timeline
from tinker_local.backend.scheduling.queue_states import ACTIVE, QueueState, SamplerQueue, memory_state
from tinker_local.types import (
    InternalError,
    InvalidRequestError,
    SampleOutput,
    SampleRequest,
    TooManyRequestsError,
    UnsupportedError,
)


class Samples:
    """Takes samples, renders their prompts in threads, and hands them to the sampler of their session's base model."""

    def __init__(
        self,
        options: BackendOptions,
        sessions: SamplingSessions,
        versions: SamplerVersions,
        operations: Operations,
        uses: CheckpointUses,
    ) -> None:
        self._options = options
        self._sessions = sessions
        self._versions = versions
        self._operations = operations
        self._uses = uses
        self._rendering = ThreadPoolExecutor(2, thread_name_prefix="render")
        self._images = ImageAssets(options.image_folder, options.image_hosts)
        self._queued = 0
        self._in_samplers: dict[ServedModel, SamplerQueue] = {}

    async def sample(self, request: SampleRequest) -> Operation[SampleOutput]:
        """Queue a sample; the same (sampling session, seq_id) again is the same operation."""
        request_id = paths.request_id(request.sampling_session_id, request.seq_id)
        if (known := self._operations.get(request_id)) is not None:
            return known
        self._check(request)  # before anything is made for each of `num_samples`
        sequence_ids = tuple(f"{request_id}:{index}" for index in range(request.num_samples))
        operation: Operation[SampleOutput] = Operation(request_id, "sample", sequence_ids)
        try:
            session = await self._sessions.get(request.sampling_session_id)
        except InternalError as error:
            # Lost for ever: told through the future, because the SDK would submit again after a 5xx.
            self._operations.add(operation)
            operation.fail(error)
            return operation
        if (known := self._operations.get(request_id)) is not None:
            return known
        _check_context(request, session.base.engines.sampler.max_context_length)
        if self._queued >= self._options.max_queued_samples:
            raise TooManyRequestsError(f"{self._queued} samples are queued, which is the most this server takes")
        operation.failures = session.base.counts.failures
        self._operations.add(operation)
        session.clients.watch(request.seq_id, operation)
        self._queued += 1
        session.base.counts.samples_accepted += 1
        session.running.add(operation)
        if session.checkpoint is not None:
            self._uses.take(session.checkpoint)
        task = asyncio.create_task(self._run(session, request, operation))
        task.add_done_callback(lambda _: self._ended(session, operation))  # it may be cancelled before it begins
        operation.run_as(task)
        return operation

    def _check(self, request: SampleRequest) -> None:
        if request.record_stability_info:
            raise UnsupportedError(
                "record_stability_info: only stable_reinforce reads it, a loss that this server does not have; leave "
                "it out and train with another, as with loss_fn=importance_sampling of a recipe"
            )
        if request.num_samples > self._options.max_num_samples:
            raise InvalidRequestError(
                f"num_samples: {request.num_samples} is more than this server's {self._options.max_num_samples}"
            )

    async def _run(self, session: SamplingSession, request: SampleRequest, operation: Operation[SampleOutput]) -> None:
        try:
            output = await self._sample(session, request, operation)
            sequences = tuple(
                sequence.model_copy(update={"sequence_id": sequence_id})
                for sequence, sequence_id in zip(output.sequences, operation.sequence_ids, strict=True)
            )
            self._ended(session, operation)
            operation.succeed(output.model_copy(update={"sequences": sequences}))
        except Exception as error:
            self._ended(session, operation)
            operation.fail_from(error)

    def _ended(self, session: SamplingSession, operation: Operation[SampleOutput]) -> None:
        """A sample ended, whichever way; whoever gets its result finds it counted out."""
        if operation in session.running:
            session.running.discard(operation)
            if session.checkpoint is not None:
                self._uses.leave(session.checkpoint)
            session.base.counts.samples_accepted -= 1
            self._queued -= 1

    async def _sample(
        self, session: SamplingSession, request: SampleRequest, operation: Operation[SampleOutput]
    ) -> SampleOutput:
        work = SampleWork(
            await self._prompt(session.base, request, operation.timeline),
            self._version(session),
            request.sampling_params,
            request.num_samples,
            prompt_logprobs=request.prompt_logprobs,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_logprobs=request.target_prompt_logprobs,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            begun=partial(operation.timeline.enter, "running"),
        )
        queue = self._in_samplers.setdefault(session.base, SamplerQueue())
        queue.enter(operation, session.record.session_id, request.num_samples)
        try:
            output = await sample_counted(session.base, work)
            operation.timeline.note(sampled_tokens=sampled_tokens(output))
            return output
        finally:
            queue.leave(operation)

    async def _prompt(self, base: ServedModel, request: SampleRequest, timeline: Timeline) -> RenderedInput:
        """The prompt with its images fetched and rendered; it must fit in the context with what is sampled."""
        loop, given = asyncio.get_running_loop(), request.prompt
        if names_images(given):
            async with self._images.turn(given):
                timeline.enter("fetching")
                try:
                    given = await self._images.resolved(given, "prompt")
                finally:
                    timeline.enter("waiting")
        render = timeline.during("preparing", base.engines.renderer.render)
        prompt = await loop.run_in_executor(self._rendering, render, given, "prompt")
        timeline.note(num_samples=request.num_samples, prompt_tokens=prompt.length, images=len(prompt.images))
        token_budget(prompt.length, request.sampling_params.max_tokens, base.engines.sampler.max_context_length)
        return prompt

    def _version(self, session: SamplingSession) -> AdapterVersion | None:
        """What `session` is of; None for a base model."""
        if session.nameless is not None:
            return self._versions.nameless(session.nameless)
        return None if session.checkpoint is None else self._versions.named(session.checkpoint)

    def state_of(self, operation: Operation[Any]) -> QueueState:
        """What a sample that is not done waits for."""
        session = self._sessions.opened(paths.owner_of(operation.request_id))
        if session is None:
            return ACTIVE
        base = session.base
        queue = self._in_samplers.get(base)
        if queue is None or operation not in queue:
            return ACTIVE
        if base.memory_sharing.trainer_has_memory:
            return memory_state(session.record.session_id, [model.session_id for model in base.scheduler.running])
        return queue.state(operation, base.engines.sampler.sequences_waiting)

    def close(self) -> None:
        self._rendering.shutdown(wait=False, cancel_futures=True)


def _check_context(request: SampleRequest, limit: int) -> None:
    """Refuse at once, as the hosted service does, what can be seen not to fit: clients that shorten a conversation
    and try again tell this from a failed sample by its status. A prompt with an image that does not say its tokens is
    checked when it is rendered."""
    try:
        length = request.prompt.length
    except ValueError:
        return
    token_budget(length, request.sampling_params.max_tokens, limit)


async def sample_counted(base: ServedModel, work: SampleWork) -> SampleOutput:
    """Let the sampler work, and count what it does."""
    counts = base.counts
    counts.samples_running += 1
    try:
        output = await base.engines.sampler.sample(work)
    finally:
        counts.samples_running -= 1
    counts.samples += len(output.sequences)
    counts.prompt_tokens += work.prompt.length
    counts.sampled_tokens += sampled_tokens(output)
    return output


def sampled_tokens(output: SampleOutput) -> int:
    """Of all sequences."""
    return sum(sequence.tokens.size for sequence in output.sequences)
