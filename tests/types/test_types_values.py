"""What our types hold: immutable arrays, unchanged values, and nothing that contradicts itself."""

import base64
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import ValidationError
from tinker_local.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    LoraConfig,
    ModelInput,
    ProvenanceSpan,
    SampledSequence,
    TensorData,
    TopkLogprobs,
)

from tests.types.types_strategies import JPEG, PNG

# --- immutable arrays ------------------------------------------------------------------------------------------------


def holders(array: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """Everything of ours that can be given `array` (numbers from 1 on), as the array that it then holds."""
    ints, longs, matrix = array.view(np.int32), array.view(np.int32).astype(np.int64), array.reshape(1, -1)
    sparse = TensorData(
        data=array[:1], dtype="float32", shape=[1, 2**20], sparse_crow_indices=[0, 1], sparse_col_indices=longs[:1] % 7
    )
    topk = TopkLogprobs(token_ids=ints.reshape(1, -1), logprobs=matrix)
    return {
        "EncodedTextChunk": EncodedTextChunk(tokens=ints).tokens,
        "ModelInput.from_ints": ModelInput.from_ints(ints).chunks[0].tokens,  # type: ignore[union-attr]
        "TensorData": TensorData(data=array, dtype="float32").data,
        "TensorData.from_numpy": TensorData.from_numpy(matrix).data,
        "TensorData.to_numpy": TensorData.from_numpy(matrix).to_numpy(),
        "sparse values": sparse.data,
        "dense of sparse": sparse.to_numpy(),
        "Datum": Datum(model_input=ModelInput(), loss_fn_inputs={"w": array}).loss_fn_inputs["w"].data,
        "SampledSequence": SampledSequence(stop_reason="stop", tokens=ints, logprobs=array).logprobs,  # type: ignore[dict-item]
        "TopkLogprobs.token_ids": topk.token_ids,
        "TopkLogprobs.logprobs": topk.logprobs,
    }


@pytest.mark.parametrize("name", holders(np.ones(3, np.float32)))
def test_arrays_given_cannot_be_changed_through_us_nor_ours_through_them(name: str) -> None:
    given = np.array([1.0, 2.0, 3.0], np.float32)
    held = holders(given)[name]
    before = held.copy()
    given[:] = 9.0
    np.testing.assert_array_equal(held, before)
    assert not held.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        held[...] = 0
    assert given.flags.writeable  # and the caller's array was left alone


def test_read_only_views_of_writable_memory_are_copied() -> None:
    owner = np.array([1, 2, 3], np.int64)
    view = owner.view()
    view.flags.writeable = False
    for array in (view, view[1:], np.frombuffer(memoryview(bytearray(owner)).toreadonly(), np.int64)):
        assert not np.shares_memory(TensorData(data=array, dtype="int64").data, array)


def test_memory_that_nobody_can_write_to_is_shared() -> None:
    raw = np.arange(4, dtype=np.int64).tobytes()
    frozen = np.arange(4)
    frozen.flags.writeable = False
    for array in (np.frombuffer(raw, np.int64), np.frombuffer(memoryview(raw), np.int64)[1:], frozen, frozen[2:]):
        tensor = TensorData(data=array, dtype="int64")
        assert np.shares_memory(tensor.data, array)
        assert np.shares_memory(TensorData(data=tensor.data, dtype="int64").data, array)
        assert np.shares_memory(tensor.to_numpy(), array)


def test_fields_cannot_be_set() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EncodedTextChunk(tokens=[1]).tokens = np.zeros(1, np.int32)  # type: ignore[misc]


# --- values are kept or refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint64), [np.int64(1), np.int32(2)],
     np.array([1, 9, 2])[::2]],
    ids=["list", "tuple", "range", "int64", "uint64", "numpy numbers", "strided"],
)  # fmt: skip
def test_token_ids_of_any_integer_kind_become_int32(tokens: Any) -> None:
    chunk = EncodedTextChunk(tokens=tokens)
    assert chunk.tokens.dtype == np.int32
    assert chunk.tokens.tolist() == [1, 2]
    assert chunk.length == 2


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "at least one token"),
        ([1, -1], "must not be negative, found -1 at position 1"),
        ([2**31], "must fit int32, found 2147483648 at position 0"),
        (np.array([0, 2**32 + 1]), "must fit int32, found 4294967297 at position 1"),
        (np.array([2**63], np.uint64), "must fit int32, found 9223372036854775808 at position 0"),
        ([2**70], "at most 64 bits"),
        ([1.0], "must be integers, not float64"),
        (np.array([1.5]), "must be integers, not float64"),
        ([True], "must be numbers, not bool"),
        ([1, True], "must be numbers, not bool"),
        (np.array([True]), "not bool"),
        (["1"], "must be numbers"),
        ("12", "must be a list of numbers or an array, not str"),
        (b"12", "must be a list of numbers or an array, not bytes"),
        ([[1]], r"must have 1 dimension, not shape \[1, 1\]"),
        (5, "must be a list of numbers or an array, not int"),
        (None, "not NoneType"),
        (torch.tensor([1]), "not Tensor"),
    ],
    ids=repr,
)
def test_token_ids_that_are_none_are_refused(tokens: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=f"tokens\n.*{reason}"):
        EncodedTextChunk(tokens=tokens)


