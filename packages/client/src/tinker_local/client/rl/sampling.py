"""Replies for the trajectories of one group. Siblings that begin alike share their first request."""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker_local.client.rl.episode import EpisodeError

_GATHER_SECONDS = 0.01
_CONTEXT_REFUSAL = "context window"
"""What the service's refusal of a prompt that leaves no room for a reply contains."""


class ContextOverflowError(Exception):
    """The prompt leaves no room for a reply; the message has the numbers."""


@dataclass(slots=True)
class _Shared:
    """A request that siblings wait for: one future per sample."""

    waiting: list[asyncio.Future[tinker.SampledSequence]]


class GroupSampler:
    """Samples replies for the members of group `index`.

    First prompts that are equal and come within 10 ms of each other go as one request of several samples, so that an
    image travels once and not once per sibling. With `params.seed` they go apart, each with its own seed: what is
    sampled then does not depend on who came when.
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

    async def reply(self, prompt: tinker.ModelInput, member: int, turn: int) -> tinker.SampledSequence:
        """One reply to `prompt`.

        Raises ContextOverflowError, or EpisodeError of kind "sampling" for whatever else the service refuses.
        """
        params = self._params_for(prompt, member, turn)
        if turn == 0 and params.seed is None:
            return await self._reply_together(prompt, params)
        (sequence,) = await self._sample(prompt, 1, params)
        return sequence

    async def _reply_together(self, prompt: tinker.ModelInput, params: tinker.SamplingParams) -> tinker.SampledSequence:
        """The first to come waits a moment, then asks for all who came with the same prompt."""
        key = _content(prompt)
        mine: asyncio.Future[tinker.SampledSequence] = asyncio.get_running_loop().create_future()
        if (shared := self._shared.get(key)) is not None:
            shared.waiting.append(mine)
            return await mine
        shared = self._shared[key] = _Shared([mine])
        try:
            await asyncio.sleep(_GATHER_SECONDS)
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

    async def _sample(
        self, prompt: tinker.ModelInput, count: int, params: tinker.SamplingParams
    ) -> Sequence[tinker.SampledSequence]:
        try:
            response: tinker.SampleResponse = await self._sampler.sample(prompt, count, params)
        except tinker.TinkerError as error:
            if _CONTEXT_REFUSAL in str(error):
                raise ContextOverflowError(str(error)) from error
            raise EpisodeError("sampling", f"{type(error).__name__}: {error}", error) from error
        if any(sequence.logprobs is None for sequence in response.sequences):
            raise EpisodeError("sampling", "the service gave no logprobs of the sampled tokens")
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
            words = np.random.SeedSequence([self._params.seed, self._index, member, turn]).generate_state(1)
            changes["seed"] = int(words[0])
        return self._params.model_copy(update=changes)


def _content(prompt: tinker.ModelInput) -> Hashable:
    """What makes two prompts equal."""
    return tuple(
        tuple(chunk.tokens) if isinstance(chunk, tinker.EncodedTextChunk) else chunk.model_dump_json()
        for chunk in prompt.chunks
    )


def _fail(future: asyncio.Future[tinker.SampledSequence], error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        future.cancel()
    elif not future.done():
        future.set_exception(error)
