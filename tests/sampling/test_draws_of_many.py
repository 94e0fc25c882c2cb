"""Steps of more requests than are drawn at a time, without an engine."""

from typing import Any

import pytest
import torch
from tinker_local.backend.vllm_engine.build_engine import prepare_environment
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.backend.vllm_engine.draw_tokens import ROWS, Asked, FullVocabularyDraw, Likeliest, at_share

MANY = 2 * ROWS + 3


def draws(logits: Any, seeds: Any, top_k: Any) -> Any:
    """Tokens and logprobs; each request has a seed, unless it is None."""
    device = logits.device
    generators = {row: torch.Generator(device).manual_seed(seed) for row, seed in enumerate(seeds) if seed is not None}
    cut = torch.tensor(top_k, dtype=torch.int32, device=device)
    asked = Asked(torch.ones(len(logits), device=device), some_greedy=False, top_k_b=cut, generators=generators)
    tokens, chosen = FullVocabularyDraw(device)(logits.clone(), asked)
    return tokens, chosen.logprobs


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
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(-1, tokens[:, None].long())[:, 0])


def test_the_likeliest_of_a_large_step_belong_to_their_requests(logits: Any) -> None:
    widths = {row: 1 + row % 3 for row in range(0, MANY) if row % 10}
    of_row = Likeliest.of(logits, widths).by_row()
    assert of_row.keys() == widths.keys()
    assert len(widths) > ROWS
    for row, (ids, logprobs) in of_row.items():
        expected = logits[row].log_softmax(-1).topk(widths[row])
        assert ids.tolist() == expected.indices.tolist()
        assert logprobs.tolist() == pytest.approx(expected.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("width", [1, 5, 255, 256, 257, 513, 50_001])
def test_a_share_of_a_row_is_the_token_that_a_sum_in_float64_finds(width: int) -> None:
    random = torch.Generator().manual_seed(width)
    p = (3 * torch.randn(200, width, generator=random)).softmax(-1)
    p[:, 1::3] = 0.0  # as top-k leaves them
    p[7:9, : width // 2] = 0.0
    p[9, -1] = 1e-30
    share = torch.rand(200, dtype=torch.float64, generator=random)
    share[:8:2], share[1:9:2] = 0.0, 1 - 2**-53
    found = at_share(p, share)
    chosen = p.gather(1, found[:, None])[:, 0].double()
    upto = p.double().cumsum(-1).gather(1, found[:, None])[:, 0]
    target = share * p.double().sum(-1)
    assert bool((chosen > 0).all())
    # A block's sum in float32 is off by up to 256 roundings of 2**-24.
    off = 2**-16 * p.double().sum(-1)
    assert bool((upto - chosen <= target + off).all())
    assert bool((target <= upto + off).all())
    reference = torch.searchsorted(p.double().cumsum(-1), target[:, None], right=True)[:, 0]
    assert int((found == reference).sum()) >= 198


def test_uniform_shares_draw_what_the_probabilities_say() -> None:
    p = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.0, 0.4])
    shares = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(at_share(p.expand(10_000, -1), shares), minlength=6)
    assert counts.tolist() == [1000, 0, 2000, 3000, 0, 4000]


def test_a_row_of_nan_yields_some_token() -> None:
    """Its logprob is NaN, which is what says so."""
    found = at_share(torch.full((2, 600), torch.nan), torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert bool(((found >= 0) & (found < 600)).all())


@pytest.mark.parametrize("draws", [0, 1, 5, 3000])
def test_a_request_that_comes_back_goes_on_with_its_random_numbers(logits: Any, draws: int) -> None:
    """As after a preemption: its generator is that of one that has drawn as often, each time from a whole row."""
    draw = FullVocabularyDraw(logits.device)
    generator = torch.Generator(logits.device).manual_seed(11)
    rows = logits[:1].softmax(-1)
    for _ in range(draws):
        draw._draw(rows, {0: generator})
    again = draw.past(11, draws, rows.shape[1])
    assert torch.equal(again.get_state(), generator.get_state())
