"""Recorded sessions: conversations of programs that spoke OpenAI's or Anthropic's API with the server, as Datums.

record_session("monday")
...  # programs with base_url http://HOST:8000/session/monday/v1
trajectories = recorded("monday")
data = to_datums(trajectories, advantages, "importance_sampling")
training_client.forward_backward(data, "importance_sampling")
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import numpy as np
import tinker
from tinker_local.client.endpoint import Endpoint, connect, send
from tinker_local.types import InvalidRequestError

LossName: TypeAlias = Literal["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"]

Span: TypeAlias = tinker.PromptProvenanceSpan | tinker.SampledProvenanceSpan

SECONDS = 600
"""For the answer of a server that reads a long session."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One reply. `number`: in its session; `parent`: the turn that it continues token by token, None for a first one.

    `prompt`: what the model read; `tokens`, `logprobs`: what it sampled, in float32 nats of log softmax(logits / T)
    over the vocabulary, as the SDK's samples have them. `forced`: indices into `tokens` that a grammar left no choice
    for.
    `model`: the name that the program gave; `version`: the checkpoint that sampled, None for the base model.
    `messages`: what the request added to the conversation of `parent`; `reply`: the model's message, as the program got
    it. `branch`: `turn`, `message` and `differs`, if the conversation resembles that turn's and does not continue it.
    `begun`, `ended`: seconds since 1970.
    """

    number: int
    parent: int | None
    prompt: tinker.ModelInput
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    forced: tuple[int, ...]
    stop_reason: str
    model: str
    version: str | None
    sampling_params: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    branch: Mapping[str, Any] | None
    abandoned: bool
    reward: float | None
    begun: float
    ended: float


@dataclass(slots=True)
class RecordedTrajectory:
    """A path from the first turn of a tree to a leaf. Trajectories of one tree share their first turns.

    `reward`: the sum of what was posted for its turns, 0 if nothing was; a program may set it.
    """

    session: str
    turns: tuple[RecordedTurn, ...]
    reward: float = field(default=0.0)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(turn.tokens) for turn in self.turns)


def record_session(
    name: str | None = None,
    *,
    lifetime_hours: float = 24.0,
    max_bytes: int = 2**30,
    keep_thoughts: bool = False,
    base_url: str | None = None,
    api_key: str | None = None,
) -> str:
    """Make a session on a server that was started with `--record-sessions`; its name.

    OpenAI's clients then use `{server}/session/{name}/v1` as their base URL, Anthropic's `{server}/session/{name}`.
    `keep_thoughts`: prompts continue what was sampled even where the template would drop the thoughts of earlier turns.

    Raises tinker.APIConnectionError if no server answers, tinker.APIStatusError if it refuses.
    """
    endpoint = connect(base_url, api_key, check_server=False)
    body = {"name": name, "lifetime_hours": lifetime_hours, "max_bytes": max_bytes, "keep_thoughts": keep_thoughts}
    return str(send(endpoint, "POST", "recorded_sessions", json=body, timeout=SECONDS).json()["name"])


def forget_session(session: str, *, base_url: str | None = None, api_key: str | None = None) -> None:
    """Delete a session and its pictures. Raises as `record_session`."""
    endpoint = connect(base_url, api_key, check_server=False)
    send(endpoint, "DELETE", _path(session), timeout=SECONDS)


def recorded(session: str, *, base_url: str | None = None, api_key: str | None = None) -> list[RecordedTrajectory]:
    """The trajectories of a session: one for each leaf, in the order in which the leaves were sampled. Turns that were
    abandoned, and that nothing continues, are left out.

    Raises as `record_session`.
    """
    endpoint = connect(base_url, api_key, check_server=False)
    answer = send(endpoint, "GET", f"{_path(session)}/turns", timeout=SECONDS)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    pictures: dict[str, bytes] = {}
    turns = {line["turn"]: _turn(line, session, endpoint, pictures) for line in lines}
    return trajectories_of(session, turns)


def trajectories_of(session: str, turns: Mapping[int, RecordedTurn]) -> list[RecordedTrajectory]:
    """See `recorded`; `turns` by their numbers."""
    inner: set[int] = set()
    for turn in turns.values():  # a turn that is abandoned may have continued one that is not
        if not turn.abandoned and turn.parent is not None:
            inner.add(turn.parent)
    found = []
    for leaf in turns.values():
        if leaf.abandoned or leaf.number in inner:
            continue
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(turns[parent])
        rewards = [turn.reward for turn in path if turn.reward is not None]
        found.append(RecordedTrajectory(session, tuple(reversed(path)), float(sum(rewards))))
    return found


def to_datums(
    trajectories: Sequence[RecordedTrajectory],
    advantages: Sequence[float],
    loss_fn: LossName = "importance_sampling",
    *,
    shared: Literal["each", "once"] = "each",
) -> list[tinker.Datum]:
    """One datum of N positions for each trajectory: inputs are all tokens but the last, targets all but the first.

    At sampled tokens, `advantages` is the trajectory's and `logprobs` the sampler's; elsewhere, and at tokens that a
    grammar left no choice for, they are 0. stable_reinforce gets provenance spans, from which the server
    takes logprobs and sampled tokens. `shared`: a turn of k trajectories is in k data. With "each", it counts in all of
    them, with its own advantage in each; with "once" in the first alone, with the mean of the k advantages. The
    ratio of a sequence (gspo, stable_reinforce) is over all its turns in either case, and so is the KL term of
    stable_reinforce.

    Raises InvalidRequestError for another number of advantages than trajectories, one that is not finite, or
    stable_reinforce on tokens that a grammar left no choice for, which it could not leave out.
    """
    if len(advantages) != len(trajectories):
        raise InvalidRequestError(f"advantages: {len(advantages)} numbers for {len(trajectories)} trajectories")
    if (bad := next((at for at, value in enumerate(advantages) if not np.isfinite(value)), None)) is not None:
        raise InvalidRequestError(f"advantages[{bad}]: {advantages[bad]} is not finite")
    users: dict[tuple[str, int], list[int]] = {}
    for at, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            users.setdefault((trajectory.session, turn.number), []).append(at)
    data = []
    for at, trajectory in enumerate(trajectories):
        values: list[float | None] = []
        for turn in trajectory.turns:
            using = users[trajectory.session, turn.number]
            if shared == "each":
                values.append(float(advantages[at]))
            else:
                values.append(float(np.mean([advantages[each] for each in using])) if using[0] == at else None)
        data.append(_datum(trajectory, values, loss_fn))
    return data


def _datum(trajectory: RecordedTrajectory, values: Sequence[float | None], loss_fn: LossName) -> tinker.Datum:
    """`values`: the advantage of each turn; None for one that counts elsewhere."""
    last = trajectory.turns[-1]
    positions = last.prompt.length + len(last.tokens)
    targets = np.zeros(positions, np.int64)
    start = 0
    for chunk in last.prompt.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            targets[start : start + chunk.length] = chunk.tokens
        start += chunk.length
    targets[start:] = last.tokens
    logprobs, advantages, mask = (np.zeros(positions, np.float32) for _ in range(3))
    for turn, value in zip(trajectory.turns, values, strict=True):
        first, free = turn.prompt.length, np.ones(len(turn.tokens), np.float32)
        free[list(turn.forced)] = 0
        span = slice(first, first + len(turn.tokens))
        if loss_fn == "stable_reinforce" and turn.forced:
            raise InvalidRequestError(
                f"loss_fn: stable_reinforce counts every sampled token, and a grammar left no choice for "
                f"{len(turn.forced)} of {len(turn.tokens)} of turn {turn.number} of {trajectory.session!r}"
            )
        logprobs[span] = np.asarray(turn.logprobs, np.float32) * free
        mask[span] = free
        if value is not None:
            advantages[span] = value * free
    inputs: dict[str, Any] = {"target_tokens": targets[1:], "logprobs": logprobs[1:], "advantages": advantages[1:]}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = mask[1:]
    datum = tinker.Datum(model_input=_without_last(last), loss_fn_inputs=inputs)
    return datum.with_provenance(*_spans(trajectory)) if loss_fn == "stable_reinforce" else datum


def _spans(trajectory: RecordedTrajectory) -> tuple[list[Span], list[Span]]:
    """Where the inputs and the targets come from."""
    spans: list[Span] = []
    end = 0
    for turn in trajectory.turns:
        name = f"recorded:{trajectory.session}:{turn.number}"
        if turn.prompt.length > end:
            spans.append(tinker.PromptProvenanceSpan(sequence_id=name, offset=end, length=turn.prompt.length - end))
        if turn.tokens:
            spans.append(tinker.SampledProvenanceSpan(sequence_id=name, length=len(turn.tokens)))
        end = turn.prompt.length + len(turn.tokens)
    first, last = spans[0], spans[-1]
    inputs = [*spans[:-1], *([replace(last, length=last.length - 1)] if last.length > 1 else [])]
    shorter = [replace(first, offset=first.offset + 1, length=first.length - 1)] if first.length > 1 else []
    return inputs, [*shorter, *spans[1:]]


def _without_last(turn: RecordedTurn) -> tinker.ModelInput:
    chunks = list(turn.prompt.chunks)
    if len(turn.tokens) > 1:
        chunks.append(tinker.EncodedTextChunk(tokens=list(turn.tokens[:-1])))
    return tinker.ModelInput(chunks=chunks)


def _turn(line: Mapping[str, Any], session: str, endpoint: Endpoint, pictures: dict[str, bytes]) -> RecordedTurn:
    chunks: list[tinker.ModelInputChunk] = []
    for chunk in line["prompt"]:
        if "tokens" in chunk:
            chunks.append(tinker.EncodedTextChunk(tokens=chunk["tokens"]))
            continue
        name = chunk["picture"]
        if name not in pictures:
            answer = send(endpoint, "GET", f"{_path(session)}/pictures/{name}", timeout=SECONDS)
            pictures[name] = answer.content
        chunks.append(
            tinker.types.ImageChunk(
                data=pictures[name], format=chunk["format"], expected_tokens=chunk["expected_tokens"]
            )
        )
    same = ("parent", "stop_reason", "model", "version", "sampling_params", "messages", "reply", "branch")
    return RecordedTurn(
        number=line["turn"],
        prompt=tinker.ModelInput(chunks=chunks),
        tokens=tuple(line["tokens"]),
        logprobs=tuple(line["logprobs"]),
        forced=tuple(line["forced"]),
        **{name: line[name] for name in (*same, "abandoned", "reward", "begun", "ended")},
    )


def _path(session: str) -> str:
    return f"recorded_sessions/{quote(session, safe='')}"
