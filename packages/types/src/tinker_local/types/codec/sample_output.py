"""Results of `sample` (its requests are JSON)."""

from tinker_local.types.base import errors_named
from tinker_local.types.codec.wire_tensors import (
    FLOAT32,
    INT32,
    decode_tensor,
    encode_tensor,
    parse,
    raw_bytes,
    refuse_unknown_fields,
    view,
)
from tinker_local.types.errors import InvalidRequestError
from tinker_local.types.results import PromptAltTokens, SampledSequence, SampleOutput, TopkLogprobs
from tinker_local.types.tensors import TensorData
from tinker_local.types.wire import tinker_local_wire_pb2 as wire


def encode_sample_output(output: SampleOutput) -> bytes:
    """`output` as the SDK reads it; without sequence ids (the SDK takes them from the promise)."""
    message = wire.SampleResponse(prompt_cache_hit_tokens=output.prompt_cache_hit_tokens)
    for sequence in output.sequences:
        target = message.sequences.add(
            stop_reason=wire.STOP_REASON_LENGTH if sequence.stop_reason == "length" else wire.STOP_REASON_STOP,
            tokens=raw_bytes(sequence.tokens, INT32),
        )
        if sequence.logprobs is not None:
            target.logprobs = raw_bytes(sequence.logprobs, FLOAT32)
        if sequence.topk_logprobs is not None:
            _encode_topk(sequence.topk_logprobs, target.topk_sampled_logprobs)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = raw_bytes(output.prompt_logprobs, FLOAT32)
    if output.topk_prompt_logprobs is not None:
        _encode_topk(output.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        _encode_shaped(output.target_prompt_logprobs, message.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        _encode_shaped(output.prompt_alt_tokens.tokens, message.prompt_alt_tokens.tokens)
        _encode_shaped(output.prompt_alt_tokens.logprobs, message.prompt_alt_tokens.logprobs)
    return bytes(message.SerializeToString())


def decode_sample_output(body: bytes) -> SampleOutput:
    """The inverse of `encode_sample_output`; `sequence_id` is None."""
    message = parse(wire.SampleResponse(), body)
    refuse_unknown_fields(message, "body")
    has = message.HasField
    alternatives = None
    if has("prompt_alt_tokens"):
        refuse_unknown_fields(message.prompt_alt_tokens, "prompt_alt_tokens")
        alternatives = PromptAltTokens(
            tokens=decode_tensor(message.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
            logprobs=decode_tensor(message.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
        )
    return SampleOutput(
        sequences=tuple(
            _decode_sequence(sequence, f"sequences[{index}]") for index, sequence in enumerate(message.sequences)
        ),
        prompt_logprobs=(view(message.prompt_logprobs, FLOAT32, "prompt_logprobs") if has("prompt_logprobs") else None),
        topk_prompt_logprobs=(
            _decode_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs") if has("topk_prompt_logprobs") else None
        ),
        target_prompt_logprobs=(
            decode_tensor(message.target_prompt_logprobs, "target_prompt_logprobs")
            if has("target_prompt_logprobs")
            else None
        ),
        prompt_alt_tokens=alternatives,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def _decode_sequence(message: wire.SampledSequence, where: str) -> SampledSequence:
    refuse_unknown_fields(message, where)
    if message.stop_reason not in (wire.STOP_REASON_STOP, wire.STOP_REASON_LENGTH):
        raise InvalidRequestError(f"{where}.stop_reason: unknown value {message.stop_reason}")
    tokens = view(message.tokens, INT32, f"{where}.tokens")
    logprobs = view(message.logprobs, FLOAT32, f"{where}.logprobs") if message.HasField("logprobs") else None
    topk = None
    if message.HasField("topk_sampled_logprobs"):
        topk = _decode_topk(message.topk_sampled_logprobs, f"{where}.topk_sampled_logprobs")
    with errors_named(where):
        return SampledSequence(
            stop_reason="length" if message.stop_reason == wire.STOP_REASON_LENGTH else "stop",
            tokens=tokens,
            logprobs=logprobs,
            topk_logprobs=topk,
        )


def _encode_topk(topk: TopkLogprobs, message: wire.TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = raw_bytes(topk.token_ids, INT32)
    message.logprobs = raw_bytes(topk.logprobs, FLOAT32)


def _encode_shaped(tensor: TensorData, message: wire.Tensor) -> None:
    """With the shape spelled out: in results the SDK reads a missing one as that of a scalar."""
    encode_tensor(tensor, message)
    message.shape[:] = tensor.dense_shape


def _decode_topk(message: wire.TopkLogprobs, where: str) -> TopkLogprobs:
    refuse_unknown_fields(message, where)
    token_ids = view(message.token_ids, INT32, f"{where}.token_ids")
    logprobs = view(message.logprobs, FLOAT32, f"{where}.logprobs")
    shape = (message.length, message.k)
    for name, array in (("token_ids", token_ids), ("logprobs", logprobs)):
        if array.size != message.length * message.k:
            raise InvalidRequestError(f"{where}.{name}: {array.size} values for shape {list(shape)}")
    return TopkLogprobs(token_ids=token_ids.reshape(shape), logprobs=logprobs.reshape(shape))
