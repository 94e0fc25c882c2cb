"""Logprobs of chosen tokens, from vLLM's sampler to its outputs, without what nobody asked for.

vLLM writes the logprobs of the whole vocabulary, counts every chosen token's rank in it, and carries ids, logprobs and
ranks of each token through objects of its own. Here one number a token travels: a vector a step to the host, floats
through vLLM's scheduler, which asks for each request's (`slice_request`), and a list in the request's output.

Shape suffixes: b requests of a step, n positions of a prompt, v vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

CHUNK_NUMBERS = 2**26
"""How many float32 numbers of [N, V] exist at a time: 256 MiB."""


class Scores(Protocol):
    """Stands for the logprobs of a vocabulary in vLLM's sampler."""

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logprobs, float32 [N], of one token (int64 [N]) for each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """float32 [B, V] that sum to 1 in each row; those of chosen tokens are greater than 0."""

    p_bv: torch.Tensor

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`."""
        return self.p_bv.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).log()


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """[N, V] of any floating dtype."""

    logits_nv: torch.Tensor

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scores`. A long prompt is taken in parts: in float32 its logits may be as large as the KV cache."""
        rows = max(1, CHUNK_NUMBERS // self.logits_nv.shape[-1])
        parts = zip(self.logits_nv.split(rows), token_ids.split(rows), strict=True)
        return torch.cat(
            [
                logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
                for logits, ids in parts
            ]
        )


class ChosenLogprobs:
    """Of the chosen tokens, float32 [N]; for vLLM's `LogprobsTensors`, `LogprobsLists` in its steps.

    As vLLM unpacks those of prompts, it is also (token ids [N, 1], logprobs [N, 1], ranks [N]); ranks are 0.
    """

    def __init__(self, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs

    def __iter__(self) -> Any:
        yield self._token_ids.unsqueeze(-1)
        yield self._logprobs.unsqueeze(-1)
        yield torch.zeros_like(self._token_ids)
        yield None

    def to_cpu_nonblocking(self) -> "ChosenLogprobs":
        """What vLLM calls on its copying stream; the result is read when that stream is done."""
        if self._logprobs.device.type == "cpu":
            return self
        return ChosenLogprobs(self._token_ids, self._logprobs.to("cpu", non_blocking=True))

    def tolists(self) -> "StepLogprobs":
        """As Python's floats."""
        return StepLogprobs(self._logprobs.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """One float for each request of a step."""

    values: list[float]

    def slice_request(self, index: int, count: int) -> float | None:
        """That of one request: it has one token a step (nothing here drafts tokens), or none while its prompt is not
        all in."""
        assert count <= 1
        return self.values[index] if count else None


def gather_logprobs(scores: Scores, num_logprobs: int, token_ids: torch.Tensor) -> ChosenLogprobs:
    """In place of `Sampler.gather_logprobs`: of the chosen tokens alone, without the most likely ones and ranks."""
    assert num_logprobs == 0
    return ChosenLogprobs(token_ids, scores.of(token_ids))


@dataclass(slots=True, eq=False)
class RequestLogprobs:
    """In place of vLLM's `LogprobsProcessor`: what a request's final output holds.

    `logprobs`: of the sampled tokens. `prompt_logprobs`: float32 [N - 1], if they were asked for.
    """

    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    prompt_token_id_logprobs: None = None
    cumulative_logprob: None = None

    def update_from_output(self, output: Any) -> None:
        """Take what one step gave (`EngineCoreOutput`)."""
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy()


def collect_logprobs(engine: Any) -> None:
    """Let the outputs of an `LLMEngine` hold `RequestLogprobs`'s lists and arrays."""
    processor = engine.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        processor.request_states[request.request_id].logprobs_processor = RequestLogprobs()

    processor.add_request = add_request
