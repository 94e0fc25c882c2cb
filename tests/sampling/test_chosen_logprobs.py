"""Logprobs of chosen tokens are what the whole vocabulary's would be, in every path that vLLM takes them on."""

import numpy as np
import pytest
import torch
from tinker_local.backend.vllm_engine.draw_tokens import Logits, Probabilities, gather_logprobs


def test_logprobs_from_probabilities_are_exact_to_rounding() -> None:
    """Also of tokens that are nearly certain, and of tokens as unlikely as float32 can tell."""
    logits = torch.tensor([[0.0, -20.0, -60.0], [0.0, -20.0, -60.0], [0.0, -20.0, -60.0]])
    ids = torch.arange(3)
    expected = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    got = Probabilities(logits.softmax(-1)).of(ids).double()
    assert float((got - expected).abs().max()) < 1e-5


def test_one_number_a_token_leaves_the_sampler() -> None:
    ids = torch.tensor([1, 2, 0])
    logits = torch.zeros(3, 4)
    step = gather_logprobs(Logits(logits), 0, ids).to_cpu_nonblocking().tolists()
    assert [step.slice_request(row, 1) for row in range(3)] == pytest.approx([-np.log(4)] * 3)
    assert step.slice_request(1, 0) is None  # a prompt that is not all in has no token yet
