"""All layers of the written-out decoder, forward and backward.

Legend: T tokens, H hidden size, R columns of adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tinker_local.backend.options import DecoderName
from tinker_local.backend.training.kernels.delta_segments import CHUNK
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.lora.lora import check_distinct
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.model.decoder import PackedRow
from tinker_local.backend.training.model.decoders.written_out.attention_block import (
    AttentionBlock,
    AttentionPass,
    QueryScale,
)
from tinker_local.backend.training.model.decoders.written_out.beside_experts_block import BesideExpertsBlock
from tinker_local.backend.training.model.decoders.written_out.block import (
    Angles,
    Block,
    BlockPass,
    RowContext,
    present,
)
from tinker_local.backend.training.model.decoders.written_out.delta_block import DeltaBlock
from tinker_local.backend.training.model.decoders.written_out.experts_block import ExpertsBlock
from tinker_local.backend.training.model.decoders.written_out.gemma4_attention import Gemma4AttentionBlock
from tinker_local.backend.training.model.decoders.written_out.layer_end import LayerEndBlock
from tinker_local.backend.training.model.per_layer import ProjectPerLayer
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.model.taken_routes import LayerRoutes
from tinker_local.backend.training.rotations import Rotations, rotation
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.training.run.block_memory import attended_bytes, decoder_memory, worth_keeping
from tinker_local.backend.training.run.recompute_policy import ActivationMemory, Keep, RecomputePolicy
from tinker_local.backend.weights.large_weights import RESIDENT, Walk

Layer = Sequence[Block]
"""The blocks of a layer, in order."""

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""What attention put out: `attended` and `logsumexp` of an `AttentionPass`."""


_TWICE_IN_A_ROW = {"Glm4vTextRotaryEmbedding", "GlmOcrTextRotaryEmbedding"}
"""transformers' modules that give each angle twice in a row. Others give all of them twice, also for pairs."""


class WrittenOutDecoder:
    """Implements `training.decoder.Decoder` for layers made of known blocks. `dtype`: of activations; `norm` [H]:
    weight of the last norm; `rotary(embeds, position_ids)`: transformers' module for cos and sin, which has one more
    argument where layers of different `kinds` turn by different angles; `query_scale`: of all layers; `per_layer`: what
    layers read beside hidden states, if they do. Its gradient does not reach the embeddings: no tower of such a model
    is trained."""

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
        query_scale: QueryScale | None = None,
        per_layer: ProjectPerLayer | None = None,
    ) -> None:
        self.layers = layers
        self.dtype = dtype
        self.norm = norm
        self.epsilon = epsilon
        self.rotary = rotary
        self.kinds = kinds
        self.kernels = kernels
        self.query_scale = query_scale
        self.per_layer = per_layer
        self.targets = [target for layer in layers for block in layer for target in block.targets]
        self.least_segment = CHUNK if any(isinstance(block, DeltaBlock) for layer in layers for block in layer) else 1
        check_distinct(self.targets)
        self._experts = {
            index: block
            for index, layer in enumerate(layers)
            for block in layer
            if isinstance(block, ExpertsBlock | BesideExpertsBlock)
        }
        self.routed = _routed(self._experts)

    def forward(
        self, row: PackedRow, lora: LoraBatch, policy: RecomputePolicy | None, walk: Walk = RESIDENT
    ) -> "WrittenOutPass":
        """See `Decoder.forward`."""
        read = None if self.per_layer is None else self.per_layer(row.embeds, present(row.per_layer))
        context = self._context(row, lora, read)
        x = row.add_deepstack(-1, row.embeds.clone()) if row.has_deepstack(-1) else row.embeds
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

    def _context(self, row: PackedRow, lora: LoraBatch, per_layer: torch.Tensor | None = None) -> RowContext:
        angles = {kind: self._angles(row, kind) for kind in self.kinds}
        routes: dict[object, LayerRoutes] = {}
        if row.routes is not None:
            routes = {block: row.routes.layer(place) for place, block in enumerate(self._experts.values())}
        if self.query_scale is None:
            return RowContext(self.kernels, row.segments, angles, angles, lora, per_layer, routes=routes)
        scale = self.query_scale(row.position_ids.flatten())[:, None]
        # Not rounded to 16 bits, as vLLM does not.
        scaled = {kind: (scale * cos, scale * sin) for kind, (cos, sin) in angles.items()}
        return RowContext(self.kernels, row.segments, angles, scaled, lora, per_layer, routes=routes)

    def _angles(self, row: PackedRow, kind: str | None) -> Angles:
        """cos and sin [T, rotary], first those of one half; some of transformers' modules give these alone."""
        of_kind = () if kind is None else (kind,)
        frequencies = getattr(self.rotary, "_".join([*of_kind, "inv_freq"]))
        cos, sin = (each.squeeze(0) for each in self.rotary(row.embeds, row.position_ids, *of_kind))
        if cos.shape[-1] == len(frequencies):
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        if type(self.rotary).__name__ in _TWICE_IN_A_ROW:
            cos, sin = (each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for each in (cos, sin))
        return cos, sin

    def rotations(self, layers: Sequence[int] | None, position_ids: torch.Tensor) -> Rotations:
        """See `Decoder.rotations`."""
        length, place = position_ids.shape[-1], self.norm.device
        row = PackedRow(
            torch.zeros(length, 1, dtype=self.dtype, device=place), position_ids, Segments((length,), place)
        )
        lora = LoraBatch({}, [], self.dtype, torch.float32, gradient=False)
        context = self._context(row, lora)
        blocks = {index: layer[0] for index, layer in enumerate(self.layers) if layers is None or index in layers}
        return {
            index: rotation(*block.rotated(context))
            for index, block in blocks.items()
            if isinstance(block, AttentionBlock)
        }

    def memory(self, tokens: int, columns: int, keys: float = 0) -> ActivationMemory:
        """See `Decoder.memory`."""
        hidden, itemsize = len(self.norm), self.dtype.itemsize
        layers = [[block.memory(tokens, columns, itemsize) for block in layer] for layer in self.layers]
        attended = [
            sum(
                attended_bytes(tokens, itemsize, heads=block.heads, head_size=block.head_size)
                for block in layer
                if isinstance(block, AttentionBlock) and worth_keeping(keys, block.rule.window, hidden)
            )
            for layer in self.layers
        ]
        found = decoder_memory(layers, tokens * hidden * itemsize, attended)
        return replace(found, always=found.always + self._beside_layers(tokens))

    def _beside_layers(self, tokens: int) -> int:
        """Bytes of keys and values that several layers read, and of what layers read beside hidden states: as the row
        has it, and with what is added to it."""
        blocks, itemsize = [block for layer in self.layers for block in layer], self.dtype.itemsize
        lent: int = sum(
            block.lent_memory(tokens, itemsize) for block in blocks if isinstance(block, Gemma4AttentionBlock)
        )
        ends = (block.per_layer for block in blocks if isinstance(block, LayerEndBlock))
        read: int = sum(tokens * end.gate.outputs * itemsize for end in ends if end is not None)
        return lent + 2 * read


