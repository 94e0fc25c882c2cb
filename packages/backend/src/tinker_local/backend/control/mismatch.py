"""How far a trainer is from the sampler whose tokens it is given: what a request brings and its result has anyway, the
sampler's logprobs q and the trainer's l of the same tokens, compared in a thread of the server while the trainer goes
on. No device computes anything for it.

With r = exp(l - q), the ratio of a token's probabilities, KL(sampler, trainer) is the mean of r - 1 - log r over
sampled tokens, in nats per token: k3 of Schulman, "Approximating KL Divergence" (2020),
http://joschu.net/blog/kl-approx.html. Like k1, the mean of -log r, it has no bias for tokens that were drawn from the
sampler's distribution, since r - 1 is 0 on average. It is chosen over k1 because no token's part is negative: where
both nearly agree, a part is half of log r squared, while in k1 a log r of 0.01 would have to cancel over tens of
thousands of tokens before a distance of 5e-5 shows. (k2, the mean of half of log r squared, is biased.)

Legend: N positions of a datum, M those of all data of a request, C those that count.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.training.losses.loss import LOGPROBS, Loss, any_of
from tinker_local.backend.training.trainer import TrainDatum, TrainResult
from tinker_local.types import ProvenanceSpan

NEAR = 0.2
"""How far from 1 a ratio may be before it counts as beyond: PPO's usual thresholds."""

_FURTHEST = 300.0
"""Of l - q, above which a ratio counts as that of so many nats: sums of ratios stay finite."""

ALL = "all"
CONTEXTS = ("text", "after_image")
TURNS = ("turn_1", "turn_2", "turn_3", "turn_4_on")
STALENESS = ("staleness_0", "staleness_1", "staleness_2", "staleness_3_on", "staleness_unknown")
"""Groups of tokens: all; by whether an image of the datum comes before; by the turn, which is an unbroken stretch of
sampled tokens in a datum; by how many optimizer steps the run has taken since it saved the weights that sampled."""

_UNKNOWN = len(STALENESS) - 1

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Distance:
    """Of `tokens` sampled tokens: the sum of r - 1 - log r, in nats; how many have a ratio below 1 - `NEAR` or above
    1 + `NEAR`; the largest ratio."""

    tokens: int = 0
    kl_sum: float = 0.0
    beyond: int = 0
    largest_ratio: float = 0.0

    def __add__(self, other: "Distance") -> "Distance":
        return Distance(
            self.tokens + other.tokens,
            self.kl_sum + other.kl_sum,
            self.beyond + other.beyond,
            max(self.largest_ratio, other.largest_ratio),
        )

    @property
    def kl(self) -> float:
        """Nats per token; only with tokens."""
        return self.kl_sum / self.tokens

    @property
    def beyond_share(self) -> float:
        """Of all tokens; only with tokens."""
        return self.beyond / self.tokens


Mismatch = Mapping[str, Distance]
"""By group; a group without tokens may be absent."""


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """The targets [start, stop) of a datum are sampled tokens. `version`: the weights that drew them; None: unknown."""

    start: int
    stop: int
    version: str | None


DrawnBy = Sequence[tuple[int, str]] | str | None
"""The weights that drew a sequence, by name: of all its tokens, or of so many in a row; None: unknown."""


def sampled_spans(spans: Iterable[ProvenanceSpan], drawn_by: Callable[[str], DrawnBy]) -> list[SampledSpan]:
    """The sampled ones of a datum's provenance spans, in parts that one version drew; `drawn_by` a sequence id."""
    found, start = [], 0
    for span in spans:
        if span.source == "sampled" and span.length:
            drawn = drawn_by(span.sequence_id)
            rows = [(span.offset + span.length, drawn)] if drawn is None or isinstance(drawn, str) else drawn
            begin = -span.offset  # of the row, in the span
            for tokens, version in rows:
                first, end = max(begin, 0), min(begin + tokens, span.length)
                if first < end:
                    found.append(SampledSpan(start + first, start + end, version))
                begin += tokens
        start += span.length
    return found