@pytest.mark.parametrize(
    ("data", "dtype", "reason"),
    [
        ([1.0, 2.5], "int64", "data: int64 values must be integers, not float64"),
        (np.ones(1, np.float32), "int64", "data: int64 values must be integers, not float32"),
        (np.array([2**63], np.uint64), "int64", "data: int64 values must fit int64, found 9223372036854775808"),
        ([1e300], "float32", r"data: float32 values must fit float32, found 1e\+300 at position 0"),
        ([True], "float32", "must be numbers, not bool"),
        ([1 + 2j], "float32", "not complex128"),
        ([[1.0]], "float32", r"must have 1 dimension, not shape \[1, 1\]"),
        (["a"], "float32", "must be numbers"),
        ([1], "bfloat16", "dtype\n.*Input should be 'float32' or 'int64'"),
    ],
)
def test_tensor_values_that_would_change_are_refused(data: Any, dtype: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TensorData(data=data, dtype=dtype)


def test_tensor_values_are_converted_without_a_change() -> None:
    assert TensorData(data=[1, 2], dtype="float32").data.dtype == np.float32
    assert TensorData(data=[], dtype="float32").data.dtype == np.float32
    assert TensorData(data=[], dtype="int64").data.dtype == np.int64
    assert TensorData(data=[-(2**63), 2**63 - 1], dtype="int64").data.tolist() == [-(2**63), 2**63 - 1]
    special = TensorData(data=[np.inf, -np.inf, np.nan], dtype="float32").data
    np.testing.assert_array_equal(special, np.array([np.inf, -np.inf, np.nan], np.float32))
    assert TensorData(data=np.array([1.5], np.float16), dtype="float32").data.tolist() == [1.5]
    scalar = TensorData.from_numpy(np.float64(3))
    assert (scalar.shape, scalar.to_numpy().shape, float(scalar.to_numpy())) == ((), (), 3.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [3]}, r"shape \[3\] holds 3 values, not 2"),
        ({"shape": [-1, -2]}, r"shape: negative size in \[-1, -2\]"),
        ({"shape": [2**32, 2**32]}, "holds 18446744073709551616 values, not 2"),
        ({"sparse_crow_indices": [0, 2]}, "must be given together or not at all"),
        ({"sparse_col_indices": [0, 1]}, "must be given together or not at all"),
    ],
)
def test_dense_tensors_that_contradict_themselves_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TensorData(**{"data": [1, 2], "dtype": "int64", **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": None}, "shape: a sparse tensor has two dimensions, not None"),
        ({"shape": [10]}, r"shape: a sparse tensor has two dimensions, not \[10\]"),
        ({"shape": [2, 2**40]}, r"shape \[2, 1099511627776\] has 2199023255552 cells, the limit is 134217728"),
        ({"shape": [3, 5]}, "sparse_crow_indices: 3 entries for 3 rows, expected 4"),
        ({"shape": [2, 4]}, r"sparse_col_indices: must be in \[0, 4\), found 1 to 4"),
        ({"sparse_col_indices": [-1, 4, 0]}, r"sparse_col_indices: must be in \[0, 5\), found -1 to 4"),
        ({"sparse_col_indices": [1, 4]}, "sparse_col_indices: 2 entries for 3 values"),
        ({"sparse_col_indices": [4, 4, 2]}, "sparse_col_indices: must rise within a row, found 4 after 4"),
        ({"sparse_col_indices": [4, 1, 2]}, "sparse_col_indices: must rise within a row, found 1 after 4"),
        ({"sparse_crow_indices": [0, 2, 2]}, "sparse_crow_indices: must rise from 0 to 3"),
        ({"sparse_crow_indices": [1, 2, 3]}, "sparse_crow_indices: must rise from 0 to 3"),
        ({"sparse_crow_indices": [0, 4, 3]}, "sparse_crow_indices: must rise from 0 to 3"),
        ({"sparse_crow_indices": [0.0, 2.0, 3.0]}, "sparse_crow_indices\n.*must be integers"),
    ],
)
def test_sparse_tensors_that_contradict_themselves_are_refused(change: dict[str, Any], reason: str) -> None:
    good: dict[str, Any] = {
        "data": [1.0, 2.0, 3.0],
        "dtype": "float32",
        "shape": [2, 5],
        "sparse_crow_indices": [0, 2, 3],
        "sparse_col_indices": [1, 4, 2],
    }
    TensorData(**good)
    with pytest.raises(ValidationError, match=reason):
        TensorData(**{**good, **change})


