"""The codec against itself and against the SDK's own encoder and decoder."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as public
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_request import ForwardBackwardRequest as SdkForwardBackwardRequest
from tinker_local.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageAssetPointerChunk,
    ImageChunk,
    InternalError,
    InvalidRequestError,
    ModelInput,
    SampledSequence,
    SampleOutput,
    TensorData,
    UnsupportedError,
)
from tinker_local.types.codec import (
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_output,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_output,
    parse_forward_backward_envelope,
)
from tinker_local.types.sdk import from_sdk, to_sdk
from tinker_local.types.wire import tinker_local_wire_pb2 as wire
from tinker_local.types.wire_tensors import FLOAT32 as AS_FLOAT32
from tinker_local.types.wire_tensors import message_parts

from tests.types.types_strategies import (
    PNG,
    finite_floats,
    forward_backward_outputs,
    names,
    quick,
    requests,
    sample_outputs,
    sdk_datums,
)


def root(array: npt.NDArray[Any]) -> object:
    """Whatever owns the memory that `array` looks at."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


# --- requests --------------------------------------------------------------------------------------------------------


@quick
@given(requests)
def test_request_survives_the_wire(request: ForwardBackwardRequest) -> None:
    assert decode_forward_backward_request(encode_forward_backward_request(request)) == request


@quick
@given(
    data=st.lists(sdk_datums(), max_size=3),
    config=st.none() | st.dictionaries(names, finite_floats | names, max_size=3),
    forward_only=st.booleans(),
)
def test_what_the_sdk_encodes_is_what_we_decode(
    data: list[sdk.Datum], config: dict[str, float | str] | None, forward_only: bool
) -> None:
    content = sdk.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config)
    request = SdkForwardBackwardRequest(forward_backward_input=content, model_id="s:train:0", seq_id=7)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    decoded = decode_forward_backward_request(message.SerializeToString())

    assert (decoded.model_id, decoded.seq_id, decoded.loss_fn) == ("s:train:0", 7, "ppo")
    assert decoded.forward_only is forward_only
    assert decoded.loss_fn_config == (config or {})
    assert len(decoded.data) == len(data)
    for mine, theirs in zip(decoded.data, data, strict=True):
        assert mine.model_input == from_sdk(theirs.model_input)
        assert mine.model_input_spans == from_sdk(theirs).model_input_spans
        assert mine.loss_fn_input_spans == from_sdk(theirs).loss_fn_input_spans
        assert mine.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
        for name, tensor in theirs.loss_fn_inputs.items():
            assert mine.loss_fn_inputs[name].is_sparse == (tensor.sparse_crow_indices is not None)
            dense = tensor.to_numpy()
            assert mine.loss_fn_inputs[name].dtype == tensor.dtype
            np.testing.assert_array_equal(mine.loss_fn_inputs[name].to_numpy(), np.atleast_1d(dense))

    # And ours sends the same bytes (maps have no order, hence the detour over the message).
    sent = public.ForwardBackwardRequest.FromString(encode_forward_backward_request(decoded))
    assert sent.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)


def test_decoded_arrays_are_views_of_the_message_and_not_copies() -> None:
    datum = Datum(
        model_input=ModelInput.from_ints(range(100)),
        loss_fn_inputs={
            "target_tokens": np.arange(100),
            "weights": TensorData(
                data=np.ones(3),
                dtype="float32",
                shape=[3, 50],
                sparse_crow_indices=range(4),
                sparse_col_indices=[4, 5, 6],
            ),
        },
    )
    body = encode_forward_backward_request(ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum], loss_fn="x"))
    decoded = decode_forward_backward_request(body).data[0]
    weights, text = decoded.loss_fn_inputs["weights"], decoded.model_input.chunks[0]
    assert isinstance(text, EncodedTextChunk)
    assert weights.sparse_crow_indices is not None
    assert weights.sparse_col_indices is not None
    arrays = [
        text.tokens,
        decoded.loss_fn_inputs["target_tokens"].data,
        decoded.loss_fn_inputs["target_tokens"].to_numpy(),
        weights.data,
        weights.sparse_crow_indices,
        weights.sparse_col_indices,
    ]
    assert [array.dtype.name for array in arrays] == ["int32", "int64", "int64", "float32", "int64", "int64"]
    for array in arrays:
        assert isinstance(root(array), bytes)
        assert not array.flags.writeable


