"""What transformers' own layers make of positions, with which the decoders are compared at every one."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tinker_local.backend.families.family import Family
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.model.decoder import Decoder
from tinker_local.backend.training.model.decoders.packed_attention import attends
from tinker_local.backend.training.rotations import (
    Rotate,
    Rotations,
    compare_rotations,
    constant,
    layer_rotations,
    text_positions,
)
from tinker_local.types import UnsupportedError

log = logging.getLogger(__name__)


def decoder_rotations(
    modules: Any, layers: Sequence[int] | None, position_ids: torch.Tensor, rotary: Any = None
) -> Rotations:
    """Those of transformers' decoder `modules`; see `layer_rotations`."""
    attending = [index for index, layer in enumerate(modules.layers) if attends(layer)]
    chosen = [index for index in attending if layers is None or index in layers]
    dtype = next(modules.parameters()).dtype
    try:
        return layer_rotations(modules, chosen, position_ids, dtype, _stand_in, rotary)
    except Exception:  # of any of transformers' architectures
        log.warning("what %s makes of positions cannot be looked at", type(modules).__name__, exc_info=True)
        return {}


def _stand_in(module: Any, head_size: int) -> torch.nn.Module | None:
    if not isinstance(module, torch.nn.Linear):
        return None
    weight = module.weight
    found: torch.nn.Module = constant(module, module.out_features, head_size, weight.dtype, weight.device, pair=False)
    return found


def rotate_on(decoder: Decoder, family: Family, config: Any, device: torch.device) -> Rotate:
    """The rotations of a decoder by positions alone."""
    axes = position_axes(family, config)

    def rotate(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        return decoder.rotations(layers, rows(positions, axes, device))

    return rotate


def position_axes(family: Family, config: Any) -> int:
    """How many rows positions have."""
    return len(family.position_ids(config, RenderedInput(np.zeros(1, np.int32), ())))


def rows(positions: npt.NDArray[np.int64], axes: int, device: torch.device) -> torch.Tensor:
    """Positions [3, T] as rotary modules take them: [1, T] or [3, 1, T]."""
    found = torch.from_numpy(positions[:axes].copy()).to(device)
    return found if axes == 1 else found[:, None]


def check_positions(decoder: Decoder, modules: Any, family: Family, config: Any, max_positions: int) -> None:
    """UnsupportedError unless `decoder` makes of every position below `max_positions` what transformers' own layers do
    in a sequence of that length. A model on the meta device has no values to compare."""
    parameter = next(modules.parameters())
    if parameter.is_meta or getattr(modules, "rotary_emb", None) is None:
        return
    device, axes = parameter.device, position_axes(family, config)
    rotary = type(modules.rotary_emb)(config=modules.rotary_emb.config).to(device)
    if not decoder_rotations(modules, None, rows(text_positions(np.zeros(1, np.int64)), axes, device)):
        return

    def own(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        # Some frequencies depend on the longest position of a call.
        longest = np.append(positions, np.full((3, 1), max_positions - 1), axis=1)
        found = decoder_rotations(modules, layers, rows(longest, axes, device), rotary)
        return {layer: rotation[:, :-1] for layer, rotation in found.items()}

    rounding = max(torch.finfo(parameter.dtype).eps, torch.finfo(torch.float32).eps)  # of transformers' angles
    found = compare_rotations(rotate_on(decoder, family, config, device), own, max_positions, rounding, images=axes > 1)
    if found.missing:
        raise UnsupportedError(f"layer {found.missing[0]} has no positions, or has some only in transformers")
    if (differing := found.differing) is not None:
        raise UnsupportedError(
            f"from position {differing.position} on, queries or keys of layer {differing.layer} differ from "
            f"transformers' by {differing.difference:.2g} of their size; allowed is {differing.limit:.2g}"
        )
