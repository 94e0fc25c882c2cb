"""The wire format: protobuf bytes from and to our types.

Decoding makes no Python lists: an array is a read-only numpy view of the bytes that protobuf hands out (only int32 and
bfloat16 tensors are widened into new memory). A `forward_backward` body is decoded in two stages, because a server
accepts every request that it can put in order and reports what is wrong with its data through the future:
`parse_forward_backward_envelope` fails only if there is no model and no place in its order; `envelope.decode()` fails
with an InvalidRequestError that names the field, e.g. `data[3].loss_fn_inputs['weights']`.

Arrays are raw little-endian bytes in C order. A field that the schema does not know is refused, never dropped.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tinker_local.types.base import errors_named, freeze
from tinker_local.types.datum import (
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ProvenanceSpan,
    TensorData,
    TensorDtype,
)
from tinker_local.types.errors import InternalError, InvalidRequestError, UnsupportedError
from tinker_local.types.requests_and_results import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    PromptAltTokens,
    SampledSequence,
    SampleOutput,
    TopkLogprobs,
)
from tinker_local.types.wire import tinker_local_wire_pb2 as wire


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackwardEnvelope:
    """A `forward_backward` body with only the envelope decoded: `model_id`, `seq_id` >= 1, `forward_only`."""

    model_id: str
    seq_id: int
    forward_only: bool
    _message: wire.ForwardBackwardRequest = field(repr=False)

    def decode(self) -> ForwardBackwardRequest:
        """The whole request; InvalidRequestError (or UnsupportedError) names the first wrong field."""
        message = self._message
        refuse_unknown_fields(message, "body")
        data = tuple(_decode_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data))
        with errors_named(""):
            return ForwardBackwardRequest(
                model_id=self.model_id,
                seq_id=self.seq_id,
                data=data,
                loss_fn=message.loss_fn,
                loss_fn_config=_decode_loss_fn_config(message),
                forward_only=self.forward_only,
            )


def parse_forward_backward_envelope(body: bytes) -> ForwardBackwardEnvelope:
    """Decode the envelope; InvalidRequestError only if `body` is not protobuf or lacks `model_id` or `seq_id`."""
    message = parse(wire.ForwardBackwardRequest(), body)
    if not message.model_id:
        raise InvalidRequestError("model_id: missing")
    if message.seq_id < 1:
        raise InvalidRequestError(
            f"seq_id: must be at least 1, not {message.seq_id} (0 is what a missing one reads as)"
        )
    return ForwardBackwardEnvelope(message.model_id, message.seq_id, message.forward_only, message)


def decode_forward_backward_request(body: bytes) -> ForwardBackwardRequest:
    """Envelope and data at once."""
    return parse_forward_backward_envelope(body).decode()


def encode_forward_backward_request(request: ForwardBackwardRequest) -> bytes:
    """The body that the SDK sends for `request`; UnsupportedError for image pointers, which have no wire format."""
    message = wire.ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        forward_only=request.forward_only,
    )
    for key, value in request.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
            message.loss_fn_config[key] = value
    for index, datum in enumerate(request.data):
        _encode_datum(datum, message.data.add(), f"data[{index}]")
    return bytes(message.SerializeToString())


def _decode_loss_fn_config(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    """`loss_fn_config_v2` where a key is in both: `loss_fn_config` is its copy for old servers, without the texts."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        where = f"loss_fn_config_v2[{key!r}]"
        refuse_unknown_fields(value, where)
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidRequestError(f"{where}: neither a number nor a text")
        config[key] = getattr(value, kind)
    return config


def _decode_datum(message: wire.Datum, where: str) -> Datum:
    refuse_unknown_fields(message, where)
    chunks = tuple(
        _decode_chunk(chunk, f"{where}.model_input.chunks[{index}]") for index, chunk in enumerate(message.model_input)
    )
    tensors = {
        name: decode_tensor(tensor, f"{where}.loss_fn_inputs[{name!r}]")
        for name, tensor in message.loss_fn_inputs.items()
    }
    spans = _decode_spans(message.model_input_spans, f"{where}.model_input_spans")
    loss_spans = _decode_spans(message.loss_fn_input_spans, f"{where}.loss_fn_input_spans")
    has_spans = bool(spans or loss_spans)
    with errors_named(where):
        return Datum(
            model_input=ModelInput(chunks=chunks),
            loss_fn_inputs=tensors,
            model_input_spans=spans if has_spans else None,
            loss_fn_input_spans=loss_spans if has_spans else None,
        )


