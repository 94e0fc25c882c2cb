"""What a trainer does: many LoRA adapters on one frozen base model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.interface import RenderedInput
from tinker_local.types import ApiError, LoraConfig
from tinker_local.types.base import Frozen

AdapterDType = Literal["float32", "bfloat16"]

LORA_ALPHA = 32
"""LoRA scale is alpha / rank with this alpha, as on the hosted service."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainDatum:
    """One rendered example of N positions.

    `target_tokens`: int64 [N] or [N, K]. `loss_inputs`: float32 arrays of the same shape, by name (`weights`;
    `logprobs` and `advantages`). Shapes, names and ids were checked before.
    """

    input: RenderedInput
    target_tokens: npt.NDArray[np.int64]
    loss_inputs: Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class TrainWork:
    """One client's request: the loss of `data` under `adapter_id`, with or without its gradient."""

    adapter_id: str
    data: Sequence[TrainDatum]
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class TrainResult:
    """`outputs`: per datum, in order: `logprobs` float32 of the shape of `target_tokens`, and for cross_entropy
    `elementwise_loss`. `metrics`: `loss:sum` and others, keys `name:reduction`."""

    outputs: Sequence[Mapping[str, npt.NDArray[np.float32]]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterState:
    """A host copy of an adapter: `tensors` by PEFT name (those of `Trainer.export` apart), float32 or the bits of
    bfloat16 in uint16 (numpy has no such type); `optimizer`: state tensors (float32) of the optimizer of
    `optimizer_type`, named `STATE.TENSOR`, with `step` their count of updates, None and 0 if not captured."""

    base_model: str
    lora_config: LoraConfig
    target_modules: Sequence[str]
    tensors: Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.uint16]]
    optimizer: Mapping[str, npt.NDArray[np.float32]] | None = None
    step: int = 0
    optimizer_type: str = "adamw"

    def peft_config(self) -> dict[str, Any]:
        """The content of PEFT's `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.lora_config.rank,
            "lora_alpha": LORA_ALPHA,
            "lora_dropout": 0.0,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
        }


class Trainer(Protocol):
    """The adapters of one base model. Every method blocks and is called from one worker thread, one at a time."""

    vocab_size: int
    """Token ids must be below this."""

    max_context_length: int
    """The longest sequence, in positions."""

    @property
    def images_encoded(self) -> int:
        """How many images went through the vision tower so far; it may be read from any thread."""

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        """Bytes of weights, gradients and optimizer state that an adapter takes; asked from any thread at any time."""

    def create_adapter(self, adapter_id: str, config: LoraConfig, optimizer: str = "adamw") -> None:
        """A new adapter that changes nothing yet (B = 0), trained by the optimizer of this type."""

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        """Create or replace an adapter by `state`; without optimizer state in it the optimizer starts anew.

        Raises InvalidRequestError if the tensors do not fit the base model.
        """

    def remove_adapter(self, adapter_id: str) -> None:
        """Free the adapter; unknown ids are ignored."""

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        """Losses of several requests, of any adapters, in shared micro-batches; gradients are added up per adapter.

        One result per request, in order; a request that fails gets its error and adds nothing to any gradient. It is a
        NotEnoughMemoryError if the request could succeed with more memory.
        """

    def discard_gradients(self, adapter_id: str) -> None:
        """Forget the gradients added up since the last step."""

    def optim_step(self, adapter_id: str, params: Frozen) -> dict[str, float]:
        """One update by the adapter's optimizer with the gradients added up, which are cleared. `params`: its
        `settings`. Returns metrics: `grad_norm`, the gradient's norm before clipping, and `grad_norm/MODULE` of each
        module from a trainer that was told to report them."""

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """A host copy of the adapter as it is now, which later steps do not change; its weights rounded to `dtype`."""

    def export(self, adapter_id: str) -> AdapterState:
        """A host copy of the weights as they are now, float32, for programs that read the hosted service's exports: its
        tensors have the names that the service gives (`Family.hosted_path`), so that no trainer loads it."""

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput) -> npt.NDArray[np.float32]:
        """log p(token[i+1] | tokens[..i]) for i in [0, N-1), float32 [N-1] of each input, concatenated; None is the
        base model. All inputs are computed in one row."""

    def release_memory(self) -> None:
        """Give back what is allocated on the device for nothing but speed, to whoever else uses the device."""

    def close(self) -> None:
        """Free everything."""
