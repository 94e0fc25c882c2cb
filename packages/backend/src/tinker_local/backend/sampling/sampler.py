"""The `Sampler` protocol: one base model and immutable versions of adapters on it."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterVersion
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.threads import THE_SERVER, Who
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.types import (
    ContextOverflowError,
    InvalidRequestError,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)
from tinker_local.types.requests_and_results import StopReason

RESERVED = 32
"""Sequences for which a sampler has room besides those that it is to run at once, so that the first samples of a
session need not wait until others end."""


def do_nothing() -> None:
    """For events that a caller does not look at."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The next tokens of one sequence, as soon as they are drawn. `sample`: its index in the client's request.

    `logprobs`: one for each of `tokens`. `likeliest`: ids and logprobs of the likeliest for each, the likeliest first,
    if the request asks for them. `stop_reason`: None while the sequence goes on.
    """

    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    stop_reason: StopReason | None = None


Drawn = Callable[[DrawnTokens], None]
"""Takes tokens from any thread, those of one sequence in order."""


def ignore_drawn(_: DrawnTokens) -> None:
    """Stands for a `Drawn` of another process."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """As OpenAI's API defines them: before the temperature, the logit of a token that was sampled n > 0 times in this
    sequence is lowered by `presence + n * frequency`."""

    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class MovingWeights:
    """What a sample of an in-flight client runs on: the weights of `target`, which move while it runs.

    `number`: of the work's `version`, from 1; the target may have a newer one already, and never gets an older one.
    `since`: the number of the save that made the client. `namespace`: what the client's keys and values are kept under,
    which no other client has.
    """

    target: str
    number: int
    since: int
    namespace: str


@dataclass(frozen=True, slots=True, eq=False)
class SampleWork:
    """One request. `params.max_tokens` None means up to the context. `version` None is the base model.

    `topk_sample_logprobs`: how many of the likeliest tokens come with every sampled one. The other fields after
    `num_samples` are questions about the prompt (`prompt_scores`). `target_prompt_logprobs`: int64 [P - 1, K], -1 for
    none. `prompt_logprobs_last_n` None: all positions. `first_sample`: the index of the first sequence in the client's
    request, on which its seed depends. `routes`: sequences come with the experts that their positions took, if the
    sampler is `routed`. `replica`: which of several replicas answers, if it works; None: any.

    `begun` is called once, from any thread, when the first sequence runs on the device. `ended` may be called, from any
    thread, when one of the sequences has ended before the last. `drawn` gets every token of the result before the
    result is there; None: the request is not streamed. `grammar`: what the tokens of each sequence must spell; None:
    anything. `penalties` None: none. `moving`: of an in-flight client; None: `version` draws all tokens. `who`: whose
    work it is.
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
    first_sample: int = 0
    replica: int | None = None
    ended: Callable[[], None] = do_nothing
    begun: Callable[[], None] = do_nothing
    drawn: Drawn | None = None
    grammar: Grammar | None = None
    penalties: Penalties | None = None
    routes: bool = False
    moving: MovingWeights | None = None
    who: Who = THE_SERVER

    def seeds(self) -> list[int] | None:
        """63 bits for each sequence; None without a seed.

        vLLM takes seed + index for each, so that neighbouring seeds share samples, and fails beyond 64 bits.
        """
        if self.params.seed is None:
            return None
        return self.seeded(*(str(self.first_sample + index) for index in range(self.num_samples)))

    def seeded(self, *what: str) -> list[int]:
        """63 bits for each of `what`, from the seed and the prompt.

        With one seed for many prompts, as RL programs have it, all would draw with the same random numbers otherwise,
        and a batch would teach less than it seems to.
        """
        images = [(placed.offset, placed.image.content_hash) for placed in self.prompt.images]
        common = hashlib.sha256(f"{self.params.seed}/{images}/".encode() + self.prompt.token_ids.tobytes())
        found = []
        for each in what:
            one = common.copy()
            one.update(f"/{each}".encode())
            found.append(int.from_bytes(one.digest()[:8], "big") >> 1)
        return found


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Where the time of sequences that one call of `Sampler.sample` ran together went, in seconds of the clock of the
    engine's process. The parts come one after the other.

    Attributes
    ----------
    waking: until the sampler was awake.
    loading: reading the adapter, checking it and giving it a place in the engine.
    queued: in the engine, until the first sequence ran.
    prefill: from then to the first token.
    decode: from the first token to the last one of the last sequence.
    longest: tokens of the longest sequence.
    preemptions: how often the engine took a sequence's place away and computed it again later.
    replica: which of several.
    """

    waking: float = 0.0
    loading: float = 0.0
    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    longest: int = 0
    preemptions: int = 0
    replica: int = 0

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None if there is none."""
        return self.decode / (self.longest - 1) if self.longest > 1 else None


