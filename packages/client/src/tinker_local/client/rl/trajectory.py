"""The record of one episode, and its training data: exactly the tokens that the sampler received and produced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import tinker
from tinker_local.client.rl.chat import Chunk
from tinker_local.types import InvalidRequestError

End: TypeAlias = Literal["terminated", "truncated", "max_turns", "context", "failed"]
FailureKind: TypeAlias = Literal["environment", "observation", "sampling", "timeout"]
Span: TypeAlias = tinker.PromptProvenanceSpan | tinker.SampledProvenanceSpan


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the model and the environment's answer to it.

    `prompt`: the sampler's input. `tokens`, `logprobs`: its output; logprobs are float32 nats at the sampling
    temperature, one per token. `sequence_id`: the service's id of the sample, "" if nothing was sampled. `action`: the
    text passed to the environment. `observation`, `reward`, `info`: the environment's answer.
    """

    prompt: tinker.ModelInput
    tokens: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    sequence_id: str
    stop_reason: tinker.StopReason
    action: str
    observation: Any = None
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trajectory could not continue: the part that failed, its message, and the exception."""

    kind: FailureKind
    message: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An episode, complete or cut off.

    `end`: the environment reports "terminated" and "truncated"; "max_turns" and "context" are limits, with the numbers
    in `reason`; "failed" comes with a `failure`. `num_images`: images in the last prompt.
    """

    turns: tuple[Turn, ...]
    end: End
    reason: str = ""
    failure: Failure | None = None
    num_images: int = 0

    @property
    def reward(self) -> float:
        """The return: the sum of the rewards of all turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def trainable(self) -> bool:
        """Whether it counts in its group: it did not fail and has at least one sampled token."""
        return self.failure is None and bool(self.turns)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(turn.tokens) for turn in self.turns)

    def data(
        self, advantage: float | Sequence[float] = 1.0, loss_fn: tinker.types.LossFnType = "importance_sampling"
    ) -> list[tinker.Datum]:
        """The trajectory as training data. `advantage`: one number, or one per turn. See `turns_to_data`."""
        return turns_to_data(self.turns, advantage, loss_fn)


def turns_to_data(
    turns: Sequence[Turn],
    advantage: float | Sequence[float] = 1.0,
    loss_fn: tinker.types.LossFnType = "importance_sampling",
) -> list[tinker.Datum]:
    """Turns in order as data. A turn continues the previous datum if its prompt begins with all earlier tokens.

    An episode is therefore one datum of N positions if the chat template appends, and one datum per turn if it
    rewrites. Inputs are all tokens except the last, targets all except the first. At sampled tokens, `advantages` is
    the turn's advantage and `logprobs` the sampler's (for "cross_entropy": `weights` is the advantage). Everywhere else
    (prompt, observations, images, ends of turns that were not sampled) they are 0, which trains nothing. An end of turn
    is only added if something follows it: after the last sample it would train nothing, and no request has seen it.

    If its turns have a `sequence_id`, a datum carries provenance spans, which say for each token which request's prompt
    or sample it comes from. Raises InvalidRequestError if `advantage` does not match `turns` in length, or a turn's
    logprobs do not match its tokens.
    """
    per_turn = np.asarray(advantage, np.float64)
    if per_turn.ndim == 0:
        per_turn = np.full(len(turns), per_turn)
    if len(per_turn) != len(turns):
        raise InvalidRequestError(f"advantage: {len(per_turn)} numbers for {len(turns)} turns")
    data: list[tinker.Datum] = []
    sequence = _Sequence()
    for index, (turn, value) in enumerate(zip(turns, per_turn.tolist(), strict=True)):
        if len(turn.logprobs) != len(turn.tokens):
            raise InvalidRequestError(f"turns[{index}]: {len(turn.logprobs)} logprobs for {len(turn.tokens)} tokens")
        if not turn.tokens:  # nothing to train; its prompt is part of the next one
            continue
        prompt = _runs(turn.prompt.chunks)
        if not sequence.is_prefix_of(prompt):
            data += sequence.data(loss_fn)
            sequence = _Sequence()
        sequence.append(turn, prompt, value)
    return data + sequence.data(loss_fn)


class _Sequence:
    """Tokens of turns that continue each other, with the loss inputs of each position."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._positions = 0
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._advantages: list[npt.NDArray[np.float32]] = []
        self._spans: list[Span] | None = []  # None once a turn has no request

    def is_prefix_of(self, prompt: list["_Run"]) -> bool:
        if not self._runs:
            return True
        if len(prompt) < len(self._runs):
            return False
        *before, last = self._runs
        other = prompt[len(before)]
        begin = other[: len(last)] if isinstance(last, list) and isinstance(other, list) else other
        return begin == last and prompt[: len(before)] == before

    def append(self, turn: Turn, prompt: list["_Run"], advantage: float) -> None:
        """`prompt` begins with all that is here, and is kept."""
        given, sampled = sum(map(_length, prompt)) - self._positions, len(turn.tokens)
        self._runs = prompt if prompt and isinstance(prompt[-1], list) else [*prompt, []]
        last = self._runs[-1]
        assert isinstance(last, list)
        last += map(int, turn.tokens)  # numpy's integers too
        self._logprobs += [np.zeros(given, np.float32), np.asarray(turn.logprobs, np.float32)]
        self._advantages += [np.zeros(given, np.float32), np.full(sampled, advantage, np.float32)]
        if not turn.sequence_id:
            self._spans = None
        if self._spans is not None and given:
            span = tinker.PromptProvenanceSpan(sequence_id=turn.sequence_id, offset=self._positions, length=given)
            self._spans.append(span)
        if self._spans is not None:
            self._spans.append(tinker.SampledProvenanceSpan(sequence_id=turn.sequence_id, length=sampled))
        self._positions += given + sampled

    def data(self, loss_fn: tinker.types.LossFnType) -> list[tinker.Datum]:
        """The datum, as a list; empty if no position predicts a sampled token."""
        if self._positions < 2:
            return []
        targets = np.concatenate(
            [np.array(run if isinstance(run, list) else (0,) * run.length, np.int64) for run in self._runs]
        )
        logprobs, advantages = np.concatenate(self._logprobs), np.concatenate(self._advantages)
        inputs: dict[str, Any] = {"target_tokens": targets[1:]}
        if loss_fn == "cross_entropy":
            inputs["weights"] = advantages[1:]
        else:
            inputs |= {"logprobs": logprobs[1:], "advantages": advantages[1:]}
        datum = tinker.Datum(model_input=_without_last(self._runs), loss_fn_inputs=inputs)
        if (spans := self._spans) is None:
            return [datum]
        return [datum.with_provenance([*spans[:-1], *_shorten(spans[-1])], [*_shorten(spans[0], first=1), *spans[1:]])]