def _encode_datum(datum: Datum, message: wire.Datum, where: str) -> None:
    for index, chunk in enumerate(datum.model_input.chunks):
        target = message.model_input.add()
        if isinstance(chunk, EncodedTextChunk):
            target.encoded_text.tokens = raw_bytes(chunk.tokens, INT32)
        elif isinstance(chunk, ImageChunk):
            target.image.data = chunk.data
            target.image.format = chunk.format
            if chunk.expected_tokens is not None:
                target.image.expected_tokens = chunk.expected_tokens
        else:
            raise UnsupportedError(
                f"{where}.model_input.chunks[{index}]: an image pointer cannot be trained on; send the image itself"
            )
    for name, tensor in datum.loss_fn_inputs.items():
        encode_tensor(tensor, message.loss_fn_inputs[name])
    for span in datum.model_input_spans or ():
        _encode_span(span, message.model_input_spans.add())
    for span in datum.loss_fn_input_spans or ():
        _encode_span(span, message.loss_fn_input_spans.add())


def _decode_chunk(message: wire.Chunk, where: str) -> EncodedTextChunk | ImageChunk:
    refuse_unknown_fields(message, where)
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        refuse_unknown_fields(message.encoded_text, where)
        tokens = view(message.encoded_text.tokens, INT32, f"{where}.tokens")
        with errors_named(where):
            return EncodedTextChunk(tokens=tokens)
    if kind == "image":
        return _decode_image(message.image, where)
    if kind == "dmel":
        raise UnsupportedError(f"{where}.dmel: audio chunks are not supported; a model input holds text and images")
    raise InvalidRequestError(f"{where}: neither encoded_text nor image is set")


def _decode_image(message: wire.ImageChunk, where: str) -> ImageChunk:
    refuse_unknown_fields(message, where)
    if message.HasField("override_dimensions"):
        size = message.override_dimensions
        raise UnsupportedError(
            f"{where}.override_dimensions: {size.width}x{size.height} is not supported; resize the image before sending"
        )
    with errors_named(where):
        return ImageChunk(
            data=message.data,
            format=message.format,  # type: ignore[arg-type]  # any string; the type refuses unknown formats
            expected_tokens=message.expected_tokens if message.HasField("expected_tokens") else None,
        )


def _decode_spans(messages: Iterable[wire.ProvenanceSpan], where: str) -> tuple[ProvenanceSpan, ...]:
    return tuple(_decode_span(message, f"{where}[{index}]") for index, message in enumerate(messages))


def _decode_span(message: wire.ProvenanceSpan, where: str) -> ProvenanceSpan:
    refuse_unknown_fields(message, where)
    kind = message.WhichOneof("span")
    if kind is None:
        raise InvalidRequestError(f"{where}: neither prompt_tokens nor sampled_tokens is set")
    span = message.prompt_tokens if kind == "prompt_tokens" else message.sampled_tokens
    refuse_unknown_fields(span, where)
    with errors_named(where):
        return ProvenanceSpan(
            source="prompt" if kind == "prompt_tokens" else "sampled",
            sequence_id=span.sequence_id,
            offset=span.offset,
            length=span.length,
        )


