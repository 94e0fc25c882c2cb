"""What a model reads and learns from: chunks of text and images, `ModelInput`, `TensorData`, `Datum`."""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    field_serializer,
    field_validator,
    model_validator,
)
from tinker_local.types.base import (
    AsList,
    Frozen,
    Indices,
    Int32Array,
    Int64Array,
    Tokens,
    TupleOf,
    float32_array,
    freeze,
    integer_array,
    number_array,
    tokens_array,
)

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


JPEG_MAGIC = b"\xff\xd8\xff"


ImageFormat = Literal["png", "jpeg", "webp", "gif"]
"""What servers read. The SDK sends the first two."""


def image_format(data: bytes) -> ImageFormat | None:
    """The format according to the first bytes of an image file, or None."""
    if data.startswith(PNG_MAGIC):
        return "png"
    if data.startswith(JPEG_MAGIC):
        return "jpeg"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    return "gif" if data.startswith((b"GIF87a", b"GIF89a")) else None


class EncodedTextChunk(Frozen):
    """Token ids of a piece of text. `tokens`: int32 [N], N >= 1, read-only."""

    tokens: Tokens
    type: Literal["encoded_text"] = "encoded_text"

    @field_validator("tokens")
    @classmethod
    def _not_empty(cls, tokens: Int32Array) -> Int32Array:
        if not tokens.size:
            raise ValueError("a text chunk needs at least one token")
        return tokens

    @property
    def length(self) -> int:
        """Number of positions of this chunk."""
        return int(self.tokens.size)


class ImageChunk(Frozen):
    """One image as the bytes of its PNG, JPEG, WebP or GIF file. It covers the image's patch positions only; the
    markers around it (vision start and end) are text.

    `data` accepts bytes or base64 text and serialises to base64. `expected_tokens` is the number of positions that the
    client expects; the server computes the real number and fails the request on a mismatch.
    """

    data: bytes
    format: ImageFormat
    expected_tokens: Annotated[int, Field(ge=1)] | None = None
    type: Literal["image"] = "image"

    @field_validator("data", mode="before")
    @classmethod
    def _decode(cls, data: Any) -> Any:
        if isinstance(data, str):
            try:
                return base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"not base64: {error}") from None
        return data

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if not self.data:
            raise ValueError("data: the image is empty")
        found = image_format(self.data)
        if found is None:
            raise ValueError(f"data: no PNG, JPEG, WebP or GIF file (it begins with {self.data[:8].hex(' ')})")
        if found != self.format:
            raise ValueError(f"format: says {self.format!r}, but data is a {found} file")
        return self

    @classmethod
    def of(cls, data: bytes, expected_tokens: int | None = None) -> Self:
        """With the format that `data` have; ValidationError if they hold none that is read."""
        return cls(data=data, format=image_format(data) or "png", expected_tokens=expected_tokens)

    @field_serializer("data")
    def _encode(self, data: bytes) -> str:
        return base64.b64encode(data).decode("ascii")

    @property
    def length(self) -> int:
        """`expected_tokens`; ValueError if it was not given, because then only a renderer knows the number."""
        if self.expected_tokens is None:
            raise ValueError("the length of an ImageChunk is known only if expected_tokens is set")
        return self.expected_tokens


class ImageAssetPointerChunk(Frozen):
    """An image given by path or URL, for sampling only; fetched only from where the operator allows it."""

    location: Annotated[str, Field(min_length=1)]
    format: ImageFormat
    expected_tokens: Annotated[int, Field(ge=1)] | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        """`expected_tokens`; ValueError if it was not given."""
        if self.expected_tokens is None:
            raise ValueError("the length of an ImageAssetPointerChunk is known only if expected_tokens is set")
        return self.expected_tokens


Chunk = Annotated[EncodedTextChunk | ImageChunk | ImageAssetPointerChunk, Field(discriminator="type")]