def measure(
    loss: Loss,
    data: Sequence[TrainDatum],
    result: TrainResult,
    spans: Sequence[Sequence[SampledSpan] | None],
    staleness: Mapping[str, int],
    vocab_size: int,
) -> dict[str, Distance]:
    """The distance in each group that has tokens, and in `ALL`.

    A position counts if one of its inputs is not 0 (the sampler's logprob, the advantage, the mask of gspo, the record
    of stable_reinforce) and its target is a token: a token of advantage 0 that was sampled counts, a prompt does not.
    `spans`: of each datum, if it has them; else turns are stretches of positions that count. `staleness`: by version,
    optimizer steps since it was saved.
    """
    lengths = np.array([datum.input.length for datum in data], np.int64)
    inputs = {name: np.concatenate([datum.loss_inputs[name] for datum in data]) for name in loss.inputs}
    targets = np.concatenate([datum.target_tokens for datum in data])
    counted: BoolArray = any_of(inputs, loss.inputs) & (targets >= 0) & (targets < vocab_size)
    at = np.flatnonzero(counted)
    if not len(at):
        return {ALL: Distance()}
    logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
    log_ratio = np.minimum(logprobs[at].astype(np.float64) - inputs[LOGPROBS][at].astype(np.float64), _FURTHEST)
    less_1 = np.expm1(log_ratio)  # r - 1, with all digits where r is near 1
    parts, beyond = less_1 - log_ratio, np.abs(less_1) > NEAR
    starts = np.cumsum(lengths) - lengths
    whole = Distance(len(at), float(parts.sum()), int(beyond.sum()), float(less_1.max()) + 1)
    found = {ALL: whole, CONTEXTS[0]: whole, STALENESS[_UNKNOWN]: whole}
    divided: list[tuple[Sequence[str], Int64Array]] = [(TURNS, _turns(counted, spans, starts, lengths)[at])]
    if any(datum.input.images for datum in data):
        del found[CONTEXTS[0]]
        divided.append((CONTEXTS, _after_image(data, starts, lengths)[at].astype(np.int64)))
    if any(span.version in staleness for of_datum in spans for span in of_datum or ()):
        del found[STALENESS[_UNKNOWN]]
        divided.append((STALENESS, _staleness(spans, staleness, starts, int(lengths.sum()))[at]))
    for names, group in divided:
        found |= _by_group(names, group, less_1, parts, beyond)
    return found


def _by_group(
    names: Sequence[str], group: Int64Array, less_1: Float64Array, parts: Float64Array, beyond: BoolArray
) -> dict[str, Distance]:
    """`group` int64 [C]: the number of each token's name."""
    size = len(names)
    tokens = np.bincount(group, minlength=size)
    kl, far = np.bincount(group, parts, size), np.bincount(group[beyond], minlength=size)
    here = np.flatnonzero(tokens)
    whole = len(here) == 1
    return {
        names[each]: Distance(
            int(tokens[each]),
            float(kl[each]),
            int(far[each]),
            float((less_1 if whole else less_1[group == each]).max()) + 1,
        )
        for each in here
    }


def _after_image(data: Sequence[TrainDatum], starts: Int64Array, lengths: Int64Array) -> BoolArray:
    """Whether an image of the datum comes before each position, bool [M]."""
    found = np.zeros(int(lengths.sum()), np.bool_)
    for datum, start, length in zip(data, starts.tolist(), lengths.tolist(), strict=True):
        if datum.input.images:
            found[start + min(placed.offset for placed in datum.input.images) : start + length] = True
    return found


def _turns(
    counted: BoolArray, spans: Sequence[Sequence[SampledSpan] | None], starts: Int64Array, lengths: Int64Array
) -> Int64Array:
    """Which of `TURNS` each position is in, int64 [M]."""
    in_turn = counted.copy()
    for of_datum, start, length in zip(spans, starts.tolist(), lengths.tolist(), strict=True):
        if of_datum is not None:
            in_turn[start : start + length] = False
            for span in of_datum:
                in_turn[start + span.start : start + span.stop] = True
    begins = in_turn.copy()
    begins[1:] &= ~in_turn[:-1]
    begins[starts] = in_turn[starts]
    number: Int64Array = np.cumsum(begins, dtype=np.int64)
    before: Int64Array = number[starts] - begins[starts]
    turn: Int64Array = np.clip(number - np.repeat(before, lengths), 1, len(TURNS)) - 1
    return turn


