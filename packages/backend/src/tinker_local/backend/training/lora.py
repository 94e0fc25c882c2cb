"""LoRA adapters of many models on one frozen base (arXiv 2106.09685): y = W x + (alpha / r) B (A x).

Legend: T tokens of a micro-batch, r rank, n numbers of one adapter. An adapter keeps all its matrices in one flat
vector, so that the optimizer, the norm and the gradients are single tensors. Which tokens belong to which adapter is
told by `AdapterSlices`, set explicitly for the time of a forward or backward; one thread at a time.
"""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.training.adamw import AdamState, new_adam_state
from tinker_local.backend.training.interface import LORA_ALPHA, AdapterState
from tinker_local.types import InvalidRequestError, LoraConfig

LM_HEAD = "lm_head"
MOMENTS = ("exp_avg", "exp_avg_sq")
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
    """One matrix of an adapter: its name in PEFT's files, its target's path, A or B, and its place in the vector."""

    name: str
    path: str
    factor: str
    shape: tuple[int, int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This matrix inside the flat vector."""
        return flat[self.start : self.stop].view(self.shape)


def layout(targets: Mapping[str, torch.nn.Linear], config: LoraConfig) -> tuple[TensorSpec, ...]:
    """The matrices of an adapter, A [r, in] then B [out, r] of each target, one behind the other."""
    specs: list[TensorSpec] = []
    start = 0
    for path, module in targets.items():
        if not is_trained(path, config):
            continue
        for factor, shape in (
            ("A", (config.rank, module.in_features)),
            ("B", (module.out_features, config.rank)),
        ):
            spec = TensorSpec(f"base_model.model.{path}.lora_{factor}.weight", path, factor, shape, start)
            specs.append(spec)
            start = spec.stop
    return tuple(specs)


class Adapter:
    """One model's adapter: weights, the gradient added up since the last step, and the optimizer's moments.

    `weights` [n] in float32 (float64 if the trainer computes in float64). `gradient` [n], or None for zero.
    """

    def __init__(self, config: LoraConfig, specs: tuple[TensorSpec, ...], weights: torch.Tensor) -> None:
        self.config = config
        self.specs = specs
        self.scale = LORA_ALPHA / config.rank
        self.weights = weights
        self.gradient: torch.Tensor | None = None
        self.gradient_seen = False
        self.adam: AdamState = new_adam_state(weights)
        self.parameters = {(spec.path, spec.factor): _leaf(spec.view(weights)) for spec in specs}
        """Leaf tensors that share the memory of `weights`."""

    def pair(self, path: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of the target at `path`, or None if it is not trained."""
        a = self.parameters.get((path, "A"))
        return None if a is None else (a, self.parameters[path, "B"])


def _leaf(view: torch.Tensor) -> torch.Tensor:
    return view.detach().requires_grad_()


def initial_weights(specs: Sequence[TensorSpec], seed: int | None) -> torch.Tensor:
    """B = 0, A uniform in +-1/sqrt(in) as PEFT draws it (Kaiming with a = sqrt(5)); float32 [n] on the host.

    The same seed gives the same weights on any machine; no global generator is used.
    """
    generator = torch.Generator().manual_seed((secrets.randbits(63) if seed is None else seed) % 2**64)
    weights = torch.zeros(specs[-1].stop)
    for spec in specs:
        if spec.factor == "A":
            bound = 1 / math.sqrt(spec.shape[1])
            spec.view(weights).uniform_(-bound, bound, generator=generator)
    return weights


def flatten(specs: Sequence[TensorSpec], tensors: Mapping[str, npt.NDArray[np.float32]], what: str) -> torch.Tensor:
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


def unflatten(specs: Sequence[TensorSpec], flat: torch.Tensor) -> dict[str, npt.NDArray[np.float32]]:
    """A host copy of the vector as matrices by PEFT name, float32."""
    host = flat.detach().to("cpu", torch.float32, copy=True)
    return {spec.name: spec.view(host).numpy() for spec in specs}


def without_prefix(moments: Mapping[str, npt.NDArray[np.float32]], prefix: str) -> dict[str, npt.NDArray[np.float32]]:
    """Of an `AdapterState`'s moments those behind `prefix`, by the names of their tensors."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in moments.items() if name.startswith(start)}


def capture(adapter: Adapter, base_model: str, target_modules: Sequence[str], *, optimizer: bool) -> AdapterState:
    """`adapter` as it is now."""
    flats = zip(MOMENTS, (adapter.adam.exp_avg, adapter.adam.exp_avg_sq), strict=True)
    moments = {
        f"{prefix}.{name}": array
        for prefix, flat in flats
        if optimizer
        for name, array in unflatten(adapter.specs, flat).items()
    }
    return AdapterState(
        base_model=base_model,
        lora_config=adapter.config,
        target_modules=target_modules,
        tensors=unflatten(adapter.specs, adapter.weights),
        optimizer=moments if optimizer else None,
        step=adapter.adam.step if optimizer else 0,
    )


def target_modules(model: torch.nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """PEFT's `target_modules` for exactly these `paths`: last names, or whole paths where a last name also stands for
    a module that is not trained (Qwen2.5-VL's vision tower has projections of the same names)."""
    names = tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    matched = {path for path, _ in model.named_modules() if path.rsplit(".", 1)[-1] in names}
    return names if matched == set(paths) else tuple(paths)


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """Rows [start, stop) belong to `adapter`; None is the base model."""

    adapter: Adapter | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AdapterSlices:
    """Which adapter each row of a matrix of activations belongs to: slices that tile the rows, in order."""

    slices: tuple[AdapterSlice, ...]

    def select(self, rows: npt.NDArray[np.int64]) -> "AdapterSlices":
        """The same for the matrix made of these `rows` (ascending)."""
        bounds = [(s.adapter, *np.searchsorted(rows, (s.start, s.stop))) for s in self.slices]
        return AdapterSlices(tuple(AdapterSlice(a, int(i), int(j)) for a, i, j in bounds if i < j))

    def parameters(self, *, lm_head: bool) -> list[tuple[Adapter, TensorSpec]]:
        """The matrices that take part: those on the LM head, or all others."""
        adapters = {id(s.adapter): s.adapter for s in self.slices if s.adapter is not None}
        return [
            (adapter, spec)
            for adapter in adapters.values()
            for spec in adapter.specs
            if (spec.path == LM_HEAD) == lm_head
        ]


class LoraLayers:
    """Adds the adapters' parts to the outputs of the base model's Linear modules, by forward hooks."""

    def __init__(self, targets: Mapping[str, torch.nn.Linear]) -> None:
        self._assigned: AdapterSlices | None = None
        self._hooks = [
            module.register_forward_hook(partial(self._add_adapters, path)) for path, module in targets.items()
        ]

    @contextmanager
    def assigned(self, slices: AdapterSlices) -> Iterator[None]:
        """Rows of all activations are as `slices` says. A backward that computes layers again belongs inside, too."""
        before, self._assigned = self._assigned, slices
        try:
            yield
        finally:
            self._assigned = before

    def remove(self) -> None:
        """Take the hooks off the base model."""
        for hook in self._hooks:
            hook.remove()

    def _add_adapters(
        self, path: str, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        slices = () if self._assigned is None else self._assigned.slices
        if not any(s.adapter and s.adapter.pair(path) for s in slices):
            return None
        x, y = args[0].flatten(0, -2), output.flatten(0, -2)
        parts = [_add_lora(x[s.start : s.stop], y[s.start : s.stop], s.adapter, path) for s in slices]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(output)


def _add_lora(x: torch.Tensor, y: torch.Tensor, adapter: Adapter | None, path: str) -> torch.Tensor:
    """y + scale B (A x), in the dtype of the activations; y if `adapter` does not train `path`. x [T, in], y [T, out].

    Tokens of one adapter are neighbours, so a grouped matrix product can do all slices at once where one exists.
    """
    pair = None if adapter is None else adapter.pair(path)
    if adapter is None or pair is None:
        return y
    a, b = pair
    return torch.addmm(y, x @ a.to(x.dtype).T, b.to(x.dtype).T, alpha=adapter.scale)
