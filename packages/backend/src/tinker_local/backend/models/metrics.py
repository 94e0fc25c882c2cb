"""What is counted while a base model is served. Every number is kept by the part that knows it and only read here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinker_local.types.errors import Category


@dataclass(slots=True, eq=False)
class Counts:
    """What the control plane itself counts for one base model, since its start; the event loop alone touches it.

    `samples`: sequences given out. `prompt_tokens`: positions of their prompts, once per request. `sampled_tokens`: of
    these sequences. `samples_accepted`: requests that have not ended; of these, `samples_running` are in the sampler.
    `submits_refused`: training requests for which there was no room. `failures`: operations that ended with an error,
    by its category.
    """

    samples: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    samples_accepted: int = 0
    samples_running: int = 0
    optimizer_steps: int = 0
    submits_refused: int = 0
    failures: Counter[Category] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, eq=False)
class ModelMetrics:
    """One copy of a base model at one moment. Counts begin with the server and never go down.

    Counts
    ------
    images_rendered: images decoded and processed; one that is still kept is not processed again.
    images_encoded_by_sampler, images_encoded_by_trainer: images that went through that engine's vision tower.
    samples, prompt_tokens, sampled_tokens: sequences given out, the positions of their prompts (once per request,
        image positions included), their own tokens.
    trained_tokens: positions of the data of every `forward_backward` that succeeded (`forward` is none).
    optimizer_steps: steps taken.
    submits_refused: how often a training request was not taken, because as much was queued as may be; each is sent
        again, and counts again if it is refused again.
    sampler_sleeps: how often the sampler gave its memory to the trainer, for requests that did not fit otherwise.
    failures: operations that ended with an error, by the category that the client saw; a cancelled one is the user's.
        What was refused at submission never became an operation.

    Of the moment
    -------------
    samples_running, samples_waiting: sample requests in the sampler (its own queue included), and on their way to it.
    commands_running, commands_waiting: training commands in the trainer, and queued for it.
    adapters: adapters that are being trained.
    sampler_versions: adapter versions that the sampler has verified and may be sampled from.
    sampler_asleep: whether the sampler is asleep so that the trainer can use its memory; the next sample wakes it.
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
    sampler_sleeps: int
    sampler_asleep: bool
