"""Questions about a prompt and the arrays with the answers, which samplers fill in parts.

Row r of a prompt of P positions, 0 <= r < P - 1, is about position r + 1: the model's distribution after the positions
0 to r. Logprobs are of temperature 1. Positions of an image are like any other: the row is the language model's
distribution there, and the scored token is the image pad's id.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InvalidRequestError, PromptAltTokens, TensorData, TopkLogprobs
from tinker_local.types.base import freeze

MAX_CELLS = 2**25
"""Most cells of one answer (positions times k, or scored ids). 8 bytes each, so 256 MiB."""

EMPTY_LOGPROB = -99999.0
"""With token 0, the value of a top-k cell that was not computed."""


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The cells of `target_prompt_logprobs` that name an id, in the order of their rows.

    int64 [M] each: `rows`, `ids`, and `cells`, their indices in the answer's flat data. The answer has the shape and
    layout of `request`.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    cells: npt.NDArray[np.int64]
    request: TensorData

    def within(self, start: int, stop: int) -> slice:
        """Which of the cells are in rows [start, stop)."""
        first, end = np.searchsorted(self.rows, (start, stop))
        return slice(int(first), int(end))

    def answer(self, logprobs: npt.NDArray[np.float32]) -> TensorData:
        """`logprobs` [M] in their cells, 0.0 elsewhere."""
        data = np.zeros(self.request.data.size, np.float32)
        data[self.cells] = logprobs
        return self.request.model_copy(update={"data": data, "dtype": "float32"})


@dataclass(frozen=True, slots=True)
class Draws:
    """`k` tokens for each row, independent and with replacement, from softmax(logits / temperature).

    `key`: 63 bits. The random numbers of a row only depend on it, so a prompt that is computed in parts, or twice,
    draws the same tokens.
    """

    k: int
    temperature: float
    key: int

    def uniforms(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """[stop - start, k] in [0, 1), for rows [start, stop)."""
        begin = start * self.k
        bits = np.random.Philox(key=self.key)
        bits.advance(begin // 4)  # each of its steps makes four numbers
        numbers = np.random.Generator(bits).random(begin % 4 + (stop - start) * self.k)
        return numbers[begin % 4 :].reshape(stop - start, self.k)


@dataclass(frozen=True, slots=True, eq=False)
class PromptQuestions:
    """`next_ids` int32 [P - 1]: the token that follows each row. `chosen`: whether to score them. `chosen_from`: the
    first row to score, and to give the top-k of."""

    next_ids: npt.NDArray[np.int32]
    chosen: bool
    chosen_from: int
    topk: int
    targets: Targets | None
    draws: Draws | None

    @property
    def num_rows(self) -> int:
        """P - 1."""
        return int(self.next_ids.size)

    @property
    def first_row(self) -> int:
        """The first row that has to be computed."""
        if self.draws is not None:
            return 0
        first = self.num_rows if self.targets is None else int(self.targets.rows[0])
        return min(first, self.chosen_from) if self.chosen or self.topk else first

    def unanswered(self) -> "PromptScores":
        """Arrays for the answers."""
        rows, drawn = self.num_rows, 0 if self.draws is None else self.draws.k
        return PromptScores(
            chosen_of_positions=np.full(1 + rows, np.nan, np.float32),
            topk_ids_of_positions=np.zeros((1 + rows, self.topk), np.int32),
            topk_logprobs_of_positions=np.full((1 + rows, self.topk), EMPTY_LOGPROB, np.float32),
            targets=np.zeros(0 if self.targets is None else self.targets.ids.size, np.float32),
            drawn_ids=np.zeros((rows, drawn), np.int64),
            drawn_logprobs=np.zeros((rows, drawn), np.float32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """`chosen` [P - 1], `topk_…` and `drawn_…` [P - 1, k], `targets` [M]; logprobs float32. The first two are views of
    arrays with position 0 before the rows, [P] and [P, k]: the answer, which is not copied."""

    chosen_of_positions: npt.NDArray[np.float32]
    topk_ids_of_positions: npt.NDArray[np.int32]
    topk_logprobs_of_positions: npt.NDArray[np.float32]
    targets: npt.NDArray[np.float32]
    drawn_ids: npt.NDArray[np.int64]
    drawn_logprobs: npt.NDArray[np.float32]

    @property
    def chosen(self) -> npt.NDArray[np.float32]:
        return self.chosen_of_positions[1:]

    @property
    def topk_ids(self) -> npt.NDArray[np.int32]:
        return self.topk_ids_of_positions[1:]

    @property
    def topk_logprobs(self) -> npt.NDArray[np.float32]:
        return self.topk_logprobs_of_positions[1:]

    def fields(self, questions: PromptQuestions) -> dict[str, Any]:
        """Fields of `SampleOutput`; position 0 has no logprob."""
        fields: dict[str, Any] = {}
        if questions.chosen:
            fields["prompt_logprobs"] = freeze(self.chosen_of_positions)
        if questions.topk:
            fields["topk_prompt_logprobs"] = TopkLogprobs(
                token_ids=freeze(self.topk_ids_of_positions), logprobs=freeze(self.topk_logprobs_of_positions)
            )
        if questions.targets is not None:
            fields["target_prompt_logprobs"] = questions.targets.answer(self.targets)
        if questions.draws is not None:
            fields["prompt_alt_tokens"] = PromptAltTokens(
                tokens=TensorData.from_numpy(self.drawn_ids), logprobs=TensorData.from_numpy(self.drawn_logprobs)
            )
        return fields


def prompt_questions(work: SampleWork, vocab_size: int) -> PromptQuestions | None:
    """The questions of `work`, None if it has none; InvalidRequestError for what cannot be answered."""
    length = work.prompt.length
    chosen_from = _first_of_last(work.prompt_logprobs_last_n, length, work.prompt_logprobs)
    _check_width("topk_prompt_logprobs", work.topk_prompt_logprobs, length, vocab_size)
    _check_cells("prompt_alt_tokens_k", length, work.prompt_alt_tokens_k)
    targets = None
    if work.target_prompt_logprobs is not None:
        targets = _targets(work.target_prompt_logprobs, length, vocab_size)
    draws = None
    if work.prompt_alt_tokens_k:
        draws = Draws(work.prompt_alt_tokens_k, work.params.temperature, _key(work))
    if not (work.prompt_logprobs or work.topk_prompt_logprobs or targets or draws):
        return None
    return PromptQuestions(
        work.prompt.token_ids[1:], work.prompt_logprobs, chosen_from, work.topk_prompt_logprobs, targets, draws
    )


def check_sample_topk(k: int, num_samples: int, budget: int, vocab_size: int) -> None:
    """InvalidRequestError if `topk_sample_logprobs` is too many for `num_samples` of up to `budget` tokens."""
    if k > vocab_size:
        raise InvalidRequestError(f"topk_sample_logprobs: {k} is more than the vocabulary's {vocab_size} tokens")
    if num_samples * budget * k > MAX_CELLS:
        raise InvalidRequestError(
            f"topk_sample_logprobs: num_samples {num_samples} times up to {budget} tokens times {k} "
            f"are {num_samples * budget * k} logprobs, this server's limit is {MAX_CELLS}"
        )


def _check_width(name: str, k: int, length: int, vocab_size: int) -> None:
    if k > vocab_size:
        raise InvalidRequestError(f"{name}: {k} is more than the vocabulary's {vocab_size} tokens")
    _check_cells(name, length, k)


def _check_cells(name: str, length: int, k: int) -> None:
    if length * k > MAX_CELLS:
        raise InvalidRequestError(
            f"{name}: {length} prompt tokens times {k} are {length * k}, this server's limit is {MAX_CELLS}"
        )


def _first_of_last(last_n: int | None, length: int, prompt_logprobs: bool) -> int:
    """The row of the first of the last `last_n` positions."""
    if last_n is None:
        return 0
    if not prompt_logprobs:
        raise InvalidRequestError(f"prompt_logprobs_last_n: {last_n} needs prompt_logprobs, which is false")
    if not 1 <= last_n <= length - 1:
        raise InvalidRequestError(
            f"prompt_logprobs_last_n: {last_n} is not between 1 and {length - 1} (the prompt has {length} tokens, "
            "the first of which has no logprob)"
        )
    return length - 1 - last_n


def _targets(request: TensorData, length: int, vocab_size: int) -> Targets:
    name, shape = "target_prompt_logprobs", list(request.dense_shape)
    if request.dtype != "int64":
        raise InvalidRequestError(f"{name}: token ids are int64, not {request.dtype}")
    if len(shape) != 2 or shape[0] != length - 1:
        raise InvalidRequestError(
            f"{name}: shape {shape}, expected [{length - 1}, K]: one row for each of the {length} prompt tokens "
            "but the first"
        )
    cells = np.flatnonzero(request.data != -1)
    ids = request.data[cells].astype(np.int64)
    if not ids.size:
        raise InvalidRequestError(f"{name}: names no token id, every one of its {request.data.size} cells is -1")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise InvalidRequestError(
            f"{name}: token id {ids[wrong[0]]} (data[{cells[wrong[0]]}]) is outside the vocabulary of {vocab_size} "
            "tokens; -1 asks for nothing"
        )
    if ids.size > MAX_CELLS:
        raise InvalidRequestError(f"{name}: {ids.size} ids to score, this server's limit is {MAX_CELLS}")
    if request.sparse_crow_indices is None:
        rows = cells // shape[1]
    else:
        rows = np.searchsorted(request.sparse_crow_indices, cells, side="right") - 1
    return Targets(rows, ids, cells, request)


def _key(work: SampleWork) -> int:
    """63 bits, independent of samples with the same seed."""
    return secrets.randbits(63) if work.params.seed is None else work.seeded("alternatives")[0]
