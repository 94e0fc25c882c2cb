"""Counters of a served base model. Each number is kept by the part that knows it, and only read here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from tinker_local.backend.scheduling.operation_totals import TOKEN_BOUNDS, Histogram
from tinker_local.types.errors import Category


@dataclass(slots=True, eq=False)
class Counts:
    """Counts of the control plane for one base model since its start. Used on the event loop only.

    `samples`: sequences returned. `prompt_tokens`: positions of their prompts, once per request. `sampled_tokens`: of
    these sequences. `samples_accepted`: unfinished requests.
    `ephemeral_bytes`: of the ephemeral sampler versions that are kept; `versions_dropped`: of them, because of a
    session's limit. `in_flight_published`: versions that the sampler went on to; `in_flight_tokens`: of in-flight
    clients; `tokens_on_older_keys`: of these, drawn on keys of an earlier version. `submits_refused`: training requests
    refused because the queue was full. `failures`: failed operations by category. `first_token_seconds`: of samples,
    from the request to the first token; `token_seconds`: for each token after it, of the slowest sequence.
    """

    samples: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    samples_accepted: int = 0
    ephemeral_bytes: int = 0
    versions_dropped: int = 0
    in_flight_published: int = 0
    in_flight_tokens: int = 0
    tokens_on_older_keys: int = 0
    optimizer_steps: int = 0
    submits_refused: int = 0
    failures: Counter[Category] = field(default_factory=Counter)
    first_token_seconds: Histogram = field(default_factory=Histogram)
    token_seconds: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """One of several replicas of the sampler. `sequences`: in it. `kv_cache_used`: share of its KV cache, 0 to 1.
    `restarts`: of its process. `works`: false while that has ended and the next one is not ready."""

    sequences: int
    kv_cache_used: float
    restarts: int
    works: bool


@dataclass(frozen=True, slots=True, eq=False)
class ModelMetrics:
    """One copy of a base model at one moment. Counts start at zero when the model is ready, and never go down.

    Counts
    ------
    images_rendered: images decoded and processed; cached ones are not processed again.
    images_encoded_by_sampler, images_encoded_by_trainer: images that each engine's vision tower encoded.
    samples, prompt_tokens, sampled_tokens: sequences returned, the positions of their prompts (once per request,
        image positions included), their own tokens.
    trained_tokens: positions of the data of successful `forward_backward`s (`forward` does not count).
    optimizer_steps: steps taken.
    submits_refused: training requests refused because the queue was full; a request that is sent and refused again
        counts again.
    sampler_sleeps: how often the sampler went to sleep for training requests that did not fit otherwise.
    versions_dropped: ephemeral sampler versions dropped because there were too many bytes of them.
    in_flight_published: versions that the sampler went on to for in-flight clients.
    in_flight_tokens, tokens_on_older_keys: tokens of in-flight clients; those drawn on keys and values that may be of
        an earlier version, so that no single version computes their logprobs again.
    trainer_restarts, sampler_restarts: how often the process of each was started again.
    failures: failed operations by the category that the client saw; cancelled ones count as the user's. Requests
        refused at submission are not operations.

    Of the moment
    -------------
    samples_running, samples_waiting: sample requests in the sampler (including its queue), and on their way to it.
    commands_running, commands_waiting: training commands in the trainer, and queued for it.
    adapters: adapters that are being trained.
    sampler_versions: adapter versions that the sampler has verified.
    ephemeral_bytes: of the ephemeral sampler versions, in shared memory or on disk.
    sequences: sequences in the sampler, its own queue included.
    kv_cache_used: share of the sampler's KV cache, 0 to 1, that these sequences hold; the mean of several replicas.
    kv_cache_bytes: of the sampler's KV cache on each of its GPUs; 0 if that is vLLM's own choice.
    trainer_cached_bytes: of the device's memory, what the trainer holds but does not use, in all its ranks.
    sampler_asleep: whether the sampler is asleep so that the trainer can use its memory; the next sample wakes it.
    trainer_works, sampler_works: false while the process of each has ended and the next one is not ready; of replicas
        while none works.
    replicas: several replicas of the sampler by their numbers; empty if there is one sampler.
    """

    images_rendered: int
    images_encoded_by_sampler: int
    images_encoded_by_trainer: int
    samples: int
    prompt_tokens: int
    sampled_tokens: int
    trained_tokens: int
    optimizer_steps: int
    submits_refused: int
    failures: Mapping[Category, int]
    samples_running: int
    samples_waiting: int
    commands_running: int
    commands_waiting: int
    adapters: int
    sampler_versions: int
    ephemeral_bytes: int
    versions_dropped: int
    in_flight_published: int
    in_flight_tokens: int
    tokens_on_older_keys: int
    sequences: int
    kv_cache_used: float
    kv_cache_bytes: int
    trainer_cached_bytes: int
    sampler_sleeps: int
    sampler_asleep: bool
    trainer_restarts: int
    trainer_works: bool
    sampler_restarts: int
    sampler_works: bool
    replicas: Mapping[int, ReplicaMetrics]
