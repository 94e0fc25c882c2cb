"""All layers of the written-out decoder, forward and backward.

Legend: T tokens, H hidden size, R columns of adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.backend.families.family import Experts
from tinker_local.backend.options import DecoderName
from tinker_local.backend.training.kernels.kernels import ACTIVATIONS, Activation, Kernels, activated
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.attention import Segments
from tinker_local.backend.training.model.decoder import PackedRow
from tinker_local.backend.training.model.decoders.packed_attention import attention_rules
from tinker_local.backend.training.model.decoders.packed_delta_net import PARAMETERS
from tinker_local.backend.training.model.decoders.packed_experts import is_experts
from tinker_local.backend.training.model.decoders.written_out.attention_block import AttentionBlock
from tinker_local.backend.training.model.decoders.written_out.block import (
    Block,
    BlockPass,
    NormAfter,
    RowContext,
    norm_weight,
)
from tinker_local.backend.training.model.decoders.written_out.delta_block import DeltaBlock
from tinker_local.backend.training.model.decoders.written_out.experts_block import ExpertsBlock
from tinker_local.backend.training.model.decoders.written_out.mlp_block import MlpBlock
from tinker_local.backend.training.rotations import Rotations, rotation
from tinker_local.backend.training.run.block_memory import decoder_memory
from tinker_local.backend.training.run.recompute_policy import ActivationMemory, Keep, RecomputePolicy
from tinker_local.backend.weights.large_weights import RESIDENT, LargeWeights, Walk
from tinker_local.types import UnsupportedError

Layer = Sequence[Block]
"""The blocks of a layer, in order."""


class WrittenOutDecoder:
    """Implements `training.decoder.Decoder` for layers made of known blocks. `dtype`: of activations; `norm` [H]:
    weight of the last norm; `rotary(embeds, position_ids)`: transformers' module for cos and sin, which has one more
    argument where layers of different `kinds` turn by different angles."""

    name: DecoderName = "written-out"

    def __init__(
        self,
        layers: Sequence[Layer],
        dtype: torch.dtype,
        norm: torch.Tensor,
        epsilon: float,
        rotary: Any,
        kinds: Sequence[str | None],
        kernels: Kernels,
    ) -> None:
        self.layers = layers
        self.dtype = dtype
        self.norm = norm
        self.epsilon = epsilon
        self.rotary = rotary
        self.kinds = kinds
        self.kernels = kernels
        self.targets = [target for layer in layers for block in layer for target in block.targets]

    def forward(
        self, row: PackedRow, lora: LoraBatch, policy: RecomputePolicy | None, walk: Walk = RESIDENT
    ) -> "WrittenOutPass":
        """See `Decoder.forward`."""
        angles = {kind: self._angles(row, kind) for kind in self.kinds}
        context = RowContext(self.kernels, row.segments, angles, lora)
        x = row.embeds
        kept: list[_KeptLayer] = []
        for index, layer in enumerate(self.layers):
            walk.layer(index)
            passes: list[BlockPass] = []
            for block in layer:
                passes.append(block.start(x, context))
                x = passes[-1].forward()
            if policy is not None:
                kept.append(_kept(layer, passes, policy[index]))
            x = row.add_deepstack(index, x)
        hidden = self.kernels.rms_norm(x, self.norm, self.epsilon)
        return WrittenOutPass(self, row if row.grad_deepstack else None, context, walk, hidden, x, kept)

    def _angles(self, row: PackedRow, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, rotary]; some of transformers' modules give those of the first half alone."""
        of_kind = () if kind is None else (kind,)
        frequencies = getattr(self.rotary, "_".join([*of_kind, "inv_freq"]))
        cos, sin = (each.squeeze(0) for each in self.rotary(row.embeds, row.position_ids, *of_kind))
        if cos.shape[-1] == len(frequencies):
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        return cos, sin

    def rotations(self, layers: Sequence[int] | None, position_ids: torch.Tensor) -> Rotations:
        """See `Decoder.rotations`."""
        length, place = position_ids.shape[-1], self.norm.device
        row = PackedRow(
            torch.zeros(length, 1, dtype=self.dtype, device=place), position_ids, Segments((length,), place)
        )
        lora = LoraBatch({}, [], self.dtype, torch.float32, gradient=False)
        angles = {kind: self._angles(row, kind) for kind in self.kinds}
        context = RowContext(self.kernels, row.segments, angles, lora)
        blocks = {index: layer[0] for index, layer in enumerate(self.layers) if layers is None or index in layers}
        return {
            index: rotation(*block.rotated(context))
            for index, block in blocks.items()
            if isinstance(block, AttentionBlock)
        }

    def memory(self, tokens: int, columns: int) -> ActivationMemory:
        """See `Decoder.memory`."""
        itemsize = self.dtype.itemsize
        layers = [[block.memory(tokens, columns, itemsize) for block in layer] for layer in self.layers]
        return decoder_memory(layers, tokens * len(self.norm) * itemsize)


