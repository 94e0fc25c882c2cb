"""transformers' short convolutions with gates (LFM2) on packed rows. Their own forward lets the sequences of a row see
each other.

    B, C, x = in_proj(m)        out = out_proj(C * conv(B * x))

Legend: T positions, H hidden size, W taps of the convolution.
"""

from typing import Any

import torch
from tinker_local.backend.training.model.segments import Segments
from tinker_local.types import UnsupportedError

_PARTS = {"conv", "in_proj", "out_proj"}


def is_short_conv(module: Any) -> bool:
    """Whether `module` has the parts of such a layer. What it computes is compared later."""
    if {name for name, _ in module.named_children()} != _PARTS or not isinstance(module.conv, torch.nn.Conv1d):
        return False
    channels = module.conv.in_channels
    return bool(module.conv.groups == channels and module.in_proj.out_features == 3 * channels)


def packed_short_conv(module: Any, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """What `module` makes of `hidden` [1, T, H], each of `segments` after its path alone. Calls its Linear modules.
    UnsupportedError for a row that several ranks share."""
    if segments.shared is not None:
        raise UnsupportedError("short convolutions are not computed on rows that several ranks share")
    before, after, x = module.in_proj(hidden)[0].chunk(3, dim=-1)
    mixed = _short_conv(before * x, module.conv.weight.squeeze(1), module.conv.bias, segments)
    output: torch.Tensor = module.out_proj((after * mixed)[None])
    return output


def _short_conv(x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, segments: Segments) -> torch.Tensor:
    """The causal convolution of `x` [T, H] by `taps` [H, W], whose last is for a position itself."""
    width = taps.shape[1]
    result = x * taps[:, -1] if bias is None else x * taps[:, -1] + bias
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    for steps, rows in enumerate(segments.rows_back(width - 1), start=1):
        result = result + padded.index_select(0, rows) * taps[:, width - 1 - steps]
    return result
