"""`ProcessTrainer`: `training.trainer.Trainer` on a trainer in a separate process."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.process.process import TrainerProcess
from tinker_local.backend.training.trainer import AdapterDType, AdapterState, TrainResult, TrainWork
from tinker_local.types import ApiError, LoraConfig
from tinker_local.types.base import Frozen


class ProcessTrainer:
    """Implements `Trainer` with the trainer in `process`. The constructor blocks until it is loaded.

    Errors of the trainer are raised here: an ApiError unchanged, others as InternalError with the traceback in the log.
    If the process ends, the running call and every later one raise InternalError with its exit code or signal.
    """

    def __init__(self, process: TrainerProcess) -> None:
        self._process = process
        loaded = process.load()
        self.vocab_size = loaded.vocab_size
        self.max_context_length = loaded.max_context_length
        self._adapter_bytes = loaded.adapter_bytes

    @property
    def images_encoded(self) -> int:
        """Images that had passed the vision tower when the last call ended."""
        return self._process.images_encoded

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        """The size that the trainer reported when it was loaded, so that this does not wait for a running call.

        Sizes between two ranks are interpolated: an adapter's matrices are [rank, in] and [out, rank].
        """
        sizes = self._adapter_bytes[optimizer, config.train_unembed, config.train_mlp, config.train_attn]
        if not sizes:  # nothing would be trained; the trainer raises the error
            return cast(int, self._process.call("adapter_bytes", config, optimizer))
        largest = max(sizes)
        if config.rank > largest:
            return sizes[largest] * config.rank // largest
        return round(float(np.interp(config.rank, list(sizes), list(sizes.values()))))

    def create_adapter(self, adapter_id: str, config: LoraConfig, optimizer: str = "adamw") -> None:
        self._process.call("create_adapter", adapter_id, config, optimizer)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        self._process.call("load_adapter", adapter_id, state)

    def remove_adapter(self, adapter_id: str) -> None:
        self._process.call("remove_adapter", adapter_id)

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        return cast(list[TrainResult | ApiError], self._process.call("forward_backward", work))

    def discard_gradients(self, adapter_id: str) -> None:
        self._process.call("discard_gradients", adapter_id)

    def optim_step(self, adapter_id: str, params: Frozen) -> dict[str, float]:
        return cast(dict[str, float], self._process.call("optim_step", adapter_id, params))

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """The arrays are in memory that the process has handed over; it is freed with the last of them."""
        return cast(AdapterState, self._process.call("capture", adapter_id, optimizer=optimizer, dtype=dtype))

    def export(self, adapter_id: str) -> AdapterState:
        """As for `capture`, the arrays are in memory that the process has handed over."""
        return cast(AdapterState, self._process.call("export", adapter_id))

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput) -> npt.NDArray[np.float32]:
        return cast(npt.NDArray[np.float32], self._process.call("logprobs", adapter_id, *inputs))

    def release_memory(self) -> None:
        self._process.call("release_memory")

    def close(self) -> None:
        """End the process within seconds."""
        self._process.close()
