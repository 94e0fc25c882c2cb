"""Hypothesis strategies: random objects of our types and of the official SDK's."""

import io
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from tinker import types as sdk
from tinker_local.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageAssetPointerChunk,
    ImageChunk,
    LoraConfig,
    ModelInput,
    PromptAltTokens,
    ProvenanceSpan,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)

from tests.conftest import few

quick = settings(deadline=None, max_examples=few(60), suppress_health_check=[HealthCheck.too_slow])


def image_file(format: str, size: tuple[int, int] = (3, 2)) -> bytes:
    """A small image as the bytes of its file."""
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 60)).save(file, format)
    return file.getvalue()


PNG, JPEG = image_file("PNG"), image_file("JPEG")

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
counts = st.none() | st.integers(1, 5000)
float32s = st.floats(width=32)  # NaN and infinities too: only the backend refuses them
finite_floats = st.floats(allow_nan=False, allow_infinity=False)
text_chunks = st.builds(EncodedTextChunk, tokens=token_lists)
image_chunks = st.builds(ImageChunk, data=st.just(PNG), format=st.just("png"), expected_tokens=counts) | st.builds(
    ImageChunk, data=st.just(JPEG), format=st.just("jpeg"), expected_tokens=counts
)
pointer_chunks = st.builds(
    ImageAssetPointerChunk, location=names, format=st.sampled_from(["png", "jpeg"]), expected_tokens=counts
)
trainable_inputs = st.builds(ModelInput, chunks=st.lists(text_chunks | image_chunks, max_size=4))
model_inputs = st.builds(ModelInput, chunks=st.lists(text_chunks | image_chunks | pointer_chunks, max_size=4))


