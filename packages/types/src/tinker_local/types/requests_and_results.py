"""What each operation takes and returns, as `InProcessBackend` has it and as JSON bodies carry it.

Fields that are not listed here are refused by name; nothing is accepted and then ignored.
"""

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from tinker_local.types.base import AsList, Frozen, Logprobs, Tokens, TupleOf, float32_array, integer_array
from tinker_local.types.datum import Datum, ModelInput, TensorData
from tinker_local.types.errors import InvalidRequestError

Metadata = dict[str, Any]


LONGEST_ID = 256
"""Characters of an id."""


Id = Annotated[str, Field(max_length=LONGEST_ID)]
"""Of a session, a model or a sampler. Those of this server have about 60 characters."""


RequestId = Annotated[str, Field(max_length=2 * LONGEST_ID)]
"""An `Id` and what belongs to the request."""


TrainingSeqId = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Position of an operation in its model's order; int32 on the wire."""


SlotId = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Number that a client gives to a model or sampling session in its session, or to a sample request."""


class CreateSessionRequest(Frozen):
    """Open a session, which owns the models and sampling sessions created in it."""

    tags: TupleOf[str] = ()
    user_metadata: Metadata = Field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


# Training -------------------------------------------------------------------------------------------------------------


class LoraConfig(Frozen):
    """A LoRA adapter: its rank, the matrices it trains, and the seed of its initialisation (None: random).

    `train_vision`: also the vision tower, which the hosted service never trains.
    """

    rank: Annotated[int, Field(ge=1)] = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    train_vision: bool = False

    @model_serializer(mode="wrap")
    def _plain_as_in_the_sdk(self, fields_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All fields; `train_vision` only where it is set."""
        fields: dict[str, Any] = fields_of(self)
        return fields if self.train_vision else {name: fields[name] for name in fields if name != "train_vision"}


TRAIN_VISION = "tinker_local.train_vision"
"""The entry of `user_metadata` with which clients of the SDK, whose `LoraConfig` has no such field, set
`LoraConfig.train_vision`: "true" or "false"."""


def asks_for_vision(user_metadata: Metadata | None) -> bool:
    """Whether `TRAIN_VISION` is "true"; InvalidRequestError for another value than "false"."""
    asked = (user_metadata or {}).get(TRAIN_VISION, "false")
    if asked not in ("true", "false"):
        raise InvalidRequestError(f"user_metadata[{TRAIN_VISION!r}]: must be 'true' or 'false', not {asked!r}")
    return bool(asked == "true")


class OptimizerConfig(Frozen):
    """The optimizer chosen when a model is created."""

    type: str = "adamw"
    version: int | None = None


class CreateModelRequest(Frozen):
    """A new LoRA adapter on `base_model`; its id is `{session_id}:train:{model_seq_id}`. `lora`: its configuration,
    `lora_config` with the vision tower if `user_metadata` asks for that."""

    session_id: Id
    model_seq_id: SlotId
    base_model: Annotated[str, Field(min_length=1)]
    lora_config: LoraConfig = LoraConfig()
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"

    @property
    def lora(self) -> LoraConfig:
        config = self.lora_config
        return config.model_copy(update={"train_vision": True}) if asks_for_vision(self.user_metadata) else config