def test_decoded_results_are_views_of_one_buffer() -> None:
    output = ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": TensorData.from_numpy(np.ones(n))} for n in (1, 2, 3)])
    decoded = decode_forward_backward_output(encode_forward_backward_output(output))
    owners = {id(root(datum["logprobs"].data)) for datum in decoded.loss_fn_outputs}
    assert len(owners) == 1
    assert isinstance(root(decoded.loss_fn_outputs[2]["logprobs"].data), bytes)
    sample = SampleOutput(sequences=[SampledSequence(stop_reason="stop", tokens=[1, 2], logprobs=[-1.0, -2.0])])
    sequence = decode_sample_output(encode_sample_output(sample)).sequences[0]
    assert isinstance(root(sequence.tokens), bytes)
    assert isinstance(root(sequence.logprobs), bytes)


def request_message(**datum: Any) -> wire.ForwardBackwardRequest:
    """A message whose fourth datum is made of `datum`; the others are good."""
    good = wire.Datum(model_input=[{"encoded_text": {"tokens": b"\1\0\0\0"}}])
    return wire.ForwardBackwardRequest(
        model_id="m", seq_id=1, loss_fn="x", data=[good, good, good, wire.Datum(**datum)]
    )


def tensor_message(**tensor: Any) -> wire.ForwardBackwardRequest:
    return request_message(loss_fn_inputs={"weights": wire.Tensor(**tensor)})


FLOAT32, INT64, INT32, BFLOAT16 = wire.DTYPE_FLOAT32, wire.DTYPE_INT64, wire.DTYPE_INT32, wire.DTYPE_BFLOAT16
ONES_CSR = {
    "values": b"\0" * 8,
    "crow_indices": np.array([0, 1, 2]).tobytes(),
    "col_indices": np.array([0, 1]).tobytes(),
}


