"""The matrices of a layer's routed experts in 8 or 4 bits (`codes.py`): two stacks, in one copy for both engines.

A stack is stored as vLLM has it, [E, out, in], also where transformers has [E, in, out]. The trainer makes its numbers
where it multiplies: all of a stack in one pass on CUDA, which does not wait for the device, and elsewhere those of one
expert at a time.

Legend: E experts, H hidden size, I intermediate size, G groups in a row.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tinker_local.backend.weights.codes import Packed, inputs_of, stacked, to_codes
from tinker_local.backend.weights.frozen_matrix import GroupedProduct
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.backend.weights.packed import CODES, SCALES, pack_layers, packable_modules
from tinker_local.backend.weights.precision import BITS, Bits, Packable, has_groups

_MATRICES = {EXPERTS_GATE_UP, EXPERTS_DOWN}
_BIASES = {f"{name}_bias" for name in _MATRICES}
_PIECE = 2**26
"""Numbers that are rounded at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Stacks:
    """`gate_up` [E, 2 I, H] and `down` [E, H, I], which are views where transformers has them `transposed`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    transposed: bool

    @staticmethod
    def of(module: Any) -> "Stacks | None":
        """Those of transformers' `module`, if it has the parameters of routed experts and no others."""
        found = {name: weight.detach() for name, weight in module.named_parameters(recurse=False)}
        if found.keys() not in (_MATRICES, _MATRICES | _BIASES) or any(found[name].dim() != 3 for name in _MATRICES):
            return None
        gate_up, down = found[EXPERTS_GATE_UP], found[EXPERTS_DOWN]
        for transposed in (False, True):
            count, height, hidden = gate_up.shape
            if down.shape == (count, hidden, height // 2):
                return Stacks(gate_up, down, transposed)
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return None

    @property
    def packable(self) -> bool:
        return experts_are_packed(self.gate_up.shape[2], self.down.shape[2])


def experts_are_packed(hidden: int, width: int) -> bool:
    """Whether experts of `width` are packed where their model is: rows of both stacks can be divided into groups."""
    return has_groups(hidden) and has_groups(width)


@dataclass(frozen=True, slots=True, eq=False)
class PackedStack:
    """A `FrozenStack` of `count` matrices, `stored` one below the other. In memory besides it, while one multiplies:
    all numbers in `dtype` on CUDA, and one matrix elsewhere."""

    stored: Packed
    count: int
    dtype: torch.dtype

    @property
    def outputs(self) -> int:
        return len(self.stored.codes) // self.count

    @property
    def inputs(self) -> int:
        return inputs_of(self.stored.codes)

    @property
    def device(self) -> torch.device:
        return self.stored.codes.device

    def times(self, x: torch.Tensor, groups: GroupedProduct) -> torch.Tensor:
        return groups.multiply_made(x, self.outputs, lambda e: self.matrix(e).T, lambda: self.numbers().transpose(1, 2))

    def back(self, grad: torch.Tensor, groups: GroupedProduct) -> torch.Tensor:
        return groups.multiply_made(grad, self.inputs, self.matrix, self.numbers)

    def matrix(self, expert: int) -> torch.Tensor:
        """W_e [out, in]."""
        rows = slice(expert * self.outputs, (expert + 1) * self.outputs)
        return self.stored.rows(rows).numbers(self.dtype)

    def numbers(self) -> torch.Tensor:
        """[E, out, in]."""
        return self.stored.numbers(self.dtype).view(self.count, self.outputs, self.inputs)


class PackedMatrices(torch.nn.Module):
    """`qweight` int8 [E, out, in], or uint8 [E, out, in/2] for 4 bits, and `scales` [E, out, G] of a stack, which takes
    the place of a parameter of transformers' experts. `curved`: as of `codes.Packed`."""

    def __init__(self, stored: Packed, dtype: torch.dtype) -> None:
        super().__init__()
        self.qweight = torch.nn.Parameter(stored.codes, requires_grad=False)
        self.scales = torch.nn.Parameter(stored.scales, requires_grad=False)
        self.curved, self.dtype = stored.curved, dtype

    @staticmethod
    def rounded(stack: torch.Tensor, bits: Bits, device: torch.device | None) -> "PackedMatrices":
        """Packs `stack` [E, out, in], some matrices at a time, on `device` if that is quicker."""
        some = stack.split(max(1, _PIECE // stack[0].numel()))
        made = (to_codes(each.to(device).reshape(-1, stack.shape[2]), bits) for each in some)
        found = stacked(made, stack.device)
        codes, scales = (each.view(*stack.shape[:2], -1) for each in (found.codes, found.scales))
        return PackedMatrices(replace(found, codes=codes, scales=scales), stack.dtype)

    def stack(self) -> PackedStack:
        """Shares its numbers with this."""
        stored = Packed(self.qweight.detach().flatten(0, 1), self.scales.detach().flatten(0, 1), curved=self.curved)
        return PackedStack(stored, len(self.qweight), self.dtype)


class PackedExperts(torch.nn.Module):
    """In place of transformers' module of a layer's experts, as whose forward it computes, with `PackedMatrices` in
    place of the two stacks."""

    def __init__(self, module: Any, stacks: Stacks, bits: Bits, device: torch.device | None = None) -> None:
        """Packs the `stacks` of `module` one after the other, and takes their memory from it."""
        super().__init__()
        self.transposed = stacks.transposed
        for name, stack in ((EXPERTS_GATE_UP, stacks.gate_up), (EXPERTS_DOWN, stacks.down)):
            setattr(self, name, PackedMatrices.rounded(stack, bits, device))
            shape = module.get_parameter(name).to("meta")
            setattr(module, name, torch.nn.Parameter(shape, requires_grad=False))
        for name in _BIASES:
            self.register_parameter(name, getattr(module, name, None))
        for name in ("act_fn", "alpha", "limit"):  # what says how experts compute
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        self._original = (module,)  # hidden from `modules`, as its parameters have no memory

    @property
    def original(self) -> Any:
        """transformers' module, whose two stacks are on the meta device."""
        return self._original[0]

    def forward(self, *given: Any) -> Any:
        """As `module`, with all numbers of both stacks at a time: for comparisons."""
        found = {name: bias for name in _BIASES if (bias := getattr(self, name)) is not None}
        for name in sorted(_MATRICES):
            numbers = getattr(self, name).stack().numbers()
            found[name] = numbers.transpose(1, 2).contiguous() if self.transposed else numbers
        return torch.func.functional_call(self.original, found, given)


def packable_experts(decoder: torch.nn.Module) -> Iterator[tuple[str, Any, Stacks]]:
    """The modules of routed experts in the layers of transformers' `decoder` that are packed, with their paths."""
    for path, module in [*decoder.named_modules()]:
        stacks = None if isinstance(module, PackedExperts) else Stacks.of(module)
        if stacks is not None and stacks.packable:
            yield path, module, stacks


def pack_decoder(decoder: torch.nn.Module, precision: str, device: torch.device | None = None) -> None:
    """Replace the projections in the layers of transformers' `decoder`, and its experts, by packed ones, which are made
    on `device`, one at a time."""
    pack_layers(decoder, precision, device)
    for path, module, stacks in packable_experts(decoder):
        parent, _, name = path.rpartition(".")
        setattr(decoder.get_submodule(parent), name, PackedExperts(module, stacks, BITS[precision], device))


def packable_in(decoder: torch.nn.Module) -> Packable | None:
    """What of transformers' `decoder` can be packed, for the plan of memory; None if nothing can, or not its experts,
    which are most of it."""
    found = [stacks for module in decoder.modules() if (stacks := Stacks.of(module)) is not None]
    if not all(stacks.packable for stacks in found):
        return None
    both = [stack.shape for stacks in found for stack in (stacks.gate_up, stacks.down)]
    matrices = [(each.out_features, each.in_features) for _, each in packable_modules(decoder)]
    return Packable.of(matrices, [(count, outputs, inputs) for count, outputs, inputs in both])


@contextmanager
def dense_experts(model: torch.nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """While open, transformers' `model` has its own modules of experts again, in place of packed ones: the stacks of
    these, without values, by their names."""
    packed = {path: each for path, each in model.named_modules() if isinstance(each, PackedExperts)}

    def put(path: str, module: torch.nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)

    try:
        for path, module in packed.items():
            put(path, module.original)
        yield {
            f"{path}.{name}": each.original.get_parameter(name) for path, each in packed.items() for name in _MATRICES
        }
    finally:
        for path, module in packed.items():
            put(path, module)


def file_names(
    prefix: str, module: PackedExperts, names: tuple[str, str, str], *, whole: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names that vLLM's loading knows for parts of what `module`, whose experts files call `prefix`, has. `names`: of
    gate, up and down in the files. `whole`: it takes each stack as one, in which gate and up take turns; else it takes
    each matrix, gate first."""
    for kind in (CODES, SCALES):
        gate_up, down = (getattr(getattr(module, name), kind).detach() for name in (EXPERTS_GATE_UP, EXPERTS_DOWN))
        if whole:
            yield f"{prefix}.routed_experts.w13_{kind}", gate_up
            yield f"{prefix}.routed_experts.w2_{kind}", down
            continue
        for expert, (both, below) in enumerate(zip(gate_up, down, strict=True)):
            for name, part in zip(names[:2], both.chunk(2), strict=True):
                yield f"{prefix}.{expert}.{name}.{kind}", part
            yield f"{prefix}.{expert}.{names[2]}.{kind}", below
