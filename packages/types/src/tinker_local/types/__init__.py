"""Shared types of tinker-local. Importing this loads neither torch, transformers nor Pillow.

`tinker_local.types.codec` holds the wire format, `tinker_local.types.sdk` the conversions from and to the official
SDK's objects (it imports `tinker` when called).
"""

from tinker_local.types import sdk as sdk  # lets all types accept the objects of the SDK
from tinker_local.types.base import Frozen as Frozen
from tinker_local.types.base import invalid as invalid
from tinker_local.types.base import user_message as user_message
from tinker_local.types.datum import Chunk as Chunk
from tinker_local.types.datum import Datum as Datum
from tinker_local.types.datum import EncodedTextChunk as EncodedTextChunk
from tinker_local.types.datum import ImageAssetPointerChunk as ImageAssetPointerChunk
from tinker_local.types.datum import ImageChunk as ImageChunk
from tinker_local.types.datum import ModelInput as ModelInput
from tinker_local.types.datum import ProvenanceSpan as ProvenanceSpan
from tinker_local.types.datum import TensorData as TensorData
from tinker_local.types.datum import TensorDtype as TensorDtype
from tinker_local.types.datum import image_format as image_format
from tinker_local.types.errors import ApiError as ApiError
from tinker_local.types.errors import AuthenticationError as AuthenticationError
from tinker_local.types.errors import Category as Category
from tinker_local.types.errors import ContextOverflowError as ContextOverflowError
from tinker_local.types.errors import GoneError as GoneError
from tinker_local.types.errors import InternalError as InternalError
from tinker_local.types.errors import InvalidRequestError as InvalidRequestError
from tinker_local.types.errors import NotEnoughMemoryError as NotEnoughMemoryError
from tinker_local.types.errors import NotFoundError as NotFoundError
from tinker_local.types.errors import PermissionDeniedError as PermissionDeniedError
from tinker_local.types.errors import StorageFullError as StorageFullError
from tinker_local.types.errors import TooManyRequestsError as TooManyRequestsError
from tinker_local.types.errors import UnsupportedError as UnsupportedError
from tinker_local.types.pictures import as_rgb as as_rgb
from tinker_local.types.pictures import open_picture as open_picture
from tinker_local.types.prompt_layout import PromptLayout as PromptLayout
from tinker_local.types.requests_and_results import TRAIN_VISION as TRAIN_VISION
from tinker_local.types.requests_and_results import AdamParams as AdamParams
from tinker_local.types.requests_and_results import CopyWeightsRequest as CopyWeightsRequest
from tinker_local.types.requests_and_results import CreateModelRequest as CreateModelRequest
from tinker_local.types.requests_and_results import CreateSamplingSessionRequest as CreateSamplingSessionRequest
from tinker_local.types.requests_and_results import CreateSessionRequest as CreateSessionRequest
from tinker_local.types.requests_and_results import DrawnUnder as DrawnUnder
from tinker_local.types.requests_and_results import ForwardBackwardOutput as ForwardBackwardOutput
from tinker_local.types.requests_and_results import ForwardBackwardRequest as ForwardBackwardRequest
from tinker_local.types.requests_and_results import LoadWeightsRequest as LoadWeightsRequest
from tinker_local.types.requests_and_results import LoraConfig as LoraConfig
from tinker_local.types.requests_and_results import OptimizerConfig as OptimizerConfig
from tinker_local.types.requests_and_results import OptimStepOutput as OptimStepOutput
from tinker_local.types.requests_and_results import OptimStepRequest as OptimStepRequest
from tinker_local.types.requests_and_results import PromptAltTokens as PromptAltTokens
from tinker_local.types.requests_and_results import SampledSequence as SampledSequence
from tinker_local.types.requests_and_results import SampleOutput as SampleOutput
from tinker_local.types.requests_and_results import SampleRequest as SampleRequest
from tinker_local.types.requests_and_results import SamplingParams as SamplingParams
from tinker_local.types.requests_and_results import SaveWeightsExternalRequest as SaveWeightsExternalRequest
from tinker_local.types.requests_and_results import SaveWeightsForSamplerRequest as SaveWeightsForSamplerRequest
from tinker_local.types.requests_and_results import SaveWeightsRequest as SaveWeightsRequest
from tinker_local.types.requests_and_results import TopkLogprobs as TopkLogprobs
from tinker_local.types.session_search import ClientFinishedQuery as ClientFinishedQuery
from tinker_local.types.session_search import FinishType as FinishType
from tinker_local.types.session_search import SessionCursor as SessionCursor
from tinker_local.types.session_search import SessionSearchRequest as SessionSearchRequest
from tinker_local.types.session_search import StatusQuery as StatusQuery
from tinker_local.types.session_search import UserQuery as UserQuery
