"""What operations return."""

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, PlainSerializer
from tinker_local.types.base import Frozen, Tokens, freeze
from tinker_local.types.tensors import TensorData

StopReason = Literal["stop", "length"]


def _float32(value: object) -> npt.NDArray[np.float32] | None:
    return None if value is None else freeze(np.ascontiguousarray(value, dtype=np.float32))


def _int32(value: object) -> npt.NDArray[np.int32] | None:
    return None if value is None else freeze(np.ascontiguousarray(value, dtype=np.int32))


_List = PlainSerializer(lambda array: None if array is None else array.tolist())
Floats = Annotated[npt.NDArray[np.float32], BeforeValidator(_float32), _List]
OptionalFloats = Annotated[npt.NDArray[np.float32] | None, BeforeValidator(_float32), _List]
Ints = Annotated[npt.NDArray[np.int32], BeforeValidator(_int32), _List]


class ForwardBackwardOutput(Frozen):
    """`loss_fn_outputs`: one mapping per datum, in request order; `logprobs` has the shape of `target_tokens`.

    `metrics` keys are `name:reduction`; `loss:sum` is always there.
    """

    loss_fn_output_type: str = "TorchLossReturn"
    loss_fn_outputs: tuple[dict[str, TensorData], ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)


class OptimStepOutput(Frozen):
    """Metrics of an optimizer step, such as the gradient norm before clipping."""

    metrics: dict[str, float] = Field(default_factory=dict)


class TopkLogprobs(Frozen):
    """`token_ids` int32 [L, k] and `logprobs` float32 [L, k]; an empty cell is token 0 with logprob -99999."""

    token_ids: Ints
    logprobs: Floats


class SampledSequence(Frozen):
    """One sampled sequence: `tokens` int32 [S]; `logprobs` float32 [S], log softmax(logits / T) over the vocabulary."""

    stop_reason: StopReason
    tokens: Tokens
    logprobs: OptionalFloats = None
    topk_logprobs: TopkLogprobs | None = None
    sequence_id: str | None = None


class SampleOutput(Frozen):
    """`prompt_logprobs` float32 [P], NaN at position 0; one sequence per requested sample."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: OptionalFloats = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
