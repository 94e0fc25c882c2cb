"""A decoder for any causal language model of transformers: its own modules and autograd, plus adapters and packing.

New families start here, and the written-out decoder is compared with it. Five things change, without patching
transformers. Attention is a registered function that receives the segments of the row, so that sequences share it
without padding and without seeing each other. Linear attention and short convolutions are computed here instead
(`packed_delta_net.py`, `packed_short_conv.py`). The Linear modules that adapters train add the adapters of all
sequences in the row. Layers can be checkpointed. Gated MLPs and norms keep less (`gated_mlp.py`, `recomputed_norm.py`).
Legend: T tokens, H hidden size, N heads, D head size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tinker_local.backend.families.family import LoraNames
from tinker_local.backend.options import DecoderName
from tinker_local.backend.training.kernels.delta_segments import CHUNK
from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, Flag, Target, groups_of, layout
from tinker_local.backend.training.lora.lora_batch import LoraBatch, LowRank, Parts, project, project_backward
from tinker_local.backend.training.model.decoder import PackedRow
from tinker_local.backend.training.model.decoders.gated_mlp import GatedDown, is_gated
from tinker_local.backend.training.model.decoders.packed_attention import (
    ATTENTION,
    PackedCall,
    attending,
    attention_rules,
)
from tinker_local.backend.training.model.decoders.packed_delta_net import is_delta_net, packed_delta_net
from tinker_local.backend.training.model.decoders.packed_experts import (
    expert_targets,
    is_experts,
    packed_experts,
    weights_of,
)
from tinker_local.backend.training.model.decoders.packed_short_conv import is_short_conv, packed_short_conv
from tinker_local.backend.training.model.decoders.recomputed_norm import RecomputedNorm, is_norm
from tinker_local.backend.training.model.decoders.transformers_positions import decoder_rotations
from tinker_local.backend.training.model.experts import ExpertWeights
from tinker_local.backend.training.model.per_layer import per_layer_arguments
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.model.taken_routes import LayerRoutes, RowRoutes, taking
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.training.run.recompute_policy import ActivationMemory, Keep, LayerMemory, RecomputePolicy
from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix, MakeMatrix
from tinker_local.backend.weights.large_weights import RESIDENT, LargeWeights, Walk
from tinker_local.types import LoraConfig, UnsupportedError
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The arguments of one forward, also needed by its backward."""

    row: PackedRow
    lora: LoraBatch
    policy: RecomputePolicy | None
    walk: Walk


