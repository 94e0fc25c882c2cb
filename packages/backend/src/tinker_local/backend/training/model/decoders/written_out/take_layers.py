"""Take a decoder of transformers apart into blocks, if there are blocks for all that it has."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import torch
from tinker_local.backend.families.family import Experts
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.model.decoders.packed_attention import attention_rules
from tinker_local.backend.training.model.decoders.written_out.attention_block import AttentionBlock, query_scale
from tinker_local.backend.training.model.decoders.written_out.beside_experts_block import BesideExpertsBlock
from tinker_local.backend.training.model.decoders.written_out.block import LAYER_END, Block, LayerPart, norm_weight
from tinker_local.backend.training.model.decoders.written_out.delta_block import DeltaBlock
from tinker_local.backend.training.model.decoders.written_out.experts_block import ExpertsBlock
from tinker_local.backend.training.model.decoders.written_out.gemma4_attention import Gemma4AttentionBlock
from tinker_local.backend.training.model.decoders.written_out.layer_end import LayerEndBlock
from tinker_local.backend.training.model.decoders.written_out.layers import WrittenOutDecoder
from tinker_local.backend.training.model.decoders.written_out.mlp_block import MlpBlock
from tinker_local.backend.training.model.per_layer import project_per_layer
from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import MakeMatrix
from tinker_local.backend.weights.large_weights import RESIDENT, LargeWeights
from tinker_local.backend.weights.packed import dense_name
from tinker_local.types import UnsupportedError

BLOCKS: tuple[type[Block], ...] = (
    Gemma4AttentionBlock,
    AttentionBlock,
    DeltaBlock,
    BesideExpertsBlock,
    ExpertsBlock,
    MlpBlock,
    LayerEndBlock,
)
"""All kinds of blocks. The first that recognises a part of a layer takes it."""

_MLP = "mlp"
_NORMS = (
    (("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")),
    (("input_layernorm", "post_attention_layernorm"), ("post_self_attn_layernorm", "post_mlp_layernorm")),
    (("input_layernorm", "post_attention_layernorm"), (None, None)),
)
"""The norms before attention and before the MLP, and those after both: Gemma's, GLM's, and those of most models. The
first of which a layer has all are its own."""
_ONE_PLUS = {
    *("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"),
    *("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"),
}
"""transformers' norms that multiply by 1 + w."""
_IN_FLOAT32 = {"Gemma4RMSNorm"}
"""Those that multiply by w in float32."""
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
"""Of a layer that reads something beside hidden states: two projections, and the norm after them."""
_BESIDE = (
    *("router", "experts", "pre_feedforward_layernorm_2"),
    *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
)
"""Of a layer with experts beside its MLP: these, the norm before them, and those after both."""


def take_layers(
    decoder: Any,
    path: str,
    kernels: Kernels,
    weights: LargeWeights = RESIDENT,
    experts: Experts | None = None,
    make: MakeMatrix = dense,
) -> WrittenOutDecoder:
    """Make a decoder from transformers' module `decoder`, at `path` of its model: RMS norms before attention and MLP,
    or before and after both, rotary positions, and in between what `BLOCKS` compute. `experts`: how the family names
    routed experts. UnsupportedError says what differs.

    `make` may join matrices: the modules' own parameters become views of the joined ones. Walks through `weights`.
    """
    if getattr(decoder, "rotary_emb", None) is None:
        raise UnsupportedError("it has no rotary positions")
    if getattr(decoder, "norm", None) is None:
        raise UnsupportedError("it has no norm after its layers")
    if (factor := getattr(decoder, "embedding_multiplier", 1.0)) != 1.0:
        raise UnsupportedError(f"it multiplies embeddings by {factor} (embedding_multiplier)")
    several = getattr(decoder.rotary_emb, "layer_types", None)  # in Gemma 3
    rotaries = decoder.config.layer_types if several else [None] * len(decoder.layers)
    _check_parameters(decoder.norm, {"weight"}, "norm")
    found: list[list[tuple[type[Block], LayerPart]]] = []
    counts: Counter[tuple[type[Block], str]] = Counter()
    sizes: defaultdict[type[Block], dict[Sizes, str]] = defaultdict(dict)
    for index, layer in enumerate(decoder.layers):
        found.append([])
        for part in _parts(layer, f"{path}.layers.{index}", f"layer {index}", rotaries[index], experts, make):
            block = _block_for(part, f"layer {index}")
            known = sizes[block]
            sizes_of = getattr(part.module, _MLP, part.module)  # of a layer with experts beside its MLP that of the MLP
            variant = known.setdefault(_sizes(sizes_of), str(len(known)) if known else "")
            found[-1].append((block, replace(part, index=counts[block, variant], variant=variant)))
            counts[block, variant] += 1
    attending = [part.module for parts in found for block, part in parts if issubclass(block, AttentionBlock)]
    scale = query_scale(attending[0]) if attending else None  # of all layers, which share their class and config
    rules = attention_rules(decoder, weights)
    layers = []
    with weights.walk(backward=False) as walk:
        for index, parts in enumerate(found):
            walk.layer(index)
            layers.append([block.take(replace(part, rule=rules.get(id(part.module)))) for block, part in parts])
    norm, epsilon = norm_weight(decoder.norm)
    kinds = sorted(set(several or [None]))
    dtype, project = decoder.norm.weight.dtype, project_per_layer(decoder)
    return WrittenOutDecoder(layers, dtype, norm, epsilon, decoder.rotary_emb, kinds, kernels, scale, project)


