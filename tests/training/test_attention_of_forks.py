"""Attention on rows where sequences share their beginning, against each sequence alone, in float64."""

import itertools

import pytest
import torch
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import NO_PARENT, Segments

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


def rows_of(segments: Segments, segment: int) -> torch.Tensor:
    """The positions in the row of the sequence that ends with `segment`."""
    path = segments.path(segment)
    return torch.cat([torch.arange(segments.starts[at], segments.starts[at] + segments.lengths[at]) for at in path])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("images", [False, True])
def test_sequences_that_share_their_beginning_are_as_if_each_were_alone(
    rule: str, forest: str, images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.backend.training.model.attention.SCORES", 60)  # several portions
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


def test_places_and_keys_follow_the_path() -> None:
    segments = Segments((5, 2, 4, 1), CPU, parents=(NO_PARENT, 0, 1, 0))
    assert segments.before == (0, 5, 7, 5)
    assert segments.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5]
    wanted = [[0, 1, 2, 3, 4], list(range(7)), list(range(11)), [0, 1, 2, 3, 4, 11]]
    assert segments.key_rows.tolist() == list(itertools.chain(*wanted))
    assert segments.bounds.keys.tolist() == [0, 5, 12, 23, 29]
    assert (segments.longest, segments.bounds.longest_query) == (11, 5)


def test_without_parents_keys_are_the_row_itself() -> None:
    segments = Segments((5, 2), CPU)
    row = torch.randn(7, 2, 4)
    assert segments.to_keys(row) is row
    assert segments.bounds.keys is segments.bounds.queries
