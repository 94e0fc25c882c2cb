"""Logprobs of chosen tokens are what the whole vocabulary's would be, in every path that vLLM takes them on."""

import numpy as np
import pytest
import torch
from tinker_local.backend.vllm_engine.draw_tokens import (
    Asked,
    ChosenLogprobs,
    FullVocabularyDraw,
    Logits,
    Probabilities,
)


def test_logprobs_from_probabilities_are_exact_to_rounding() -> None:
    """Also of tokens that are nearly certain, and of tokens as unlikely as float32 can tell."""
    logits = torch.tensor([[0.0, -20.0, -60.0], [0.0, -20.0, -60.0], [0.0, -20.0, -60.0]])
    ids = torch.arange(3)
    expected = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    got = Probabilities(logits.softmax(-1)).of(ids).double()
    assert float((got - expected).abs().max()) < 1e-5


def test_one_number_a_token_leaves_the_sampler() -> None:
    step = ChosenLogprobs(Logits(torch.zeros(3, 4)).of(torch.tensor([1, 2, 0]))).to_cpu_nonblocking().tolists()
    assert [step.slice_request(row, 1) for row in range(3)] == pytest.approx([-np.log(4)] * 3)
    assert step.slice_request(1, 0) is None  # a prompt that is not all in has no token yet


def test_rows_at_temperature_0_beside_others_take_the_likeliest_with_its_logprob_at_1() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([0.0, 0.5, 0.0, 2.0, 1.0, 0.0])
    ids, chosen = FullVocabularyDraw(torch.device("cpu"))(logits.clone(), Asked(temperature, some_greedy=True))
    assert torch.equal(ids[temperature == 0].long(), logits[temperature == 0].argmax(-1))
    expected = (logits / temperature.where(temperature > 0, 1.0)[:, None]).log_softmax(-1)
    torch.testing.assert_close(chosen.logprobs, expected.gather(1, ids[:, None].long())[:, 0])
    alone, of_alone = FullVocabularyDraw(torch.device("cpu"))(logits.clone(), Asked(None, some_greedy=True))
    assert torch.equal(alone.long(), logits.argmax(-1))
    torch.testing.assert_close(of_alone.logprobs, logits.log_softmax(-1).max(-1).values)
