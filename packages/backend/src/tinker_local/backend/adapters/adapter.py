"""What a LoRA adapter is: its scale, its tensors in host memory, and an immutable version of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter_tensors import FlatTensors
from tinker_local.types import LoraConfig

AdapterDType = Literal["float32", "bfloat16"]

WEIGHTS_VECTOR = "weights"
"""The vector of an adapter's weights, for `Trainer.read_adapter`."""

LORA_ALPHA = 32
"""The LoRA scale is alpha / rank with this alpha, as on the hosted service."""

Factor = Literal["A", "B"]
FACTORS: tuple[Factor, ...] = ("A", "B")

HEAD = "lm_head"
"""The path of the LM head's module."""

_PREFIX = "base_model.model."


def tensor_name(path: str, factor: str) -> str:
    """PEFT's name of factor A or B of the module at `path`."""
    return f"{_PREFIX}{path}.lora_{factor}.weight"


def path_of(name: str) -> str:
    """The path of the module that the tensor `name` is of; the reverse of `tensor_name`."""
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterState:
    """A host copy of an adapter.

    `tensors`: by PEFT name (from `Trainer.export`: by the hosted service's), float32 or the bits of bfloat16 as uint16
    (numpy has no bfloat16). `optimizer`: float32 state tensors of the optimizer `optimizer_type`, named `STATE.TENSOR`,
    and `step` its number of updates; None and 0 if not captured.
    """

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


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """All of an adapter but its numbers, which are vectors of the same layout: its weights, and the optimizer's states.

    `places`: each tensor's offset in a vector and its shape, by PEFT name. `states`: the names of the optimizer's
    vectors. The other fields are those of `AdapterState`.
    """

    base_model: str
    lora_config: LoraConfig
    target_modules: Sequence[str]
    places: Mapping[str, tuple[int, tuple[int, ...]]]
    states: Sequence[str]
    step: int
    optimizer_type: str

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return sum(math.prod(shape) for _, shape in self.places.values())

    def filled(
        self, weights: npt.NDArray[Any], states: Mapping[str, npt.NDArray[np.float32]] | None = None
    ) -> AdapterState:
        """The adapter with these vectors; without `states`, its weights alone."""
        optimizer = None
        if states is not None:
            flats = {state: FlatTensors(states[state], self.places) for state in self.states}
            optimizer = {f"{state}.{name}": array for state, flat in flats.items() for name, array in flat.items()}
        return AdapterState(
            base_model=self.base_model,
            lora_config=self.lora_config,
            target_modules=self.target_modules,
            tensors=FlatTensors(weights, self.places),
            optimizer=optimizer,
            step=0 if states is None else self.step,
            optimizer_type=self.optimizer_type,
        )


def written() -> AdapterState | None:
    return None


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable version of an adapter, in a folder in PEFT's layout.

    `name` is never used again: a new save is a new version. `path` holds `adapter_config.json` and
    `adapter_model.safetensors`, which are compared with their checksums before they are loaded, if there are any and
    unless they were `just_written`. Until that folder can be read, `unwritten()` gives its content; afterwards it gives
    None. It may be called from any thread.
    """

    name: str
    path: Path
    unwritten: Callable[[], AdapterState | None] = field(default=written, compare=False)
    just_written: bool = field(default=False, compare=False)