@pytest.mark.parametrize(
    ("dtype", "array", "expected"),
    [
        (INT32, np.array([1, -2, 2**31 - 1], np.int32), np.array([1, -2, 2**31 - 1], np.int64)),
        (BFLOAT16, np.array([0x3F80, 0xC020, 0x7F80], np.uint16), np.array([1.0, -2.5, np.inf], np.float32)),
    ],
    ids=["int32", "bfloat16"],
)
def test_narrow_dtypes_are_widened(dtype: int, array: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    message = tensor_message(dense=array.tobytes(), dtype=dtype, shape=[3])
    tensor = decode_forward_backward_request(message.SerializeToString()).data[3].loss_fn_inputs["weights"]
    assert tensor.data.dtype == expected.dtype
    np.testing.assert_array_equal(tensor.data, expected)


def test_nan_and_infinity_are_left_to_the_backend() -> None:
    values = np.array([np.nan, np.inf, -np.inf], np.float32)
    message = tensor_message(dense=values.tobytes(), dtype=FLOAT32, shape=[3])
    message.loss_fn_config_v2["clip"].number = np.nan
    decoded = decode_forward_backward_request(message.SerializeToString())
    np.testing.assert_array_equal(decoded.data[3].loss_fn_inputs["weights"].data, values)


def test_v2_of_the_loss_config_wins_and_keys_that_only_v1_has_are_kept() -> None:
    message = request_message()
    message.loss_fn_config["both"] = 1.0
    message.loss_fn_config["old"] = 2.0
    message.loss_fn_config_v2["both"].number = 3.0
    message.loss_fn_config_v2["text"].text = "mean"
    decoded = decode_forward_backward_request(message.SerializeToString())
    assert decoded.loss_fn_config == {"both": 3.0, "old": 2.0, "text": "mean"}


WRONG_DATA = {
    "weights of 7 bytes": (
        tensor_message(dense=b"1234567", dtype=FLOAT32),
        "data[3].loss_fn_inputs['weights']: 7 bytes",
    ),
    "fewer values than the shape": (
        tensor_message(dense=b"\0" * 12, dtype=FLOAT32, shape=[4]),
        "data[3].loss_fn_inputs['weights']: shape [4] holds 4 values, not 3",
    ),
    "more values than the shape": (
        tensor_message(dense=b"\0" * 16, dtype=INT64, shape=[1, 1]),
        "data[3].loss_fn_inputs['weights']: shape [1, 1] holds 1 values, not 2",
    ),
    "negative shape": (
        tensor_message(dense=b"\0" * 4, dtype=FLOAT32, shape=[-1, -1]),
        "data[3].loss_fn_inputs['weights'].shape: negative size in [-1, -1]",
    ),
    "shape whose product overflows": (
        tensor_message(dense=b"", dtype=FLOAT32, shape=[2**32, 2**32]),
        "data[3].loss_fn_inputs['weights']: shape [4294967296, 4294967296] holds",
    ),
    "unspecified dtype": (tensor_message(dense=b""), "data[3].loss_fn_inputs['weights'].dtype: unknown value 0"),
    "unknown dtype": (tensor_message(dense=b"", dtype=9), "data[3].loss_fn_inputs['weights'].dtype: unknown value 9"),
    "no encoding": (
        tensor_message(dtype=FLOAT32),
        "data[3].loss_fn_inputs['weights']: neither dense nor sparse_csr is set",
    ),
    "sparse without a shape": (
        tensor_message(sparse_csr=ONES_CSR, dtype=FLOAT32),
        "data[3].loss_fn_inputs['weights'].shape: a sparse tensor has two dimensions, not None",
    ),
    "sparse column out of range": (
        tensor_message(sparse_csr=ONES_CSR, dtype=FLOAT32, shape=[2, 1]),
        "data[3].loss_fn_inputs['weights'].sparse_col_indices: must be in [0, 1), found 0 to 1",
    ),
    "sparse rows do not fit": (
        tensor_message(sparse_csr=ONES_CSR, dtype=FLOAT32, shape=[3, 2]),
        "data[3].loss_fn_inputs['weights'].sparse_crow_indices: 3 entries for 3 rows, expected 4",
    ),
    "sparse and huge": (
        tensor_message(sparse_csr=ONES_CSR, dtype=FLOAT32, shape=[2, 2**40]),
        "data[3].loss_fn_inputs['weights']: shape [2, 1099511627776] has 2199023255552 cells, the limit is",
    ),
    "sparse indices cut short": (
        tensor_message(sparse_csr={**ONES_CSR, "col_indices": b"123"}, dtype=FLOAT32, shape=[2, 2]),
        "data[3].loss_fn_inputs['weights'].col_indices: 3 bytes",
    ),
    "tokens of 5 bytes": (
        request_message(model_input=[{"encoded_text": {"tokens": b"12345"}}]),
        "data[3].model_input.chunks[0].tokens: 5 bytes are not a multiple of 4",
    ),
    "empty text": (
        request_message(model_input=[{"encoded_text": {}}]),
        "data[3].model_input.chunks[0].tokens: a text chunk needs at least one token",
    ),
    "negative token": (
        request_message(model_input=[{"encoded_text": {"tokens": np.array([4, -5], np.int32).tobytes()}}]),
        "data[3].model_input.chunks[0].tokens: token ids must not be negative, found -5 at position 1",
    ),
    "no chunk kind": (
        request_message(model_input=[{"encoded_text": {"tokens": b"1234"}}, {}]),
        "data[3].model_input.chunks[1]: neither encoded_text nor image is set",
    ),
    "no image": (
        request_message(model_input=[{"image": {"data": b"hello", "format": "png"}}]),
        "data[3].model_input.chunks[0].data: no PNG, JPEG, WebP or GIF file (it begins with 68 65 6c 6c 6f)",
    ),
    "format that contradicts the image": (
        request_message(model_input=[{"image": {"data": PNG, "format": "jpeg"}}]),
        "data[3].model_input.chunks[0].format: says 'jpeg', but data is a png file",
    ),
    "unknown image format": (
        request_message(model_input=[{"image": {"data": PNG, "format": "bmp"}}]),
        "data[3].model_input.chunks[0].format: Input should be 'png', 'jpeg', 'webp' or 'gif', not 'bmp'",
    ),
    "no expected tokens": (
        request_message(model_input=[{"image": {"data": PNG, "format": "png", "expected_tokens": 0}}]),
        "data[3].model_input.chunks[0].expected_tokens: Input should be greater than or equal to 1, not 0",
    ),
    "span without a kind": (request_message(model_input_spans=[{}]), "data[3].model_input_spans[0]: neither"),
    "span without a sequence": (
        request_message(loss_fn_input_spans=[{"prompt_tokens": {"length": 1}}]),
        "data[3].loss_fn_input_spans[0].sequence_id:",
    ),
    "span of negative length": (
        request_message(loss_fn_input_spans=[{"sampled_tokens": {"sequence_id": "a", "length": -1}}]),
        "data[3].loss_fn_input_spans[0].length: Input should be greater than or equal to 0, not -1",
    ),
}

UNSUPPORTED_DATA = {
    "dmel": (request_message(model_input=[{"dmel": {"dmel": b"1"}}]), "data[3].model_input.chunks[0].dmel: "),
    "override_dimensions": (
        request_message(
            model_input=[
                {"image": {"data": PNG, "format": "png", "override_dimensions": {"width": 3, "height": 4}}},
            ]
        ),
        "data[3].model_input.chunks[0].override_dimensions: 3x4 is not supported",
    ),
}


@pytest.mark.parametrize("case", [*WRONG_DATA, *UNSUPPORTED_DATA])
def test_wrong_data_is_accepted_by_the_envelope_and_named_when_decoded(case: str) -> None:
    message, expected = {**WRONG_DATA, **UNSUPPORTED_DATA}[case]
    envelope = parse_forward_backward_envelope(message.SerializeToString())
    assert (envelope.model_id, envelope.seq_id, envelope.forward_only) == ("m", 1, False)
    with pytest.raises(UnsupportedError if case in UNSUPPORTED_DATA else InvalidRequestError) as caught:
        envelope.decode()
    assert str(caught.value).startswith(expected)


def test_loss_config_value_without_a_kind_is_named() -> None:
    message = request_message()
    message.loss_fn_config_v2["clip"].SetInParent()
    with pytest.raises(InvalidRequestError, match=r"loss_fn_config_v2\['clip'\]: neither a number nor a text"):
        decode_forward_backward_request(message.SerializeToString())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\xff\xff\xff", "body: 3 bytes that are not a ForwardBackwardRequest"),
        (b'{"model_id": "m", "seq_id": 1}', "body: 30 bytes that are not a ForwardBackwardRequest"),
        (b"", "model_id: missing"),
        (wire.ForwardBackwardRequest(seq_id=1).SerializeToString(), "model_id: missing"),
        (wire.ForwardBackwardRequest(model_id="m").SerializeToString(), "seq_id: must be at least 1, not 0"),
        (
            wire.ForwardBackwardRequest(model_id="m", seq_id=-4).SerializeToString(),
            "seq_id: must be at least 1, not -4",
        ),
    ],
    ids=["garbage", "json", "empty", "no model", "no seq_id", "negative seq_id"],
)
def test_envelope_refuses_only_what_has_no_place_in_an_order(body: bytes, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_forward_backward_envelope(body)
    assert str(caught.value).startswith(expected)


UNKNOWN_FIELD = b"\x98\x06\x01"  # field 99, varint 1


@pytest.mark.parametrize(
    "path", ["", "data.0", "data.0.model_input.0", "data.0.model_input.0.encoded_text", "data.0.model_input.1.image"]
)
def test_fields_of_a_later_schema_are_refused_and_not_dropped(path: str) -> None:
    datum = Datum(model_input=ModelInput.from_ints([1]).append(ImageChunk(data=PNG, format="png")))
    request = ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum], loss_fn="x")
    message = wire.ForwardBackwardRequest.FromString(encode_forward_backward_request(request))
    target: Any = message
    for step in filter(None, path.split(".")):
        target = target[int(step)] if step.isdigit() else getattr(target, step)
    target.MergeFromString(UNKNOWN_FIELD)
    envelope = parse_forward_backward_envelope(message.SerializeToString())
    with pytest.raises(UnsupportedError, match=r"field numbers \[99\] are not known"):
        envelope.decode()


