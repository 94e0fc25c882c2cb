"""What attention makes of positions: the query and the key that each layer gets from the same input at any position.

Rotary embeddings turn both by angles, from a table that may end, and some models multiply the query by a factor that
depends on its position. Configs say so in many ways, and every engine reads its own. So this module does not read them:
it runs the layers up to their attention with projections that give one constant row, and looks at what arrives. That
reads no large weights. Legend: T positions, D head size.
"""

import contextlib
import copy
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Rotations = Mapping[int, npt.NDArray[np.float32]]
"""Query and key of the first head, [2, T, D], by the index of the layer; NaN where the engine has no such position.
Layers without attention over positions are missing."""

Rotate = Callable[[Sequence[int] | None, npt.NDArray[np.int64]], Rotations]
"""The rotations of some layers (None: of all) at positions int64 [3, T], one row for each axis of M-RoPE; text has
three equal rows, and an engine without M-RoPE reads the first."""

AT_ONCE = 2048
"""Positions of one call."""

FEW = 48
"""Positions at which all layers are compared, to find those that are alike."""

_WEIGHT = 0.5
"""Every number of the norms between projections and attention."""


def constant_row(width: int, head_size: int) -> npt.NDArray[np.float32]:
    """What a projection of `width` gives: the same numbers for each head, between 0.5 and 1 and with both signs, so
    that any two of them can be told apart. float32 [width]."""
    random = np.random.Generator(np.random.Philox(17))
    head = random.uniform(0.5, 1.0, head_size) * random.choice([-1.0, 1.0], head_size)
    return np.resize(head.astype(np.float32), width)


