"""LoRA adapters of many training runs on one frozen base (arXiv 2106.09685): y = W x + (alpha / r) B (A x).

Legend: T tokens of a micro-batch, r rank, n numbers of one adapter, L blocks of one kind. An adapter stores all its
matrices in one flat vector, so that the optimizer, the norm and the gradients work on single tensors. The matrices of
one projection are contiguous over all blocks, so that they form one tensor too. `lora_batch.py` concatenates the
adapters of a micro-batch."""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.adapters.adapter import (
    FACTORS,
    LORA_ALPHA,
    WEIGHTS_VECTOR,
    AdapterDType,
    AdapterLayout,
    AdapterState,
    Factor,
    tensor_name,
)
from tinker_local.backend.adapters.adapter_tensors import FlatTensors
from tinker_local.backend.families.family import Family
from tinker_local.backend.training.optimizers.adamw import ADAMW
from tinker_local.backend.training.optimizers.optimizer import Limits, Optimizer, OptimizerState, spans_of
from tinker_local.backend.training.run.transfer import to_host
from tinker_local.types import InvalidRequestError, LoraConfig
from tinker_local.types.base import Frozen

HEAD_GROUP = "head"
"""The LoRA group of the LM head. All other groups belong to the decoder or the vision tower."""

Flag = Literal["attn", "mlp", "unembed", "vision"]


@dataclass(frozen=True, slots=True)
class Target:
    """A frozen matrix that adapters can train, at module `path` of the model, or one for each of `experts`: the weight
    of a module, or some of its rows under a name that the model does not have (see `SplitRows`).

    `group`: projections that read the same input in one kind of block (`attention.qkv`); `projection`: its name;
    `index`: the block among those of its kind, from 0. `flag`: the field `train_...` of `LoraConfig` that enables it.
    `experts` 0: a single matrix. Otherwise all experts share one factor, `shared`, and each has its own of the other.
    """

    path: str
    group: str
    projection: str
    index: int
    inputs: int
    outputs: int
    flag: Flag
    experts: int = 0
    shared: Factor = "A"

    @classmethod
    def of(cls, path: str, group: str, index: int, module: torch.nn.Linear, flag: Flag) -> "Target":
        """The target for the weight of `module`."""
        return cls(path, group, path.rsplit(".", 1)[-1], index, module.in_features, module.out_features, flag)

    def is_trained(self, config: LoraConfig) -> bool:
        """Whether the flags of `config` enable it."""
        flags = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
        return {**flags, "vision": config.train_vision}[self.flag]

    def shape(self, factor: Factor, rank: int) -> tuple[int, ...]:
        """Of factor A [r, in] or B [out, r] in files; of E experts [E, ...], or [1, ...] if they share it."""
        matrix = (rank, self.inputs) if factor == "A" else (self.outputs, rank)
        return (1 if factor == self.shared else self.experts, *matrix) if self.experts else matrix


Groups = Mapping[str, Sequence[str]]


def groups_of(targets: Sequence[Target]) -> Groups:
    """The projections of each group, in order."""
    groups: dict[str, list[str]] = {}
    for target in targets:
        projections = groups.setdefault(target.group, [])
        if target.projection not in projections:
            projections.append(target.projection)
    return groups