def test_unlisted_cells_of_a_sparse_tensor_take_the_fill_value() -> None:
    tensor = TensorData(
        data=[7, 8], dtype="int64", shape=[3, 2], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[1, 0]
    )
    assert tensor.to_numpy().tolist() == [[0, 7], [0, 0], [8, 0]]
    assert tensor.to_numpy(fill=-1).tolist() == [[-1, 7], [-1, -1], [8, -1]]


# --- datums ----------------------------------------------------------------------------------------------------------


def test_lists_in_a_datum_become_tensors_of_the_fields_dtype() -> None:
    inputs: dict[str, Any] = {"target_tokens": [[1, 2], [3, 4]], "weights": [1, 0], "empty": [], "array": np.arange(2)}
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs=inputs)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in datum.loss_fn_inputs.items()}
    assert found == {
        "target_tokens": ("int64", (2, 2)),
        "weights": ("float32", (2,)),
        "empty": ("float32", (0,)),
        "array": ("int64", (2,)),
    }


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"target_tokens": [1.5]}, r"loss_fn_inputs\.target_tokens\n.*int64 values must be integers"),
        ({"weights": [[1], [2, 3]]}, "loss_fn_inputs\n.*'weights': the rows differ in length"),
        ({"weights": ["a"]}, r"loss_fn_inputs\.weights\.data\n.*must be numbers"),
        ({"weights": np.array([True])}, r"loss_fn_inputs\.weights\.data\n.*not bool"),
        ({"weights": 1.0}, r"loss_fn_inputs\.weights\n"),
        ([1], "loss_fn_inputs\n"),
    ],
)
def test_wrong_loss_inputs_are_refused_by_name(inputs: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs=inputs)


def test_spans_come_in_pairs() -> None:
    span = ProvenanceSpan(source="prompt", sequence_id="a", length=1)
    with pytest.raises(ValidationError, match="must be given together or not at all"):
        Datum(model_input=ModelInput.from_ints([1]), model_input_spans=[span])


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_image_data_is_bytes_or_base64_and_serialises_to_base64() -> None:
    chunk = ImageChunk(data=PNG, format="png", expected_tokens=4)
    encoded = base64.b64encode(PNG).decode()
    assert ImageChunk(data=encoded, format="png", expected_tokens=4) == chunk  # type: ignore[arg-type]
    assert chunk.model_dump()["data"] == encoded
    assert ImageChunk.model_validate_json(chunk.model_dump_json()) == chunk


