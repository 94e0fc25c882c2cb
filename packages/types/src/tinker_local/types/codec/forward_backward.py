"""`ForwardBackwardRequest` and `ForwardBackwardOutput` as protobuf."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.types.base import errors_named
from tinker_local.types.codec.wire_tensors import (
    INT32,
    INT64,
    TENSOR_DTYPES,
    WIRE_DTYPES,
    decode_tensor,
    decode_values,
    encode_tensor,
    parse,
    raw_bytes,
    refuse_unknown_fields,
    view,
)
from tinker_local.types.datum import Datum, EncodedTextChunk, ImageChunk, ModelInput, ProvenanceSpan
from tinker_local.types.errors import InternalError, InvalidRequestError, UnsupportedError
from tinker_local.types.requests import ForwardBackwardRequest
from tinker_local.types.results import ForwardBackwardOutput
from tinker_local.types.tensors import TensorData
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
    datums = [{name: _at_least_1d(tensor) for name, tensor in datum.items()} for datum in output.loss_fn_outputs]
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


def _at_least_1d(tensor: TensorData) -> npt.NDArray[Any]:
    return np.atleast_1d(tensor.to_numpy())


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
