"""What a sampler does: one base model and immutable versions of adapters on it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tinker_local.backend.rendering.interface import RenderedInput
from tinker_local.backend.training.interface import AdapterDType, AdapterState
from tinker_local.types import InvalidRequestError, SampleOutput, SamplingParams, TensorData


def _written() -> AdapterState | None:
    return None


def nobody_asks() -> None:
    """For `SampleWork.begun`."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable version of an adapter: a folder in PEFT's layout that is never written again.

    `name` is unique for ever (a new save is a new version); `path` holds `adapter_config.json` and
    `adapter_model.safetensors`. While that folder is being written, `unwritten()` gives what will be in it; it gives
    None from the moment on when the folder can be read. It may be called from any thread.
    """

    name: str
    path: Path
    unwritten: Callable[[], AdapterState | None] = field(default=_written, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class SampleWork:
    """One request. `params.max_tokens` None means up to the context. `version` None is the base model.

    What follows `num_samples` is asked about the prompt (`prompt_scores`), but for `topk_sample_logprobs`, which is
    how many of the likeliest tokens come with every sampled one. `target_prompt_logprobs` int64 [P - 1, K], -1 for
    none; `prompt_logprobs_last_n` None: all positions. `begun` is called once, from any thread, when the first of the
    sequences has a place on the device.
    """

    prompt: RenderedInput
    version: AdapterVersion | None
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    begun: Callable[[], None] = nobody_asks


class Sampler(Protocol):
    """Samples from one base model; called on the event loop, never blocks it.

    Logprobs of sampled tokens, and of the likeliest ones beside them, are log softmax(logits / T) over the whole
    vocabulary, T = 0 gives those of T = 1. Logprobs of prompts are of T = 1, NaN at position 0, whatever T is; tokens
    at the positions of a prompt are drawn at T, not cut by top-k and top-p, and their logprobs are of T = 1 too.
    Cancelling the task of `sample` frees its slots.

    While it sleeps it takes next to none of the device's memory, and nothing but `wake`, `remove_version` and `close`
    may be called.
    """

    max_context_length: int

    adapter_dtype: AdapterDType
    """What adapters are rounded to here; there is no use in handing over more digits."""

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` may be called."""

    @property
    def asleep(self) -> bool:
        """Whether it sleeps; it may be read from any thread."""

    @property
    def images_encoded(self) -> int:
        """How many images went through the vision tower so far; it may be read from any thread."""

    @property
    def versions_loaded(self) -> int:
        """How many versions were loaded and not removed; it may be read from any thread."""

    @property
    def sequences_waiting(self) -> int:
        """How many sequences of `sample`s in flight have no place on the device yet; it may be read from any thread."""

    async def load_version(self, version: AdapterVersion) -> None:
        """Make `version` ready, from memory if its folder is not written yet, and verify that its tensors matched
        modules; raises InvalidRequestError if it cannot be served. Loading one that is loaded does nothing."""

    async def remove_version(self, version: AdapterVersion) -> None:
        """Forget `version`; its folder may be deleted afterwards."""

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Sample `num_samples` sequences in one request; a version that is not loaded is loaded first."""

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`. Called only while neither `sample` nor `load_version` runs; what
        the versions are is kept, what was cached of prompts is not. If it fails, the sampler is awake as before."""

    async def wake(self) -> None:
        """Take the memory again. If it fails, the sampler sleeps on, and `wake` may be called again."""

    async def close(self) -> None:
        """Stop the engine."""


def token_budget(prompt_length: int, max_tokens: int | None, limit: int) -> int:
    """How many tokens may be sampled; InvalidRequestError if the prompt and they exceed the context `limit`."""
    if prompt_length < 1:
        raise InvalidRequestError("prompt: there are no chunks; at least one token is needed")
    wanted = max(limit - prompt_length, 1) if max_tokens is None else max_tokens
    if prompt_length + wanted > limit:
        raise InvalidRequestError(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{prompt_length} prompt tokens + {wanted} max_tokens > {limit}"
        )
    return wanted
