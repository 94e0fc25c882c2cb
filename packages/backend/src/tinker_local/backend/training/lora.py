"""LoRA adapters of many models on one frozen base (arXiv 2106.09685): y = W x + (alpha / r) B (A x).

Legend: T tokens of a micro-batch, r rank, n numbers of one adapter, L layers. An adapter keeps all its matrices in one
flat vector, so that the optimizer, the norm and the gradients are single tensors. In it the matrices of one projection
lie one behind the other over all layers, so that a projection of all layers is one tensor too. How adapters are put
together for a micro-batch is told in `decoder/lora_batch.py`.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.adapter_tensors import FlatTensors
from tinker_local.backend.families.interface import Family
from tinker_local.backend.training.interface import LORA_ALPHA, AdapterDType, AdapterState
from tinker_local.backend.training.optimizers.adamw import ADAMW
from tinker_local.backend.training.optimizers.optimizer import Optimizer, OptimizerState
from tinker_local.backend.training.transfer import to_host
from tinker_local.types import InvalidRequestError, LoraConfig

LM_HEAD = "lm_head"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def find_targets(model: torch.nn.Module, decoder_path: str) -> dict[str, torch.nn.Linear]:
    """The Linear modules that adapters can train, by path in the model, in its order: projections of the decoder and
    the LM head. Never the embedding, never the vision tower."""
    projections = (*_ATTENTION, *_MLP)
    return {
        path: module
        for path, module in model.named_modules()
        if path == LM_HEAD or (path.startswith(f"{decoder_path}.") and path.rsplit(".", 1)[-1] in projections)
    }


def is_trained(path: str, config: LoraConfig) -> bool:
    """Whether the flags of `config` ask for the target at `path`."""
    name = path.rsplit(".", 1)[-1]
    if name == LM_HEAD:
        return config.train_unembed
    return config.train_attn if name in _ATTENTION else config.train_mlp


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One matrix of an adapter: its name in PEFT's files, its target's path, A or B, and its place in the vector.

    `projection`: the last name of the path, `layer`: which of the modules of that name it is, counted from 0.
    """

    name: str
    path: str
    projection: str
    layer: int
    factor: str
    shape: tuple[int, int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This matrix inside the flat vector."""
        return flat[self.start : self.stop].view(self.shape)


def tensor_name(path: str, factor: str) -> str:
    """The name in PEFT's files of one factor, A or B, of the module at `path`."""
    return f"base_model.model.{path}.lora_{factor}.weight"


def layout(targets: Mapping[str, torch.nn.Linear], config: LoraConfig) -> tuple[TensorSpec, ...]:
    """The matrices of an adapter, A [r, in] and B [out, r] of each target, in the order of their places: by
    projection, then A before B, then by layer."""
    by_projection: dict[str, list[str]] = {}
    for path in targets:
        if is_trained(path, config):
            by_projection.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    specs: list[TensorSpec] = []
    start = 0
    for projection, paths in by_projection.items():
        for factor in "AB":
            for layer, path in enumerate(paths):
                module = targets[path]
                shape = (config.rank, module.in_features) if factor == "A" else (module.out_features, config.rank)
                spec = TensorSpec(tensor_name(path, factor), path, projection, layer, factor, shape, start)
                specs.append(spec)
                start = spec.stop
    return tuple(specs)


class Adapter:
    """One model's adapter: weights, the gradient added up since the last step, and the optimizer with its state.

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
        self._stacks = {
            (projection, factor): [spec for spec in specs if (spec.projection, spec.factor) == (projection, factor)]
            for projection, factor in dict.fromkeys((spec.projection, spec.factor) for spec in specs)
        }

    @property
    def computable(self) -> bool:
        """Whether all weights are finite, scaled and in any dtype of activations. Others must not be multiplied by ones
        that are not: zero times infinity is no number."""
        if self._computable is None:
            largest = self.weights.abs().amax() * max(1.0, self.scale)
            self._computable = bool(largest < torch.finfo(torch.bfloat16).max)
        return self._computable

    def changed(self) -> None:
        """To be said when the weights have changed."""
        self._computable = None

    def stack(self, flat: torch.Tensor, projection: str, factor: str) -> torch.Tensor | None:
        """The matrices of one projection in all layers as a view of a vector of this layout: A [L, r, in] or
        B [L, out, r]; None if the adapter does not train it."""
        specs = self._stacks.get((projection, factor))
        if specs is None:
            return None
        return flat[specs[0].start : specs[-1].stop].view(len(specs), *specs[0].shape)


def initial_weights(specs: Sequence[TensorSpec], seed: int | None) -> torch.Tensor:
    """B = 0, A uniform in +-1/sqrt(in) as PEFT draws it (Kaiming with a = sqrt(5)); float32 [n] on the host.

    The same seed gives the same weights on any machine; no global generator is used. Modules draw in the order of
    their layers, whatever the order of their places.
    """
    generator = torch.Generator().manual_seed((secrets.randbits(63) if seed is None else seed) % 2**64)
    weights = torch.zeros(specs[-1].stop)
    for spec in sorted(specs, key=lambda spec: (spec.projection == LM_HEAD, spec.layer)):
        if spec.factor == "A":
            bound = 1 / math.sqrt(spec.shape[1])
            spec.view(weights).uniform_(-bound, bound, generator=generator)
    return weights


def flatten(specs: Sequence[TensorSpec], tensors: Mapping[str, npt.NDArray[Any]], what: str) -> torch.Tensor:
    """`tensors` by PEFT name as one vector, float32 [n] on the host; InvalidRequestError if names or shapes differ."""
    wanted = {spec.name for spec in specs}
    if tensors.keys() != wanted:
        unknown, missing = sorted(tensors.keys() - wanted), sorted(wanted - tensors.keys())
        raise InvalidRequestError(
            f"{what}: do not fit the base model; {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unknown)} are unknown {unknown[:3]}"
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


def unflatten(specs: Sequence[TensorSpec], flat: torch.Tensor, dtype: AdapterDType = "float32") -> FlatTensors:
    """A host copy of the vector as matrices by PEFT name: float32, or the bits of bfloat16 in uint16."""
    host = to_host(flat.detach(), torch.float32 if dtype == "float32" else torch.bfloat16)
    if dtype == "bfloat16":
        host = host.view(torch.uint16)
    return FlatTensors(host.numpy(), {spec.name: (spec.start, spec.shape) for spec in specs})


def gradient_norm(gradient: torch.Tensor) -> float:
    """Euclidean norm, added up in float64 so that large finite gradients have a finite norm."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def module_norms(specs: Sequence[TensorSpec], gradient: torch.Tensor) -> dict[str, float]:
    """Euclidean norm of the gradient of each module, A and B together, by its path; added up in float64."""
    norms = torch.stack([torch.linalg.vector_norm(spec.view(gradient), dtype=torch.float64) for spec in specs]).tolist()
    result: dict[str, float] = {}
    for spec, norm in zip(specs, norms, strict=True):
        result[spec.path] = math.hypot(result.get(spec.path, 0.0), norm)
    return result


def without_prefix(tensors: Mapping[str, npt.NDArray[np.float32]], prefix: str) -> dict[str, npt.NDArray[np.float32]]:
    """Of an `AdapterState`'s optimizer tensors those behind `prefix`, by the names of the adapter's tensors."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}


def capture(
    adapter: Adapter, base_model: str, target_modules: Sequence[str], *, optimizer: bool, dtype: AdapterDType
) -> AdapterState:
    """`adapter` as it is now, its weights in `dtype`."""
    state = {
        f"{prefix}.{name}": array
        for prefix, flat in adapter.optimizer_state.tensors.items()
        if optimizer
        for name, array in unflatten(adapter.specs, flat).items()
    }
    return AdapterState(
        base_model=base_model,
        lora_config=adapter.config,
        target_modules=target_modules,
        tensors=unflatten(adapter.specs, adapter.weights, dtype),
        optimizer=state if optimizer else None,
        step=adapter.optimizer_state.step if optimizer else 0,
        optimizer_type=adapter.optimizer.name,
    )


def export(
    adapter: Adapter, base_model: str, target_modules: Sequence[str], family: Family, *, tied_head: bool
) -> AdapterState:
    """The weights of `adapter` as they are now, float32, by the names of the hosted service's exports.

    `target_modules` as PEFT has them: paths lose what comes before the decoder's layers, so that as ends of paths they
    fit the names here and the model's own.
    """
    specs = [
        replace(spec, name=tensor_name(family.hosted_path(spec.path, tied_head=tied_head), spec.factor))
        for spec in adapter.specs
    ]
    return AdapterState(
        base_model=base_model,
        lora_config=adapter.config,
        target_modules=[module.removeprefix(f"{family.decoder_path}.") for module in target_modules],
        tensors=unflatten(specs, adapter.weights),
    )


def target_modules(model: torch.nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """PEFT's `target_modules` for exactly these `paths`: last names, or whole paths where a last name also stands for
    a module that is not trained (Qwen2.5-VL's vision tower has projections of the same names)."""
    names = tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    matched = {path for path, _ in model.named_modules() if path.rsplit(".", 1)[-1] in names}
    return names if matched == set(paths) else tuple(paths)


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """Rows [start, stop) of a micro-batch belong to `adapter`; None is the base model."""

    adapter: Adapter | None
    start: int
    stop: int