def _shorten(span: Span, first: int = 0) -> list[Span]:
    """`span` without its last position, or without its first."""
    if span.length == 1:
        return []
    return [replace(span, offset=span.offset + first, length=span.length - 1)]


_Run: TypeAlias = list[int] | Chunk
"""All tokens between two images, or an image."""


def _runs(chunks: Sequence[Chunk]) -> list[_Run]:
    """Copies of the tokens, so that they can be added to."""
    runs: list[_Run] = []
    for chunk in chunks:
        if not isinstance(chunk, tinker.EncodedTextChunk):
            runs.append(chunk)
        elif runs and isinstance(runs[-1], list):
            runs[-1] += chunk.tokens
        elif chunk.tokens:
            runs.append([*chunk.tokens])
    return runs


def _length(run: _Run) -> int:
    return len(run) if isinstance(run, list) else run.length


def _without_last(runs: Sequence[_Run]) -> tinker.ModelInput:
    """All text between two images as one chunk, but for the last token."""
    *before, last = runs
    assert isinstance(last, list)
    kept: list[_Run] = [*before, last[:-1]] if len(last) > 1 else before
    return tinker.ModelInput(
        chunks=[tinker.EncodedTextChunk(tokens=run) if isinstance(run, list) else run for run in kept]
    )
