"""Whether the experts that the sampler records are those it takes: checked at the start, before gradients take them.

What is recorded passes CUDA graphs, the slots of a KV cache and copies that the host does not wait for. Where one of
them is wrong, gradients would take wrong experts, and nothing else would say so.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.models.agreement import LENGTHS
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import Sampler, SampleWork
from tinker_local.backend.training.routes import RouteArray, RoutedLayers, Routes
from tinker_local.backend.training.trainer import Replayed, Trainer
from tinker_local.types import SampledSequence, SamplingParams

SAMPLES = 3
"""Samples of each text that run side by side; one more of the longest then runs alone. So graphs of two sizes count."""

TOKENS = 24
"""Tokens of a sample, each drawn in a step of decoding."""

NUDGES = 2
"""How many times the trainer computes the samples again with other rounding."""

TIMES = 4.0
"""How many times as many experts as by rounding alone may be others than the trainer's, in a layer."""

ALWAYS_NORMAL = 0.05
"""A share of other experts in a layer that is always normal: one near tie in a text that all samples begin with."""

Called = Callable[..., Awaitable[Replayed]]
"""Calls a method of the trainer with arguments."""


@dataclass(frozen=True, slots=True)
class RoutesCheck:
    """Of one replica. `other`: the share of recorded experts that the trainer would not choose itself. `without` and
    `replayed`: how far the trainer's logprobs of the sampled tokens are from the sampler's on average (nats), with its
    own experts and with the recorded ones. `problem`: why recorded experts are not to be taken; empty if they are."""

    other: float
    without: float
    replayed: float
    problem: str

    def __str__(self) -> str:
        return (
            f"{100 * self.other:.2g}% are not those of the trainer's routers, and with them its logprobs of samples "
            f"differ from the sampler's by {self.replayed:.2g} nats on average, without by {self.without:.2g}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A prompt and a sample of it."""

    prompt: RenderedInput
    sequence: SampledSequence

    @property
    def whole(self) -> RenderedInput:
        """Its P + S positions."""
        return RenderedInput(np.concatenate([self.prompt.token_ids, self.sequence.tokens]).astype(np.int32))

    def padded(self, routed: RoutedLayers) -> Routes:
        """Its experts; the last position has none."""
        routes = self.sequence.routes
        assert routes is not None
        return Routes.of(np.concatenate([routes.read(0, len(routes)), routed.unrecorded(1)]))


async def check_routes(
    trainer: Trainer,
    sampler: Sampler,
    call: Called,
    routed: RoutedLayers,
    probes: Sequence[RenderedInput],
    context: int,
    least: float,
    replica: int,
) -> RoutesCheck:
    """Sample the short texts of `probes` with recorded experts, and have the trainer compute the samples with these
    and with its own. `context`: the most positions. `least`: a difference (nats) that is always normal."""
    prompts = [each for each in probes if not each.images and each.length <= min(max(LENGTHS), context - 2)]
    if not prompts:
        return _unusable(f"a context of {context} positions has no room for samples that show whether they are right")
    samples = await _samples(sampler, prompts, context, replica)
    if problem := _fault(samples, routed):
        return _unusable(problem)
    inputs = [each.whole for each in samples]
    recorded = [each.padded(routed) for each in samples]
    nothing = [Routes.of(routed.unrecorded(each.length)) for each in inputs]
    alone = await call(trainer.replayed, inputs, nothing)
    taken = await call(trainer.replayed, inputs, recorded)
    ends = np.cumsum([each.length for each in inputs])[:-1]
    own = [Routes.of(each) for each in np.split(alone.own, ends)]
    nudged = [await call(trainer.replayed, inputs, own, nudge=1 + draw) for draw in range(NUDGES)]
    return judge_routes(samples, routed, alone, taken, nudged, least)


def _unusable(problem: str) -> RoutesCheck:
    return RoutesCheck(np.nan, np.nan, np.nan, problem)


async def _samples(sampler: Sampler, prompts: Sequence[RenderedInput], context: int, replica: int) -> Sequence[Sampled]:
    async def sampled(prompt: RenderedInput, count: int) -> list[Sampled]:
        tokens = min(TOKENS, context - prompt.length)
        params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1, stop=())
        work = SampleWork(prompt, None, params, num_samples=count, routes=True, replica=replica)
        return [Sampled(prompt, each) for each in (await sampler.sample(work)).sequences]

    together = await asyncio.gather(*(sampled(prompt, SAMPLES) for prompt in prompts))
    return [*itertools.chain.from_iterable(together), *await sampled(prompts[-1], 1)]