@dataclass(slots=True, eq=False)
class EngineClock:
    """Follows one call through an engine. Times are of `time.monotonic`; 0: not yet."""

    submitted: float = field(default_factory=time.monotonic)
    loading: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    preemptions: int = 0

    def load_since(self, started: float) -> None:
        """Count the time since `started` as `EngineTimes.loading`."""
        self.loading += time.monotonic() - started

    def begin(self) -> None:
        """The first sequence runs, if none has."""
        self.begun = self.begun or time.monotonic()

    def times(self, first_token: float, longest: int) -> EngineTimes:
        """Of a call that has ended. `first_token`: when it was drawn, 0 if there is none."""
        begun = self.begun or self.ended
        first_token = min(max(first_token or self.ended, begun), self.ended)
        return EngineTimes(
            loading=self.loading,
            queued=max(0.0, begun - self.submitted - self.loading),
            prefill=first_token - begun,
            decode=self.ended - first_token,
            longest=longest,
            preemptions=self.preemptions,
        )


class Sampler(Protocol):
    """Samples from one base model. Called on the event loop, and never blocks it.

    Logprobs of sampled tokens, and of the likeliest tokens next to them, are log softmax(logits / T) over the whole
    vocabulary; T = 0 gives those of T = 1. Logprobs of prompts are always of T = 1, and NaN at position 0. Tokens drawn
    at the positions of a prompt use T but neither top-k nor top-p, and their logprobs are of T = 1. Cancelling the task
    of `sample` frees its slots.

    With a grammar, the logits of tokens that it does not allow next are -inf, so that logprobs of sampled tokens are of
    what was drawn from, and those of the likeliest may be -inf. With penalties, the logits are those after them.

    A sampler that is asleep takes almost none of the device's memory; only `wake`, `remove_version` and `close` may be
    called.
    """

    max_context_length: int

    adapter_dtype: AdapterDType
    """The dtype of adapters in the sampler; a version needs no more digits."""

    routed: RoutedLayers | None
    """The layers of which it says which experts positions took; None: of none."""
    why_not_in_flight: str
    """Why weights cannot move under running samples (`publish`); empty if they can."""

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` may be called."""

    @property
    def asleep(self) -> bool:
        """Whether it is asleep; readable from any thread."""

    @property
    def images_encoded(self) -> int:
        """How many images the vision tower has encoded; readable from any thread."""

    @property
    def versions_loaded(self) -> int:
        """How many versions are loaded; readable from any thread."""

    @property
    def sequences_waiting(self) -> int:
        """How many sequences of requests in flight do not run yet; readable from any thread."""

    @property
    def kv_cache_used(self) -> float:
        """Share of the KV cache, 0 to 1, that sequences in flight hold. Prefixes that are kept in case another prompt
        begins with them do not count: they give way. Readable from any thread."""

    async def load_version(self, version: AdapterVersion) -> None:
        """Load `version`, from memory if its folder is not written yet, and verify that all its tensors matched
        modules. InvalidRequestError if it cannot be served. No-op for a version that is loaded."""

    async def remove_version(self, version: AdapterVersion) -> None:
        """Remove `version`; its folder may be deleted afterwards."""

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        """From their next token on, sequences of `target` run on `version`, and so do later ones. All of its layers
        change between two steps. No-op if the target has this `number` or a larger one. If it fails half way, the
        target's sequences fail, and so do later ones until a newer version is published."""

    async def end_target(self, target: str) -> None:
        """Forget `target`, of which no sample runs."""

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Sample `num_samples` sequences, and say where the time went (`EngineTimes`); loads the version first if
        necessary. A streamed one that cannot go on after its first tokens fails: it never begins again.
        InvalidRequestError for a grammar that cannot be followed."""

    async def sleep(self) -> None:
        """Release the device's memory until `wake`. Keeps the versions and drops the prefix cache. Call it only while
        neither `sample` nor `load_version` runs. If it fails, the sampler is awake as before."""

    async def wake(self) -> None:
        """Take the memory again. If it fails, the sampler stays asleep, and `wake` may be called again."""

    async def pulse(self) -> None:
        """Return as soon as the engine has made progress, asleep or not: at the end of a step that runs. One that hangs
        never does."""

    async def rotations(
        self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
    ) -> Rotations:
        """What attention makes of positions (`training/rotations.py`), in one of several replicas. Nothing for layers
        of which that is not known. Call it while it is awake."""

    async def module_outputs(self, work: SampleWork) -> ModuleOutputs:
        """What modules give for the prompt of `work`, which samples one token of the base model, while nothing else
        runs. Nothing of modules that run inside CUDA graphs."""

    async def close(self) -> None:
        """Stop the engine."""


def scores_alone(asked: SampleRequest | SampleWork, max_tokens: int | None) -> bool:
    """Whether `asked` may be for its prompt's scores alone: the SDK's `compute_logprobs` asks for one token as well."""
    tensors = asked.target_prompt_logprobs is not None
    about_prompt = asked.prompt_logprobs or asked.topk_prompt_logprobs or asked.prompt_alt_tokens_k or tensors
    return bool(about_prompt) and max_tokens == 1 and asked.num_samples == 1


def token_budget(prompt_length: int, max_tokens: int | None, limit: int, *, scored: bool = False) -> int:
    """How many tokens may be sampled. ContextOverflowError if prompt and tokens exceed the context `limit`;
    InvalidRequestError without a prompt. `scored`: see `scores_alone`; such a prompt may fill the context, and 0 tokens
    follow it."""
    if prompt_length < 1:
        raise InvalidRequestError("prompt: there are no chunks; at least one token is needed")
    if scored and prompt_length == limit:
        return 0
    wanted = max(limit - prompt_length, 1) if max_tokens is None else max_tokens
    if prompt_length + wanted > limit:
        raise ContextOverflowError(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{prompt_length} prompt tokens + {wanted} max_tokens > {limit}",
            prompt_length,
            wanted if prompt_length < limit else 0,
            limit,
        )
    return wanted


def bytes_of(output: SampleOutput) -> int:
    """Of the arrays of a result."""
    scores, alternatives = output.target_prompt_logprobs, output.prompt_alt_tokens
    tensors = [] if scores is None else [scores]
    if alternatives is not None:
        tensors += [alternatives.tokens, alternatives.logprobs]
    topk = [output.topk_prompt_logprobs, *(sequence.topk_logprobs for sequence in output.sequences)]
    arrays = [output.prompt_logprobs, *(tensor.data for tensor in tensors)]
    arrays += [array for each in topk if each is not None for array in (each.token_ids, each.logprobs)]
    arrays += [array for sequence in output.sequences for array in (sequence.tokens, sequence.logprobs)]
    return sum(array.nbytes for array in arrays if array is not None)


def sampled_tokens(output: SampleOutput) -> int:
    """Of all sequences."""
    return sum(sequence.tokens.size for sequence in output.sequences)


def without_tokens(output: SampleOutput) -> SampleOutput:
    """`output` whose sequences end, before their first token, for want of room or because none was asked for."""
    sequences = []
    for sequence in output.sequences:
        none: dict[str, Any] = {"tokens": sequence.tokens[:0], "stop_reason": "length"}
        none["logprobs"] = np.empty(0, np.float32)
        if (topk := sequence.topk_logprobs) is not None:
            none["topk_logprobs"] = TopkLogprobs(token_ids=topk.token_ids[:0], logprobs=topk.logprobs[:0])
        sequences.append(sequence.model_copy(update=none))
    return output.model_copy(update={"sequences": tuple(sequences)})


def with_times(output: SampleOutput, **changes: float) -> SampleOutput:
    """`output` with other values of its times, if it has any."""
    if output.times is None:
        return output
    return output.model_copy(update={"times": replace(output.times, **changes)})


def of_all(outputs: Sequence[SampleOutput]) -> EngineTimes | None:
    """The times of a request that ran in several calls. What comes before the first token is that of the first call,
    and what comes after it that of the call that took longest for it. None if one of them has none."""
    times = [output.times for output in outputs if isinstance(output.times, EngineTimes)]
    if len(times) < len(outputs):
        return None
    longest = max(times, key=lambda each: each.decode)
    return replace(
        times[0],
        decode=longest.decode,
        longest=longest.longest,
        preemptions=sum(each.preemptions for each in times),
    )
