"""What operations return."""

from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, model_validator
from tinker_local.types.base import Frozen, TupleOf
from tinker_local.types.tensors import AsList, Logprobs, TensorData, Tokens, float32_array, integer_array

StopReason = Literal["stop", "length"]


class ForwardBackwardOutput(Frozen):
    """`loss_fn_outputs`: one mapping per datum, in request order; `logprobs` has the shape of `target_tokens`.

    `metrics` keys are `name:reduction`; `loss:sum` is always present. The SDK combines the metrics of several requests
    by their reduction, and raises for a key without exactly one colon.
    """

    loss_fn_output_type: str = "TorchLossReturn"
    loss_fn_outputs: TupleOf[dict[str, TensorData]] = ()
    metrics: dict[str, float] = Field(default_factory=dict)


class OptimStepOutput(Frozen):
    """Metrics of an optimizer step, for example the gradient norm before clipping."""

    metrics: dict[str, float] = Field(default_factory=dict)


class TopkLogprobs(Frozen):
    """`token_ids` int32 [L, k] and `logprobs` float32 [L, k]; an empty cell is token 0 with logprob -99999."""

    token_ids: Annotated[npt.NDArray[np.int32], BeforeValidator(lambda v: integer_array(v, np.int32, ndim=2)), AsList]
    logprobs: Annotated[npt.NDArray[np.float32], BeforeValidator(lambda v: float32_array(v, ndim=2)), AsList]

    @model_validator(mode="after")
    def _same_shape(self) -> Self:
        if self.token_ids.shape != self.logprobs.shape:
            raise ValueError(f"token_ids {list(self.token_ids.shape)} and logprobs {list(self.logprobs.shape)} differ")
        return self


class PromptAltTokens(Frozen):
    """Tokens drawn at every prompt position after the first: `tokens` int64 and `logprobs` float32, both [P-1, k]."""

    tokens: TensorData
    logprobs: TensorData


class SampledSequence(Frozen):
    """One sampled sequence: `tokens` int32 [S]; `logprobs` float32 [S], log softmax(logits / T) over the vocabulary.

    `sequence_id` comes from the promise (`sample_sequence_ids`); the result's wire format does not carry it.
    """

    stop_reason: StopReason
    tokens: Tokens
    logprobs: Logprobs | None = None
    topk_logprobs: TopkLogprobs | None = None
    sequence_id: str | None = None

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if self.logprobs is not None and self.logprobs.size != self.tokens.size:
            raise ValueError(f"logprobs: {self.logprobs.size} values for {self.tokens.size} tokens")
        return self


class SampleOutput(Frozen):
    """`prompt_logprobs` float32 [P], NaN at position 0; one sequence per requested sample."""

    sequences: TupleOf[SampledSequence]
    prompt_logprobs: Logprobs | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0
