"""Conversion from and to the objects of the official SDK (`tinker.types`), without loss.

`tinker` is imported when one of these functions is called, never by importing this module. Values that the SDK allows
and our types refuse (an empty text chunk, an image that is neither PNG nor JPEG, a dmel chunk) raise our type's error.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from tinker_local.types.base import Frozen
from tinker_local.types.datum import (
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ProvenanceSpan,
    TensorData,
)
from tinker_local.types.errors import UnsupportedError
from tinker_local.types.requests_and_results import (
    AdamParams,
    ForwardBackwardOutput,
    LoraConfig,
    PromptAltTokens,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TopkLogprobs,
)

NO_LOGPROB = -99999.0
"""Logprob of an empty cell of a top-k matrix (its token is 0)."""

Converter = Callable[[Any], Any]


def from_sdk(value: Any) -> Any:
    """Our object for an object of the SDK; ours are returned as they are.

    Raises TypeError for an object without a counterpart, ValidationError (a ValueError) for a value that our type
    refuses, and UnsupportedError for a dmel chunk.
    """
    if isinstance(value, Frozen):
        return value
    convert = _converters_from_sdk().get(type(value))
    if convert is None:
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no counterpart in tinker_local.types")
    return convert(value)


def to_sdk(value: Any) -> Any:
    """The SDK's object for one of ours, with separate arrays; the SDK's objects are returned as they are.

    Raises TypeError for an object without a counterpart.
    """
    if type(value) in _converters_from_sdk():
        return value
    convert = _converters_to_sdk().get(type(value))
    if convert is None:
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no counterpart in tinker.types")
    return convert(value)


@cache
def _converters_from_sdk() -> dict[type, Converter]:
    from tinker import types as sdk
    from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensorData
    from tinker.types.topk_logprobs import TopkLogprobs as SdkTopkLogprobs

    return {
        sdk.EncodedTextChunk: lambda v: EncodedTextChunk(tokens=v.tokens),
        sdk.ImageChunk: _same_fields(ImageChunk),
        sdk.ImageAssetPointerChunk: _same_fields(ImageAssetPointerChunk),
        sdk.DmelChunk: _refuse_dmel,
        sdk.ModelInput: lambda v: ModelInput(chunks=tuple(map(from_sdk, v.chunks))),
        sdk.TensorData: lambda v: _tensor_from_sdk(v, v._numpy.reshape(-1)),
        JsonTensorData: lambda v: _tensor_from_sdk(v, v.data),
        sdk.PromptProvenanceSpan: lambda v: _span_from_sdk("prompt", v),
        sdk.SampledProvenanceSpan: lambda v: _span_from_sdk("sampled", v),
        sdk.Datum: _datum_from_sdk,
        sdk.SamplingParams: _sampling_params_from_sdk,
        sdk.LoraConfig: _same_fields(LoraConfig),
        sdk.AdamParams: _same_fields(AdamParams),
        sdk.ForwardBackwardOutput: _forward_backward_output_from_sdk,
        SdkTopkLogprobs: lambda v: TopkLogprobs(token_ids=v.token_ids, logprobs=v.logprobs),
        sdk.PromptAltTokens: lambda v: PromptAltTokens(tokens=from_sdk(v.tokens), logprobs=from_sdk(v.logprobs)),
        sdk.SampledSequence: _sequence_from_sdk,
        sdk.SampleResponse: _sample_from_sdk,
    }


@cache
def _converters_to_sdk() -> dict[type, Converter]:
    from tinker import types as sdk
    from tinker.types.topk_logprobs import TopkLogprobs as SdkTopkLogprobs

    spans = {"prompt": sdk.PromptProvenanceSpan, "sampled": sdk.SampledProvenanceSpan}
    return {
        EncodedTextChunk: lambda v: sdk.EncodedTextChunk(tokens=v.tokens.tolist()),
        ImageChunk: _same_fields(sdk.ImageChunk),
        ImageAssetPointerChunk: _same_fields(sdk.ImageAssetPointerChunk),
        ModelInput: lambda v: sdk.ModelInput(chunks=_list(v.chunks)),
        TensorData: lambda v: sdk.TensorData(
            data=v.data,
            dtype=v.dtype,
            shape=None if v.shape is None else list(v.shape),
            sparse_crow_indices=None if v.sparse_crow_indices is None else v.sparse_crow_indices.tolist(),
            sparse_col_indices=None if v.sparse_col_indices is None else v.sparse_col_indices.tolist(),
        ),
        ProvenanceSpan: lambda v: spans[v.source](sequence_id=v.sequence_id, offset=v.offset, length=v.length),
        Datum: lambda v: sdk.Datum(
            model_input=to_sdk(v.model_input),
            loss_fn_inputs=_mapping(v.loss_fn_inputs),
            model_input_spans=_optional(v.model_input_spans, _list),
            loss_fn_input_spans=_optional(v.loss_fn_input_spans, _list),
        ),
        SamplingParams: lambda v: sdk.SamplingParams(
            **{**dict(v), "stop": list(v.stop) if isinstance(v.stop, tuple) else v.stop}
        ),
        LoraConfig: _lora_to_sdk,
        AdamParams: _same_fields(sdk.AdamParams),
        ForwardBackwardOutput: lambda v: sdk.ForwardBackwardOutput(
            loss_fn_output_type=v.loss_fn_output_type,
            loss_fn_outputs=[_mapping(output) for output in v.loss_fn_outputs],
            metrics=dict(v.metrics),
        ),
        TopkLogprobs: lambda v: SdkTopkLogprobs(token_ids=v.token_ids.copy(), logprobs=v.logprobs.copy()),
        PromptAltTokens: lambda v: sdk.PromptAltTokens(tokens=to_sdk(v.tokens), logprobs=to_sdk(v.logprobs)),
        SampledSequence: lambda v: sdk.SampledSequence(
            stop_reason=v.stop_reason,
            sequence_id=v.sequence_id,
            tokens_np=v.tokens.copy(),
            logprobs_np=_optional(v.logprobs, np.copy),
            topk_logprobs_np=_optional(v.topk_logprobs, to_sdk),
        ),
        SampleOutput: lambda v: sdk.SampleResponse(
            sequences=_list(v.sequences),
            prompt_logprobs_np=_optional(v.prompt_logprobs, np.copy),
            topk_prompt_logprobs_np=_optional(v.topk_prompt_logprobs, to_sdk),
            target_prompt_logprobs=_optional(v.target_prompt_logprobs, to_sdk),
            prompt_alt_tokens=_optional(v.prompt_alt_tokens, to_sdk),
            prompt_cache_hit_tokens=v.prompt_cache_hit_tokens,
        ),
    }


def _same_fields(target: Callable[..., Any]) -> Converter:
    """For types whose fields have the same names and meaning on both sides (both are pydantic models)."""
    return lambda value: target(**dict(value))


def _lora_to_sdk(value: LoraConfig) -> Any:
    from tinker import types as sdk

    if value.train_vision:
        raise UnsupportedError("train_vision: the SDK's LoraConfig has no such field")
    return sdk.LoraConfig(**value.model_dump())


def _optional(value: Any, convert: Converter) -> Any:
    return None if value is None else convert(value)


def _list(values: Sequence[Any]) -> list[Any]:
    return [to_sdk(value) for value in values]


def _mapping(tensors: dict[str, TensorData]) -> dict[str, Any]:
    return {name: to_sdk(tensor) for name, tensor in tensors.items()}


def _refuse_dmel(value: Any) -> Any:
    raise UnsupportedError("dmel (audio) chunks are not supported; a model input holds text and images")


def _tensor_from_sdk(value: Any, data: Any) -> TensorData:
    return TensorData(
        data=data,
        dtype=value.dtype,
        shape=_optional(value.shape, tuple),
        sparse_crow_indices=value.sparse_crow_indices,
        sparse_col_indices=value.sparse_col_indices,
    )


def _span_from_sdk(source: Literal["prompt", "sampled"], value: Any) -> ProvenanceSpan:
    return ProvenanceSpan(source=source, sequence_id=value.sequence_id, offset=value.offset, length=value.length)


def _datum_from_sdk(value: Any) -> Datum:
    return Datum(
        model_input=from_sdk(value.model_input),
        loss_fn_inputs={name: from_sdk(tensor) for name, tensor in value.loss_fn_inputs.items()},
        model_input_spans=_optional(value.model_input_spans, list),
        loss_fn_input_spans=_optional(value.loss_fn_input_spans, list),
    )


def _sampling_params_from_sdk(value: Any) -> SamplingParams:
    fields = dict(value)
    stop = fields.pop("stop")
    return SamplingParams(**fields, stop=stop if stop is None or isinstance(stop, str) else tuple(stop))


def _forward_backward_output_from_sdk(value: Any) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        loss_fn_output_type=value.loss_fn_output_type,
        loss_fn_outputs=tuple({name: from_sdk(t) for name, t in output.items()} for output in value.loss_fn_outputs),
        metrics=dict(value.metrics),
    )


# The SDK's results hold arrays if they come from the wire, and lists otherwise; the properties without `_np` give lists
# in both cases.


def _sequence_from_sdk(value: Any) -> SampledSequence:
    return SampledSequence(
        stop_reason=value.stop_reason,
        tokens=value.tokens if value.tokens_np is None else value.tokens_np,
        logprobs=value.logprobs if value.logprobs_np is None else value.logprobs_np,
        topk_logprobs=_topk_from_sdk(value.topk_logprobs_np, value._topk_logprobs_list),
        sequence_id=value.sequence_id,
    )


def _sample_from_sdk(value: Any) -> SampleOutput:
    logprobs = value.prompt_logprobs_np
    if logprobs is None and value.prompt_logprobs is not None:
        logprobs = [np.nan if logprob is None else logprob for logprob in value.prompt_logprobs]
    return SampleOutput(
        sequences=tuple(map(from_sdk, value.sequences)),
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=_topk_from_sdk(value.topk_prompt_logprobs_np, value._topk_prompt_logprobs_list),
        target_prompt_logprobs=_optional(value.target_prompt_logprobs, from_sdk),
        prompt_alt_tokens=_optional(value.prompt_alt_tokens, from_sdk),
        prompt_cache_hit_tokens=value.prompt_cache_hit_tokens,
    )


def _topk_from_sdk(matrices: Any, rows: list[list[tuple[int, float]] | None] | None) -> TopkLogprobs | None:
    if matrices is not None:
        return TopkLogprobs(token_ids=matrices.token_ids, logprobs=matrices.logprobs)
    if rows is None:
        return None
    k = max((len(row) for row in rows if row is not None), default=0)
    token_ids = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), NO_LOGPROB, np.float32)
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            token_ids[index, column], logprobs[index, column] = token, logprob
    return TopkLogprobs(token_ids=token_ids, logprobs=logprobs)


Frozen._from_sdk = staticmethod(from_sdk)