def test_image_pointers_have_no_wire_format() -> None:
    datum = Datum(model_input=ModelInput(chunks=[ImageAssetPointerChunk(location="x.png", format="png")]))
    request = ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum], loss_fn="x")
    with pytest.raises(UnsupportedError, match=r"data\[0\].model_input.chunks\[0\]: an image pointer"):
        encode_forward_backward_request(request)


# --- results ---------------------------------------------------------------------------------------------------------


def dense(tensor: TensorData) -> npt.NDArray[Any]:
    return np.asarray(tensor.to_numpy())


@quick
@given(forward_backward_outputs())
def test_sdk_reads_our_forward_backward_output(output: ForwardBackwardOutput) -> None:
    body = encode_forward_backward_output(output)
    read = deserialize_forward_backward_output(body)
    assert read.loss_fn_output_type == "TorchLossReturn"
    np.testing.assert_equal(read.metrics, output.metrics)
    assert len(read.loss_fn_outputs) == len(output.loss_fn_outputs)
    for theirs, mine in zip(read.loss_fn_outputs, output.loss_fn_outputs, strict=True):
        assert theirs.keys() == mine.keys()
        for name, tensor in mine.items():
            assert theirs[name].dtype == tensor.dtype
            assert theirs[name].shape == list(tensor.dense_shape)
            np.testing.assert_array_equal(theirs[name].to_numpy(), dense(tensor))
    assert decode_forward_backward_output(body) == output