class ModelInput(Frozen):
    """A sequence of chunks. Several text chunks mean the same as their concatenation."""

    chunks: TupleOf[Chunk] = ()

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | npt.NDArray[Any]) -> Self:
        """A text-only input of `tokens`."""
        return cls(chunks=(EncodedTextChunk(tokens=tokens_array(tokens)),))

    @classmethod
    def empty(cls) -> Self:
        """An input without chunks, to append to."""
        return cls()

    @property
    def names_images(self) -> bool:
        """Whether any of its images is named and not sent."""
        return any(isinstance(chunk, ImageAssetPointerChunk) for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk | ImageChunk | ImageAssetPointerChunk) -> Self:
        """A new input with `chunk` at the end."""
        return type(self)(chunks=(*self.chunks, chunk))

    @property
    def length(self) -> int:
        """Number of positions; ValueError if an image has no `expected_tokens`."""
        return sum(chunk.length for chunk in self.chunks)

    def to_tokens(self) -> Int32Array:
        """All token ids, int32 [N]; ValueError if a chunk is not text."""
        for index, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"chunks[{index}] is {chunk.type}, which has no token ids")
        parts = [chunk.tokens for chunk in self.chunks if isinstance(chunk, EncodedTextChunk)]
        return freeze(np.concatenate(parts)) if parts else freeze(np.empty(0, np.int32))


TensorDtype = Literal["float32", "int64"]


MAX_SPARSE_CELLS = 2**27
"""Largest size of a sparse tensor once it is dense. Without a limit, a few bytes of CSR could ask for any amount of
memory."""


_Flat = Annotated[npt.NDArray[Any], BeforeValidator(number_array), AsList]


class TensorData(Frozen):
    """A tensor of one datum.

    `data`: the values, flat, in C order, float32 or int64 according to `dtype`, immutable. For a sparse tensor only the
    listed cells, row by row. `shape`: of the dense tensor; None means one-dimensional. `sparse_crow_indices`
    (int64 [rows+1]) and `sparse_col_indices` (int64 [nnz], rising within a row) are given together (CSR); unlisted
    cells are 0 unless the field's meaning says otherwise.
    """

    data: _Flat
    dtype: TensorDtype
    shape: TupleOf[int] | None = None
    sparse_crow_indices: Indices | None = None
    sparse_col_indices: Indices | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _check_once(cls, value: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        return value if isinstance(value, cls) else build(value)._check()

    def _check(self) -> Self:
        object.__setattr__(self, "data", _values(self.data, self.dtype))
        crow, col, shape = self.sparse_crow_indices, self.sparse_col_indices, self.shape
        if shape is not None and any(size < 0 for size in shape):
            raise ValueError(f"shape: negative size in {list(shape)}")
        if crow is not None and col is not None:
            _check_csr(shape, crow, col, self.data.size)
        elif crow is not None or col is not None:
            raise ValueError("sparse_crow_indices and sparse_col_indices must be given together or not at all")
        elif shape is not None and math.prod(shape) != self.data.size:
            raise ValueError(f"shape {list(shape)} holds {math.prod(shape)} values, not {self.data.size}")
        return self

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike) -> Self:
        """A dense tensor: floats become float32, integers int64."""
        value = np.asarray(array)
        if value.dtype.kind not in "fiu":
            raise ValueError(f"cannot make a tensor of {value.dtype}")
        dtype: TensorDtype = "float32" if value.dtype.kind == "f" else "int64"
        return cls(data=value.reshape(-1), dtype=dtype, shape=tuple(value.shape))

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is stored as CSR."""
        return self.sparse_crow_indices is not None

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape, with None read as one-dimensional."""
        return (int(self.data.size),) if self.shape is None else self.shape

    def to_numpy(self, fill: float = 0) -> npt.NDArray[Any]:
        """The dense tensor of shape `dense_shape`, read-only: a view if dense, `fill` in unlisted cells if sparse."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return self.data.reshape(self.dense_shape)
        dense = np.full(self.dense_shape, fill, dtype=self.data.dtype)
        rows = np.repeat(np.arange(self.dense_shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, self.sparse_col_indices] = self.data
        return freeze(dense)


def _values(data: npt.NDArray[Any], dtype: TensorDtype) -> npt.NDArray[Any]:
    try:
        return float32_array(data) if dtype == "float32" else integer_array(data, np.int64)
    except ValueError as error:
        raise ValueError(f"data: {dtype} values {error}") from None


def _check_csr(shape: tuple[int, ...] | None, crow: Int64Array, col: Int64Array, values: int) -> None:
    if shape is None or len(shape) != 2:
        raise ValueError(f"shape: a sparse tensor has two dimensions, not {None if shape is None else list(shape)}")
    if math.prod(shape) > MAX_SPARSE_CELLS:
        raise ValueError(f"shape {list(shape)} has {math.prod(shape)} cells, the limit is {MAX_SPARSE_CELLS}")
    rows, cols = shape
    if col.size != values:
        raise ValueError(f"sparse_col_indices: {col.size} entries for {values} values")
    if crow.size != rows + 1:
        raise ValueError(f"sparse_crow_indices: {crow.size} entries for {rows} rows, expected {rows + 1}")
    if crow[0] != 0 or crow[-1] != values or (crow[1:] < crow[:-1]).any():
        raise ValueError(f"sparse_crow_indices: must rise from 0 to {values}")
    if values and (col.min() < 0 or col.max() >= cols):
        raise ValueError(f"sparse_col_indices: must be in [0, {cols}), found {col.min()} to {col.max()}")
    row_of = np.repeat(np.arange(rows), np.diff(crow))
    repeated = np.flatnonzero((row_of[1:] == row_of[:-1]) & (col[1:] <= col[:-1]))
    if repeated.size:
        at = int(repeated[0])
        raise ValueError(f"sparse_col_indices: must rise within a row, found {col[at + 1]} after {col[at]}")


LONGEST_SEQUENCE_ID = 1024
"""Characters. Those of this server have about 70."""


class ProvenanceSpan(Frozen):
    """`length` positions taken from a sampled sequence's prompt or from its sampled tokens."""

    source: Literal["prompt", "sampled"]
    sequence_id: Annotated[str, Field(min_length=1, max_length=LONGEST_SEQUENCE_ID)]
    offset: Annotated[int, Field(ge=0)] = 0
    length: Annotated[int, Field(ge=0)]