Sizes = tuple[tuple[str, int, int], ...]
"""Of the projections of a part, by name: inputs and outputs."""


def _sizes(module: Any) -> Sizes:
    return tuple(
        (name, each.in_features, each.out_features)
        for name, each in module.named_modules()
        if isinstance(each, torch.nn.Linear)
    )


def _parts(
    layer: Any, path: str, where: str, rotary: str | None, experts: Experts | None, make: MakeMatrix
) -> Iterator[LayerPart]:
    """Attention (or what stands in its place) and MLP of a layer, and its end if that does something."""
    children = {name: module for name, module in layer.named_children() if any(True for _ in module.parameters())}
    has_all = (names for names in _NORMS if children.keys() >= {*names[0], *names[1]} - {None})
    before, after = next(has_all, _NORMS[-1])
    if (factor := getattr(layer, "residual_multiplier", 1.0)) != 1.0:
        raise UnsupportedError(f"{where} multiplies what it adds by {factor} (residual_multiplier)")
    norms = [name for name in (*before, *after) if name is not None]
    mixers = [block.module for block in BLOCKS if block.module not in (_MLP, LAYER_END)]
    first = next((name for name in mixers if name in children), mixers[0])
    if not getattr(children.get(first), "use_rope", True):
        raise UnsupportedError(f"{where}: {first} has no rotary positions")
    per_layer = _PER_LAYER if children.keys() >= {*_PER_LAYER} else ()
    beside = _BESIDE if children.keys() >= {*_BESIDE} else ()
    known = {first, _MLP, *norms, *per_layer, *beside}
    norms += [name for name in (*per_layer[-1:], *beside) if name.endswith("norm") or "layernorm" in name]
    if children.keys() != known:
        raise UnsupportedError(f"{where} consists of {', '.join(children)}, not of {', '.join(sorted(known))}")
    for name in sorted(norms):
        _check_norm(children[name], f"{where}: {name}")
    for name, norm, norm_after in zip((first, _MLP), before, after, strict=True):
        behind = None if norm_after is None else children[norm_after]
        whole = name == _MLP and bool(beside)
        at, module = (path, layer) if whole else (f"{path}.{name}", children[name])
        yield LayerPart(name, at, module, children[norm], behind, 0, None, rotary, experts, make)
    if hasattr(layer, "layer_scalar"):
        behind = children[per_layer[-1]] if per_layer else None
        yield LayerPart(LAYER_END, path, layer, None, behind, 0, None, rotary, experts, make)
    elif per_layer:
        raise UnsupportedError(f"{where} has {', '.join(per_layer)} and no layer_scalar")


def _block_for(part: LayerPart, where: str) -> type[Block]:
    """The kind of block that computes `part`."""
    block = next((each for each in BLOCKS if each.module == part.name and each.recognises(part)), None)
    if block is None:
        raise UnsupportedError(f"{where}: {part.name}: {type(part.module).__name__} is of no known kind")
    if block is BesideExpertsBlock:
        for name in ("mlp", "router", "experts"):
            own = {each.removeprefix(f"{name}.") for each in block.parameters if each.startswith(f"{name}.")}
            _check_parameters(getattr(part.module, name), own, f"{where}: {name}")
    elif part.name == LAYER_END:
        for name in set(dict(part.module.named_children())) & {*_PER_LAYER}:
            _check_parameters(getattr(part.module, name), {"weight"}, f"{where}: {name}")
    else:
        _check_parameters(part.module, block.parameters, f"{where}: {part.name}")
    if part.after is not None and not block.norm_after:
        raise UnsupportedError(f"{where} has a norm after {part.name}, which a {block.__name__} has not")
    return block


def _check_norm(norm: Any, where: str) -> None:
    _check_parameters(norm, {"weight"}, where)
    if not hasattr(norm, "variance_epsilon") and type(norm).__name__ not in _ONE_PLUS | _IN_FLOAT32:
        raise UnsupportedError(f"{where} is a {type(norm).__name__}, not an RMS norm")


def _check_parameters(module: Any, known: Set[str], where: str) -> None:
    unknown = {dense_name(name) for name, _ in module.named_parameters()} - known
    if unknown:
        raise UnsupportedError(f"{where} has parameters {', '.join(sorted(unknown))}")
