"""Logprobs of sampled tokens, from vLLM's sampler to its outputs, without what nobody asked for.

vLLM writes the logprobs of the whole vocabulary, counts every chosen token's rank in it, and carries ids, logprobs and
ranks of each token through objects of its own. Here one number a token travels: a vector a step to the host, floats
through vLLM's scheduler, which asks for each request's (`slice_request`), and a list in the request's output. Beside
the float travel two vectors for a request that asked for the likeliest tokens.

Shape suffixes: b requests of a step, a those of them that ask for the likeliest, k how many, v vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.sampling.prompt_scores import PromptScores

StepLogprob = float | tuple[float, npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Of one sampled token, with ids [k] and logprobs [k] of the likeliest in falling order if they were asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Likeliest:
    """`widths`: how many each request asks for, by its row in the step; row i of `ids_ak` and `logprobs_ak` (int64,
    float32) is that of the i-th of them, k the most that any asks for."""

    widths: Mapping[int, int]
    ids_ak: torch.Tensor
    logprobs_ak: torch.Tensor

    @classmethod
    def of(cls, logits_bv: torch.Tensor, widths: Mapping[int, int]) -> "Likeliest":
        """From logits that were divided by each request's temperature and are not cut."""
        log_p_av = logits_bv[list(widths)].log_softmax(dim=-1, dtype=torch.float32)
        values, ids = log_p_av.topk(max(widths.values()))
        return cls(widths, ids, values)

    def to_cpu_nonblocking(self) -> "Likeliest":
        """On the host as soon as the stream is done."""
        ids, logprobs = (tensor.to("cpu", non_blocking=True) for tensor in (self.ids_ak, self.logprobs_ak))
        return Likeliest(self.widths, ids, logprobs)

    def by_row(self) -> dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        """Ids and logprobs [k] of each request that asks, by its row."""
        ids, logprobs = self.ids_ak.cpu().numpy().astype(np.int32), self.logprobs_ak.cpu().numpy()
        return {row: (ids[at, :k].copy(), logprobs[at, :k].copy()) for at, (row, k) in enumerate(self.widths.items())}


class Scores(Protocol):
    """Stands for the logprobs of a vocabulary in vLLM's sampler; `likeliest` None if nobody asks for them."""

    @property
    def likeliest(self) -> Likeliest | None: ...

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logprobs, float32 [B], of one token (int64 [B]) for each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """float32 [B, V] that sum to 1 in each row; those of chosen tokens are greater than 0."""

    p_bv: torch.Tensor
    likeliest: Likeliest | None = None

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`."""
        return self.p_bv.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).log()


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """[B, V] of any floating dtype."""

    logits_bv: torch.Tensor
    likeliest: Likeliest | None = None

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`."""
        log_p_bv = self.logits_bv.log_softmax(dim=-1, dtype=torch.float32)
        return log_p_bv.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class ChosenLogprobs:
    """Of the chosen tokens, float32 [B]; for vLLM's `LogprobsTensors`, `LogprobsLists` in its steps."""

    logprobs: torch.Tensor
    likeliest: Likeliest | None = None

    def to_cpu_nonblocking(self) -> "ChosenLogprobs":
        """What vLLM calls on its copying stream; the result is read when that stream is done."""
        if self.logprobs.device.type == "cpu":
            return self
        likeliest = None if self.likeliest is None else self.likeliest.to_cpu_nonblocking()
        return ChosenLogprobs(self.logprobs.to("cpu", non_blocking=True), likeliest)

    def tolists(self) -> "StepLogprobs":
        """As Python's floats, and arrays for those who ask."""
        numbers: list[float] = self.logprobs.tolist()
        if self.likeliest is None:
            return StepLogprobs(numbers)
        values: list[StepLogprob] = [*numbers]
        for row, (ids, logprobs) in self.likeliest.by_row().items():
            values[row] = (numbers[row], ids, logprobs)
        return StepLogprobs(values)


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """One for each request of a step."""

    values: Sequence[StepLogprob]

    def slice_request(self, index: int, count: int) -> StepLogprob | None:
        """That of one request: it has one token a step (nothing here drafts tokens), or none while its prompt is not
        all in."""
        assert count <= 1
        return self.values[index] if count else None


def gather_logprobs(scores: Scores, num_logprobs: int, token_ids: torch.Tensor) -> ChosenLogprobs:
    """In place of `Sampler.gather_logprobs`: of the chosen tokens, and of the likeliest for who asked; no ranks."""
    return ChosenLogprobs(scores.of(token_ids), scores.likeliest)


@dataclass(slots=True, eq=False)
class RequestLogprobs:
    """In place of vLLM's `LogprobsProcessor`: what a request's final output holds.

    `logprobs`: of the sampled tokens. `prompt_logprobs`: what was asked about the prompt.
    """

    logprobs: list[StepLogprob] = field(default_factory=list)
    prompt_logprobs: PromptScores | None = None
    prompt_token_id_logprobs: None = None
    cumulative_logprob: None = None

    def update_from_output(self, output: Any) -> None:
        """Take what one step gave (`EngineCoreOutput`)."""
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors


def collect_logprobs(engine: Any) -> None:
    """Let the outputs of an `LLMEngine` hold what `RequestLogprobs` says."""
    processor = engine.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        processor.request_states[request.request_id].logprobs_processor = RequestLogprobs()

    processor.add_request = add_request
