"""Evaluation by sampling: the model answers held-out rows, and each answer gets a score.

The functions here take text; nothing of them knows how a model is trained.
"""

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tinker
from tinker_local.client.train.examples import Preference, Rows
from tinker_local.types import InvalidRequestError
from tinker_local.types.errors import brief

Score: TypeAlias = Callable[[str, str, Mapping[str, Any]], float]
"""Of a reply, given the row's answer and the row; the mean over rows is reported."""

CHOICES = 64
"""Different answers at most that `choice` tells apart."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How replies are scored. `name`: of the metric, after "held_out_". `score_of(answers)`: the score, given the
    answers of all rows that are evaluated."""

    name: str
    score_of: Callable[[Sequence[str]], Score]


@dataclass(frozen=True, slots=True)
class Answered:
    """A held-out row, the answer that it has, and what the model says. `score`: None without an `Evaluation`."""

    row: int
    wanted: str
    said: str
    score: float | None = None


def exact(_answers: Sequence[str] = ()) -> Score:
    """1 if the reply is the answer but for blanks around it."""
    return lambda said, wanted, _row: float(said.strip() == wanted.strip())


def choice(answers: Sequence[str]) -> Score:
    """1 if the first of the known answers that the reply names, as a whole word in upper or lower case, is the right
    one: "The answer is (B)." is B. InvalidRequestError if there are more than `CHOICES` different answers."""
    known = sorted({answer.strip().casefold() for answer in answers}, key=lambda each: (-len(each), each))
    if len(known) > CHOICES:
        raise InvalidRequestError(
            f"eval: choice is for at most {CHOICES} different answers, and the held-out rows have {len(known)}; use "
            "exact, or a function of yours"
        )
    named = re.compile("|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in known if each) or r"(?!)")

    def score(said: str, wanted: str, _row: Mapping[str, Any]) -> float:
        found = named.search(said.casefold())
        return float(found is not None and found[0] == wanted.strip().casefold())

    return score


def read_evaluation(text: str) -> Evaluation:
    """What `--eval` names: `exact`, `choice`, or `FILE.py:FUNCTION`, which gets a reply and the row and returns a
    number.

    The file is run: this is the one place where the user's own code runs. InvalidRequestError says what is wrong in it.
    """
    if text == "exact":
        return Evaluation("exact", exact)
    if text == "choice":
        return Evaluation("choice", choice)
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise InvalidRequestError(f"eval: must be exact, choice or FILE.py:FUNCTION, not {brief(text)}")
    judge = _function(Path(file), name)
    return Evaluation("judge", lambda _answers: lambda said, _wanted, row: _judged(judge, said, row, text))


def _function(file: Path, name: str) -> Callable[[str, Mapping[str, Any]], Any]:
    if not file.is_file():
        raise InvalidRequestError(f"eval: {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"judge_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidRequestError(f"eval: {file} ends with {type(error).__name__}: {error}") from error
    judge = getattr(module, name, None)
    if not callable(judge):
        raise InvalidRequestError(f"eval: {file} has no function {name}")
    try:
        inspect.signature(judge).bind("reply", {})
    except TypeError:
        raise InvalidRequestError(f"eval: {name} must take a reply and a row, as in {name}(reply, row)") from None
    return judge  # type: ignore[no-any-return]


def _judged(judge: Callable[[str, Mapping[str, Any]], Any], said: str, row: Mapping[str, Any], text: str) -> float:
    try:
        score = judge(said, row)
    except (Exception, SystemExit) as error:
        raise InvalidRequestError(
            f"eval: {text} ends with {type(error).__name__}: {error} on the reply {brief(said)}"
        ) from error
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequestError(f"eval: {text} returned {brief(score)}, which is not a number")
    return number


def ends_of(rows: Rows, some: Sequence[int]) -> list[int]:
    """The token ids that end the answers of some rows, ascending: of each example the last target that is trained."""
    ends: set[int] = set()
    for row in some:
        found = rows.examples(row)
        for example in [found.chosen] if isinstance(found, Preference) else found:
            inputs = example.datum.loss_fn_inputs
            last = np.flatnonzero(inputs["weights"].to_numpy())[-1]
            ends.add(int(inputs["target_tokens"].to_numpy()[last]))
    return sorted(ends)


@dataclass(frozen=True, slots=True)
class Answerer:
    """Asks a model held-out rows at temperature 0. `decode`: token ids to text, without special tokens. `stop`: token
    ids that end a reply beside the model's end of text."""

    rows: Rows
    decode: Callable[[Sequence[int]], str]
    stop: Sequence[int] = ()

    def place(self, row: int) -> str:
        """Where a row is, as in its problems; its number, from 0, if the rows do not say."""
        place = getattr(self.rows, "place", None)
        return f"row {row}" if place is None else str(place(row))

    def answers(self, sampler: tinker.SamplingClient, rows: Sequence[int], longest: int | None) -> list[Answered]:
        """One reply to each row, of at most `longest` tokens; None: a few more than the longest of the answers."""
        if not rows:
            return []
        if longest is None:
            asked_for = 0 if self.rows.kind == "preference" else -1  # the answer of `Rows.prompt`
            longest = 8 + max(self.rows.lengths(row)[asked_for][1] for row in rows)
        params = tinker.SamplingParams(max_tokens=longest, temperature=0.0, stop=list(self.stop) or None)
        asked = [self.rows.prompt(row) for row in rows]
        futures = [sampler.sample(prompt, 1, params) for prompt, _ in asked]
        replies = [self.decode(future.result().sequences[0].tokens) for future in futures]
        return [Answered(row, wanted, said) for row, (_, wanted), said in zip(rows, asked, replies, strict=True)]

    def scored(self, answered: Sequence[Answered], evaluation: Evaluation) -> list[Answered]:
        """The same with their scores."""
        score = evaluation.score_of([each.wanted for each in answered])
        return [
            Answered(each.row, each.wanted, each.said, score(each.said, each.wanted, self.rows.raw(each.row)))
            for each in answered
        ]
