"""Causal attention inside the segments of one packed row, forward and backward.

Sliding windows, soft caps and sinks are part of the rule; positions of an image may see all of it. Where sequences
begin alike (`segments.py`), scores are with the keys of all of a segment's path, in one softmax; flash attention, which
cannot have them all at once, computes it in parts (`fused_attention.py`).

Legend: T positions, N query heads, M key-value heads (N is a multiple of M), D head size, B segments of one length with
paths of one length.

Of a row that several ranks share, queries, keys, values, outputs and gradients are those of this rank's positions."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.fused_attention import attend_fused, attend_fused_backward
from tinker_local.backend.training.model.segments import Run, Segments, wide_dtype


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, rule: AttentionRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend: `query` [T, N, D]; `key`, `value` [T, M, D], rows may be strided -> output [T, N, D], and the `logsumexp`
    for `attend_backward` (None if it needs none). T is the sum of the segments' lengths. Of a shared row, the
    `logsumexp` is that of this rank's heads."""
    if query.is_meta:  # it has no values; kernels give the output this layout
        return query.new_empty(query.shape), None
    segments = _segments_of(rule, segments)
    if (shared := segments.shared) is not None:
        query, key, value = shared.to_heads(query, key, value)
        output, logsumexp = attend(query, key, value, segments.gathered, rule.of_heads(shared))
        return shared.to_rows(output)[0], logsumexp
    if not segments.images and (found := attend_fused(query, key, value, segments, rule)) is not None:
        return found  # no fused kernel lets images see all of themselves
    if _is_plain(query, rule, segments):
        outputs = [_run_attention(query, key, value, run, rule.scaling) for run in segments.runs]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), None
    output = torch.empty_like(query)
    for run in segments.runs:
        for part in _portions(query, run.keys_of(key), run.keys_of(value), segments, run, rule):
            part.rows_of(output).copy_(part.weights(rule) @ part.value)
    return output, None


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor | None,
    segments: Segments,
    rule: AttentionRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value from that of the output, [T, N, D]. The other arguments are the inputs and
    outputs of `attend`."""
    segments = _segments_of(rule, segments)
    if (shared := segments.shared) is not None:
        grad, query, key, value, output = shared.to_heads(grad, query, key, value, output)
        of_heads = rule.of_heads(shared)
        found = attend_backward(grad, query, key, value, output, logsumexp, segments.gathered, of_heads)
        del grad, query, key, value, output
        grad_query, grad_key, grad_value = shared.to_rows(*found)
        return grad_query, grad_key, grad_value
    if logsumexp is not None:
        return attend_fused_backward(grad, query, key, value, output, logsumexp, segments, rule)
    if _is_plain(query, rule, segments):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            again, _ = attend(leaves[0], leaves[1], leaves[2], segments, rule)
            grad_query, grad_key, grad_value = torch.autograd.grad(again, leaves, grad)
        return grad_query, grad_key, grad_value
    grad_query = torch.empty_like(query)
    grad_key = torch.zeros(key.shape, dtype=wide_dtype(key), device=key.device)
    grad_value = torch.zeros(value.shape, dtype=wide_dtype(value), device=value.device)
    for run in segments.runs:
        of_keys, of_values = run.zeros_for_keys(grad_key), run.zeros_for_keys(grad_value)
        for part in _portions(query, run.keys_of(key), run.keys_of(value), segments, run, rule):
            part.backward(rule, part.rows_of(grad), grad_query, of_keys, of_values)
        run.add_keys(grad_key, of_keys)
        run.add_keys(grad_value, of_values)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _segments_of(rule: AttentionRule, segments: Segments) -> Segments:
    return segments if rule.whole_images or not segments.images else segments.without_images


WIDEST = 256
"""The widest heads for which torch has kernels of attention on CUDA. Of wider ones, as Gemma 4 has where there is no
window, it makes all scores at once."""


def _is_plain(query: torch.Tensor, rule: AttentionRule, segments: Segments) -> bool:
    """Whether `rule` reduces to causal softmax attention for these segments, for which torch has a kernel."""
    if query.is_cuda and query.shape[-1] > WIDEST:
        return False
    within = rule.window is None or rule.window >= segments.longest
    return within and rule.softcap is None and rule.sinks is None and not segments.images


def _run_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: Run, scaling: float
) -> torch.Tensor:
    """Attention of one run's segments as a batch, [count * length, N, D]."""
    queries, keys, values = (
        each.transpose(1, 2) for each in (run.queries_of(query), run.keys_of(key), run.keys_of(value))
    )
    portions = _portions_of(run, query.shape[1]) if run.before else [(0, run.length)]
    outputs: list[torch.Tensor] = []
    for start, stop in portions:
        last, seen = run.before + stop, None
        if run.before:  # torch lets the first query see the first key alone, where shapes differ
            seen = torch.ones(stop - start, last, dtype=torch.bool, device=query.device).tril(run.before + start)
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                queries[:, :, start:stop],
                keys[:, :, :last],
                values[:, :, :last],
                seen,
                is_causal=seen is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            ).transpose(1, 2)
        )
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)).flatten(0, 1)