def _encode_span(span: ProvenanceSpan, message: wire.ProvenanceSpan) -> None:
    target = message.prompt_tokens if span.source == "prompt" else message.sampled_tokens
    target.sequence_id, target.offset, target.length = span.sequence_id, span.offset, span.length


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """`output` as the SDK reads it; sparse tensors become dense, a scalar becomes [1].

    Consecutive datums whose fields have the same names, dtypes and trailing shapes share one record. The SDK misreads
    records with different field *names*, so all datums of a result should have the same fields. InternalError
    for a tensor like [3, 0], whose first dimension the format cannot hold.
    """
    message = wire.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    datums = [
        {name: np.atleast_1d(tensor.to_numpy()) for name, tensor in datum.items()} for datum in output.loss_fn_outputs
    ]
    for layout, group in groupby(datums, key=_layout):
        members = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(members))
        for name in layout:
            _encode_batch([datum[name] for datum in members], record.fields[name], name)
    return bytes(message.SerializeToString())


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """The inverse of `encode_forward_backward_output`: every tensor dense, with its shape."""
    message = parse(wire.ForwardBackwardOutput(), body)
    refuse_unknown_fields(message, "body")
    datums: list[dict[str, TensorData]] = []
    for index, record in enumerate(message.loss_fn_outputs):
        where = f"loss_fn_outputs[{index}]"
        refuse_unknown_fields(record, where)
        first = len(datums)
        datums.extend({} for _ in range(record.num_datums))
        for name, batch in record.fields.items():
            tensors = _decode_batch(batch, record.num_datums, f"{where}.fields[{name!r}]")
            for datum, tensor in zip(datums[first:], tensors, strict=True):
                datum[name] = tensor
    return ForwardBackwardOutput(
        loss_fn_output_type=message.loss_fn_output_type,
        loss_fn_outputs=tuple(datums),
        metrics=dict(message.metrics),
    )


