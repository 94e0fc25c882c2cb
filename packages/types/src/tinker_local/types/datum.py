"""`Datum`: one training example, and the provenance of its tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from tinker_local.types.base import Frozen
from tinker_local.types.chunks import ModelInput
from tinker_local.types.tensors import TensorData


class ProvenanceSpan(Frozen):
    """`length` positions that come from a sampled sequence's prompt or from its sampled tokens."""

    source: Literal["prompt", "sampled"]
    sequence_id: str
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=0)]


Spans = tuple[ProvenanceSpan, ...]


class Datum(Frozen):
    """One training example.

    `model_input` has N positions; position i predicts target i. `loss_fn_inputs` holds tensors of shape [N] (or
    [N, K]): `target_tokens` (int64), `weights`, `logprobs`, `advantages` (float32). Arrays and lists given here
    become `TensorData`. The two span lists tile `model_input` and `target_tokens` and come together or not at all.
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
    def _spans_in_pairs(self) -> "Datum":
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise ValueError("model_input_spans and loss_fn_input_spans come together or not at all")
        return self


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        array = np.asarray(value)
        if array.dtype.kind in "iu" and name != "target_tokens":
            array = array.astype(np.float32)
        return TensorData.from_numpy(array)
    return TensorData.from_numpy(value) if isinstance(value, np.ndarray) else value