def arrays(dtype: type, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any values of `dtype` (for float32 NaN and infinities too)."""
    return hnp.arrays(dtype, shape)


dense_tensors = st.builds(
    TensorData.from_numpy,
    st.sampled_from([np.float32, np.int64]).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    ),
)
shapeless_tensors = dense_tensors.map(lambda tensor: TensorData(data=tensor.data, dtype=tensor.dtype))


@st.composite
def sparse_tensors(draw: st.DrawFn, dtype: str | None = None) -> TensorData:
    dtype = dtype or draw(st.sampled_from(["float32", "int64"]))
    rows, cols = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    columns = [sorted(draw(st.sets(st.integers(0, cols - 1)))) for _ in range(rows)]
    col = [c for row in columns for c in row]
    return TensorData(
        data=draw(arrays(np.float32 if dtype == "float32" else np.int64, (len(col),))),
        dtype=dtype,
        shape=[rows, cols],
        sparse_crow_indices=np.cumsum([0, *map(len, columns)]),
        sparse_col_indices=col,
    )


tensors = dense_tensors | shapeless_tensors | sparse_tensors()
spans = st.builds(
    ProvenanceSpan,
    source=st.sampled_from(["prompt", "sampled"]),
    sequence_id=names,
    offset=st.integers(0, 2**40),
    length=st.integers(0, 2**40),
)


@st.composite
def datums(draw: st.DrawFn) -> Datum:
    # On the wire, two empty span lists equal none, so at least one span each.
    pair = draw(st.none() | st.tuples(*[st.lists(spans, min_size=1, max_size=3)] * 2))
    return Datum(
        model_input=draw(trainable_inputs),
        loss_fn_inputs=draw(st.dictionaries(names, tensors, max_size=3)),
        model_input_spans=pair and pair[0],
        loss_fn_input_spans=pair and pair[1],
    )


requests = st.builds(
    ForwardBackwardRequest,
    model_id=names,
    seq_id=st.integers(1, 2**31 - 1),
    data=st.lists(datums(), max_size=4),
    loss_fn=names,
    loss_fn_config=st.dictionaries(names, st.floats() | names, max_size=3),
    forward_only=st.booleans(),
)


@st.composite
def forward_backward_outputs(draw: st.DrawFn) -> ForwardBackwardOutput:
    """Every datum has the same fields; how many dimensions each has, and of what size, changes from datum to datum."""
    fields = draw(st.dictionaries(names, st.sampled_from([np.float32, np.int64]), max_size=3))
    shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3) | st.just((0,)) | st.just((0, 2))
    return ForwardBackwardOutput(
        loss_fn_output_type=draw(st.just("TorchLossReturn")),
        loss_fn_outputs=[
            {name: TensorData.from_numpy(draw(arrays(dtype, draw(shapes)))) for name, dtype in fields.items()}
            for _ in range(draw(st.integers(0, 5)))
        ],
        metrics=draw(st.dictionaries(names, st.floats(), max_size=3)),
    )


@st.composite
def topk_logprobs(draw: st.DrawFn, length: int | None = None) -> TopkLogprobs:
    shape = (draw(st.integers(1, 4)) if length is None else length, draw(st.integers(1, 3)))
    token_ids = draw(hnp.arrays(np.int32, shape, elements=st.integers(0, 2**31 - 1)))
    return TopkLogprobs(token_ids=token_ids, logprobs=draw(arrays(np.float32, shape)))


@st.composite
def sampled_sequences(draw: st.DrawFn) -> SampledSequence:
    tokens = draw(token_lists)
    return SampledSequence(
        stop_reason=draw(st.sampled_from(["stop", "length"])),
        tokens=tokens,
        logprobs=draw(st.none() | arrays(np.float32, (len(tokens),))),
        topk_logprobs=draw(st.none() | topk_logprobs(len(tokens))),
    )


@st.composite
def alternatives(draw: st.DrawFn) -> PromptAltTokens:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return PromptAltTokens(
        tokens=TensorData.from_numpy(draw(arrays(np.int64, shape))),
        logprobs=TensorData.from_numpy(draw(arrays(np.float32, shape))),
    )


sample_outputs = st.builds(
    SampleOutput,
    sequences=st.lists(sampled_sequences(), max_size=3),
    prompt_logprobs=st.none() | hnp.arrays(np.float32, st.integers(1, 5)),
    topk_prompt_logprobs=st.none() | topk_logprobs(),
    target_prompt_logprobs=st.none() | dense_tensors | sparse_tensors("float32"),
    prompt_alt_tokens=st.none() | alternatives(),
    prompt_cache_hit_tokens=st.integers(0, 2**31 - 1),
)

stops = st.none() | names | st.lists(names, max_size=3) | st.lists(st.integers(0, 2**31), max_size=3)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=counts,
    seed=st.none() | st.integers(),
    stop=stops,
    temperature=st.floats(0, 100),
    top_k=st.just(-1) | st.integers(1, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
)
lora_configs = st.builds(
    LoraConfig,
    rank=st.integers(1, 4096),
    seed=st.none() | st.integers(),
    train_unembed=st.booleans(),
    train_mlp=st.booleans(),
    train_attn=st.booleans(),
)
rates = st.floats(0, 1e6)
betas = st.floats(0, 1, exclude_max=True)
adam_params = st.builds(
    AdamParams,
    learning_rate=rates,
    beta1=betas,
    beta2=betas,
    eps=rates,
    weight_decay=rates,
    grad_clip_norm=rates,
)

# --- objects of the SDK, made as its users make them -----------------------------------------------------------------

sdk_chunks = st.builds(sdk.EncodedTextChunk, tokens=token_lists) | st.builds(
    sdk.ImageChunk, data=st.just(PNG), format=st.just("png"), expected_tokens=counts
)
sdk_model_inputs = st.builds(sdk.ModelInput, chunks=st.lists(sdk_chunks, max_size=4))
sdk_pointer_chunks = st.builds(
    sdk.ImageAssetPointerChunk, location=names, format=st.just("jpeg"), expected_tokens=counts
)
sdk_prompts = st.builds(sdk.ModelInput, chunks=st.lists(sdk_chunks | sdk_pointer_chunks, max_size=4))


@st.composite
def sdk_loss_fn_inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Lists, numpy arrays and torch tensors; a sparse enough torch matrix becomes CSR."""
    import torch

    n = draw(st.integers(1, 12))
    mostly_zero = st.just(0) | st.just(0) | st.just(0) | st.integers(-(2**62), 2**62)
    matrix = draw(hnp.arrays(np.int64, (n, 6), elements=mostly_zero, fill=st.just(0)))
    return draw(
        st.fixed_dictionaries(
            {
                "target_tokens": st.sampled_from(
                    [matrix, torch.from_numpy(matrix), matrix[:, 0], matrix[:, 0].tolist()]
                ),
                "weights": st.sampled_from([torch.from_numpy(matrix).float(), matrix.astype(np.float64)]),
            },
            optional={
                "logprobs": st.lists(st.floats(-50, 0), max_size=4),
                "advantages": arrays(np.float32, (n,)),
                "custom": arrays(np.int32, (2, 2)) | arrays(np.float16, ()),
            },
        )
    )


sdk_spans = st.one_of(
    [
        st.builds(kind, sequence_id=names, offset=st.integers(0, 2**40), length=st.integers(0, 2**40))
        for kind in (sdk.PromptProvenanceSpan, sdk.SampledProvenanceSpan)
    ]
)


@st.composite
def sdk_datums(draw: st.DrawFn) -> sdk.Datum:
    pair = draw(st.none() | st.tuples(*[st.lists(sdk_spans, min_size=1, max_size=3)] * 2))
    return sdk.Datum(
        model_input=draw(sdk_model_inputs),
        loss_fn_inputs=draw(sdk_loss_fn_inputs()),
        model_input_spans=pair and pair[0],
        loss_fn_input_spans=pair and pair[1],
    )


sdk_sampling_params = st.builds(
    sdk.SamplingParams,
    max_tokens=counts,
    seed=st.none() | st.integers(),
    stop=stops,
    temperature=st.integers(0, 2) | st.floats(0, 100),
    top_k=st.just(-1) | st.integers(1, 1000),
    top_p=st.just(1) | st.floats(0, 1, exclude_min=True),
)
