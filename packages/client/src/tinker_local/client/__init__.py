"""The Tinker SDK bound to a local server, and functions that make `ModelInput`s from text and images.

`import tinker_local.client as tinker` runs a program written for the SDK. The module has every public name of `tinker`,
and they are the SDK's own objects. Only `ServiceClient`, `RestClient` and `AdminClient` are subclasses, which connect
to a local server by default. `model_input`, `text_chunk`, `image_chunk`, `as_rgb`, `PromptLayout`,
`log_metrics`, `use_served_names`, `weights_of_tokens` and `WeightsSpan` are additions.
"""

import tinker as _sdk
from tinker import AdamOptimizerConfig as AdamOptimizerConfig
from tinker import AdamParams as AdamParams
from tinker import APIConnectionError as APIConnectionError
from tinker import APIError as APIError
from tinker import APIFuture as APIFuture
from tinker import APIResponse as APIResponse
from tinker import APIResponseValidationError as APIResponseValidationError
from tinker import APIStatusError as APIStatusError
from tinker import APITimeoutError as APITimeoutError
from tinker import AsyncAPIResponse as AsyncAPIResponse
from tinker import AuthenticationError as AuthenticationError
from tinker import BackcompatSamplingClientFuture as BackcompatSamplingClientFuture
from tinker import BackcompatTrainingClientFuture as BackcompatTrainingClientFuture
from tinker import BadRequestError as BadRequestError
from tinker import BillingError as BillingError
from tinker import Checkpoint as Checkpoint
from tinker import CheckpointType as CheckpointType
from tinker import ConflictError as ConflictError
from tinker import Datum as Datum
from tinker import DimuonOptimizerConfig as DimuonOptimizerConfig
from tinker import DimuonParams as DimuonParams
from tinker import DmelChunk as DmelChunk
from tinker import EncodedTextChunk as EncodedTextChunk
from tinker import ExperimentalWarning as ExperimentalWarning
from tinker import ForwardBackwardOutput as ForwardBackwardOutput
from tinker import InternalServerError as InternalServerError
from tinker import LoraConfig as LoraConfig
from tinker import LossHandle as LossHandle
from tinker import ModelID as ModelID
from tinker import ModelInput as ModelInput
from tinker import ModelInputChunk as ModelInputChunk
from tinker import NotFoundError as NotFoundError
from tinker import OptimParams as OptimParams
from tinker import OptimStepRequest as OptimStepRequest
from tinker import OptimStepResponse as OptimStepResponse
from tinker import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
from tinker import PerDatumLossFn as PerDatumLossFn
from tinker import PermissionDeniedError as PermissionDeniedError
from tinker import PromptProvenanceSpan as PromptProvenanceSpan
from tinker import RateLimitError as RateLimitError
from tinker import RequestFailedError as RequestFailedError
from tinker import RequestOptions as RequestOptions
from tinker import SampledProvenanceSpan as SampledProvenanceSpan
from tinker import SampledSequence as SampledSequence
from tinker import SampleRequest as SampleRequest
from tinker import SampleResponse as SampleResponse
from tinker import SamplingClient as SamplingClient
from tinker import SamplingParams as SamplingParams
from tinker import StopReason as StopReason
from tinker import TensorData as TensorData
from tinker import TensorDtype as TensorDtype
from tinker import Timeout as Timeout
from tinker import TinkerError as TinkerError
from tinker import TrainingClient as TrainingClient
from tinker import TrainingRun as TrainingRun
from tinker import UnprocessableEntityError as UnprocessableEntityError
from tinker import __title__ as __title__
from tinker import __version__ as __version__
from tinker import auth as auth
from tinker import lib as lib
from tinker import proto as proto
from tinker import resources as resources
from tinker import types as types
from tinker_local.client.clients import AdminClient as AdminClient
from tinker_local.client.clients import RestClient as RestClient
from tinker_local.client.clients import ServiceClient as ServiceClient
from tinker_local.client.encode_images import image_chunk as image_chunk
from tinker_local.client.inputs import model_input as model_input
from tinker_local.client.inputs import text_chunk as text_chunk
from tinker_local.client.loopback import LoopbackBackend as LoopbackBackend
from tinker_local.client.loopback import LoopbackServer as LoopbackServer
from tinker_local.client.run_metrics import log_metrics as log_metrics
from tinker_local.client.served_names import use_served_names as use_served_names
from tinker_local.client.token_spans import WeightsSpan as WeightsSpan
from tinker_local.client.token_spans import weights_of_tokens as weights_of_tokens
from tinker_local.types import PromptLayout as PromptLayout
from tinker_local.types import as_rgb as as_rgb
from tinker_local.types import open_picture as open_picture

__all__ = ["LoopbackBackend", "LoopbackServer", "PromptLayout", "as_rgb", "image_chunk", "log_metrics", "open_picture"]
__all__ += ["WeightsSpan", "model_input", "text_chunk", "use_served_names", "weights_of_tokens"]
__all__ += _sdk.__all__
