"""The chunked LM head with a bias, a scale and a soft cap, against autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.families.family import LogitRule
from tinker_local.backend.training.kernels import TorchKernels
from tinker_local.backend.training.lm_head import LmHead, Targets

ROWS, HIDDEN, VOCABULARY = 11, 6, 23


@pytest.mark.mutation(
    "logits-capped-without-the-derivative",
    "training/lm_head.py",
    "return (1 - (logits / self.rule.softcap) ** 2).mul_(self.rule.scale)",
    "return self.rule.scale",
)
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0), LogitRule(0.3, 2.0)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [VOCABULARY, 4 * VOCABULARY, 10**6])
def test_logprobs_and_gradient_follow_the_rule_of_the_family(rule: Any, has_bias: Any, chunk: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden, bias = (
        2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((VOCABULARY, HIDDEN), (ROWS, HIDDEN), (VOCABULARY,))
    )
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(ROWS), 2)
    ids = rng.integers(0, VOCABULARY, len(rows))
    weights = torch.from_numpy(rng.standard_normal(len(rows)))
    head = LmHead(weight, TorchKernels(), chunk, torch.float64, bias if has_bias else None, rule)
    targets = Targets(rows, ids, active=np.ones(len(rows), bool), prepass=np.zeros(len(rows), bool))
    logprobs, grad_hidden = head.logprobs_and_gradient(hidden, targets, None, lambda places, _: -weights[places])

    leaf = hidden.clone().requires_grad_()
    logits = rule.scale * (leaf @ weight.T + (bias if has_bias else 0))
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    wanted = logits.log_softmax(-1)[torch.from_numpy(rows), torch.from_numpy(ids)]
    (-weights * wanted).sum().backward()
    torch.testing.assert_close(logprobs, wanted.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad_hidden, leaf.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(head.logprobs(hidden, targets, None), logprobs, rtol=0, atol=1e-12)
