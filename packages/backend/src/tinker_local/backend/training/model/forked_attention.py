"""Flash attention on rows where sequences share their beginning.

A softmax over keys in several parts is that of each part, weighed by the share of its sum: with l_i the logsumexp of
part i, l = log(sum exp(l_i)) and the output is the sum of exp(l_i - l) o_i. The backward of a part, given the output
and logsumexp of the whole, recomputes weights exp(s - l) and so is that part of the whole gradient (arXiv 2205.14135,
B.2; the same as in cascade attention, arXiv 2501.01005).

Each segment attends to itself. Then, depth by depth, all that goes on from a segment attends to it in one call: as one
segment of queries without a mask, whatever sequences they are of. So nothing is computed or copied once per sequence.

A sliding window ends in the middle of a shared beginning, at another place for each position. There, the part that it
reaches is copied for each segment, which is no more than without sharing.

Legend: T positions, N query heads, M key-value heads, D head size.
"""

import torch
from tinker_local.backend.training.kernels import compat_torch
from tinker_local.backend.training.model.segments import Call, Segments, wide_dtype


def attend_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` [T, N, D]; `key`, `value` [T, M, D] -> output [T, N, D] and logsumexp [N, T]."""
    if segments.forks and window is not None and window < segments.longest:
        found = [
            compat_torch.flash_attention(
                query[call.rows], key[call.key_rows], value[call.key_rows], call.bounds, scaling, True, window
            )
            for call in segments.within(window)
        ]
        return torch.cat([output for output, _ in found]), torch.cat([logsumexp for _, logsumexp in found], 1)
    output, logsumexp = compat_torch.flash_attention(query, key, value, segments.bounds, scaling, True, window)
    for call in segments.levels if segments.forks else ():
        part = compat_torch.flash_attention(
            query[call.rows], key[call.key_rows], value[call.key_rows], call.bounds, scaling, False
        )
        _merge(output, logsumexp, *part, call)
    return output, logsumexp


def attend_flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    segments: Segments,
    scaling: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value from that of the output, [T, N, D]; `output` and `logsumexp` may include
    sinks."""
    if segments.forks and window is not None and window < segments.longest:
        grads = torch.empty_like(query), *(torch.zeros_like(each, dtype=wide_dtype(each)) for each in (key, value))
        for call in segments.within(window):
            grads[0][call.rows], *of_keys = _call_backward(
                grad, query, key, value, output, logsumexp, call, scaling, True, window
            )
            for total, part in zip(grads[1:], of_keys, strict=True):
                total.index_add_(0, call.key_rows, part.to(total.dtype))
        return grads[0], grads[1].to(key.dtype), grads[2].to(value.dtype)
    found = compat_torch.flash_attention_backward(
        grad, query, key, value, output, logsumexp, segments.bounds, scaling, True, window
    )
    for call in segments.levels if segments.forks else ():
        parts = _call_backward(grad, query, key, value, output, logsumexp, call, scaling, False)
        rows = call.rows, call.key_rows, call.key_rows
        for total, places, part in zip(found, rows, parts, strict=True):
            total.index_add_(0, places, part)  # each place once, so in the same order always
    return found


def _call_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Call,
    scaling: float,
    causal: bool,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, key_rows = call.rows, call.key_rows
    return compat_torch.flash_attention_backward(
        grad[rows],
        query[rows],
        key[key_rows],
        value[key_rows],
        output[rows],
        logsumexp[:, rows],
        call.bounds,
        scaling,
        causal,
        window,
    )


def _merge(
    output: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor, call: Call
) -> None:
    """Add the keys of one `call` to the softmax behind `output` [T, N, D] and `logsumexp` [N, T], in place."""
    before = logsumexp[:, call.rows]
    total = torch.logaddexp(before, part_logsumexp)
    shares = (torch.exp(each - total).T[..., None] for each in (before, part_logsumexp))
    merged = output[call.rows] * next(shares) + part * next(shares)
    output[call.rows] = merged.to(output.dtype)
    logsumexp[:, call.rows] = total
