"""Conversion from and to the SDK's objects, and SDK objects where ours are expected."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from pydantic import BaseModel, ValidationError
from tinker import types as sdk
from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensorData
from tinker.types.topk_logprobs import TopkLogprobs as SdkTopkLogprobs
from tinker_local.types import (
    AdamParams,
    CreateModelRequest,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    Frozen,
    ImageChunk,
    LoraConfig,
    ModelInput,
    OptimizerConfig,
    ProvenanceSpan,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TensorData,
    UnsupportedError,
)
from tinker_local.types.sdk import from_sdk, to_sdk

from tests.types.types_strategies import (
    PNG,
    adam_params,
    datums,
    forward_backward_outputs,
    image_chunks,
    lora_configs,
    model_inputs,
    quick,
    sample_outputs,
    sampling_params,
    sdk_datums,
    sdk_prompts,
    sdk_sampling_params,
    spans,
    tensors,
)

OURS = {
    "model input": model_inputs,
    "image": image_chunks,
    "tensor": tensors,
    "datum": datums(),
    "span": spans,
    "sampling params": sampling_params,
    "LoRA config": lora_configs,
    "Adam params": adam_params,
    "forward_backward output": forward_backward_outputs(),
    "sample output": sample_outputs,
}


def parts(value: Any) -> Any:
    """An object of the SDK as plain values that `==` understands (its TensorData compare by identity)."""
    if isinstance(value, sdk.TensorData):
        indices = (value.sparse_crow_indices, value.sparse_col_indices)
        return [value.dtype, value.shape, indices, value._numpy.shape, value._numpy.dtype, value._numpy.tobytes()]
    if isinstance(value, BaseModel):
        return [type(value), {name: parts(item) for name, item in value}]
    if isinstance(value, (list, tuple)):
        return [parts(item) for item in value]
    if isinstance(value, dict):
        return {name: parts(item) for name, item in value.items()}
    if isinstance(value, sdk.Datum):
        return {name: parts(item) for name, item in vars(value).items()}
    return value


@pytest.mark.parametrize("kind", OURS)
def test_ours_survive_the_way_to_the_sdk_and_back(kind: str) -> None:
    @quick
    @given(OURS[kind])
    def survives(value: Frozen) -> None:
        theirs = to_sdk(value)
        assert type(theirs).__module__.split(".")[0] == "tinker"
        assert from_sdk(theirs) == value
        assert from_sdk(value) is value
        assert to_sdk(theirs) is theirs

    survives()


@pytest.mark.parametrize(
    "kind",
    {"datum": sdk_datums(), "prompt": sdk_prompts, "sampling params": sdk_sampling_params}.items(),
    ids=lambda k: k[0],
)
def test_the_sdks_survive_the_way_to_ours_and_back(kind: Any) -> None:
    @quick
    @given(kind[1])
    def survives(value: Any) -> None:
        ours = from_sdk(value)
        assert isinstance(ours, Frozen)
        back = to_sdk(ours)
        assert type(back) is type(value)
        assert parts(back) == parts(value)

    survives()


def test_sdk_results_made_of_lists_convert_like_those_made_of_arrays() -> None:
    rows = [None, [(5, -0.5), (7, -1.5)], [(9, -0.25)]]
    made_of_lists = sdk.SampleResponse(
        sequences=[
            sdk.SampledSequence(
                stop_reason="stop", sequence_id="r:0", _tokens_list=[1, 2], _logprobs_list=[-1.0, -2.0],
                _topk_logprobs_list=rows[1:],
            )
        ],
        _prompt_logprobs_list=[None, -3.0, -4.0],
        _topk_prompt_logprobs_list=rows,
    )  # fmt: skip
    made_of_arrays = sdk.SampleResponse(
        sequences=[
            sdk.SampledSequence(
                stop_reason="stop",
                sequence_id="r:0",
                tokens_np=np.array([1, 2], np.int32),
                logprobs_np=np.array([-1, -2], np.float32),
                topk_logprobs_np=SdkTopkLogprobs(
                    np.array([[5, 7], [9, 0]], np.int32), np.array([[-0.5, -1.5], [-0.25, -99999]], np.float32)
                ),
            )
        ],
        prompt_logprobs_np=np.array([np.nan, -3, -4], np.float32),
        topk_prompt_logprobs_np=SdkTopkLogprobs(
            np.array([[0, 0], [5, 7], [9, 0]], np.int32),
            np.array([[-99999, -99999], [-0.5, -1.5], [-0.25, -99999]], np.float32),
        ),
    )
    assert from_sdk(made_of_lists) == from_sdk(made_of_arrays)
    again = to_sdk(from_sdk(made_of_lists))
    assert again.topk_prompt_logprobs == rows
    assert again.prompt_logprobs == [None, -3.0, -4.0]
    assert again.sequences[0].sequence_id == "r:0"


def test_a_sparse_tensor_of_the_sdk_stays_sparse_with_the_same_values() -> None:
    dense = torch.zeros(6, 50)
    dense[1, 3], dense[4, 0] = 2.5, -1.0
    theirs = sdk.Datum(model_input=sdk.ModelInput.from_ints([1]), loss_fn_inputs={"weights": dense})
    ours = from_sdk(theirs).loss_fn_inputs["weights"]
    assert ours.is_sparse
    assert ours.data.size == 2
    np.testing.assert_array_equal(ours.to_numpy(), dense.numpy())


def test_arrays_given_to_the_sdk_are_its_own() -> None:
    ours = SampledSequence(stop_reason="stop", tokens=[1, 2], logprobs=[-1.0, -2.0])
    theirs = to_sdk(ours)
    theirs.tokens_np[0] = 9
    assert ours.tokens.tolist() == [1, 2]


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="dmel"):
        from_sdk(sdk.DmelChunk(dmel=b"1"))
    with pytest.raises(UnsupportedError, match="dmel"):
        from_sdk(sdk.ModelInput(chunks=[sdk.DmelChunk(dmel=b"1")]))
    with pytest.raises(TypeError, match=r"tinker.*\.Checkpoint.* has no counterpart in tinker_local.types"):
        from_sdk(sdk.Checkpoint.model_construct())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"int has no counterpart in tinker_local.types"):
        from_sdk(5)
    with pytest.raises(TypeError, match=r"OptimizerConfig has no counterpart in tinker.types"):
        to_sdk(OptimizerConfig())


def test_what_the_sdk_allows_and_we_do_not_is_refused_with_the_fields_name() -> None:
    with pytest.raises(ValidationError, match="a text chunk needs at least one token"):
        from_sdk(sdk.ModelInput.from_ints([]))
    with pytest.raises(ValidationError, match="no PNG, JPEG, WebP or GIF file"):
        from_sdk(sdk.ImageChunk(data=b"hello", format="png"))


SDK_INPUT = sdk.ModelInput(
    chunks=[sdk.EncodedTextChunk(tokens=[1, 2]), sdk.ImageChunk(data=PNG, format="png", expected_tokens=4)]
)
OUR_INPUT = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), ImageChunk(data=PNG, format="png", expected_tokens=4)])


def test_sdk_objects_are_accepted_wherever_ours_are() -> None:
    assert ModelInput(chunks=list(SDK_INPUT.chunks)) == OUR_INPUT
    assert ModelInput.model_validate(SDK_INPUT) == OUR_INPUT
    assert OUR_INPUT.append(sdk.EncodedTextChunk(tokens=[3])) == OUR_INPUT.append(EncodedTextChunk(tokens=[3]))

    their_span, span = (
        sdk.SampledProvenanceSpan(sequence_id="s:0", offset=1, length=2),
        ProvenanceSpan(source="sampled", sequence_id="s:0", offset=1, length=2),
    )
    inputs: dict[str, Any] = {"target_tokens": [1, 2], "weights": np.ones((2, 1), np.float32)}
    their_datum = sdk.Datum(
        model_input=SDK_INPUT,
        loss_fn_inputs=inputs,
        model_input_spans=[their_span],
        loss_fn_input_spans=[their_span],
    )
    datum = Datum(
        model_input=OUR_INPUT,
        loss_fn_inputs=inputs,
        model_input_spans=[span],
        loss_fn_input_spans=[span],
    )
    theirs: dict[str, Any] = {"target_tokens": their_datum.loss_fn_inputs["target_tokens"], "span": their_span}
    mixed = Datum(
        model_input=SDK_INPUT,
        loss_fn_inputs={"target_tokens": theirs["target_tokens"], "weights": inputs["weights"]},
        model_input_spans=[theirs["span"]],
        loss_fn_input_spans=[span],
    )
    assert mixed == datum
    request = ForwardBackwardRequest(model_id="m", seq_id=1, data=[their_datum, datum], loss_fn="cross_entropy")
    assert request.data == (datum, datum)

    target = JsonTensorData(data=[1, -1], dtype="int64", shape=[2, 1])
    sample = SampleRequest(
        sampling_session_id="s",
        seq_id=0,
        prompt=SDK_INPUT,
        sampling_params=sdk.SamplingParams(max_tokens=3, stop=["x"]),
        target_prompt_logprobs=target,
    )
    assert sample.prompt == OUR_INPUT
    assert sample.sampling_params == SamplingParams(max_tokens=3, stop=("x",))
    assert sample.target_prompt_logprobs == TensorData(data=[1, -1], dtype="int64", shape=[2, 1])

    model = CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", lora_config=sdk.LoraConfig(rank=8))
    assert model.lora_config == LoraConfig(rank=8)
    assert AdamParams.model_validate(sdk.AdamParams(learning_rate=0.5)) == AdamParams(learning_rate=0.5)


def test_sdk_results_are_accepted_wherever_ours_are() -> None:
    tensor = sdk.TensorData(data=[1.0], dtype="float32", shape=[1])
    assert ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": tensor}]) == ForwardBackwardOutput(
        loss_fn_outputs=[{"logprobs": TensorData(data=[1.0], dtype="float32", shape=[1])}]
    )
    sequence = sdk.SampledSequence(stop_reason="stop", sequence_id="a", tokens_np=np.array([1], np.int32))
    assert SampleOutput(sequences=[sequence]).sequences[0].tokens.tolist() == [1]


def test_an_sdk_object_of_another_kind_is_refused_with_the_fields_name() -> None:
    with pytest.raises(ValidationError, match=r"model_input\n.*instance of ModelInput"):
        Datum(model_input=sdk.LoraConfig(rank=1))
    with pytest.raises(ValidationError, match=r"lora_config\.rank"):
        CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", lora_config=sdk.LoraConfig(rank=0))