SCORES = 2**26
"""Maximum number of scores in memory at once where they are materialized."""


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """The queries [start, stop) of each segment of `run`, and the keys [first, last) that they may attend to. `query`
    [B, M, N / M, l, D], `key` and `value` [B, M, 1, k, D]. `horizon` [B, 1, 1, l, 1]: `Segments.horizon` of the
    queries; None without images."""

    run: Run
    start: int
    stop: int
    first: int
    last: int
    horizon: torch.Tensor | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The queries' rows of `tensor` [T, N, D], as a view shaped like `query`."""
        return _grouped(self.run.queries_of(tensor), self.start, self.stop, self.key.shape[1])

    def weights(self, rule: AttentionRule) -> torch.Tensor:
        """Attention weights [B, M, N / M, l, k] in the dtype of the values."""
        return self._softmax(self._scores(rule), rule).to(self.value.dtype)

    def backward(
        self,
        rule: AttentionRule,
        grad: torch.Tensor,
        grad_query: torch.Tensor,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> None:
        """Write the gradient of these queries to `grad_query` [T, N, D]; add those of the keys and values to the
        others, [B, keys, M, D]."""
        scores = self._scores(rule)
        weights = self._softmax(scores, rule)
        to_key = _grouped(grad_key, self.first, self.last, self.key.shape[1])
        to_value = _grouped(grad_value, self.first, self.last, self.key.shape[1])
        wide = weights.dtype
        to_value += (weights.transpose(-1, -2) @ grad.to(wide)).sum(2, keepdim=True)
        grad_weights = (grad @ self.value.transpose(-1, -2)).to(wide)
        # Not by sum(grad * output), which is the same number, rounded otherwise: where one weight is almost 1, the
        # gradient is what these two leave of each other. A sink has no value, so it does not enter the sum.
        grad_scores = grad_weights.sub_((weights * grad_weights).sum(-1, keepdim=True)).mul_(weights)
        if rule.softcap is not None:
            capped = torch.where(weights > 0, scores / rule.softcap, 0.0)
            grad_scores *= 1 - capped * capped
        grad_scores *= rule.scaling
        self.rows_of(grad_query).copy_(grad_scores @ self.key.to(wide))
        to_key += (grad_scores.transpose(-1, -2) @ self.query.to(wide)).sum(2, keepdim=True)

    def _scores(self, rule: AttentionRule) -> torch.Tensor:
        """Scores in float32 (float64 stays), -inf where a query may not attend."""
        scores = (self.query @ self.key.transpose(-1, -2)).to(wide_dtype(self.query)) * rule.scaling
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        before = self.run.before
        queries = torch.arange(before + self.start, before + self.stop, device=scores.device)[:, None]
        keys = torch.arange(self.first, self.last, device=scores.device)[None]
        hidden = keys > queries if self.horizon is None else keys >= self.horizon
        if rule.window is not None:
            hidden = hidden | (queries - keys >= rule.window)
        return scores.masked_fill_(hidden, -torch.inf)

    @staticmethod
    def _softmax(scores: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        if rule.sinks is None:
            return scores.softmax(-1)
        batch, groups, heads, rows, _ = scores.shape
        sinks = rule.sinks.to(scores.dtype).view(1, groups, heads, 1, 1).expand(batch, -1, -1, rows, 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def _portions(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, run: Run, rule: AttentionRule
) -> Iterator[_Portion]:
    """Split the queries of `run`, of `query` [T, N, D], so that the scores of each portion stay below `SCORES`. `key`,
    `value` [B, keys, M, D]: those of the run."""
    groups = key.shape[2]
    for start, stop in _portions_of(run, query.shape[1]):
        first = 0 if rule.window is None else max(0, run.before + start - rule.window + 1)
        last, horizon = run.before + stop, None
        if segments.images:
            last = run.key_length  # an image may begin in this portion and end in another
            horizon = run.queries_of(segments.horizon)[:, None, None, start:stop, None]
        yield _Portion(
            run,
            start,
            stop,
            first,
            last,
            horizon,
            _grouped(run.queries_of(query), start, stop, groups),
            _grouped(key, first, last, groups),
            _grouped(value, first, last, groups),
        )


def _portions_of(run: Run, heads: int) -> Iterator[tuple[int, int]]:
    """Ranges of the queries of each segment of `run` that have at most `SCORES` scores together."""
    size = max(1, SCORES // (run.count * heads * run.key_length))
    for start in range(0, run.length, size):
        yield start, min(run.length, start + size)


def _grouped(of_run: torch.Tensor, start: int, stop: int, groups: int) -> torch.Tensor:
    """Positions [start, stop) of `of_run` [B, L, heads, D], a view [B, groups, heads / groups, stop - start, D]."""
    return of_run[:, start:stop].unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
