"""Attention on rows where sequences share their beginning, against each sequence alone, in float64."""

import itertools
import sys
from typing import Any

import pytest
import torch
from tinker_local.backend.training.kernels import flash_attention
from tinker_local.backend.training.kernels.flash_attention import with_sinks
from tinker_local.backend.training.model import attention
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import NO_PARENT, Bounds, Segments

HEADS, KV_HEADS, SIZE = 4, 2, 8
CPU = torch.device("cpu")
SCALING = 0.4
SINKS = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64)
RULES = {
    "plain": AttentionRule(SCALING),
    "window 4": AttentionRule(SCALING, window=4),
    "window 1": AttentionRule(SCALING, window=1),
    "softcap": AttentionRule(SCALING, softcap=2.0),
    "sinks": AttentionRule(SCALING, sinks=SINKS),
    "sinks and window": AttentionRule(SCALING, window=6, sinks=SINKS),
}
FORESTS = {
    "a group": ((7, 3, 3, 5), (NO_PARENT, 0, 0, 0)),
    "forks of forks": ((5, 2, 4, 4, 1, 3), (NO_PARENT, 0, 1, 1, 0, 4)),
    "two groups and one alone": ((4, 3, 3, 6, 2, 2, 5), (NO_PARENT, 0, 0, NO_PARENT, 3, 3, NO_PARENT)),
    "a chain": ((1, 1, 1), (NO_PARENT, 0, 1)),
}


def path_of(segments: Segments, segment: int) -> list[int]:
    """The segments from a root to `segment`."""
    found = [segment]
    while segments.parents and (parent := segments.parents[found[0]]) != NO_PARENT:
        found.insert(0, parent)
    return found


def rows_of(segments: Segments, segment: int) -> torch.Tensor:
    """The positions in the row of the sequence that ends with `segment`."""
    path = path_of(segments, segment)
    return torch.cat([torch.arange(segments.starts[at], segments.starts[at] + segments.lengths[at]) for at in path])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("images", [False, True])