def _routed(experts: Mapping[int, ExpertsBlock | BesideExpertsBlock]) -> RoutedLayers | None:
    """Of blocks by layer; None if not all of them take experts that are given, or not equally many."""
    sizes = {(block.chosen, block.weights.down.count) for block in experts.values()}
    if len(sizes) != 1 or not all(block.takes_routes for block in experts.values()):
        return None
    return RoutedLayers(tuple(experts), *sizes.pop())


@dataclass(slots=True, eq=False)
class _KeptLayer:
    """What the recompute policy kept of a layer: the passes of its blocks, or only its input `x` (`Keep.INPUT`), with
    what attention put out, for each block that attends (`Keep.ATTENDED`)."""

    layer: Layer
    x: torch.Tensor
    passes: Sequence[BlockPass] = ()
    attended: Sequence[Attended | None] = ()

    def restore(self, context: RowContext) -> Sequence[BlockPass]:
        """The passes of all blocks, ready for the backward."""
        passes = self.passes or self._again(context)
        for block_pass in passes:
            block_pass.restore()
        return passes

    def _again(self, context: RowContext) -> list[BlockPass]:
        """Run all blocks but the last, which `restore` completes."""
        x, passes = self.x, list[BlockPass]()
        for index, block in enumerate(self.layer):
            if passes:
                x = passes[-1].forward()
            passes.append(block.start(x, context))
            if self.attended and (found := self.attended[index]) is not None:
                again = passes[-1]
                assert isinstance(again, AttentionPass), "it was one before"
                again.attended, again.logsumexp = found
        return passes


def _kept(layer: Layer, passes: Sequence[BlockPass], keep: Keep) -> _KeptLayer:
    if keep is Keep.INPUT:
        return _KeptLayer(layer, passes[0].x)
    if keep is Keep.ATTENDED:
        return _KeptLayer(layer, passes[0].x, attended=[_attended(block_pass) for block_pass in passes])
    if keep is Keep.LEAN:
        for block_pass in passes:
            block_pass.drop_large()
    return _KeptLayer(layer, passes[0].x, passes)


def _attended(block_pass: BlockPass) -> Attended | None:
    if not isinstance(block_pass, AttentionPass):
        return None
    return present(block_pass.attended), block_pass.logsumexp


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
        if self.row is not None:
            self.row.write_deepstack_gradient(-1, grad)
        return grad
