"""The interface of a trainer: many LoRA adapters on one frozen base model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterLayout, AdapterState
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RouteArray, RoutedLayers, Routes
from tinker_local.types import ApiError, LoraConfig
from tinker_local.types.base import Frozen


@dataclass(frozen=True, slots=True, eq=False)
class TrainDatum:
    """One rendered example of N positions.

    `target_tokens`: int64 [N] or [N, K]. `loss_inputs`: float32 arrays of the same shape, by name (`weights`;
    `logprobs` and `advantages`). Shapes, names and ids are already checked. `routes`: the experts that positions
    take, where they are recorded; None: of no position.
    """

    input: RenderedInput
    target_tokens: npt.NDArray[np.int64]
    loss_inputs: Mapping[str, npt.NDArray[np.float32]]
    routes: Routes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrainWork:
    """One client's request: the loss of `data` with adapter `adapter_id`, and its gradient if `backward`."""

    adapter_id: str
    data: Sequence[TrainDatum]
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class TrainResult:
    """`outputs`, per datum in order: `logprobs` float32 in the shape of `target_tokens`, and for cross_entropy
    `elementwise_loss` (of all data or of none). `metrics`: `loss:sum` and others, named `name:reduction`."""

    outputs: Sequence[Mapping[str, npt.NDArray[np.float32]]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Of several inputs, concatenated. `logprobs`: as of `Trainer.logprobs`. `own` [N, L, K]: the experts that routers
    choose at each position themselves, where all layers before took those that were given."""

    logprobs: npt.NDArray[np.float32]
    own: RouteArray


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank `rank` of `size`, on host number `host`. `meeting`: where the ranks find each other; on one host the path of
    a file, empty at first, and on several "tcp://ADDRESS:PORT", where rank 0 listens."""

    rank: int
    size: int
    meeting: str
    host: int = 0


class Trainer(Protocol):
    """The adapters of one base model. Methods block; call them one at a time, from one worker thread."""

    vocab_size: int
    """Token ids must be below this."""

    max_context_length: int
    """The longest sequence, in positions."""

    trains: str
    """What computes the layers, and what adapters reach, in words."""

    routed: RoutedLayers | None
    """The layers whose experts data may name in `TrainDatum.routes`; None: they may not. With such layers, the metrics
    of a request say which share of its positions had recorded experts."""

    @property
    def images_encoded(self) -> int:
        """How many images the vision tower has encoded so far. May be read from any thread."""

    @property
    def cached_bytes(self) -> int:
        """Of the device's memory, what is in use for nothing and given back when others need it. May be read from any
        thread."""

    def check_weights(self) -> tuple[int, str]:
        """Compute the checksums of all matrices that a sampler reads too. How many there are, and which have changed
        since they were written, in words; empty if none has."""

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        """Bytes of an adapter's weights, gradients and optimizer state. May be called from any thread at any time."""

    def create_adapter(self, adapter_id: str, config: LoraConfig, optimizer: str = "adamw") -> None:
        """Create an adapter with B = 0, so that it changes nothing yet. `optimizer`: the type that trains it."""

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        """Create or replace an adapter from `state`. If that has no optimizer state, the optimizer starts afresh.

        Raises InvalidRequestError if the tensors do not fit the base model.
        """

    def remove_adapter(self, adapter_id: str) -> None:
        """Free the adapter; unknown ids are ignored."""

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        """Compute the losses of several requests in shared micro-batches, and accumulate gradients per adapter.

        Returns one result per request, in order. A failed request gets its error and adds nothing to any gradient. The
        error is a NotEnoughMemoryError if the request could succeed with more memory.
        """

    def discard_gradients(self, adapter_id: str) -> None:
        """Discard the gradients accumulated since the last step."""

    def optim_step(self, adapter_id: str, params: Frozen) -> dict[str, float]:
        """Update the adapter once with the accumulated gradients, and clear them. `params`: the `settings` of its
        optimizer. Returns the metrics `grad_norm`, the gradient's norm before clipping, and, if enabled,
        `grad_norm/MODULE` of each module.

        InvalidRequestError if it would leave a weight, or a number of the optimizer's state, that is not finite: then
        the gradients are cleared and nothing else changes.
        """

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """A host copy of the adapter, with weights rounded to `dtype`. Later steps do not change it."""

    def copy_adapter(self, adapter_id: str, copy_id: str) -> AdapterLayout:
        """Keep a copy of the adapter and its optimizer as another adapter, which is only to be read and removed. Much
        faster than `capture`: on a GPU nothing leaves its memory, unless that is short."""

    def read_adapter(self, adapter_id: str, vector: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """A host copy of the numbers [start, stop) of `WEIGHTS_VECTOR` or one of `AdapterLayout.states`."""

    def export(self, adapter_id: str) -> AdapterState:
        """A float32 host copy of the weights for programs that read the hosted service's exports. Tensors have the
        service's names (`Family.hosted_path`), so no trainer can load it."""

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> npt.NDArray[np.float32]:
        """log p(token[i+1] | tokens[..i]) for i in [0, N-1), float32 [N-1] of each input, concatenated. All inputs
        share one row. `adapter_id` None: the base model. `nudge`: unless it is 0, a seed by which each number of the
        embeddings and pixels moves by at most a unit in its last place, so that all that follows rounds otherwise."""

    def replayed(self, inputs: Sequence[RenderedInput], routes: Sequence[Routes], nudge: int = 0) -> Replayed:
        """The base model's `logprobs` of `inputs`, whose positions take the experts of `routes` where these are
        recorded. InvalidRequestError if they do not fit, or if the trainer is not `routed`."""

    def rotations(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        """What attention makes of positions (`training/rotations.py`). Nothing for layers of which that is not
        known."""

    def module_outputs(self, input: RenderedInput) -> ModuleOutputs:
        """What the base model's modules give for a text, as transformers runs them."""

    def release_memory(self) -> None:
        """Release device memory that is only cached for speed, for others that use the device."""

    def close(self) -> None:
        """Free everything."""