def _layout(datum: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What datums of one record have in common: dtype and trailing shape of each field."""
    return {name: (array.dtype.str, array.shape[1:]) for name, array in datum.items()}


def _encode_batch(arrays: Sequence[npt.NDArray[Any]], message: wire.BatchedTensor, name: str) -> None:
    trailing = arrays[0].shape[1:]
    if 0 in trailing and any(array.shape[0] for array in arrays):
        shapes = sorted({array.shape for array in arrays})
        raise InternalError(f"loss_fn_outputs[{name!r}]: the wire format cannot hold the shapes {shapes}")
    dtype, as_numpy = TENSOR_DTYPES["float32" if arrays[0].dtype.kind == "f" else "int64"]
    message.dtype = dtype
    message.data = b"".join(raw_bytes(array, as_numpy) for array in arrays)
    message.offsets = raw_bytes(np.cumsum([0, *(array.nbytes for array in arrays)]), INT64)
    message.trailing_shape.extend(trailing)


def _decode_batch(message: wire.BatchedTensor, num_datums: int, where: str) -> list[TensorData]:
    refuse_unknown_fields(message, where)
    offsets = view(message.offsets, INT64, f"{where}.offsets")
    data = message.data
    if offsets.size != num_datums + 1:
        raise InvalidRequestError(f"{where}.offsets: {offsets.size} entries for {num_datums} datums")
    if offsets[0] != 0 or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
        raise InvalidRequestError(f"{where}.offsets: must rise from 0 to {len(data)}, the length of data")
    values, dtype = decode_values(data, message.dtype, where)
    itemsize = WIRE_DTYPES[message.dtype][0].itemsize
    if (offsets % itemsize).any():
        raise InvalidRequestError(f"{where}.offsets: must be multiples of {itemsize}, the bytes of one value")
    trailing = tuple(message.trailing_shape)
    row = math.prod(trailing)
    tensors = []
    for start, end in pairwise((offsets // itemsize).tolist()):
        shape = ((end - start) // row if row else 0, *trailing)
        with errors_named(where):
            tensors.append(TensorData(data=values[start:end], dtype=dtype, shape=shape))
    return tensors


# The result of a sample (its request is JSON) -------------------------------------------------------------------------


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


# Tensors --------------------------------------------------------------------------------------------------------------


M = TypeVar("M", bound=Message)


INT32 = np.dtype("<i4")


INT64 = np.dtype("<i8")


FLOAT32 = np.dtype("<f4")


UINT16 = np.dtype("<u2")


WIRE_DTYPES: dict[int, tuple[np.dtype[Any], TensorDtype]] = {
    wire.DTYPE_FLOAT32: (FLOAT32, "float32"),
    wire.DTYPE_INT64: (INT64, "int64"),
    wire.DTYPE_INT32: (INT32, "int64"),
    wire.DTYPE_BFLOAT16: (UINT16, "float32"),
}
"""For each wire dtype: how to read its bytes, and the dtype of the resulting tensor."""


TENSOR_DTYPES: dict[TensorDtype, tuple[wire.DType, np.dtype[Any]]] = {
    "float32": (wire.DTYPE_FLOAT32, FLOAT32),
    "int64": (wire.DTYPE_INT64, INT64),
}


def encode_tensor(tensor: TensorData, message: wire.Tensor) -> None:
    dtype, as_numpy = TENSOR_DTYPES[tensor.dtype]
    message.dtype = dtype
    message.shape.extend(tensor.shape or ())
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = raw_bytes(tensor.data, as_numpy)
        return
    message.sparse_csr.values = raw_bytes(tensor.data, as_numpy)
    message.sparse_csr.crow_indices = raw_bytes(tensor.sparse_crow_indices, INT64)
    message.sparse_csr.col_indices = raw_bytes(tensor.sparse_col_indices, INT64)


def decode_tensor(message: wire.Tensor, where: str) -> TensorData:
    refuse_unknown_fields(message, where)
    shape = tuple(message.shape) or None
    encoding = message.WhichOneof("encoding")
    if encoding is None:
        raise InvalidRequestError(f"{where}: neither dense nor sparse_csr is set")
    if encoding == "dense":
        values, dtype = decode_values(message.dense, message.dtype, where)
        with errors_named(where):
            return TensorData(data=values, dtype=dtype, shape=shape)
    csr = message.sparse_csr
    refuse_unknown_fields(csr, where)
    values, dtype = decode_values(csr.values, message.dtype, where)
    crow = view(csr.crow_indices, INT64, f"{where}.crow_indices")
    col = view(csr.col_indices, INT64, f"{where}.col_indices")
    with errors_named(where):
        return TensorData(data=values, dtype=dtype, shape=shape, sparse_crow_indices=crow, sparse_col_indices=col)


def decode_values(raw: bytes, wire_dtype: int, where: str) -> tuple[npt.NDArray[Any], TensorDtype]:
    """The numbers in `raw`, and the dtype of the resulting tensor."""
    if wire_dtype not in WIRE_DTYPES:
        known = ", ".join(f"{number} {wire.DType.Name(number)}" for number in WIRE_DTYPES)
        raise InvalidRequestError(f"{where}.dtype: unknown value {wire_dtype}, known are {known}")
    numpy_dtype, dtype = WIRE_DTYPES[wire_dtype]
    values = view(raw, numpy_dtype, where)
    if wire_dtype == wire.DTYPE_INT32:
        return freeze(values.astype(np.int64)), dtype
    if wire_dtype == wire.DTYPE_BFLOAT16:  # the upper half of a float32
        halves = freeze(values.astype(np.uint32) << 16)
        return halves.view(np.float32), dtype
    return values, dtype


def view(raw: bytes, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """`raw` as a flat read-only array, without a copy."""
    if len(raw) % dtype.itemsize:
        raise InvalidRequestError(f"{where}: {len(raw)} bytes are not a multiple of {dtype.itemsize} ({dtype})")
    return np.frombuffer(raw, dtype)


def raw_bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """The bytes of `array` in C order and little-endian `dtype`."""
    return np.ascontiguousarray(array, dtype).tobytes()


def parse(message: M, body: bytes) -> M:
    """`message` filled from `body`; InvalidRequestError if that is not protobuf."""
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequestError(
            f"body: {len(body)} bytes that are not a {type(message).__name__} ({error})"
        ) from None
    return message


def refuse_unknown_fields(message: Message, where: str) -> None:
    """UnsupportedError for fields of `message` itself that the schema lacks: a later SDK gives them a meaning."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        numbers = sorted({unknown[index].field_number for index in range(len(unknown))})
        raise UnsupportedError(f"{where}: field numbers {numbers} are not known to this server")
