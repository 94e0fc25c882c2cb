"""Attention alone against transformers' eager attention: windows, soft caps and sinks, forward and backward."""

import itertools
from typing import Any

import pytest
import torch
from tinker_local.backend.training.model import attention
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Segments
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as with_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from tests.float64 import InFloat64

HEADS, KV_HEADS, SIZE, SCALING = 6, 2, 10, 0.3


class Module(torch.nn.Module):
    """The attributes of an attention module that transformers' function reads."""

    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // KV_HEADS
        self.sinks = sinks


def theirs(query: Any, key: Any, value: Any, rule: AttentionRule, image: torch.Tensor) -> torch.Tensor:
    """Attend in one segment [L, heads, D] with transformers and a mask [1, 1, L, L]. `image` [L]: the number of the
    image that each position belongs to, 0 for text."""
    places = torch.arange(len(query))
    distance = places[:, None] - places[None]
    same = (image[:, None] == image[None]) & (image > 0)
    seen = ((distance >= 0) | same) & (distance < (rule.window or len(query)))
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)[None, None]
    parts = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    if rule.sinks is not None:
        output, _ = with_sinks(Module(rule.sinks), *parts, mask, scaling=rule.scaling)
    else:
        output, _ = with_softcap(
            Module(torch.empty(0)), *parts, mask, dropout=0.0, scaling=rule.scaling, softcap=rule.softcap
        )
    return output[0]


def by_autograd(tensors: Any, grad: torch.Tensor, rule: AttentionRule, image: torch.Tensor) -> Any:
    """The gradients of query, key and value in one segment, in their dtype, through torch's own softmax."""
    query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    same = (image[:, None] == image[None]) & (image > 0)
    seen = ((distance >= 0) | same) & (distance < (rule.window or len(query)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : len(query)]
    return torch.autograd.grad(torch.einsum("nqk,knd->qnd", weights, value), leaves, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "images"),
    [(9, None, False, ()), (None, 50.0, False, ()), (None, None, True, ()), (None, None, False, ((4, 8), (20, 31)))],
    ids=["window", "soft-cap", "sinks", "images"],
)
def test_gradients_through_nearly_one_hot_attention_are_as_exact_as_torchs(
    window: Any, softcap: Any, sinks: Any, images: Any, dtype: torch.dtype
) -> None:
    """Each position looks at itself and hardly at others, so that queries and keys get what little the gradients of the
    weights leave of each other. Against float64, ours are at most three times as wrong as torch's. The first position
    sees itself alone, and its query has no gradient at all."""
    generator, length = torch.Generator().manual_seed(0), 64
    key = torch.nn.functional.normalize(torch.randn(length, KV_HEADS, SIZE, generator=generator), dim=-1)
    query = key.repeat_interleave(HEADS // KV_HEADS, 1) * 50
    value = torch.randn(length, KV_HEADS, SIZE, generator=generator) + 3
    grad = torch.randn(length, HEADS, SIZE, generator=generator)
    query, key, value, grad = (tensor.to(dtype) for tensor in (query, key, value, grad))
    rule = AttentionRule(1.0, window, softcap, torch.zeros(HEADS) if sinks else None)
    segments = Segments((length,), torch.device("cpu"), images)
    image = torch.zeros(length, dtype=torch.int64)
    for number, (start, stop) in enumerate(images, 1):
        image[start:stop] = number

    output, logsumexp = attend(query, key, value, segments, rule)
    gradients = attend_backward(grad, query, key, value, output, logsumexp, segments, rule)

    inputs = (query, key, value)
    exact = by_autograd([tensor.double() for tensor in inputs], grad.double(), rule, image)
    torchs = by_autograd(inputs, grad, rule, image)
    for ours, wanted, reference in zip(gradients, exact, torchs, strict=True):
        error, bound = ((each.double() - wanted).norm() / wanted.norm() for each in (ours, reference))
        assert error <= 3 * bound, (float(error), float(bound))
    if not sinks:
        assert not gradients[0][0].any()


@pytest.mark.mutation("window-ignored", "_Portion._scores", "hidden | (queries - keys >= rule.window)", "hidden")
@pytest.mark.mutation(
    "soft-cap-without-its-derivative", "_Portion.backward", "grad_scores *= 1 - capped * capped", "grad_scores *= 1"
)
@pytest.mark.mutation(
    "sinks-without-a-share",
    "_Portion._softmax",
    "torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]",
    "scores.softmax(-1)",
)
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (1.5, False), (None, True)])
@pytest.mark.parametrize("scores", [1, 2**26])
@pytest.mark.parametrize("images", [(), ((4, 8), (12, 15), (15, 17), (19, 21), (21, 22), (22, 29))])
def test_each_segment_attends_as_in_transformers_alone(
    window: Any, softcap: Any, sinks: Any, scores: Any, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and the three gradients in float64, in portions of any size; nothing leaks between segments. Images see
    themselves: in the middle of a segment, side by side, at its end and its start, and as all of it."""
    monkeypatch.setattr(attention, "SCORES", scores)
    lengths = (3, 9, 9, 1, 14)
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 for shape in shapes)
    grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    rule = AttentionRule(SCALING, window, softcap, torch.linspace(-1, 2, HEADS, dtype=torch.float64) if sinks else None)
    segments = Segments(lengths, torch.device("cpu"), images)

    output, logsumexp = attend(query, key, value, segments, rule)
    gradients = attend_backward(grad, query, key, value, output, logsumexp, segments, rule)

    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    bounds = itertools.pairwise([0, *itertools.accumulate(lengths)])
    q, k, v = leaves
    image = torch.zeros(sum(lengths), dtype=torch.int64)
    for number, (start, stop) in enumerate(images, 1):
        image[start:stop] = number
    with InFloat64():
        wanted = torch.cat(
            [theirs(q[start:stop], k[start:stop], v[start:stop], rule, image[start:stop]) for start, stop in bounds]
        )
        wanted_gradients = torch.autograd.grad(wanted, leaves, grad)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    for ours, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
