"""The wire format: protobuf bytes from and to our types.

Decoding makes no Python lists: an array is a read-only numpy view of the bytes that protobuf hands out (only int32 and
bfloat16 tensors are widened into new memory). A `forward_backward` body is decoded in two stages, because a server
accepts every request that it can put in order and reports errors in its data through the future.
`parse_forward_backward_envelope` fails only if the body is not protobuf or lacks `model_id` or `seq_id`, without which
the request has no place in an order. `envelope.decode()` fails with an InvalidRequestError that names the field, e.g.
`data[3].loss_fn_inputs['weights']`.

Arrays are raw little-endian bytes in C order. A field that the schema does not know is refused, never dropped.
"""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tinker_local.types.base import errors_named
from tinker_local.types.datum import (
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ProvenanceSpan,
    TensorData,
)
from tinker_local.types.errors import ApiError, InternalError, InvalidRequestError, UnsupportedError
from tinker_local.types.requests_and_results import (
    LONGEST_ID,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    PromptAltTokens,
    SampledSequence,
    SampleOutput,
    TopkLogprobs,
)
from tinker_local.types.wire import tinker_local_wire_pb2 as wire
from tinker_local.types.wire_fields import (
    BYTES,
    VARINT,
    NotProtobuf,
    fields,
    parse,
    refuse_unknown_fields,
    unknown_fields,
)
from tinker_local.types.wire_tensors import (
    FLOAT32,
    INT32,
    INT64,
    TENSOR_DTYPES,
    WIRE_DTYPES,
    Parts,
    decode_tensor,
    decode_values,
    encode_tensor,
    field_parts,
    message_parts,
    raw_bytes,
    tensor_parts,
    view,
)

T = TypeVar("T")


MAX_DATUMS = 2**14
"""Of one request; a chunk of the SDK has at most 1,024."""

MAX_PARTS = 2**18
"""Chunks, tensors and spans of one request."""

MAX_OTHER_FIELDS, MAX_OTHER_BYTES = 1024, 2**20
"""Of one request, besides its data."""

_REQUEST_FIELDS = {1: BYTES, 2: VARINT, 3: BYTES, 4: BYTES, 5: BYTES, 6: VARINT, 7: BYTES}
_DATA = 3
_DATUM_FIELDS = {1: BYTES, 2: BYTES, 3: BYTES, 4: BYTES}


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackwardEnvelope:
    """A `forward_backward` body with only the envelope decoded: `model_id`, `seq_id` >= 1, `forward_only`.

    The data are bytes of `_body` between the `_data`; `_problem`: why they cannot be decoded.
    """

    model_id: str
    seq_id: int
    forward_only: bool
    _message: wire.ForwardBackwardRequest = field(repr=False)
    _body: bytes | bytearray = field(repr=False)
    _data: list[tuple[int, int]] = field(repr=False)
    _problem: ApiError | None = None

    def decode(self) -> ForwardBackwardRequest:
        """The whole request; InvalidRequestError (or UnsupportedError) names the first wrong field."""
        return exhausted(self.decoding())

    def decoding(self) -> Generator[None, None, ForwardBackwardRequest]:
        """`decode` in steps, one for each datum."""
        if self._problem is not None:
            raise self._problem
        parts, data = 0, []
        for index, (start, end) in enumerate(self._data):
            raw = self._body[start:end]
            parts += _count_parts(raw, MAX_PARTS - parts, f"data[{index}]")
            data.append(_decode_datum(parse(wire.Datum(), raw, f"data[{index}]"), f"data[{index}]"))
            yield
        with errors_named(""):
            return ForwardBackwardRequest(
                model_id=self.model_id,
                seq_id=self.seq_id,
                data=tuple(data),
                loss_fn=self._message.loss_fn,
                loss_fn_config=_decode_loss_fn_config(self._message),
                forward_only=self.forward_only,
            )


