"""Attention by fused kernels (`kernels/flash_attention.py`), also where sequences share their beginning.

A softmax over keys in several parts is that of each part, weighed by the share of its sum: with l_i the logsumexp of
part i, l = log(sum exp(l_i)) and the output is the sum of exp(l_i - l) o_i. The backward of a part, given the output
and logsumexp of the whole, recomputes weights exp(s - l) and so is that part of the whole gradient (arXiv 2205.14135,
B.2; the same as in cascade attention, arXiv 2501.01005).

Each segment attends to itself. Then, depth by depth, all that goes on from a segment attends to it in one call: as one
segment of queries without a mask, whatever sequences they are of. So nothing is computed or copied once per sequence.

A sliding window ends in the middle of a shared beginning, at another place for each position. There, each segment gets
a copy of the keys that its window reaches. These are never more keys than the row has when nothing is shared.

Legend: T positions, N query heads, M key-value heads, D head size.
"""

from dataclasses import replace

import torch
from tinker_local.backend.training.kernels import flash_attention
from tinker_local.backend.training.kernels.flash_attention import FlashKernel, Gradients, with_sinks
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Bounds, Call, Segments, wide_dtype


def attend_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, rule: AttentionRule
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`query` [T, N, D]; `key`, `value` [T, M, D] -> output [T, N, D] and logsumexp of scores and sinks [N, T]. None
    if no kernel computes `rule` on tensors like these."""
    bounds = segments.bounds
    if (kernel := flash_attention.kernel_for(query, key, bounds, rule)) is None:
        return None
    if not segments.forks:
        return kernel.forward(query, key, value, bounds, rule)
    if _ends_on_the_way(segments, rule):
        found = []
        for call in segments.within(rule.window or 0):
            given = query[call.rows], key[call.key_rows], value[call.key_rows]
            found.append(_kernel(given[0], given[1], call.bounds, rule).forward(*given, call.bounds, rule))
        return torch.cat([output for output, _ in found]), torch.cat([logsumexp for _, logsumexp in found], 1)
    of_part = replace(rule, window=None, sinks=None)
    output, logsumexp = _kernel(query, key, bounds, of_part).forward(query, key, value, bounds, of_part)
    for call in segments.levels:
        given = query[call.rows], key[call.key_rows], value[call.key_rows]
        of_call = _kernel(given[0], given[1], call.bounds, of_part, causal=False)
        _merge(output, logsumexp, *of_call.forward(*given, call.bounds, of_part, causal=False), call)
    return (output, logsumexp) if rule.sinks is None else with_sinks(output, logsumexp, rule.sinks)


def attend_fused_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    segments: Segments,
    rule: AttentionRule,
) -> Gradients:
    """The gradients of query, key and value from that of the output, [T, N, D]. The other arguments are the inputs and
    outputs of `attend_fused`."""
    given, bounds = (grad, query, key, value, output, logsumexp), segments.bounds
    if not segments.forks:
        return _kernel(query, key, bounds, rule).backward(*given, bounds, rule)
    if _ends_on_the_way(segments, rule):
        grad_query = torch.empty_like(query)
        of_keys = [torch.zeros_like(each, dtype=wide_dtype(each)) for each in (key, value)]
        for call in segments.within(rule.window or 0):
            of_call = _rows_of(call, *given)
            kernel = _kernel(of_call[1], of_call[2], call.bounds, rule)
            grad_query[call.rows], *copied = kernel.backward(*of_call, call.bounds, rule)
            for total, part in zip(of_keys, copied, strict=True):
                total.index_add_(0, call.key_rows, part.to(total.dtype))
        return grad_query, of_keys[0].to(key.dtype), of_keys[1].to(value.dtype)
    of_part = replace(rule, window=None, sinks=None)
    found = _kernel(query, key, bounds, of_part).backward(*given, bounds, of_part)
    for call in segments.levels:
        of_call = _rows_of(call, *given)
        kernel = _kernel(of_call[1], of_call[2], call.bounds, of_part, causal=False)
        parts = kernel.backward(*of_call, call.bounds, of_part, causal=False)
        places = call.rows, call.key_rows, call.key_rows
        for total, rows, part in zip(found, places, parts, strict=True):
            total.index_add_(0, rows, part)  # each place once, so in the same order always
    return found


def _ends_on_the_way(segments: Segments, rule: AttentionRule) -> bool:
    """Whether a window hides something of a sequence."""
    return rule.window is not None and rule.window < segments.longest


def _kernel(
    query: torch.Tensor, key: torch.Tensor, bounds: Bounds, rule: AttentionRule, *, causal: bool = True
) -> FlashKernel:
    """The fastest one, the same forward and backward. `attend_fused` has found that there is one."""
    kernel = flash_attention.kernel_for(query, key, bounds, rule, causal=causal)
    assert kernel is not None, "one computes the rule, whatever the bounds"
    return kernel


def _rows_of(
    call: Call,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of a backward for the positions of `call`."""
    rows, key_rows = call.rows, call.key_rows
    return grad[rows], query[rows], key[key_rows], value[key_rows], output[rows], logsumexp[:, rows]


def _merge(
    output: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor, call: Call
) -> None:
    """Add the keys of one `call` to the softmax behind `output` [T, N, D] and `logsumexp` [N, T], in place."""
    before = logsumexp[:, call.rows]
    total = torch.logaddexp(before, part_logsumexp)
    share, part_share = (torch.exp(each - total).T[..., None] for each in (before, part_logsumexp))
    output[call.rows] = (output[call.rows] * share + part * part_share).to(output.dtype)
    logsumexp[:, call.rows] = total