def take_layers(
    decoder: Any,
    path: str,
    kernels: Kernels,
    weights: LargeWeights = RESIDENT,
    experts: Experts | None = None,
) -> WrittenOutDecoder:
    """Make a decoder from transformers' module `decoder`, at `path` of its model. Supports the layers of Llama, Qwen2,
    Qwen3, Qwen3.5, gpt-oss and Gemma: RMS norms before attention (softmax or linear) and MLP, or before and after both,
    rotary positions, SiLU or GELU; and, if the family names them, `experts` in place of MLPs. UnsupportedError says
    what differs.

    Joins matrices: the modules' own parameters become views of the joined ones. Walks through `weights`.
    """
    config = decoder.config
    if getattr(decoder, "rotary_emb", None) is None:
        raise UnsupportedError("it has no rotary positions")
    for index, layer in enumerate(decoder.layers):
        _check_layer(layer, f"layer {index}", experts, getattr(config, "hidden_act", None))
    _check_parts(decoder.norm, _NORM, "norm")
    rules = attention_rules(decoder, weights)
    several = getattr(decoder.rotary_emb, "layer_types", None)  # in Gemma 3
    kinds = config.layer_types if several else [None] * len(decoder.layers)
    layers: list[Layer] = []
    counts = dict.fromkeys(_ATTENTION, 0)
    dense = 0
    with weights.walk(backward=False) as walk:
        for index, layer in enumerate(decoder.layers):
            walk.layer(index)
            where, norm, kind = f"{path}.layers.{index}", layer.input_layernorm, _kind(layer)
            sandwich = hasattr(layer, "pre_feedforward_layernorm")
            after = NormAfter.take(layer.post_attention_layernorm) if sandwich else None
            attention, place = getattr(layer, kind), counts[kind]
            counts[kind] += 1
            first: Block = (
                AttentionBlock.take(
                    place, f"{where}.{kind}", norm, attention, rules[id(attention)], after, kinds[index]
                )
                if kind == "self_attn"
                else DeltaBlock.take(place, f"{where}.{kind}", norm, attention)
            )
            before = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
            rest = f"{where}.mlp", before, layer.mlp
            if experts is None or not _has_experts(layer.mlp):
                after = NormAfter.take(layer.post_feedforward_layernorm) if sandwich else None
                kind_of_gate = _activation(layer.mlp, where)
                layers.append((first, MlpBlock.take(dense, *rest, activation=kind_of_gate, after=after)))
                dense += 1
            elif is_experts(layer.mlp.experts):
                layers.append((first, ExpertsBlock.take(index - dense, *rest, experts)))
            else:
                raise UnsupportedError(f"layer {index}: its experts compute something else")
    norm, epsilon = norm_weight(decoder.norm)
    dtype, distinct = decoder.norm.weight.dtype, sorted(set(several or [None]))
    return WrittenOutDecoder(layers, dtype, norm, epsilon, decoder.rotary_emb, distinct, kernels)


_NORM = {"weight"}
_BEFORE = {"input_layernorm", "post_attention_layernorm"}
_SANDWICH = _BEFORE | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ONE_PLUS = {"Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"}
"""transformers' norms that multiply by 1 + w."""
_MLP = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
_ATTENTION = {
    "self_attn": {f"{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")}
    | {"q_norm.weight", "k_norm.weight", "sinks"},
    "linear_attn": PARAMETERS,
}
"""Parameters of each kind of attention, by the name of its module in a layer."""


def _kind(layer: Any) -> str:
    return "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"


_EXPERTS = {"gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert_gate.weight"}
_EXPERTS |= {f"shared_expert.{name}" for name in _MLP}
_EXPERTS |= {"router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"}


def _has_experts(mlp: Any) -> bool:
    return hasattr(mlp, "experts")