class ForwardBackwardRequest(Frozen):
    """Data, loss and its configuration; `forward_only` computes the same without a gradient."""

    model_id: Id
    seq_id: TrainingSeqId
    data: TupleOf[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = Field(default_factory=dict)
    forward_only: bool = False


class ForwardBackwardOutput(Frozen):
    """`loss_fn_outputs`: one mapping per datum, in request order; `logprobs` has the shape of `target_tokens`.

    `metrics` keys are `name:reduction`; `loss:sum` is always present. The SDK combines the metrics of several requests
    by their reduction, and raises for a key without exactly one colon.
    """

    loss_fn_output_type: str = "TorchLossReturn"
    loss_fn_outputs: TupleOf[dict[str, TensorData]] = ()
    metrics: dict[str, float] = Field(default_factory=dict)


class AdamParams(Frozen):
    """Settings of one AdamW step, with decoupled weight decay; `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @field_validator("*", mode="after")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError(f"must be a finite number, not {value}")
        return value

    @field_validator("beta1", "beta2", mode="after")
    @classmethod
    def _beta(cls, value: float) -> float:
        if not 0 <= value < 1:
            raise ValueError(f"must be in [0, 1), not {value}")
        return value

    @field_validator("eps", "weight_decay", "grad_clip_norm", "learning_rate", mode="after")
    @classmethod
    def _not_negative(cls, value: float) -> float:
        if value < 0:
            raise ValueError(f"must not be negative, not {value}")
        return value


class OptimStepRequest(Frozen):
    """One optimizer step: `adam_params`, or `optimizer_params` with the `type` of another optimizer."""

    model_id: Id
    seq_id: TrainingSeqId
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class OptimStepOutput(Frozen):
    """Metrics of an optimizer step, for example the gradient norm before clipping."""

    metrics: dict[str, float] = Field(default_factory=dict)


class SaveWeightsRequest(Frozen):
    """A durable checkpoint named `path`, with optimizer state; `ttl_seconds` None: kept for ever."""

    model_id: Id
    seq_id: TrainingSeqId
    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class LoadWeightsRequest(Frozen):
    """Either `session_id` and `model_seq_id` (creates the model) or `model_id` and `seq_id` (loads into it)."""

    path: str
    optimizer: bool
    session_id: Id | None = None
    model_seq_id: SlotId | None = None
    model_id: Id | None = None
    seq_id: TrainingSeqId | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CopyWeightsRequest(Frozen):
    """A checkpoint as the only one of a new run: in a new session (`destination_project_id`), or in a live one
    (`session_id`, `model_seq_id`)."""

    source_path: str
    destination_project_id: str | None = None
    session_id: Id | None = None
    model_seq_id: SlotId | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class SaveWeightsForSamplerRequest(Frozen):
    """Named (`path`) or nameless (`sampling_session_seq_id`)."""

    model_id: Id
    seq_id: TrainingSeqId
    path: str | None = None
    sampling_session_seq_id: SlotId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(Frozen):
    """A PEFT folder named `path`, to be downloaded. `age_encryption_recipients`: keys to encrypt its files to."""

    model_id: Id
    seq_id: TrainingSeqId
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: TupleOf[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


# Sampling -------------------------------------------------------------------------------------------------------------


class CreateSamplingSessionRequest(Frozen):
    """A sampling client of `base_model`, or of the saved weights at `model_path` (`tinker://...`)."""

    session_id: Id
    sampling_session_seq_id: SlotId
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


MAX_STOPS, MAX_STOP_CHARACTERS = 64, 4096
"""Texts in `stop`, and characters of all. Every text is looked for after every token of every sequence."""
MAX_STOP_TOKENS = 4096
"""Token ids in `stop`. 2,200 of Qwen3's tokens have a newline. vLLM looks through all of them after every token of the
sequence: this many take 30 microseconds."""


class SamplingParams(Frozen):
    """How to sample.

    `max_tokens` None: up to the context length. `stop`: a text, texts or token ids; None stops at EOS alone, an empty
    list never stops early. `top_k` -1: no limit. `temperature` 0: greedy. `seed`: any integer; None: random.
    """

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, stop: Any) -> Any:
        stop = tuple(stop) if isinstance(stop, list) else stop
        items = (stop,) if isinstance(stop, str) else stop if isinstance(stop, tuple) else ()
        most = MAX_STOPS if any(isinstance(item, str) for item in items) else MAX_STOP_TOKENS
        if len(items) > most:
            raise ValueError(f"{len(items)} stops are more than {most}")
        if (characters := sum(len(item) for item in items if isinstance(item, str))) > MAX_STOP_CHARACTERS:
            raise ValueError(f"{characters} characters are more than {MAX_STOP_CHARACTERS}")
        if stop is None or (isinstance(stop, str) and stop):
            return stop
        if isinstance(stop, tuple) and (
            all(isinstance(item, str) and item for item in stop) or all(type(item) is int for item in stop)
        ):
            return stop
        raise ValueError(f"must be a text, a list of texts or a list of token ids, none of them empty, not {stop!r}")

    @field_validator("temperature", mode="after")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"must be a finite number >= 0, not {value}")
        return value

    @field_validator("top_k", mode="after")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError(f"must be -1 (no limit) or at least 1, not {value}")
        return value

    @field_validator("top_p", mode="after")
    @classmethod
    def _top_p(cls, value: float) -> float:
        if not 0 < value <= 1:
            raise ValueError(f"must be in (0, 1], not {value}")
        return value


class SampleRequest(Frozen):
    """`num_samples` sequences after `prompt`, from the model of the sampling session.

    `prompt_logprobs` asks for the logprob of each prompt token; `target_prompt_logprobs` (int64 [P-1, K]) names ids to
    score at prompt positions 1 to P-1, -1 for none.
    """

    sampling_session_id: Id
    seq_id: SlotId
    prompt: ModelInput
    num_samples: Annotated[int, Field(ge=1)] = 1
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool = False
    type: Literal["sample"] = "sample"


StopReason = Literal["stop", "length"]


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


class DrawnUnder(Frozen):
    """`tokens` in a row of a sequence that were drawn under the weights of the run's in-flight save number `version`,
    from 1. `on_older_keys`: keys and values of the positions before them may be of an earlier version."""

    version: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=0)]
    on_older_keys: bool = False


class SampledSequence(Frozen):
    """One sampled sequence: `tokens` int32 [S]; `logprobs` float32 [S], log softmax(logits / T) over the vocabulary.

    `sequence_id` comes from the promise (`sample_sequence_ids`); the result's wire format does not carry it, nor
    `drawn_under`: of an in-flight client, which weights drew the tokens, in order; their `tokens` add up to S. `routes`
    are for the server alone: which experts the positions took.
    """

    stop_reason: StopReason
    tokens: Tokens
    logprobs: Logprobs | None = None
    topk_logprobs: TopkLogprobs | None = None
    sequence_id: str | None = None
    routes: Any = Field(default=None, exclude=True, repr=False)
    drawn_under: TupleOf[DrawnUnder] | None = None

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if self.logprobs is not None and self.logprobs.size != self.tokens.size:
            raise ValueError(f"logprobs: {self.logprobs.size} values for {self.tokens.size} tokens")
        return self


class SampleOutput(Frozen):
    """`prompt_logprobs` float32 [P], NaN at position 0; one sequence per requested sample. `times` are for the server
    alone: where the time went within the sampler."""

    sequences: TupleOf[SampledSequence]
    prompt_logprobs: Logprobs | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0
    times: Any = Field(default=None, exclude=True, repr=False)
