"""Attention and its gradients by their formulas, some queries at a time, so that long sequences fit; and the same as
fused kernels of 16 bits round it, which says how far off one may be."""

from collections.abc import Iterator

import numpy as np
import torch
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Segments, wide_dtype

BLOCK = 1024
"""Queries at a time."""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    segments: Segments,
    rule: AttentionRule,
    rounded: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """The output [T, N, D] and the gradients of query, key and value, in float32 (float64 stays). With `rounded`, the
    numbers that a fused kernel multiplies are rounded to that dtype: weights, gradients of scores, and what it gives
    back."""
    wide = wide_dtype(query)

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x if rounded is None else x.to(rounded).to(wide)

    groups = key.shape[1]
    queries, grads = (x.to(wide).unflatten(1, (groups, -1)) for x in (query, grad))
    own = zip(segments.rows_before(), segments.starts, segments.lengths, strict=True)
    path_rows = [np.concatenate([before, np.arange(start, start + length)]) for before, start, length in own]
    places = torch.from_numpy(np.concatenate(path_rows)).to(query.device)
    keys, values = (x[places].to(wide) for x in (key, value))
    output, grad_query = torch.zeros_like(queries), torch.zeros_like(queries)
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, seen, hidden in _blocks(segments, rule, query.device):
        scores = torch.einsum("qmrd,kmd->mrqk", queries[rows], keys[seen]) * rule.scaling
        capped = scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)
        masked = capped.masked_fill(hidden, -torch.inf)
        logsumexp = masked.logsumexp(-1)
        if rule.sinks is not None:
            logsumexp = torch.logaddexp(logsumexp, rule.sinks.to(wide).view(groups, -1, 1))
        weights = torch.exp(masked - logsumexp[..., None])
        output[rows] = stored(torch.einsum("mrqk,kmd->qmrd", stored(weights), values[seen]))
        grad_weights = torch.einsum("qmrd,kmd->mrqk", grads[rows], values[seen])
        shared = (grads[rows] * output[rows]).sum(-1).permute(1, 2, 0)[..., None]
        grad_scores = weights * (grad_weights - shared)
        if rule.softcap is not None:
            grad_scores = grad_scores * (1 - (capped / rule.softcap) ** 2)
        grad_scores = stored(grad_scores)
        grad_query[rows] = stored(rule.scaling * torch.einsum("mrqk,kmd->qmrd", grad_scores, keys[seen]))
        grad_key[seen] += rule.scaling * torch.einsum("mrqk,qmrd->kmd", grad_scores, queries[rows])
        grad_value[seen] += torch.einsum("mrqk,qmrd->kmd", stored(weights), grads[rows])
    found = [output.flatten(1, 2), grad_query.flatten(1, 2)]
    summed = (torch.zeros_like(key, dtype=wide).index_add_(0, places, stored(each)) for each in (grad_key, grad_value))
    return [*found, *summed]


def _blocks(
    segments: Segments, rule: AttentionRule, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows of queries, their keys, and which of these each may not see."""
    key_start = 0
    for start, length, before in zip(segments.starts, segments.lengths, segments.before, strict=True):
        for first in range(0, length, BLOCK):
            last = min(length, first + BLOCK)
            begin = 0 if rule.window is None else max(0, before + first - rule.window + 1)
            places = torch.arange(before + first, before + last, device=device)[:, None]
            seen = torch.arange(begin, before + last, device=device)[None]
            hidden = seen > places
            if rule.window is not None:
                hidden |= places - seen >= rule.window
            yield slice(start + first, start + last), slice(key_start + begin, key_start + before + last), hidden
        key_start += before + length
