"""What vLLM's layers make of positions: the same as `training/rotations.py` measures of the trainer."""

import functools
import inspect
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.training.rotations import (
    ReachedAttention,
    Rotations,
    constant,
    layer_rotations,
    rotation,
    without_weights,
)
from tinker_local.backend.vllm_engine.compat_vllm import attention_class, linear_classes, model_runner, served_model

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PARAMETERS = {"positions": "positions", "position_ids": "positions", "hidden_states": "hidden", "output": "hidden"}
"""What the forward of vLLM's attention modules takes, by the parameter's name."""


def engine_rotations(engine: Any, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
    """The rotations of `layers` of a vLLM engine (None: of all with attention) at `positions`, int64 [3, T]. Nothing,
    with a warning, for an architecture whose layers cannot be looked at in this way.

    Positions beyond the table of a layer are not computed: kernels do not check where they read. They are NaN.
    """
    try:
        return _known_rotations(engine, layers, positions)
    except Exception:  # of any of vLLM's and transformers' architectures
        log.warning("what vLLM makes of positions cannot be looked at", exc_info=True)
        return {}


def _known_rotations(engine: Any, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
    import torch

    runner, model = model_runner(engine), served_model(engine)
    modules = {index: (name, module) for index, name, module in _attention_modules(model)}
    chosen = [index for index in sorted(modules) if layers is None or index in layers]
    if not chosen:
        return {}
    rows = min(_table_rows(model), default=None)
    inside = positions if rows is None else positions[:, (positions < rows).all(axis=0)]
    found: Rotations = {}
    if inside.shape[1]:
        with torch.inference_mode():
            found = _computed(runner, model, modules, chosen, inside)
    if rows is None or inside.shape[1] == positions.shape[1]:
        return found
    known = (positions < rows).all(axis=0)
    whole = {}
    for index in chosen:
        size = found[index].shape[-1] if index in found else 1
        whole[index] = np.full((2, positions.shape[1], size), np.nan, np.float32)
        if index in found:
            whole[index][:, known] = found[index]
    return whole


def _computed(
    runner: Any,
    model: Any,
    modules: dict[int, tuple[str, Any]],
    chosen: Sequence[int],
    positions: npt.NDArray[np.int64],
) -> Rotations:
    import torch

    axes = 3 if runner.model_config.uses_mrope else 1
    place = torch.from_numpy(positions[:axes].copy()).to(runner.device)
    decoder = _transformers_decoder(model, modules[chosen[0]][0])
    if decoder is not None:
        ids = place if axes == 1 else place[:, None]
        stand_in = functools.partial(_stand_in, dtype=runner.dtype, device=runner.device)
        return layer_rotations(decoder, chosen, ids, runner.dtype, stand_in)
    one_row = place[0] if axes == 1 else place
    return {index: _rotated(modules[index][1], one_row, runner.dtype, runner.device) for index in chosen}


def _attention_modules(model: Any) -> Iterator[tuple[int, str, Any]]:
    """The index, name and module of each layer's attention: what holds vLLM's `Attention`, towers excepted."""
    attention = attention_class()
    for name, module in model.named_modules():
        if any(isinstance(child, attention) for child in module.children()):
            layer = _LAYER.search(f"{name}.")
            if layer is not None:
                yield int(layer[1]), name, module


def _transformers_decoder(model: Any, attention: str) -> Any:
    """The decoder with the module named `attention`, if its layers are transformers' own."""
    decoder = model.get_submodule(attention[: _LAYER.search(f"{attention}.").start()])  # type: ignore[union-attr]
    own = type(decoder).__mro__
    return decoder if any(each.__module__.startswith("transformers.") for each in own) else None


def _table_rows(model: Any) -> Iterator[int]:
    """How many positions each table of the model's layers has."""
    for name, module in model.named_modules():
        if "visual" in name or "vision" in name:
            continue
        for buffer in ("cos_sin_cache", "long_short_cos_sin_cache"):
            table = getattr(module, buffer, None)
            if table is not None:
                before = getattr(module, "original_max_position_embeddings", 0) if buffer.startswith("long") else 0
                yield len(table) - before if getattr(module, "use_long_rope", True) else before


def _stand_in(module: Any, head_size: int, *, dtype: Any, device: Any) -> Any:
    if not isinstance(module, linear_classes()):
        return _plain_norm(module)
    linear = getattr(module, "base_layer", module)
    width = getattr(linear, "output_size_per_partition", None) or linear.output_size
    pair = bool(getattr(linear, "return_bias", True))
    return constant(linear, width, head_size, dtype, device, pair=pair)


def _plain_norm(module: Any) -> Any:
    """A copy of a norm that computes with its own weights: what vLLM has compiled has those of the first. None for
    others."""
    if not (hasattr(module, "forward_native") and module._parameters):
        return None
    copied = without_weights(module, lambda _: None)
    copied._forward_method = copied.forward_native
    return copied


def _rotated(module: Any, positions: Any, dtype: Any, device: Any) -> npt.NDArray[np.float32]:
    """[2, T, D] of vLLM's attention `module` at `positions`, [T] or [3, T]."""
    import torch

    attention = attention_class()
    (name,) = [name for name, child in module.named_children() if isinstance(child, attention)]
    size = getattr(module, name).head_size
    stand_in = functools.partial(_stand_in, head_size=size, dtype=dtype, device=device)

    class Reached(torch.nn.Module):
        def forward(self, query: Any, key: Any, *_: Any, **__: Any) -> Any:
            raise ReachedAttention(query, query if key is None else key)  # None: it reads those of another layer

    def replaced(child: Any) -> Any:
        return Reached() if isinstance(child, attention) else stand_in(child)

    copied = without_weights(module, replaced)
    hidden = torch.zeros(positions.shape[-1], 1, dtype=dtype, device=device)
    given = {"positions": positions, "hidden": hidden}
    parameters = [name for name in inspect.signature(copied.forward).parameters if name in _PARAMETERS]
    try:
        copied.forward(**{name: given[_PARAMETERS[name]] for name in parameters})
    except ReachedAttention as reached:
        query, key = (each.reshape(len(hidden), -1)[:, :size] for each in (reached.query, reached.key))
        return rotation(query, key)
    raise RuntimeError(f"{type(module).__name__} does not reach its attention")