Spans = TupleOf[ProvenanceSpan]


class Datum(Frozen):
    """One training example.

    `model_input` has N positions; position i predicts target i. `loss_fn_inputs` holds tensors of shape [N] (or
    [N, K]): `target_tokens` (int64), `weights`, `logprobs`, `advantages` (float32). Arrays given here become
    `TensorData` of their kind; lists become int64 for `target_tokens`, float32 otherwise. The two span lists tile
    `model_input` and `target_tokens` and come together or not at all.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = Field(default_factory=dict)
    model_input_spans: Spans | None = None
    loss_fn_input_spans: Spans | None = None

    if TYPE_CHECKING:  # what is accepted, which is more than what is kept

        def __init__(
            self,
            *,
            model_input: ModelInput,
            loss_fn_inputs: Mapping[str, TensorData | npt.NDArray[Any] | Sequence[Any]] = ...,
            model_input_spans: Sequence[ProvenanceSpan] | None = None,
            loss_fn_input_spans: Sequence[ProvenanceSpan] | None = None,
        ) -> None: ...

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _tensors(cls, inputs: Any) -> Any:
        if not isinstance(inputs, Mapping):
            return inputs
        return {name: _tensor(name, value) for name, value in inputs.items()}

    @model_validator(mode="after")
    def _spans_in_pairs(self) -> Self:
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise ValueError("model_input_spans and loss_fn_input_spans must be given together or not at all")
        return self


def _tensor(name: str, value: Any) -> Any:
    """The fields of a `TensorData` if `value` is an array or a list, else `value`."""
    if isinstance(value, np.ndarray):
        dtype = "float32" if value.dtype.kind == "f" else "int64"
    elif isinstance(value, (list, tuple)):
        dtype = "int64" if name == "target_tokens" else "float32"
    else:
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name!r}: the rows differ in length") from None
    return {"data": array.reshape(-1), "dtype": dtype, "shape": tuple(array.shape)}