def _fault(samples: Sequence[Sampled], routed: RoutedLayers) -> str:
    """What no trainer could take; empty if there is nothing."""
    for each in samples:
        routes, positions = each.sequence.routes, each.whole.length - 1
        if routes is None:
            return "the sampler returned none with a sample that asked for them"
        if fault := routed.fault(routes, positions):
            return f"those of a sample {fault}"
        if not routes.known.all():
            return f"the sampler has none of {int((~routes.known).sum())} of {positions} positions of a sample"
    return ""


def judge_routes(
    samples: Sequence[Sampled],
    routed: RoutedLayers,
    alone: Replayed,
    taken: Replayed,
    nudged: Sequence[Replayed],
    least: float,
) -> RoutesCheck:
    """Whether the recorded experts of `samples` are those that were taken. `alone`: the trainer with its own experts;
    `taken`: with the recorded ones; `nudged`: with its own from `alone`, rounding otherwise.

    In each layer, of prompts and of what is sampled alone, a few times as many recorded experts as rounding changes may
    be others than the trainer's, and half as many at most as those of an unrelated position would be. Logprobs that
    the trainer computes with them may not be farther from the sampler's than without, but for what rounding moves
    where all experts are the same.
    """
    lengths = [each.whole.length for each in samples]
    is_last = np.zeros(sum(lengths), np.bool_)
    is_last[np.cumsum(lengths) - 1] = True
    # Prompts are computed in a few large steps, and sampled tokens in many small ones.
    is_sampled = np.concatenate([np.arange(each.whole.length) >= each.prompt.length for each in samples])
    others = other_experts(np.concatenate([each.padded(routed).own for each in samples]), taken.own)
    noise = max(float(other_experts(alone.own, each.own)[~is_last].mean(0).max()) for each in nudged)
    limit = min(max(ALWAYS_NORMAL, TIMES * noise), (1 - routed.chosen / routed.experts) / 2)
    parts = {"prompts": others[~is_sampled], "sampled tokens": others[is_sampled & ~is_last]}
    problem = next(filter(None, (_wrong_layer(part, each, limit, routed) for part, each in parts.items())), "")

    scored = np.concatenate([np.arange(1, each.whole.length) >= each.prompt.length for each in samples])
    theirs = np.concatenate([each.sequence.logprobs for each in samples])
    without, replayed = (float(np.abs(each.logprobs[scored] - theirs).mean()) for each in (alone, taken))
    by_rounding = float(np.mean([np.abs(each.logprobs - alone.logprobs)[scored].mean() for each in nudged]))
    allowed = max(least, by_rounding)
    if not problem and not replayed <= without + allowed:
        problem = (
            f"with those recorded the trainer's logprobs of samples differ from the sampler's by {replayed:.3g} nats "
            f"on average, and without by {without:.3g} (at most {allowed:.3g} more is normal)"
        )
    return RoutesCheck(float(others[~is_last].mean()), without, replayed, problem)


def _wrong_layer(part: str, others: npt.NDArray[np.float64], limit: float, routed: RoutedLayers) -> str:
    """The layer in which more than `limit` of the experts recorded for a `part` are others, in words; empty if there is
    none. `others` [N, L]."""
    shares = others.mean(0) if len(others) else np.zeros(1)
    worst = int(shares.argmax())
    if shares[worst] <= limit:
        return ""
    return (
        f"of those recorded in layer {routed.layers[worst]} for {part}, {100 * shares[worst]:.2g}% are not those of "
        f"the trainer's router (at most {100 * limit:.2g}% is normal)"
    )


def other_experts(recorded: RouteArray, own: RouteArray) -> npt.NDArray[np.float64]:
    """Which share of the K experts of `own` [N, L, K] is not among those `recorded`, [N, L]."""
    found = (own[..., None] == recorded[..., None, :]).any(-1)
    missing: npt.NDArray[np.float64] = 1 - found.mean(-1)
    return missing