def text_positions(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions [T] of text on all three axes."""
    return np.tile(positions, (3, 1))


def image_positions(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions [T] on the first axis, and others up to them on the other two."""
    return np.stack([positions, (positions * 7 + 3) % (positions + 1), (positions * 13 + 5) % (positions + 1)])


# Comparison -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Differing:
    """The first position at which two engines differ, the layer, and by how much: the largest difference of one number
    of query or key, relative to their size at position 0. NaN if one of the engines has no such position. `limit`: the
    most that is rounding."""

    position: int
    layer: int
    difference: float
    limit: float
    missing_in_second: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """`differing`: None if both agree at every position. `scaled`: the first position whose query has another length
    than that at 0, if there is one. `layers`: how many were compared; `missing`: which one engine alone has."""

    differing: Differing | None
    scaled: int | None
    layers: int
    missing: Sequence[int]

    def in_words(self, limit: int) -> str:
        """What was compared of positions below `limit`."""
        if not self.layers:
            return "rotary positions not compared"
        missing = f" of layers but {', '.join(map(str, self.missing))}" if self.missing else ""
        return f"rotary positions{missing} compared at all {limit}"


def compare_rotations(
    first: Rotate, second: Rotate, limit: int, rounding: float, *, images: bool = False, at_once: int = AT_ONCE
) -> Compared:
    """Compare two engines at all positions below `limit`, with `images` also where the axes of M-RoPE differ.

    All layers are compared at a few positions, and one of those that are alike there at all. `rounding`: of one number
    relative to 1, in the engines' dtype. Angles are float32 products of position and frequency in both, so that they
    differ by a few units in the last place of the position.
    """
    few = _few(limit)
    ours, theirs = first(None, text_positions(few)), second(None, text_positions(few))
    common = sorted(ours.keys() & theirs.keys())
    missing = sorted(ours.keys() ^ theirs.keys())
    kinds: dict[bytes, int] = {}
    for layer in common:
        kinds.setdefault(ours[layer].tobytes() + theirs[layer].tobytes(), layer)
    # All arrays begin with position 0.
    sizes = {layer: (_size(ours[layer]), _size(theirs[layer])) for layer in common}
    found: list[Differing] = []
    scaled: list[int] = []
    last = limit

    def look(layers: Iterable[int], positions: npt.NDArray[np.int64], a: Rotations, b: Rotations) -> None:
        for layer in layers:
            x, y = a[layer] / sizes[layer][0], b[layer] / sizes[layer][1]
            if (differing := _first_difference(layer, positions, x, y, rounding)) is not None:
                found.append(differing)
            lengths = np.sqrt(np.square(x).mean(axis=(0, 2)))
            if len(changed := np.flatnonzero(np.abs(lengths - 1) > 4 * rounding + 1e-3)):
                scaled.append(int(positions[changed[0]]))

    look(common, few, ours, theirs)
    layers = list(kinds.values())
    for start in range(0, limit if layers else 0, at_once):
        positions = np.arange(start, min(start + at_once, limit))
        rows = [text_positions(positions), *([image_positions(positions)] if images else [])]
        for row in rows:
            look(layers, positions, first(layers, row), second(layers, row))
        last = min((each.position for each in found), default=limit)
        if last < start + at_once:
            break
    differing = min(found, key=lambda each: each.position, default=None)
    return Compared(differing, min(scaled, default=None), len(common), missing)


def _few(limit: int) -> npt.NDArray[np.int64]:
    """0, some small positions, some large ones, and the last."""
    small = np.unique(np.geomspace(1, max(limit - 1, 1), FEW // 2).astype(np.int64))
    return np.unique(np.concatenate([[0], small, np.linspace(0, limit - 1, FEW // 2).astype(np.int64)]))


def _size(rotation: npt.NDArray[np.float32]) -> float:
    """Root of the mean square of query and key at the first position."""
    return float(np.sqrt(np.square(rotation[:, 0]).mean())) or 1.0


def _first_difference(
    layer: int,
    positions: npt.NDArray[np.int64],
    ours: npt.NDArray[np.float32],
    theirs: npt.NDArray[np.float32],
    rounding: float,
) -> Differing | None:
    """Of arrays [2, T, D], relative to their size at position 0."""
    sizes = np.maximum(1.0, np.sqrt(np.square(ours).mean(axis=(0, 2))))
    differences = np.abs(ours - theirs).max(axis=(0, 2)) / sizes
    limits = np.minimum(8 * rounding + positions * 2.0**-20, 0.5)
    wrong = np.flatnonzero(~(differences <= limits))
    if not len(wrong):
        return None
    at = int(wrong[0])
    missing = bool(np.isnan(theirs[:, at]).any() and not np.isnan(ours[:, at]).any())
    return Differing(int(positions[at]), layer, float(differences[at]), float(limits[at]), missing)


# transformers' layers -------------------------------------------------------------------------------------------------

SHARED_KEYS = "shared_kv_states"
"""An argument of transformers' layers: keys and values that several of them read, by the kind of layer."""
RECORDING = "tinker_local_rotations"
"""A name in transformers' registry of attention functions."""


class ReachedAttention(Exception):
    """Ends the forward of a layer that has reached attention, with its query and key [1, heads, T, D]."""

    def __init__(self, query: "torch.Tensor", key: "torch.Tensor") -> None:
        super().__init__()
        self.query, self.key = query, key


def record(module: Any, query: "torch.Tensor", key: "torch.Tensor", *_: Any, **__: Any) -> Any:
    """An attention function of transformers that ends the forward. A layer that reads the keys of another one has its
    query in their place."""
    raise ReachedAttention(query, query if getattr(module, "is_kv_shared_layer", False) else key)


def layer_rotations(
    modules: Any,
    layers: Sequence[int],
    position_ids: "torch.Tensor",
    dtype: "torch.dtype",
    linear: "Callable[[Any, int], torch.nn.Module | None]",
    rotary: Any = None,
) -> Rotations:
    """The rotations of `layers` of transformers' decoder `modules` at `position_ids`, [1, T] or [3, 1, T].

    `linear(module, head size)`: what stands in for a module that is a projection; None for others. `rotary`: the module
    of rotary positions, if another than the decoder's.
    """
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(RECORDING, record)
    config = modules.config
    chosen, config._attn_implementation = config._attn_implementation, RECORDING
    found: dict[int, npt.NDArray[np.float32]] = {}
    try:
        with torch.no_grad():
            calls = _layer_calls(modules, position_ids, dtype, rotary)
            for index in layers:
                args, kwargs = calls[index]
                layer = modules.layers[index]
                stand_in = functools.partial(_swapped, linear, _head_size(layer, config))
                layer = without_weights(layer, stand_in)
                if SHARED_KEYS in kwargs:
                    kwargs = {**kwargs, SHARED_KEYS: defaultdict(lambda: (torch.zeros(1), torch.zeros(1)))}
                try:
                    layer.forward(*args, **kwargs)
                except ReachedAttention as reached:
                    found[index] = rotation(reached.query[0, 0], reached.key[0, 0])
    finally:
        config._attn_implementation = chosen
    return found


def _swapped(
    linear: "Callable[[Any, int], torch.nn.Module | None]", head_size: int, module: Any
) -> "torch.nn.Module | None":
    return linear(module, head_size)


def _head_size(layer: Any, config: Any) -> int:
    sizes = [module.head_dim for module in layer.modules() if isinstance(getattr(module, "head_dim", None), int)]
    given = sizes[0] if sizes else getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def rotation(query: "torch.Tensor", key: "torch.Tensor") -> npt.NDArray[np.float32]:
    """[2, T, D] of two times [T, D] on any device."""
    import torch

    found: npt.NDArray[np.float32] = torch.stack([query, key]).float().cpu().numpy()
    return found


def without_weights(module: Any, linear: "Callable[[Any], torch.nn.Module | None]") -> Any:
    """A copy of `module` that reads no weights: `linear` gives what stands in for its projections, and vectors are
    constant. What has larger weights besides is as it was, and must not run."""
    import torch

    stand_in = linear(module)
    if stand_in is not None:
        return stand_in
    copied = _own_copy(module)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() == 1:
            copied._parameters[name] = torch.nn.Parameter(torch.full_like(parameter, _WEIGHT), requires_grad=False)
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else without_weights(child, linear)
    return copied


def _own_copy(module: Any) -> Any:
    """A copy whose modules and parameters can be replaced. Its methods are its own, and not the forward that a decoder
    has put there for training."""
    copied = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(copied)[name] = dict(vars(module)[name])
    for name, value in vars(module).items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            vars(copied)[name] = types.MethodType(value.__func__, copied)
        elif name == "forward":
            del vars(copied)[name]
    return copied


def _layer_calls(
    modules: Any, position_ids: "torch.Tensor", dtype: "torch.dtype", rotary: Any
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with which transformers' decoder `modules` calls each of its layers at `position_ids`."""
    import torch
    from tinker_local.backend.training.model.per_layer import per_layer_arguments

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Last(Exception):
        pass

    class Layer(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            own = {name: value for name, value in vars(layer).items() if name not in vars(self) and name != "forward"}
            self.__dict__.update(own)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            if len(calls) == len(modules.layers):
                raise Last
            return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    decoder = _own_copy(modules)
    decoder._modules["layers"] = torch.nn.ModuleList([Layer(layer) for layer in modules.layers])
    if rotary is not None:
        decoder._modules["rotary_emb"] = rotary
    tokens = position_ids.shape[-1]
    embeds = torch.ones(1, 1, modules.config.hidden_size, dtype=dtype, device=position_ids.device)
    with contextlib.suppress(Last):
        decoder.forward(
            inputs_embeds=embeds.expand(1, tokens, -1),
            position_ids=position_ids,
            use_cache=False,
            **per_layer_arguments(modules, tokens),
        )
    return calls


def constant(like: Any, width: int, head_size: int, dtype: "torch.dtype", device: "torch.device", *, pair: bool) -> Any:
    """A module in place of the projection `like` that gives `constant_row` for each row of its input; `pair`: and None
    beside it, as vLLM's."""
    import torch

    row = torch.from_numpy(constant_row(width, head_size)).to(device, dtype)

    class Constant(torch.nn.Module):
        def forward(self, x: Any, *_: Any, **__: Any) -> Any:
            rows = row.expand(*x.shape[:-1], width).contiguous()
            return (rows, None) if pair else rows

        def __getattr__(self, name: str) -> Any:
            return getattr(like, name)

    return Constant()