def test_ragged_and_two_dimensional_outputs_stay_in_request_order() -> None:
    shapes = [(3,), (2,), (4, 5), (1, 5), (2, 7), (6,)]
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * i for i, shape in enumerate(shapes)]
    output = ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": TensorData.from_numpy(a)} for a in arrays])
    body = encode_forward_backward_output(output)
    records = public.ForwardBackwardOutput.FromString(body).loss_fn_outputs
    assert [(r.num_datums, list(r.fields["logprobs"].trailing_shape)) for r in records] == [
        (2, []),
        (2, [5]),
        (1, [7]),
        (1, []),
    ]
    offsets = np.frombuffer(records[1].fields["logprobs"].offsets, np.int64)
    assert offsets.tolist() == [0, 80, 100]  # bytes, not elements
    for theirs, array in zip(deserialize_forward_backward_output(body).loss_fn_outputs, arrays, strict=True):
        np.testing.assert_array_equal(theirs["logprobs"].to_numpy(), array)


def test_a_new_record_starts_where_the_fields_change() -> None:
    a, b = TensorData.from_numpy(np.ones(2)), TensorData.from_numpy(np.zeros(1))
    output = ForwardBackwardOutput(loss_fn_outputs=[{"a": a}, {"a": a, "b": b}, {"b": b, "a": a}, {}, {"a": b}])
    body = encode_forward_backward_output(output)
    assert [r.num_datums for r in wire.ForwardBackwardOutput.FromString(body).loss_fn_outputs] == [1, 2, 1, 1]
    assert decode_forward_backward_output(body) == output


def test_outputs_without_fields_are_counted() -> None:
    body = encode_forward_backward_output(ForwardBackwardOutput(loss_fn_outputs=[{}, {}, {}]))
    assert deserialize_forward_backward_output(body).loss_fn_outputs == [{}, {}, {}]