@pytest.mark.parametrize(
    ("data", "format", "reason"),
    [
        (b"", "png", "data: the image is empty"),
        (b"BM    ", "png", "data: no PNG, JPEG, WebP or GIF file"),
        (PNG, "jpeg", "format: says 'jpeg', but data is a png file"),
        (JPEG, "png", "format: says 'png', but data is a jpeg file"),
        (PNG, "bmp", "format\n"),
        ("no base64!", "png", "data\n.*not base64"),
        ([1, 2], "png", "data\n"),
    ],
)
def test_data_that_is_no_image_is_refused(data: Any, format: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ImageChunk(data=data, format=format)


def test_length_of_an_image_is_what_the_client_expects_or_unknown() -> None:
    known = ModelInput.from_ints([1, 2]).append(ImageChunk(data=PNG, format="png", expected_tokens=4))
    assert known.length == 6
    for chunk in (ImageChunk(data=PNG, format="png"), ImageAssetPointerChunk(location="x", format="png")):
        with pytest.raises(ValueError, match=f"{type(chunk).__name__} is known only if expected_tokens is set"):
            known.append(chunk).length  # noqa: B018


def test_tokens_of_several_text_chunks_are_their_concatenation() -> None:
    parts = ModelInput.from_ints([1, 2]).append(EncodedTextChunk(tokens=[3]))
    assert parts.to_tokens().tolist() == [1, 2, 3]
    assert not parts.to_tokens().flags.writeable
    assert ModelInput.empty().to_tokens().tolist() == []
    with pytest.raises(ValueError, match=r"chunks\[1\] is image, which has no token ids"):
        ModelInput.from_ints([1]).append(ImageChunk(data=PNG, format="png")).to_tokens()


# --- results, equality -----------------------------------------------------------------------------------------------


def test_results_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValidationError, match="logprobs: 1 values for 2 tokens"):
        SampledSequence(stop_reason="stop", tokens=[1, 2], logprobs=[-1.0])
    with pytest.raises(ValidationError, match=r"token_ids \[1, 2\] and logprobs \[2, 1\] differ"):
        TopkLogprobs(token_ids=[[1, 2]], logprobs=[[-1.0], [-2.0]])
    with pytest.raises(ValidationError, match=r"token_ids\n.*must be integers"):
        TopkLogprobs(token_ids=[[1.5]], logprobs=[[-1.0]])


def test_rank_is_at_least_one() -> None:
    with pytest.raises(ValidationError, match="rank"):
        LoraConfig(rank=0)


def test_equality_looks_at_dtype_shape_and_value_and_takes_nan_for_equal() -> None:
    def tensor(*data: float, **fields: Any) -> TensorData:
        return TensorData(**{"data": data, "dtype": "float32", **fields})

    assert tensor(1, np.nan) == tensor(1, np.nan)
    assert tensor(1, 2) != tensor(1, 3)
    assert tensor(1) != tensor(1, dtype="int64")
    assert tensor(1, 2, shape=[2]) != tensor(1, 2, shape=[1, 2])
    assert ForwardBackwardOutput(metrics={"loss:sum": np.nan}) == ForwardBackwardOutput(metrics={"loss:sum": np.nan})
    assert ForwardBackwardOutput(loss_fn_outputs=[{"a": tensor(1)}]) != ForwardBackwardOutput(loss_fn_outputs=[{}])
    assert EncodedTextChunk(tokens=[1]) != ImageChunk(data=PNG, format="png")


def test_values_survive_pickling() -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([1]).append(ImageChunk(data=PNG, format="png")),
        loss_fn_inputs={"target_tokens": [1], "weights": [0.5]},
    )
    assert pickle.loads(pickle.dumps(datum)) == datum
