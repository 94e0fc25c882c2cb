"""Vision tower attention over many images at once, registered under a name that transformers' models look up.

transformers passes packed rows with their bounds only to attentions whose name contains "flash". It calls others image
by image, in every layer, and synchronizes with the device each time.
"""

import itertools
from typing import Any

import torch
from tinker_local.backend.training.kernels.flash_attention import kernel_for
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Bounds
from transformers import AttentionInterface

PACKED_ATTENTION = "tinker_local_packed_flash"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from every patch of an image (or window) to all patches of it; transformers' attention signature.

    `query`, `key`, `value` [1, heads, T, D]; `cu_seq_lens_q` [images + 1]: the start of each image, then the end.
    Returns [1, T, heads, D].
    """
    if attention_mask is not None or dropout:
        raise NotImplementedError("packed attention does not support masks or dropout")
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    starts, longest, rule = cu_seq_lens_q.to(torch.int32), int(max_length_q), AttentionRule(scaling)
    bounds = Bounds(starts, starts, longest, longest)
    if (kernel := kernel_for(rows[0], rows[1], bounds, rule, causal=False)) is not None:
        output, _ = kernel.forward(rows[0], rows[1], rows[2], bounds, rule, causal=False)
        return output.unsqueeze(0), None
    lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    outputs, start = [], 0
    for length, group in itertools.groupby(lengths):  # neighbours of equal length share one call
        count = len(list(group))
        batched = [
            tensor[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2) for tensor in rows
        ]
        output = torch.nn.functional.scaled_dot_product_attention(*batched, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start += count * length
    return torch.cat(outputs).unsqueeze(0), None


def use_packed_attention(tower: Any) -> None:
    """Make a vision tower of transformers use `packed_attention`. Call it after the model is loaded: during loading,
    transformers takes any name with "flash" for a package that must be installed."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    tower.config._attn_implementation = PACKED_ATTENTION
