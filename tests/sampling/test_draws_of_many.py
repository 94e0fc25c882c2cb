"""Steps of more requests than are drawn at a time, without an engine."""

from typing import Any

import pytest
import torch
from tinker_local.backend.vllm_engine.build_engine import prepare_environment
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.backend.vllm_engine.draw_tokens import ROWS, FullVocabularyDraw, Likeliest

MANY = 2 * ROWS + 3


def draws(logits: Any, seeds: Any, top_k: Any) -> Any:
    """Tokens and logprobs; each request has a seed, unless it is None."""
    device = logits.device
    generators = {row: torch.Generator(device).manual_seed(seed) for row, seed in enumerate(seeds) if seed is not None}
    module = FullVocabularyDraw(device)
    tokens, scores = module(logits.clone(), generators, torch.tensor(top_k, dtype=torch.int32, device=device), None)
    return tokens, scores.of(tokens)


@pytest.fixture
def logits() -> Any:
    prepare_environment()
    device = "cpu" if runs_on_cpu() else "cuda"
    return torch.randn(MANY, 64, generator=torch.Generator().manual_seed(0)).to(device)


def test_each_request_of_a_large_step_draws_what_it_draws_alone(logits: Any) -> None:
    seeds = [None if row % 5 == 4 else row for row in range(MANY)]
    top_k = [1 + row % 7 if seed is not None else 1 for row, seed in enumerate(seeds)]
    tokens, logprobs = draws(logits, seeds, top_k)
    for row in (0, 4, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, MANY - 1):
        alone, logprob = draws(logits[row : row + 1], seeds[row : row + 1], top_k[row : row + 1])
        assert tokens[row] == alone
        torch.testing.assert_close(logprobs[row], logprob[0])
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])


def test_the_likeliest_of_a_large_step_belong_to_their_requests(logits: Any) -> None:
    widths = {row: 1 + row % 3 for row in range(0, MANY) if row % 10}
    of_row = Likeliest.of(logits, widths).by_row()
    assert of_row.keys() == widths.keys()
    assert len(widths) > ROWS
    for row, (ids, logprobs) in of_row.items():
        expected = logits[row].log_softmax(-1).topk(widths[row])
        assert ids.tolist() == expected.indices.tolist()
        assert logprobs.tolist() == pytest.approx(expected.values.tolist(), abs=1e-6)