class AutogradDecoder:
    """Implements `training.decoder.Decoder` on `modules`, transformers' decoder at `path` of its model, whose layers
    have `weights`. `make`: makes the frozen matrices that adapters are beside; transformers multiplies by the rest."""

    name: DecoderName = "autograd"

    def __init__(
        self, modules: Any, path: str, lora: LoraNames, weights: LargeWeights = RESIDENT, make: MakeMatrix = dense
    ) -> None:
        attention_rules(modules, weights)  # raises if a layer does not use the registered function
        self._by_module = find_targets(modules, path, lora)
        self._matrices = {linear: make([linear]) for linear in self._by_module}
        self.targets = [target for targets in self._by_module.values() for target in targets]
        self._modules = modules
        self._run: _Run | None = None
        self._weights = weights
        self.routed: RoutedLayers | None = None
        in_layers = {module for layer in modules.layers for module in layer.modules()}
        norms = [module for module in modules.modules() if module not in in_layers and is_norm(module)]
        gated: list[Any] = []
        deltas: list[Any] = []
        convolutions: list[Any] = []
        experts: list[tuple[int, str, Any]] = []
        with weights.walk(backward=False) as walk:
            for index, layer in enumerate(modules.layers):
                walk.layer(index)
                norms += [module for module in layer.modules() if is_norm(module)]
                gated += [one for one in layer.modules() if is_gated(one) and one.down_proj in self._by_module]
                deltas += [module for module in layer.modules() if is_delta_net(module)]
                convolutions += [module for module in layer.modules() if is_short_conv(module)]
                if lora.experts is None and any(weights_of(one) is not None for one in layer.modules()):
                    raise UnsupportedError(f"layer {index} has routed experts, of which its family knows nothing")
                if lora.experts is not None:
                    named = layer.named_modules(prefix=f"{path}.layers.{index}")
                    experts += [(index, name, module) for name, module in named if is_experts(module)]
        self.least_segment = CHUNK if deltas else 1
        for linear in self._by_module:
            linear.forward = functools.partial(self._linear, linear, linear.forward)
        for delta in deltas:
            delta.forward = functools.partial(self._delta, delta, delta.forward)
        for convolution in convolutions:
            convolution.forward = functools.partial(self._convolution, convolution, convolution.forward)
        self._experts_of: dict[int, Any] = {}
        self._chosen: dict[Any, int] = {}
        self._expert_targets: dict[Any, list[Target]] = {}
        self._expert_weights: dict[Any, ExpertWeights] = {}
        if lora.experts is not None:
            for index, (layer_index, name, module) in enumerate(experts):
                self._experts_of[layer_index] = module
                self._expert_targets[module] = expert_targets(name, "experts", index, module, lora.experts)
                of_module = weights_of(module)
                assert of_module is not None, "is_experts"
                self._expert_weights[module] = of_module
                module.forward = functools.partial(self._experts, module, module.forward)
            found = {**self._by_module, **self._expert_targets}
            self.targets = [target for module in modules.modules() for target in found.get(module, ())]
        for mlp in gated:
            mlp.forward = functools.partial(self._mlp, mlp, mlp.forward)
        for norm in norms:
            norm.forward = functools.partial(self._norm, norm.forward)
        for index, layer in enumerate(modules.layers):
            layer.forward = functools.partial(self._layer, index, layer.forward)

    def rotations(self, layers: Sequence[int] | None, position_ids: torch.Tensor) -> Rotations:
        """See `Decoder.rotations`."""
        return decoder_rotations(self._modules, layers, position_ids)

    def forward(
        self, row: PackedRow, lora: LoraBatch, policy: RecomputePolicy | None, walk: Walk = RESIDENT
    ) -> "AutogradPass":
        """See `Decoder.forward`."""
        run = _Run(row, lora, policy, walk)
        embeds = row.embeds.detach()
        with self._running(run) as packed, torch.set_grad_enabled(policy is not None):
            embeds.requires_grad_(policy is not None)
            further = per_layer_arguments(self._modules, len(embeds), row.per_layer)
            output = self._modules(
                inputs_embeds=embeds[None], position_ids=row.position_ids, use_cache=False, packed=packed, **further
            )
            hidden, grad_hidden = output.last_hidden_state[0], list[torch.Tensor]()
            root = _Gradient.apply(hidden, grad_hidden)
        return AutogradPass(self, run, embeds, root, grad_hidden, hidden.detach())

    def memory(self, tokens: int, columns: int, keys: float = 0) -> ActivationMemory:
        """Extrapolate from a measurement on few tokens; a layer's backward takes about what its forward keeps. A layer
        keeps its input alone, or all, whatever `keys` there are."""
        per_token = self._bytes_per_token
        inputs = tokens * self._modules.config.hidden_size * self._dtype.itemsize
        layers = [LayerMemory(tokens * (layer + 7 * columns * self._dtype.itemsize), 0) for layer in per_token]
        return ActivationMemory(2 * max(layer.lean for layer in layers) + (len(layers) + 4) * inputs, layers)

    def measure(self) -> None:
        """Measure what `memory` needs, which walks through the weights."""
        assert self._bytes_per_token
        self.routed = self._routed()

    def _routed(self) -> RoutedLayers | None:
        """None if not all routers take experts that are given, or not equally many. A layer has one module of
        experts, or `_expert_targets` has more of them than `_experts_of`."""
        sizes = {(self._chosen[one], self._expert_weights[one].down.count) for one in self._expert_weights}
        if len(sizes) != 1 or len(self._experts_of) != len(self._expert_weights):
            return None
        routed = RoutedLayers(tuple(self._experts_of), *sizes.pop())
        device = next(self._modules.parameters()).device
        experts = torch.arange(routed.chosen, device=device).expand(4, len(routed.layers), -1)
        row = replace(self._row(4), routes=RowRoutes(experts, routed.experts))
        batch = LoraBatch({}, [], self._dtype, torch.float32, gradient=False)
        self.routed = routed
        try:
            with torch.no_grad(), self._weights.walk(backward=False) as walk:
                self.forward(row, batch, None, walk)
        except UnsupportedError:
            return None
        return routed

    def _row(self, tokens: int) -> PackedRow:
        parameter = next(self._modules.parameters())
        embeds = torch.zeros(tokens, self._modules.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
        positions = torch.arange(tokens, device=parameter.device)[None]
        return PackedRow(embeds, positions, Segments((tokens,), parameter.device))

    def undo(self) -> None:
        """Restore the modules' own forward methods."""
        for module in self._modules.modules():
            module.__dict__.pop("forward", None)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self._modules.parameters()).dtype
        return dtype

    @contextmanager
    def _running(self, run: _Run) -> Iterator[PackedCall]:
        assert self._run is None, "one pass at a time"
        self._run = run
        packed = PackedCall(run.row.segments)
        try:
            with attending(self._modules, ATTENTION, packed):
                yield packed
        finally:
            self._run = None

    def _low_rank(self, linear: Any) -> LowRank | None:
        if self._run is None:
            return None
        target = self._by_module[linear][0]
        return self._run.lora.group(target.group, target.index)

    def _linear(self, linear: Any, original: Callable[..., Any], x: torch.Tensor) -> Any:
        if self._run is None:
            return original(x)
        parts = functools.partial(_rows, [target.outputs for target in self._by_module[linear]])
        return AdaptedLinear.apply(x, self._matrices[linear], linear.bias, self._low_rank(linear), parts)

    def _delta(
        self, net: Any, original: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **rest: Any
    ) -> Any:
        if self._run is None:
            return original(hidden_states, *args, **rest)
        return packed_delta_net(net, hidden_states, self._run.row.segments)

    def _convolution(
        self, module: Any, original: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **rest: Any
    ) -> Any:
        if self._run is None:
            return original(hidden_states, *args, **rest)
        return packed_short_conv(module, hidden_states, self._run.row.segments)

    def _mlp(self, mlp: Any, original: Callable[..., Any], x: torch.Tensor) -> Any:
        if self._run is None:
            return original(x)
        down = mlp.down_proj
        return GatedDown.apply(
            mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, self._matrices[down], down.bias, self._low_rank(down)
        )

    def _experts(
        self, module: Any, original: Callable[..., Any], x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor
    ) -> Any:
        if self._run is None:
            return original(x, experts, scores)
        self._chosen[module] = experts.shape[1]
        gate, _, down = self._expert_targets[module]
        low_ranks = (self._run.lora.group(target.group, target.index) for target in (gate, down))
        return packed_experts(self._expert_weights[module], x, experts, scores, *low_ranks)

    def _norm(self, original: Callable[..., Any], x: torch.Tensor) -> Any:
        return original(x) if self._run is None else RecomputedNorm.apply(x, original)

    def _layer(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return original(*args, **kwargs)
        run.walk.layer(index)
        if run.row.routes is not None and self.routed is not None and index in self.routed.layers:
            original = _routing(original, run.row.routes.layer(self.routed.layers.index(index)))
        if index == 0 and run.row.has_deepstack(-1):
            args = (_AddedBefore.apply(args[0], run.row), *args[1:])
        if run.policy is not None and run.policy[index] is Keep.INPUT:
            output = checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            output = original(*args, **kwargs)
        hidden = _Enter.apply(output[0] if isinstance(output, tuple) else output, run, index)
        if run.row.has_deepstack(index):
            hidden = run.row.add_deepstack(index, hidden[0].clone())[None]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    @functools.cached_property
    def _bytes_per_token(self) -> list[int]:
        """Bytes per token that autograd keeps for each layer, from two short rows with adapters on all targets."""
        few, many = self._kept_bytes(16), self._kept_bytes(48)
        return [(b - a) // 32 for a, b in zip(few, many, strict=True)]

    def _kept_bytes(self, tokens: int) -> list[int]:
        parameter, row = next(self._modules.parameters()), self._row(tokens)
        config = LoraConfig(rank=1)
        specs = layout(self.targets, config)
        adapter = Adapter(config, specs, torch.zeros(specs[-1].stop, device=parameter.device))
        batch = LoraBatch(
            groups_of(self.targets), [AdapterSlice(adapter, 0, tokens)], parameter.dtype, torch.float32, gradient=False
        )
        kept: list[dict[int, int]] = []
        # A storage's identity is the address of its object, since data on the meta device have no address.
        known = {tensor.untyped_storage()._cdata for tensor in self._modules.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if kept and storage._cdata not in known:
                kept[-1][storage._cdata] = storage.nbytes()
            return tensor.detach()  # the tensor itself would refer to the graph, which would then never be freed

        hooks = [layer.register_forward_pre_hook(lambda *_: kept.append({})) for layer in self._modules.layers]
        try:
            kept_tensors = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with kept_tensors, self._weights.walk(backward=False) as walk:
                self.forward(row, batch, [Keep.ALL] * len(self._modules.layers), walk)
        finally:
            for hook in hooks:
                hook.remove()
        return [sum(layer.values()) for layer in kept]


def _routing(layer: Callable[..., Any], routes: LayerRoutes) -> Callable[..., Any]:
    """`layer`, whose router takes `routes`, also when it is computed again."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        with taking(routes):
            return layer(*args, **kwargs)

    return routed


@dataclass(slots=True, eq=False)
class AutogradPass:
    """A `DecoderPass`. `root`: where the graph ends; it takes the gradient of `hidden` [T, H] from `grad_hidden`."""

    decoder: AutogradDecoder
    run: _Run
    embeds: torch.Tensor
    root: torch.Tensor
    grad_hidden: list[torch.Tensor]
    hidden: torch.Tensor

    def backward(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderPass.backward`."""
        self.grad_hidden.append(grad_hidden)
        del grad_hidden, self.hidden  # no layer's backward needs them
        with self.decoder._running(self.run):
            torch.autograd.backward(self.root)
        del self.root
        assert self.embeds.grad is not None
        return self.embeds.grad


class _Enter(torch.autograd.Function):
    """The output of layer `index` as it is; its backward enters the layer once more."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, run: _Run, index: int) -> torch.Tensor:
        ctx.run, ctx.index = run, index
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.run.walk.layer(ctx.index)
        ctx.run.row.write_deepstack_gradient(ctx.index, grad[0])
        return grad, None, None


class _AddedBefore(torch.autograd.Function):
    """What enters the first layer, with image features added."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, row: PackedRow) -> torch.Tensor:
        ctx.row = row
        return row.add_deepstack(-1, hidden[0].clone())[None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.row.write_deepstack_gradient(-1, grad[0])
        return grad, None


class _Gradient(torch.autograd.Function):
    """A root for `hidden` whose backward hands over the gradient in `gradients`: an argument of
    `torch.autograd.backward` would stay in memory until the end."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradients.pop(), None


def find_targets(modules: Any, path: str, lora: LoraNames) -> dict[Any, list[Target]]:
    """The targets of each Linear module of the decoder `modules` that `lora` names, in the decoder's order. Modules
    with the same name and shape form one group over all layers; the parts of one are projections of its group."""
    found: dict[Any, list[Target]] = {}
    counts: dict[str, int] = {}
    for name, module in modules.named_modules():
        parent, _, last = name.rpartition(".")
        split = lora.split.get(last)
        if not isinstance(module, torch.nn.Linear) or (split is None and lora.flag(name) is None):
            continue
        if lora.keys_are_values(modules.get_submodule(parent), last):
            continue
        suffix = name.split(".", 2)[-1] if name.startswith("layers.") else name
        group = f"{suffix} {module.out_features}x{module.in_features}"
        index = counts[group] = counts.get(group, -1) + 1
        projections = (last,) if split is None else split.projections
        heights = (module.out_features,) if split is None else split.heights(modules.get_submodule(parent))
        flag: Flag = lora.flag(f"{parent}.{projections[0]}") or "mlp"
        found[module] = [
            Target(f"{path}.{parent}.{projection}", group, projection, index, module.in_features, height, flag)
            for projection, height in zip(projections, heights, strict=True)
        ]
    if not found:
        named = "in its layers" if lora.every_linear else f"named {', '.join((*lora.attn, *lora.mlp))}"
        raise UnsupportedError(f"it has no Linear modules {named}")
    return found


def keys_as_values(modules: Any, lora: LoraNames) -> str:
    """What adapters leave out of layers of the decoder `modules`, in words; empty if that is nothing."""
    count = sum(
        lora.keys_are_values(parent, name) for parent in modules.modules() for name, _ in parent.named_children()
    )
    return f"{count} k_proj are left out, whose keys are values, too: vLLM would add to keys alone" if count else ""


def _rows(heights: list[int], output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`Parts` of a module whose parts have these `heights`."""
    return tuple(output.split(heights, dim=-1))


class AdaptedLinear(torch.autograd.Function):
    """x W^T + bias + low rank. The backward writes the adapters' gradients to `LowRank`, outside autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        matrix: FrozenMatrix,
        bias: torch.Tensor | None,
        low_rank: LowRank | None,
        parts: Parts,
    ) -> torch.Tensor:
        rows = x.detach().flatten(0, -2)
        h, output = project(rows, matrix, bias, low_rank, parts)
        if low_rank is not None:
            ctx.save_for_backward(rows, h)
        ctx.matrix, ctx.low_rank, ctx.parts = matrix, low_rank, parts
        return output.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_output = grad.flatten(0, -2)
        if ctx.low_rank is None:
            grad_rows = ctx.matrix.back(grad_output)
        else:
            rows, h = ctx.saved_tensors
            grad_rows = project_backward(grad_output, rows, ctx.matrix, ctx.low_rank, h, ctx.parts)
        return grad_rows.unflatten(0, grad.shape[:-1]), None, None, None, None
