"""`Datum`: one training example, and the provenance of its tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator
from tinker_local.types.base import Frozen, TupleOf
from tinker_local.types.chunks import ModelInput
from tinker_local.types.tensors import TensorData


class ProvenanceSpan(Frozen):
    """`length` positions that come from a sampled sequence's prompt or from its sampled tokens."""

    source: Literal["prompt", "sampled"]
    sequence_id: Annotated[str, Field(min_length=1)]
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

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _tensors(cls, inputs: Any) -> Any:
        if not isinstance(inputs, Mapping):
            return inputs
        return {name: _tensor(name, value) for name, value in inputs.items()}

    @model_validator(mode="after")
    def _spans_in_pairs(self) -> Self:
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise ValueError("model_input_spans and loss_fn_input_spans come together or not at all")
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
