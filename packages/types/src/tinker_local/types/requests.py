"""The operations' requests, as `InProcessBackend` takes them and as JSON bodies carry them.

Fields that are not listed here are refused by name; nothing is accepted and then ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import Field
from tinker_local.types.base import Frozen, TupleOf
from tinker_local.types.datum import Datum, ModelInput
from tinker_local.types.params import AdamParams, LoraConfig, SamplingParams
from tinker_local.types.tensors import TensorData

Metadata = dict[str, Any]

TrainingSeqId = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Position of an operation in its model's order; int32 on the wire."""

SlotId = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Number that a client gives to a model or sampling session in its session, or to a sample request."""


class OptimizerConfig(Frozen):
    """The optimizer chosen when a model is created."""

    type: str = "adamw"
    version: int | None = None


class CreateSessionRequest(Frozen):
    """Open a session, which owns the models and sampling sessions created in it."""

    tags: TupleOf[str] = ()
    user_metadata: Metadata = Field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateModelRequest(Frozen):
    """A new LoRA adapter on `base_model`; its id is `{session_id}:train:{model_seq_id}`."""

    session_id: str
    model_seq_id: SlotId
    base_model: Annotated[str, Field(min_length=1)]
    lora_config: LoraConfig = LoraConfig()
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"


class ForwardBackwardRequest(Frozen):
    """Data, loss and its configuration; `forward_only` computes the same without a gradient."""

    model_id: str
    seq_id: TrainingSeqId
    data: TupleOf[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = Field(default_factory=dict)
    forward_only: bool = False


class OptimStepRequest(Frozen):
    """One optimizer step: `adam_params`, or `optimizer_params` with the `type` of another optimizer."""

    model_id: str
    seq_id: TrainingSeqId
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeightsRequest(Frozen):
    """A durable checkpoint named `path`, with optimizer state; `ttl_seconds` None: kept for ever."""

    model_id: str
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
    session_id: str | None = None
    model_seq_id: SlotId | None = None
    model_id: str | None = None
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
    session_id: str | None = None
    model_seq_id: SlotId | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class SaveWeightsForSamplerRequest(Frozen):
    """Named (`path`) or nameless (`sampling_session_seq_id`)."""

    model_id: str
    seq_id: TrainingSeqId
    path: str | None = None
    sampling_session_seq_id: SlotId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(Frozen):
    """A PEFT folder named `path`, to be downloaded. `age_encryption_recipients`: keys to encrypt its files to."""

    model_id: str
    seq_id: TrainingSeqId
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: TupleOf[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class CreateSamplingSessionRequest(Frozen):
    """A sampling client of `base_model`, or of the saved weights at `model_path` (`tinker://...`)."""

    session_id: str
    sampling_session_seq_id: SlotId
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SampleRequest(Frozen):
    """`num_samples` sequences after `prompt`, from the model of the sampling session.

    `prompt_logprobs` asks for the logprob of each prompt token; `target_prompt_logprobs` (int64 [P-1, K]) names ids to
    score at prompt positions 1 to P-1, -1 for none.
    """

    sampling_session_id: str
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