def _staleness(
    spans: Sequence[Sequence[SampledSpan] | None], staleness: Mapping[str, int], starts: Int64Array, size: int
) -> Int64Array:
    """Which of `STALENESS` each position is in, int64 [M]."""
    found = np.full(size, _UNKNOWN, np.int64)
    for of_datum, start in zip(spans, starts.tolist(), strict=True):
        for span in of_datum or ():
            if span.version is not None and span.version in staleness:
                found[start + span.start : start + span.stop] = min(staleness[span.version], _UNKNOWN - 1)
    return found


def added(each: Iterable[Mismatch]) -> dict[str, Distance]:
    """Of several requests together; empty without any token."""
    found: dict[str, Distance] = {}
    for name, distance in itertools.chain.from_iterable(mismatch.items() for mismatch in each):
        if distance.tokens:
            found[name] = found.get(name, Distance()) + distance
    return found


def telling(mismatch: Mismatch) -> dict[str, Distance]:
    """`ALL`, and those groups that are not all there is: contexts with an image, turns if there are two, staleness
    where some is known. Empty without any token."""
    if ALL not in mismatch:
        return {}
    names = [ALL]
    names += CONTEXTS if CONTEXTS[1] in mismatch else ()
    names += TURNS if any(name in mismatch for name in TURNS[1:]) else ()
    names += STALENESS if any(name in mismatch for name in STALENESS[:_UNKNOWN]) else ()
    return {name: mismatch[name] for name in names if name in mismatch}


def request_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Of one request, by `name:reduction`: sums and a maximum, which stay right when the SDK combines the requests into
    which it has cut a call. A mean over tokens would not: the SDK weighs by data."""
    distance = mismatch[ALL]
    return {
        "mismatch/kl:sum": distance.kl_sum,
        "mismatch/tokens:sum": float(distance.tokens),
        "mismatch/beyond:sum": float(distance.beyond),
        "mismatch/largest_ratio:max": distance.largest_ratio,
    }


def step_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Of all requests since the last optimizer step, and the groups that `telling` has chosen: `mismatch/MEASURE` of
    all tokens and `mismatch/MEASURE/GROUP`."""
    return {
        f"mismatch/{measure}{'' if group == ALL else f'/{group}'}": value
        for group, distance in mismatch.items()
        for measure, value in measures(distance).items()
    }


MEASURES = ("kl", "largest_ratio", "beyond_share", "tokens")


def measures(distance: Distance) -> dict[str, float]:
    """By the names in `MEASURES`: `kl` in nats per token, ratio and share as numbers, and the number of tokens."""
    return {name: float(getattr(distance, name)) for name in MEASURES}


class Watch:
    """Says once when a run's sampler and trainer are further apart than they were.

    The first `_FIRST` on-policy steps are what is usual; a step of tokens whose staleness is unknown counts as one. Any
    later step is compared with the largest of them, and so is a stale one before there are so many.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._largest = 0.0
        self._told = False

    def note(self, step: int, mismatch: Mismatch) -> str | None:
        """What to say of optimizer step number `step`; None: nothing."""
        if self._told or ALL not in mismatch:
            return None
        stale = sum(mismatch[name].tokens for name in STALENESS[1:_UNKNOWN] if name in mismatch)
        distance = mismatch[ALL]
        if not stale and self._steps < _FIRST:
            self._steps, self._largest = self._steps + 1, max(self._largest, distance.kl)
            return None
        if not self._steps or distance.kl <= max(_TIMES * self._largest, _NOISE):
            return None
        self._told = True
        words = f", and {stale / distance.tokens:.0%} were sampled by older weights" if stale else ""
        return (
            f"step {step}: sampler and trainer are {distance.kl:.3g} nats per token apart, more than {_TIMES:g} times "
            f"the {self._largest:.3g} of the first {self._steps} on-policy steps; of {distance.tokens} tokens "
            f"{distance.beyond_share:.1%} have a ratio beyond 1 ± {NEAR:g}, the largest is "
            f"{distance.largest_ratio:.3g}{words}; this is said once (docs/losses.md, The distance of the sampler)"
        )


_FIRST, _TIMES = 10, 3.0
"""Steps that say what is usual, and how many times as far is worth a line in the log."""

_NOISE = 1e-5
"""Nats per token. Below it no step is worth a line: ratios are 1 ± 0.0045 there, which rounding explains."""