def test_sequences_that_share_their_beginning_are_as_if_each_were_alone(
    rule: str, forest: str, images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.backend.training.model.attention.SCORES", 60)  # several portions
    monkeypatch.setattr("tinker_local.backend.training.model.segments.MOST_KEYS", 20)
    lengths, parents = FORESTS[forest]
    seen = ((0, 2), (sum(lengths[:-1]), sum(lengths))) if images and lengths[0] > 1 else ()
    segments = Segments(lengths, CPU, seen, parents=parents)
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value, grad = (
        torch.randn(total, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    output, logsumexp = attend(query, key, value, segments, RULES[rule])
    found = attend_backward(grad, query, key, value, output, logsumexp, segments, RULES[rule])

    wanted = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for segment in range(len(lengths)):
        rows = rows_of(segments, segment)
        start = segments.starts[segment]
        place = {int(row): at for at, row in enumerate(rows)}
        alone = Segments((len(rows),), CPU, tuple((place[a], place[b - 1] + 1) for a, b in seen if a in place))
        given = query[rows], key[rows], value[rows]
        one, its_logsumexp = attend(*given, alone, RULES[rule])
        own = torch.arange(start, start + lengths[segment])
        torch.testing.assert_close(output[own], one[-len(own) :], rtol=0, atol=1e-13)
        # What is shared has its own gradient once: in the sequence that ends with it.
        own_grad = torch.zeros_like(one)
        own_grad[-len(own) :] = grad[own]
        grads = attend_backward(own_grad, *given, one, its_logsumexp, alone, RULES[rule])
        for total_grad, part in zip(wanted, grads, strict=True):
            total_grad.index_add_(0, rows, part)
    for mine, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)


class TorchFlash:
    """Stands in for a `FlashKernel`, which a CPU has not: the same outputs from the same arguments, by torch's softmax,
    in float64."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def scores(self, query: Any, key: Any, bounds: Bounds, rule: AttentionRule, causal: bool) -> Any:
        """Of all queries and keys [N, T, keys], -inf where one does not see the other, and their derivative by what the
        soft cap makes them of."""
        scores = torch.einsum("qnd,knd->nqk", query, key.repeat_interleave(HEADS // KV_HEADS, 1)) * rule.scaling
        slope = torch.ones_like(scores)
        if rule.softcap is not None:
            capped = torch.tanh(scores / rule.softcap)
            scores, slope = rule.softcap * capped, 1 - capped**2
        seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
        pairs = zip(bounds.queries.tolist(), bounds.keys.tolist(), strict=True)
        for (start, first), (stop, last) in itertools.pairwise(pairs):
            assert stop > start
            assert last > first
            distance = (
                torch.arange(stop - start)[:, None] + (last - first) - (stop - start) - torch.arange(last - first)
            )
            of_segment = (distance >= 0) | (not causal)
            seen[start:stop, first:last] = of_segment & (distance < (rule.window or len(key) + len(query)))
        assert stop == len(query)
        assert last == len(key)
        return scores.masked_fill(~seen, -torch.inf), slope

    def forward(
        self, query: Any, key: Any, value: Any, bounds: Bounds, rule: AttentionRule, *, causal: bool = True
    ) -> Any:
        self.calls.append((len(query), len(key)))
        scores, _ = self.scores(query, key, bounds, rule, causal)
        values = value.repeat_interleave(HEADS // KV_HEADS, 1)
        found = torch.einsum("nqk,knd->qnd", scores.softmax(-1), values), scores.logsumexp(-1)
        return found if rule.sinks is None else with_sinks(*found, rule.sinks)

    def backward(
        self,
        grad: Any,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        logsumexp: Any,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> Any:
        """As kernels do: from the logsumexp and the output, not from another softmax."""
        scores, slope = self.scores(query, key, bounds, rule, causal)
        weights = torch.exp(scores - logsumexp[..., None])
        wide = [each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value)]
        to_weights = torch.einsum("qnd,knd->nqk", grad, wide[1]) - (grad * output).sum(-1).T[..., None]
        to_scores = weights * to_weights * slope * rule.scaling
        to_key, to_value = torch.einsum("nqk,qnd->knd", to_scores, query), torch.einsum("nqk,qnd->knd", weights, grad)
        folded = (each.unflatten(1, (KV_HEADS, -1)).sum(2) for each in (to_key, to_value))
        return torch.einsum("nqk,knd->qnd", to_scores, wide[0]), *folded


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("most", [1, 2**15])
def test_parts_of_flash_attention_make_up_the_whole_on_a_fake_kernel(
    rule: str, forest: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, parents = FORESTS[forest]
    monkeypatch.setattr("tinker_local.backend.training.model.segments.MOST_KEYS", most)
    segments = Segments(lengths, CPU, parents=parents)
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randn(sum(lengths), heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    wanted, _ = attend(query, key, value, segments, RULES[rule])
    wanted_grads = attend_backward(grad, query, key, value, wanted, None, segments, RULES[rule])

    flash = TorchFlash()
    monkeypatch.setattr(flash_attention, "kernel_for", lambda *given, causal=True: flash)
    output, logsumexp = attend(query, key, value, segments, RULES[rule])
    found = attend_backward(grad, query, key, value, output, logsumexp, segments, RULES[rule])

    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-13)
    for mine, expected in zip(found, wanted_grads, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_a_group_is_two_calls_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake kernel: the keys of the prompt are read once, by all samples together."""
    flash = TorchFlash()
    monkeypatch.setattr(flash_attention, "kernel_for", lambda *given, causal=True: flash)
    segments = Segments((7, 3, 3, 5, 4, 2), CPU, parents=(NO_PARENT, 0, 0, 0, NO_PARENT, 4))
    row = [torch.randn(24, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    attend(row[0], row[1], row[2], segments, RULES["plain"])
    assert flash.calls == [(24, 24), (11 + 2, 7 + 4)]


def test_places_follow_the_path() -> None:
    segments = Segments((5, 2, 4, 1), CPU, parents=(NO_PARENT, 0, 1, 0))
    assert segments.before == (0, 5, 7, 5)
    assert segments.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5]
    assert segments.longest == 11
    assert [run.key_rows is None for run in segments.runs] == [True, False, False, False]


def test_without_parents_keys_are_the_row_itself() -> None:
    segments = Segments((5, 2), CPU)
    row = torch.randn(7, 2, 4)
    assert all(run.keys_of(row)._base is row for run in segments.runs)
    assert segments.levels == ()


def test_a_conversation_of_two_thousand_forks_is_laid_out_at_once() -> None:
    """Each turn forks from the one before: nothing walks through all of its ancestors in Python."""
    turns = 2000
    lengths = (1,) * (2 * turns)
    parents = (NO_PARENT, *(at - 1 if at % 2 else at - 2 for at in range(1, 2 * turns)))
    segments = Segments(lengths, CPU, parents=parents)
    calls = 0

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(counted)
    try:
        keys = sum(len(call.key_rows) for call in segments.within(5))
    finally:
        sys.setprofile(None)
    assert keys == sum(min(5, place) for place in segments.key_lengths)
    assert calls < 200 * turns


def test_the_mask_of_a_long_fork_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of 16,000 positions after a prompt of 16,000 would have half a billion at once."""
    monkeypatch.setattr(attention, "SCORES", 40 * HEADS)
    masks, attention_of = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
        if mask is not None:
            masks.append(mask.numel())
        found: torch.Tensor = attention_of(query, key, value, mask, **options)
        return found

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    segments = Segments((10, 9, 9), CPU, parents=(NO_PARENT, 0, 0))
    query, key, value = (torch.randn(28, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attend(query, key, value, segments, RULES["plain"])
    assert len(masks) > 1
    assert max(masks) <= 40