def check_distinct(targets: Sequence[Target]) -> None:
    """ValueError if two targets are the same projection of the same block of a group: they would share one adapter."""
    seen: dict[tuple[str, str, int], str] = {}
    for target in targets:
        path = seen.setdefault((target.group, target.projection, target.index), target.path)
        if path != target.path:
            raise ValueError(f"{path} and {target.path} are both {target.projection} {target.index} of {target.group}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One factor of an adapter: its name in PEFT's files, its target, the target's `order` in the model, A or B, its
    shape, and where it starts in the vector."""

    name: str
    target: Target
    order: int
    factor: Factor
    shape: tuple[int, ...]
    start: int

    @property
    def path(self) -> str:
        return self.target.path

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This matrix as a view of the flat vector."""
        return flat[self.start : self.stop].view(self.shape)


def layout(targets: Sequence[Target], config: LoraConfig) -> tuple[TensorSpec, ...]:
    """The factors of an adapter, A [r, in] and B [out, r] of each target (see `Target.shape`), in the order of the
    vector: by group and projection, then A before B, then by block."""
    stacks: dict[tuple[str, str], list[tuple[int, Target]]] = {}
    for order, target in enumerate(targets):
        if target.is_trained(config):
            stacks.setdefault((target.group, target.projection), []).append((order, target))
    specs: list[TensorSpec] = []
    start = 0
    for stack in stacks.values():
        for factor in FACTORS:
            for order, target in stack:
                shape = target.shape(factor, config.rank)
                spec = TensorSpec(tensor_name(target.path, factor), target, order, factor, shape, start)
                specs.append(spec)
                start = spec.stop
    return tuple(specs)


class Adapter:
    """The adapter of one training run: weights, gradient accumulated since the last step, optimizer and its state.

    `weights` [n] in float32 (float64 if the trainer computes in float64). `gradient` [n], or None for zero.
    """

    def __init__(
        self,
        config: LoraConfig,
        specs: tuple[TensorSpec, ...],
        weights: torch.Tensor,
        optimizer: Optimizer = ADAMW,
        state: OptimizerState | None = None,
    ) -> None:
        self.config = config
        self.specs = specs
        self.scale = LORA_ALPHA / config.rank
        self.weights = weights
        self.gradient: torch.Tensor | None = None
        self.gradient_seen = False
        self._computable: bool | None = None
        self.optimizer = optimizer
        self.optimizer_state = state or optimizer.new_state(torch, weights)
        self._stacks: dict[tuple[str, str, str], list[TensorSpec]] = {}
        for spec in specs:
            key = (spec.target.group, spec.target.projection, spec.factor)
            self._stacks.setdefault(key, []).append(spec)

    def vector(self, name: str) -> torch.Tensor:
        """The weights, or a state of the optimizer, [n]."""
        return self.weights if name == WEIGHTS_VECTOR else self.optimizer_state.tensors[name]

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "Adapter":
        """Another adapter with the same numbers and no gradient."""
        state = OptimizerState(
            {name: copy(flat) for name, flat in self.optimizer_state.tensors.items()}, self.optimizer_state.step
        )
        return Adapter(self.config, self.specs, copy(self.weights), self.optimizer, state)

    def take(self, stepped: "Adapter") -> None:
        """Take the numbers of `stepped`, this adapter or a copy of it, after an optimizer step."""
        self.weights, self.optimizer_state = stepped.weights, stepped.optimizer_state
        self._computable = None

    def step(self, gradient: torch.Tensor, settings: Frozen, norm: float) -> None:
        """One optimizer step; InvalidRequestError, without a change, if it would leave what cannot be computed with or
        not be saved (in float32)."""
        tensors = {spec.name: (spec.start, spec.stop) for spec in self.specs}
        limits = Limits(weights=self._largest_weight, state=torch.finfo(torch.float32).max)
        self.optimizer.step(torch, self.weights, gradient, self.optimizer_state, settings, norm, tensors, limits)

    @property
    def _largest_weight(self) -> float:
        """Below it, a weight is finite also when scaled and in any dtype of activations."""
        return float(np.nextafter(torch.finfo(torch.bfloat16).max / max(1.0, self.scale), 0.0))

    @property
    def computable(self) -> bool:
        """Whether all weights are small enough. Non-finite adapters must not share a matmul with others: 0 x inf is
        NaN."""
        if self._computable is None:
            low, high = extremes(self.weights)
            self._computable = max(-low, high) <= self._largest_weight
        return self._computable

    def stack(self, flat: torch.Tensor, group: str, projection: str, factor: str) -> torch.Tensor | None:
        """The matrices of one projection in all L blocks of its kind, A [L, r, in] or B [L, out, r], as a view of
        `flat`, a vector of this layout; None if the adapter does not train the projection. What E experts do not share
        is [L, E, ...]."""
        specs = self._stacks.get((group, projection, factor))
        if specs is None:
            return None
        stack = flat[specs[0].start : specs[-1].stop].view(len(specs), *specs[0].shape)
        target = specs[0].target
        return stack[:, 0] if target.experts and target.shared == factor else stack


def initial_weights(specs: Sequence[TensorSpec], seed: int | None) -> torch.Tensor:
    """B = 0, and A uniform in +-1/sqrt(in), as in PEFT (Kaiming with a = sqrt(5)); float32 [n] on the host.

    The same seed gives the same weights on any machine; no global generator is used. Values are drawn in the order of
    the model, independent of the order in the vector.
    """
    generator = torch.Generator().manual_seed((secrets.randbits(63) if seed is None else seed) % 2**64)
    weights = torch.zeros(specs[-1].stop)
    for spec in sorted(specs, key=lambda spec: spec.order):
        if spec.factor == "A":
            bound = 1 / math.sqrt(spec.shape[-1])
            spec.view(weights).uniform_(-bound, bound, generator=generator)
    return weights


def flatten(specs: Sequence[TensorSpec], tensors: Mapping[str, npt.NDArray[Any]], what: str) -> torch.Tensor:
    """`tensors` by PEFT name as one vector, float32 [n] on the host. InvalidRequestError if names or shapes differ or
    values are not finite."""
    wanted = {spec.name for spec in specs}
    if tensors.keys() != wanted:
        unknown, missing = sorted(tensors.keys() - wanted), sorted(wanted - tensors.keys())
        raise InvalidRequestError(
            f"{what}: do not fit the base model; {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unknown)} tensors are unknown {unknown[:3]}"
        )
    flat = torch.empty(specs[-1].stop)
    for spec in specs:
        array = np.asarray(tensors[spec.name], dtype=np.float32)
        if array.shape != spec.shape:
            raise InvalidRequestError(f"{what}: {spec.name} has shape {list(array.shape)}, expected {list(spec.shape)}")
        if not np.isfinite(array).all():
            raise InvalidRequestError(f"{what}: {spec.name} holds values that are not finite")
        spec.view(flat).copy_(torch.from_numpy(array.copy()))
    return flat


def extremes(flat: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest number of `flat`, in one pass over it and without a copy; both NaN if one is."""
    return spans_of(torch, [flat])[0]


_NORM_PART = 2**22
"""Numbers whose float64 copy a cache holds."""


def gradient_norm(gradient: torch.Tensor) -> float:
    """Euclidean norm, summed in float64 so that large finite gradients have a finite norm. In parts, because torch
    makes a float64 copy on the CPU."""
    return float(torch.linalg.vector_norm(torch.stack(_norms(gradient.split(_NORM_PART)))))


def module_norms(specs: Sequence[TensorSpec], gradient: torch.Tensor) -> dict[str, float]:
    """Euclidean norm of each module's gradient, A and B together, by path; summed in float64."""
    norms = torch.stack(_norms([spec.view(gradient) for spec in specs])).tolist()
    result: dict[str, float] = {}
    for spec, norm in zip(specs, norms, strict=True):
        result[spec.path] = math.hypot(result.get(spec.path, 0.0), norm)
    return result


def _norms(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Euclidean norm of each, in float64. On CUDA one pass: `torch.linalg.vector_norm` makes a float64 copy first."""
    found: tuple[torch.Tensor, ...] = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return found


def without_prefix(tensors: Mapping[str, npt.NDArray[np.float32]], prefix: str) -> dict[str, npt.NDArray[np.float32]]:
    """The optimizer tensors of an `AdapterState` whose names start with `prefix`, by the adapter's tensor names."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}


def adapter_layout(adapter: Adapter, base_model: str, target_modules: Sequence[str]) -> AdapterLayout:
    """All of `adapter` but its numbers."""
    return AdapterLayout(
        base_model=base_model,
        lora_config=adapter.config,
        target_modules=target_modules,
        places={spec.name: (spec.start, spec.shape) for spec in adapter.specs},
        states=tuple(adapter.optimizer_state.tensors),
        step=adapter.optimizer_state.step,
        optimizer_type=adapter.optimizer.name,
    )


def host_vector(flat: torch.Tensor, dtype: AdapterDType = "float32") -> npt.NDArray[Any]:
    """A host copy of `flat`: float32, or the bits of bfloat16 as uint16."""
    host = to_host(flat.detach(), torch.float32 if dtype == "float32" else torch.bfloat16)
    array: npt.NDArray[Any] = (host.view(torch.uint16) if dtype == "bfloat16" else host).numpy()
    return array


def export(
    adapter: Adapter, base_model: str, target_modules: Sequence[str], family: Family, *, tied_head: bool
) -> AdapterState:
    """A float32 host copy of the weights of `adapter`, with the tensor names of the hosted service's exports.

    `target_modules`: PEFT's. Paths lose the prefix up to the decoder's layers, because PEFT matches them as suffixes,
    so that they match both the names here and the model's own.
    """
    specs = [
        replace(spec, name=tensor_name(family.hosted_path(spec.path, tied_head=tied_head), spec.factor))
        for spec in adapter.specs
    ]
    return AdapterState(
        base_model=base_model,
        lora_config=adapter.config,
        target_modules=[module.removeprefix(f"{family.decoder_path}.") for module in target_modules],
        tensors=FlatTensors(host_vector(adapter.weights), {spec.name: (spec.start, spec.shape) for spec in specs}),
    )


def target_modules(model: torch.nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """PEFT's `target_modules` for exactly these `paths`: last names, or whole paths if a last name also matches a
    module that is not trained (Qwen2.5-VL's vision tower has projections of the same names). Parts of a module (see
    `SplitRows`) and projections of experts have names that match none."""
    names = tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    matched = {path for path, _ in model.named_modules() if path.rsplit(".", 1)[-1] in names}
    return names if matched <= set(paths) else tuple(paths)


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """Rows [start, stop) of a micro-batch use `adapter` (None: the base model)."""

    adapter: Adapter | None
    start: int
    stop: int