def _activation(mlp: Any, where: str) -> Activation:
    """Of the gate of transformers' `mlp`, by what it computes: names in configs differ, and some are not used."""
    x = torch.linspace(-4, 4, 65)
    for name in ACTIVATIONS:
        if torch.allclose(mlp.act_fn(x), activated(x, name), rtol=0, atol=1e-6):
            return name
    raise UnsupportedError(f"{where}: mlp: {type(mlp.act_fn).__name__} is none of {', '.join(ACTIVATIONS)}")


def _check_layer(layer: Any, where: str, experts: Experts | None, activation: str | None) -> None:
    """`activation`: of experts, by the config."""
    parts = {name: module for name, module in layer.named_children() if any(True for _ in module.parameters())}
    kind = _kind(layer)
    norms = _SANDWICH if parts.keys() >= _SANDWICH else _BEFORE
    known = {kind, "mlp", *norms}
    if parts.keys() != known:
        raise UnsupportedError(f"{where} consists of {', '.join(parts)}, not of {', '.join(sorted(known))}")
    routed = experts is not None and _has_experts(layer.mlp)
    if routed and activation != "silu":
        raise UnsupportedError(f"{where}: hidden_act {activation!r} of experts is not 'silu'")
    if norms is _SANDWICH and (kind != "self_attn" or routed):
        raise UnsupportedError(f"{where} has norms after linear attention or experts")
    _check_parts(parts[kind], _ATTENTION[kind], f"{where}: {kind}")
    _check_parts(layer.mlp, _EXPERTS if routed else _MLP, f"{where}: mlp")
    for name in sorted(norms):
        _check_parts(parts[name], _NORM, f"{where}: {name}")
        if not hasattr(parts[name], "variance_epsilon") and type(parts[name]).__name__ not in _ONE_PLUS:
            raise UnsupportedError(f"{where}: {name} is a {type(parts[name]).__name__}, not an RMS norm")


def _check_parts(module: Any, known: set[str], where: str) -> None:
    unknown = {name for name, _ in module.named_parameters()} - known
    if unknown:
        raise UnsupportedError(f"{where} has parameters {', '.join(sorted(unknown))}")


@dataclass(slots=True, eq=False)
class _KeptLayer:
    """What the recompute policy kept of a layer: the passes of its blocks, or only its input `x` (`Keep.INPUT`)."""

    layer: Layer
    x: torch.Tensor
    passes: Sequence[BlockPass] = ()

    def restore(self, context: RowContext) -> Sequence[BlockPass]:
        """The passes of all blocks, ready for the backward."""
        passes = self.passes or self._again(context)
        for block_pass in passes:
            block_pass.restore()
        return passes

    def _again(self, context: RowContext) -> list[BlockPass]:
        """Run all blocks but the last, which `restore` completes."""
        x, passes = self.x, list[BlockPass]()
        for block in self.layer[:-1]:
            passes.append(block.start(x, context))
            x = passes[-1].forward()
        return [*passes, self.layer[-1].start(x, context)]


def _kept(layer: Layer, passes: Sequence[BlockPass], keep: Keep) -> _KeptLayer:
    if keep is Keep.INPUT:
        return _KeptLayer(layer, passes[0].x)
    if keep is Keep.LEAN:
        for block_pass in passes:
            block_pass.drop_large()
    return _KeptLayer(layer, passes[0].x, passes)


@dataclass(slots=True, eq=False)
class WrittenOutPass:
    """A `DecoderPass`. `row`: None if no image features need a gradient. `hidden` [T, H]: after the last norm; `last`
    [T, H]: before it."""

    decoder: WrittenOutDecoder
    row: PackedRow | None
    context: RowContext
    walk: Walk
    hidden: torch.Tensor
    last: torch.Tensor
    kept: list[_KeptLayer]

    def backward(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderPass.backward`."""
        decoder = self.decoder
        grad = decoder.kernels.rms_norm_backward(grad_hidden, self.last, decoder.norm, decoder.epsilon, None)
        del grad_hidden, self.hidden, self.last  # no layer's backward needs them
        while self.kept:
            self.walk.layer(len(self.kept) - 1)
            if self.row is not None:
                self.row.write_deepstack_gradient(len(self.kept) - 1, grad)
            passes = list(self.kept.pop().restore(self.context))
            while passes:
                grad = passes.pop().backward(grad)
        return grad
