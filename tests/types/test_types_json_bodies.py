"""JSON bodies as the SDK 0.38.0 sends them, and values of JSON that must or must not pass."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError
from tinker import types as sdk
from tinker._compat import model_dump
from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensorData
from tinker_local.types import (
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    Frozen,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    invalid,
)
from tinker_local.types.sdk import from_sdk

from tests.types.types_strategies import names, quick, sdk_prompts, sdk_sampling_params

seq_ids = st.integers(1, 2**31 - 1)
slots = st.integers(0, 10**18)
metadata = st.none() | st.dictionaries(names, names, max_size=2)
ttls = st.none() | st.integers(3600, 10**9)
floats = st.floats(0, 0.99)
optimizer_configs = st.just(sdk.AdamOptimizerConfig()) | st.just(sdk.DimuonOptimizerConfig())
lora_configs = st.builds(
    sdk.LoraConfig,
    rank=st.integers(1, 512),
    seed=st.none() | st.integers(),
    train_unembed=st.booleans(),
    train_mlp=st.booleans(),
    train_attn=st.booleans(),
)
adam = st.builds(
    sdk.AdamParams,
    learning_rate=st.integers(0, 3) | floats,
    beta1=st.just(0) | floats,
    beta2=floats,
    eps=floats,
    weight_decay=st.just(1) | floats,
    grad_clip_norm=floats,
)
targets = hnp.arrays("int64", hnp.array_shapes(min_dims=2, max_dims=2, max_side=3)).map(
    JsonTensorData.from_numpy
) | st.just(
    JsonTensorData(
        data=[5, 6], dtype="int64", shape=[3, 9], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[8, 0]
    )
)

BODIES: dict[str, tuple[type[Frozen], st.SearchStrategy[Any]]] = {
    "create_session": (
        CreateSessionRequest,
        st.builds(
            sdk.CreateSessionRequest,
            tags=st.lists(names, max_size=2),
            user_metadata=st.dictionaries(names, names, max_size=2),
            sdk_version=st.just("0.38.0"),
            project_id=st.none() | names,
            display_name=st.none() | names,
        ),
    ),
    "create_model": (
        CreateModelRequest,
        st.builds(
            sdk.CreateModelRequest,
            session_id=names,
            model_seq_id=slots,
            base_model=names,
            user_metadata=metadata,
            lora_config=st.none() | lora_configs,
            optimizer_config=optimizer_configs,
        ),
    ),
    "optim_step": (
        OptimStepRequest,
        st.builds(
            sdk.OptimStepRequest,
            model_id=names,
            seq_id=seq_ids,
            optim_params=adam | st.builds(sdk.DimuonParams, learning_rate=floats, beta1=floats),
        ),
    ),
    "save_weights": (
        SaveWeightsRequest,
        st.builds(
            sdk.SaveWeightsRequest,
            model_id=names,
            seq_id=seq_ids,
            path=names,
            ttl_seconds=ttls,
            overwrite=st.booleans(),
            user_metadata=metadata,
        ),
    ),
    "load_weights into a new model": (
        LoadWeightsRequest,
        st.builds(
            sdk.LoadWeightsRequest,
            session_id=names,
            model_seq_id=slots,
            path=names,
            optimizer=st.booleans(),
            base_model=st.none() | names,
            user_metadata=metadata,
            optimizer_config=st.none() | optimizer_configs,
            weights_access_token=st.none() | names,
        ),
    ),
    "load_weights into an old model": (
        LoadWeightsRequest,
        st.builds(sdk.LoadWeightsRequest, model_id=names, seq_id=seq_ids, path=names, optimizer=st.booleans()),
    ),
    "save_weights_for_sampler, named": (
        SaveWeightsForSamplerRequest,
        st.builds(
            sdk.SaveWeightsForSamplerRequest,
            model_id=names,
            seq_id=seq_ids,
            path=names,
            ttl_seconds=ttls,
            user_metadata=metadata,
        ),
    ),
    "save_weights_for_sampler, nameless": (
        SaveWeightsForSamplerRequest,
        st.builds(
            sdk.SaveWeightsForSamplerRequest,
            model_id=names,
            seq_id=seq_ids,
            sampling_session_seq_id=slots,
            kind=st.sampled_from(["snapshot", "inflight"]),
        ),
    ),
    "create_sampling_session": (
        CreateSamplingSessionRequest,
        st.builds(
            sdk.CreateSamplingSessionRequest,
            session_id=names,
            sampling_session_seq_id=slots,
            base_model=st.none() | names,
            model_path=st.none() | names,
        ),
    ),
    "asample": (
        SampleRequest,
        st.builds(
            sdk.SampleRequest,
            sampling_session_id=names,
            seq_id=slots,
            num_samples=st.integers(1, 16),
            prompt=sdk_prompts,
            sampling_params=sdk_sampling_params,
            prompt_logprobs=st.none() | st.booleans(),
            topk_prompt_logprobs=st.integers(0, 5),
            topk_sample_logprobs=st.integers(0, 5),
            target_prompt_logprobs=st.none() | targets,
            prompt_alt_tokens_k=st.integers(0, 5),
            prompt_logprobs_last_n=st.none() | st.integers(1, 5),
            record_stability_info=st.none() | st.booleans(),
        ),
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_field_of_an_sdk_body_arrives(kind: str) -> None:
    ours, theirs = BODIES[kind]

    @quick
    @given(theirs)
    def arrives(request: Any) -> None:
        body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")  # as the SDK's resources do
        parsed = ours.model_validate_json(json.dumps(body, separators=(",", ":")))
        ours_again = json.loads(parsed.model_dump_json(exclude_none=True))
        assert {name: ours_again.get(name) for name in body} == body

    arrives()


def test_prompt_of_an_sdk_body_is_the_sdks_prompt() -> None:
    @quick
    @given(sdk_prompts)
    def same(prompt: Any) -> None:
        request = sdk.SampleRequest(
            sampling_session_id="s", seq_id=0, prompt=prompt, sampling_params=sdk.SamplingParams()
        )
        body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
        assert SampleRequest.model_validate_json(json.dumps(body)).prompt == from_sdk(prompt)

    same()


def sample_body(chunk: Any = None, **params: Any) -> str:
    chunks = [{"type": "encoded_text", "tokens": [1]}, chunk or {"type": "encoded_text", "tokens": [2]}]
    return json.dumps(
        {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": chunks}, "sampling_params": params}
    )


def text(*tokens: Any) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (sample_body(text(4, -5)), "prompt.chunks[1].tokens: token ids must not be negative, found -5 at position 1"),
        (sample_body(text()), "prompt.chunks[1].tokens: a text chunk needs at least one token"),
        (sample_body(text(1.5)), "prompt.chunks[1].tokens: token ids must be integers, not float64"),
        (sample_body(text(1, True)), "prompt.chunks[1].tokens: token ids must be numbers, not bool"),
        (sample_body(text(2**31)), "prompt.chunks[1].tokens: token ids must fit int32, found 2147483648 at position 0"),
        (sample_body(text(2**70)), "prompt.chunks[1].tokens: token ids must be numbers of at most 64 bits, not object"),
        (sample_body(text("a")), "prompt.chunks[1].tokens: token ids must be numbers"),
        (sample_body({"type": "encoded_text", "tokens": "ab"}), "prompt.chunks[1].tokens: token ids must be a list"),
        (sample_body({"type": "dmel", "dmel": "AA=="}), "prompt.chunks[1]: Input tag 'dmel'"),
        (
            sample_body({"type": "image", "data": "aGVsbG8=", "format": "png"}),
            "prompt.chunks[1].data: no PNG, JPEG, WebP or GIF file (it begins with 68 65 6c 6c 6f)",
        ),
        (sample_body({"type": "image", "data": "@@", "format": "png"}), "prompt.chunks[1].data: not base64"),
        (sample_body({"type": "image", "data": "é", "format": "png"}), "prompt.chunks[1].data: not base64"),
        (sample_body({"type": "image", "data": "", "format": "png"}), "prompt.chunks[1].data: the image is empty"),
        (sample_body(temperature=-1), "sampling_params.temperature: must be a finite number >= 0, not -1.0"),
        (sample_body(temperature=float("nan")), "sampling_params.temperature: must be a finite number >= 0, not nan"),
        (sample_body(temperature="1"), "sampling_params.temperature: Input should be a valid number"),
        (sample_body(temperature=True), "sampling_params.temperature: Input should be a valid number, not True"),
        (sample_body(top_p=0), "sampling_params.top_p: must be in (0, 1], not 0.0"),
        (sample_body(top_k=0), "sampling_params.top_k: must be -1 (no limit) or at least 1, not 0"),
        (sample_body(max_tokens=0), "sampling_params.max_tokens: Input should be greater than or equal to 1, not 0"),
        (sample_body(max_tokens=1.5), "sampling_params.max_tokens: Input should be a valid integer"),
        (sample_body(stop=["a", 1]), "sampling_params.stop: must be a text, a list of texts or a list of token ids"),
        (sample_body(stop=[True]), "sampling_params.stop: must be a text"),
        (sample_body(stop=""), "sampling_params.stop: must be a text"),
        (sample_body(min_p=0.1), "sampling_params.min_p: this field is not supported by this server"),
    ],
)
def test_wrong_samples_are_refused_with_the_fields_name(body: str, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SampleRequest.model_validate_json(body)
    error = invalid(caught.value)
    assert str(error).startswith(expected)
    assert error.status == 400


def step_body(**params: Any) -> str:
    return json.dumps({"model_id": "m", "seq_id": 1, "adam_params": params})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # The SDK sends null for NaN and infinity; other clients send the constants that JSON does not have.
        (
            step_body(learning_rate=None),
            "adam_params.learning_rate: Input should be a valid number, not null (which is",
        ),
        (step_body(learning_rate=float("nan")), "adam_params.learning_rate: must be a finite number, not nan"),
        (step_body(learning_rate=float("inf")), "adam_params.learning_rate: must be a finite number, not inf"),
        (step_body(beta1=1), "adam_params.beta1: must be in [0, 1), not 1.0"),
        (step_body(eps=-1e-8), "adam_params.eps: must not be negative, not -1e-08"),
        (step_body(amsgrad=True), "adam_params.amsgrad: this field is not supported by this server"),
        (json.dumps({"model_id": "m", "seq_id": 0}), "seq_id: Input should be greater than or equal to 1, not 0"),
        (json.dumps({"model_id": "m", "seq_id": 2**31}), "seq_id: Input should be less than or equal to 2147483647"),
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
    ],
)
def test_wrong_optimizer_steps_are_refused_with_the_fields_name(body: str, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OptimStepRequest.model_validate_json(body)
    assert str(invalid(caught.value)).startswith(expected)


def test_integers_are_numbers_in_json() -> None:
    step = OptimStepRequest.model_validate_json(step_body(learning_rate=1, weight_decay=0))
    assert step.adam_params is not None
    assert type(step.adam_params.learning_rate) is float
    sample = SampleRequest.model_validate_json(sample_body(temperature=1, top_p=1))
    assert type(sample.sampling_params.temperature) is float


def test_empty_stop_and_absent_stop_are_different_and_any_seed_fits() -> None:
    assert SampleRequest.model_validate_json(sample_body(stop=[])).sampling_params.stop == ()
    assert SampleRequest.model_validate_json(sample_body()).sampling_params.stop is None
    for seed in (0, -1, 2**64, -(10**30)):
        assert SampleRequest.model_validate_json(sample_body(seed=seed)).sampling_params.seed == seed


def test_several_errors_are_all_told() -> None:
    with pytest.raises(ValidationError) as caught:
        SampleRequest.model_validate_json(sample_body(text(-1), top_k=0))
    message = str(invalid(caught.value, "request"))
    assert message == (
        "request.prompt.chunks[1].tokens: token ids must not be negative, found -1 at position 0; "
        "request.sampling_params.top_k: must be -1 (no limit) or at least 1, not 0"
    )
