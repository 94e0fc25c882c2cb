"""Samples replies for the trajectories of one group. Trajectories with equal first prompts share a request."""

import asyncio
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker_local.client.rl.episode import EpisodeError
from tinker_local.client.rl.workers import is_cancelled

_GATHER_SECONDS = 0.01
_CONTEXT_REFUSAL = "context window"
"""Part of the service's error for a prompt that leaves no room for a reply."""


class ContextOverflowError(Exception):
    """The prompt leaves no room for a reply; the message has the numbers."""


@dataclass(slots=True)
class _Shared:
    """A request that several trajectories wait for: one future per sample."""

    waiting: list[asyncio.Future[tinker.SampledSequence]]


class GroupSampler:
    """Samples replies for the members of group `index`.

    Equal first prompts that arrive within 10 ms of each other, or are being rendered at that time (`expected`), become
    one request with several samples, so that an image is sent once and not once per trajectory. With `params.seed`,
    each trajectory sends its own request with its own seed, so that the samples do not depend on arrival times.
    """

    def __init__(
        self,
        sampler: tinker.SamplingClient,
        params: tinker.SamplingParams,
        index: int,
        context_length: int | None = None,
    ) -> None:
        self._sampler = sampler
        self._params = params
        self._index = index
        self._context_length = context_length
        self._shared: dict[Hashable, _Shared] = {}
        self._expected: set[asyncio.Future[None]] = set()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Marks the rendering of a first prompt; a shared request that has not been sent yet waits for it."""
        here = asyncio.get_running_loop().create_future()
        self._expected.add(here)
        try:
            yield
        finally:
            self._expected.remove(here)
            here.set_result(None)

    async def reply(self, prompt: tinker.ModelInput, member: int, turn: int) -> tinker.SampledSequence:
        """One reply to `prompt`.

        Raises ContextOverflowError, or EpisodeError of kind "sampling" for any other refusal of the service.
        """
        params = self._params_for(prompt, member, turn)
        if turn == 0 and params.seed is None:
            return await self._reply_together(prompt, params)
        (sequence,) = await self._sample(prompt, 1, params)
        return sequence

    async def _reply_together(self, prompt: tinker.ModelInput, params: tinker.SamplingParams) -> tinker.SampledSequence:
        """The first caller waits a moment, then sends one request for all callers with the same prompt."""
        key = _content(prompt)
        mine: asyncio.Future[tinker.SampledSequence] = asyncio.get_running_loop().create_future()
        if (shared := self._shared.get(key)) is not None:
            shared.waiting.append(mine)
            return await mine
        shared = self._shared[key] = _Shared([mine])
        try:
            await self._gather()
            del self._shared[key]
            sequences = await self._sample(prompt, len(shared.waiting), params)
        except BaseException as error:
            for other in shared.waiting[1:]:
                _fail(other, error)
            raise
        for other, sequence in zip(shared.waiting[1:], sequences[1:], strict=True):
            if not other.done():
                other.set_result(sequence)
        return sequences[0]

    async def _gather(self) -> None:
        """Wait for members that started together, but not for those whose rendering starts later."""
        await asyncio.sleep(_GATHER_SECONDS)
        if self._expected:
            await asyncio.wait(set(self._expected))

    async def _sample(
        self, prompt: tinker.ModelInput, count: int, params: tinker.SamplingParams
    ) -> Sequence[tinker.SampledSequence]:
        try:
            response: tinker.SampleResponse = await self._sampler.sample(prompt, count, params)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            # The SDK cancels the requests of a closed client; this rollout itself was not cancelled.
            raise EpisodeError("sampling", "the request was cancelled by the client", error) from error
        except Exception as error:  # errors of the SDK or of the libraries below it
            if _CONTEXT_REFUSAL in str(error):
                raise ContextOverflowError(str(error)) from error
            raise EpisodeError("sampling", f"{type(error).__name__}: {error}", error) from error
        if len(response.sequences) != count:
            raise EpisodeError("sampling", f"the service returned {len(response.sequences)} samples instead of {count}")
        if any(sequence.logprobs is None for sequence in response.sequences):
            raise EpisodeError("sampling", "the service returned no logprobs of the sampled tokens")
        return response.sequences

    def _params_for(self, prompt: tinker.ModelInput, member: int, turn: int) -> tinker.SamplingParams:
        changes: dict[str, Any] = {}
        if self._context_length is not None:
            room = self._context_length - prompt.length
            if room < 1:
                raise ContextOverflowError(
                    f"the prompt of turn {turn + 1} has {prompt.length} positions, the context {self._context_length}"
                )
            changes["max_tokens"] = min(self._params.max_tokens or room, room)
        if self._params.seed is not None:
            words = np.random.SeedSequence([self._params.seed % 2**64, self._index, member, turn]).generate_state(1)
            changes["seed"] = int(words[0])
        return self._params.model_copy(update=changes)


def _content(prompt: tinker.ModelInput) -> Hashable:
    """A key that is equal for equal prompts, made without copying images."""
    return tuple(map(_chunk_content, prompt.chunks))


def _chunk_content(chunk: tinker.ModelInputChunk) -> Hashable:
    match chunk:
        case tinker.EncodedTextChunk():
            return tuple(chunk.tokens)
        case tinker.types.ImageChunk():
            return chunk.data, chunk.format, chunk.expected_tokens
    return chunk.model_dump_json()


def _fail(future: asyncio.Future[tinker.SampledSequence], error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        future.cancel()
    elif not future.done():
        future.set_exception(error)