def test_a_shape_that_the_wire_cannot_hold_is_an_error_of_ours() -> None:
    output = ForwardBackwardOutput(loss_fn_outputs=[{"a": TensorData.from_numpy(np.zeros((3, 0)))}])
    with pytest.raises(InternalError, match=r"loss_fn_outputs\['a'\]: the wire format cannot hold .*\(3, 0\)"):
        encode_forward_backward_output(output)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"offsets": np.array([0, 4]).tobytes()}, "offsets: 2 entries for 2 datums"),
        ({"offsets": np.array([0, 4, 9]).tobytes()}, "offsets: must rise from 0 to 8"),
        ({"offsets": np.array([0, 3, 8]).tobytes()}, "offsets: must be multiples of 4"),
        ({"trailing_shape": [3]}, r"shape \[0, 3\] holds 0 values, not 1"),
        ({"dtype": 0}, "dtype: unknown value 0"),
    ],
    ids=["count", "end", "half a value", "trailing shape", "dtype"],
)
def test_broken_results_are_named(change: dict[str, Any], expected: str) -> None:
    good = {"data": b"\0" * 8, "offsets": np.array([0, 4, 8]).tobytes(), "dtype": FLOAT32}
    record = wire.ArrayRecord(num_datums=2, fields={"logprobs": wire.BatchedTensor(**{**good, **change})})
    body = wire.ForwardBackwardOutput(loss_fn_outputs=[record]).SerializeToString()
    with pytest.raises(InvalidRequestError, match=rf"loss_fn_outputs\[0\].fields\['logprobs'\](\.|: ){expected}"):
        decode_forward_backward_output(body)


@quick
@given(sample_outputs)
def test_sdk_reads_our_sample_output(output: SampleOutput) -> None:
    body = encode_sample_output(output)
    read = deserialize_sample_response(body)
    assert decode_sample_output(body) == output
    assert from_sdk(read) == output
    expected = to_sdk(output)
    for theirs, mine in zip(read.sequences, expected.sequences, strict=True):
        assert (theirs.stop_reason, theirs.tokens) == (mine.stop_reason, mine.tokens)
        np.testing.assert_equal(theirs.logprobs, mine.logprobs)
        np.testing.assert_equal(theirs.topk_logprobs, mine.topk_logprobs)
    np.testing.assert_equal(read.prompt_logprobs, expected.prompt_logprobs)


def test_large_arrays_of_a_result_are_copied_once() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    *_, values = message_parts(wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=[2, 3]), dense=(array, AS_FLOAT32))
    assert np.shares_memory(np.frombuffer(values, np.float32), array)


def test_prompt_logprobs_keep_their_nan_and_empty_logprobs_are_kept_apart_from_none() -> None:
    output = SampleOutput(
        sequences=[
            SampledSequence(stop_reason="length", tokens=[], logprobs=[]),
            SampledSequence(stop_reason="stop", tokens=[3]),
        ],
        prompt_logprobs=[np.nan, -1.5],
    )
    body = encode_sample_output(output)
    assert decode_sample_output(body) == output
    assert deserialize_sample_response(body).prompt_logprobs == [None, -1.5]


def test_tensors_of_a_sample_always_tell_their_shape() -> None:
    """The SDK fails on a result whose tensor has none."""
    output = SampleOutput(sequences=[], target_prompt_logprobs=TensorData(data=[-1.0, -2.0], dtype="float32"))
    read = deserialize_sample_response(encode_sample_output(output)).target_prompt_logprobs
    assert read is not None
    assert read.shape == [2]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (wire.SampleResponse(sequences=[{"stop_reason": 7}]), r"sequences\[0\].stop_reason: unknown value 7"),
        (wire.SampleResponse(sequences=[{"tokens": b"123"}]), r"sequences\[0\].tokens: 3 bytes"),
        (
            wire.SampleResponse(sequences=[{"tokens": b"1234", "logprobs": b"12341234"}]),
            r"sequences\[0\].logprobs: 2 values for 1 tokens",
        ),
        (
            wire.SampleResponse(topk_prompt_logprobs={"k": 2, "length": 1, "token_ids": b"1234"}),
            r"topk_prompt_logprobs.token_ids: 1 values for shape \[1, 2\]",
        ),
        (wire.SampleResponse(target_prompt_logprobs={}), "target_prompt_logprobs: neither dense nor sparse_csr"),
    ],
    ids=["stop reason", "tokens", "logprobs", "top-k", "target"],
)
def test_broken_samples_are_named(message: wire.SampleResponse, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        decode_sample_output(message.SerializeToString())