def exhausted(steps: Generator[None, None, T]) -> T:
    """What `steps` return at their end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def parse_forward_backward_envelope(body: bytes | bytearray) -> ForwardBackwardEnvelope:
    """Decode the envelope; InvalidRequestError only if `body` is not protobuf or lacks `model_id` or `seq_id`.

    Reads at most `MAX_DATUMS` data and `MAX_OTHER_FIELDS` other fields, and builds none of the data.
    """
    data: list[tuple[int, int]] = []
    others: list[bytes | bytearray] = []
    unknown: list[int] = []
    problem: ApiError | None = None
    size = 0
    try:
        for number, kind, begin, value, end in fields(body):
            if kind != _REQUEST_FIELDS.get(number):
                unknown.append(number)
                problem = unknown_fields("body", set(unknown))
            elif number == _DATA:
                data.append((value, end))
            else:
                size += end - begin
                if size > MAX_OTHER_BYTES:
                    raise InvalidRequestError(f"body: more than {MAX_OTHER_BYTES} bytes besides the data")
                others.append(body[begin:end])
            if len(data) > MAX_DATUMS:
                problem = InvalidRequestError(f"data: more than {MAX_DATUMS} datums; send fewer at once")
            elif len(others) + len(unknown) > MAX_OTHER_FIELDS:
                problem = problem or InvalidRequestError(f"body: more than {MAX_OTHER_FIELDS} fields besides the data")
            if len(data) > MAX_DATUMS or len(others) + len(unknown) > MAX_OTHER_FIELDS:
                break
    except NotProtobuf as error:
        raise InvalidRequestError(f"body: {len(body)} bytes that are not a ForwardBackwardRequest ({error})") from None
    message = parse(wire.ForwardBackwardRequest(), b"".join(others))
    if not message.model_id:
        raise InvalidRequestError("model_id: missing")
    if len(message.model_id) > LONGEST_ID:
        raise InvalidRequestError(f"model_id: {len(message.model_id)} characters, the most is {LONGEST_ID}")
    if message.seq_id < 1:
        raise InvalidRequestError(
            f"seq_id: must be at least 1, not {message.seq_id} (0 is what a missing one reads as)"
        )
    return ForwardBackwardEnvelope(message.model_id, message.seq_id, message.forward_only, message, body, data, problem)


def _count_parts(raw: bytes | bytearray, most: int, where: str) -> int:
    """How many chunks, tensors and spans a datum has; InvalidRequestError as soon as it has more than `most`."""
    found = 0
    try:
        for number, kind, *_ in fields(raw):
            if kind != _DATUM_FIELDS.get(number):
                raise unknown_fields(where, {number})
            found += 1
            if found > most:
                raise InvalidRequestError(
                    f"{where}: with it the request has more than {MAX_PARTS} chunks, tensors and spans"
                )
    except NotProtobuf as error:
        raise InvalidRequestError(f"{where}: {len(raw)} bytes that are not a Datum ({error})") from None
    return found


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
            target.topk_sampled_logprobs.MergeFromString(b"".join(_topk_parts(sequence.topk_logprobs)))
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = raw_bytes(output.prompt_logprobs, FLOAT32)
    parts: Parts = [message.SerializeToString()]
    if output.topk_prompt_logprobs is not None:
        parts += field_parts(message, "topk_prompt_logprobs", _topk_parts(output.topk_prompt_logprobs))
    if output.target_prompt_logprobs is not None:
        parts += field_parts(message, "target_prompt_logprobs", tensor_parts(output.target_prompt_logprobs))
    if (drawn := output.prompt_alt_tokens) is not None:
        content = field_parts(message.prompt_alt_tokens, "tokens", tensor_parts(drawn.tokens))
        content += field_parts(message.prompt_alt_tokens, "logprobs", tensor_parts(drawn.logprobs))
        parts += field_parts(message, "prompt_alt_tokens", content)
    return b"".join(parts)


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


def _topk_parts(topk: TopkLogprobs) -> Parts:
    length, k = topk.token_ids.shape
    message = wire.TopkLogprobs(length=length, k=k)
    return message_parts(message, token_ids=(topk.token_ids, INT32), logprobs=(topk.logprobs, FLOAT32))


def _decode_topk(message: wire.TopkLogprobs, where: str) -> TopkLogprobs:
    refuse_unknown_fields(message, where)
    token_ids = view(message.token_ids, INT32, f"{where}.token_ids")
    logprobs = view(message.logprobs, FLOAT32, f"{where}.logprobs")
    shape = (message.length, message.k)
    for name, array in (("token_ids", token_ids), ("logprobs", logprobs)):
        if array.size != message.length * message.k:
            raise InvalidRequestError(f"{where}.{name}: {array.size} values for shape {list(shape)}")
    return TopkLogprobs(token_ids=token_ids.reshape(shape), logprobs=logprobs.reshape(shape))
