"""Tokens that are drawn in one pass: the kernel equals plain torch, and a step uses it where it may."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_local.backend.vllm_engine.draw_tokens import Asked, FullVocabularyDraw

from tests.interpreter import run_interpreted
from tests.sampling import one_pass_cases


@pytest.mark.more
@pytest.mark.mutation(
    "one-pass-without-noise",
    "one_pass_draw._draw",
    "tl.where(draws, _gumbel(bits[part]), 0.0)",
    "tl.where(draws, 0.0, 0.0)",
)
@pytest.mark.mutation(
    "one-pass-logprob-unscaled", "one_pass_draw._draw", ".to(tl.float32) / temperature", ".to(tl.float32)"
)
def test_the_kernel_draws_as_plain_torch_does_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("one_pass_cases.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_draws_as_plain_torch_does_on_a_gpu(dtype: torch.dtype) -> None:
    for rows, width in ((5, 7), (4, 512), (6, 2049), (1024, 151_936), (3, 262_144)):
        one_pass_cases.check_logprobs("cuda", rows, width, dtype)
    one_pass_cases.check_distribution("cuda", 100_000)
    one_pass_cases.check_rows_and_lanes_are_independent("cuda", 100_000)
    one_pass_cases.check_nan("cuda")


@pytest.mark.mutation(
    "one-pass-ignores-seeds", "Asked.plain", "return not (cut or self.generators or ", "return not (cut or "
)
@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"top_k_b": torch.tensor([5, 5])}, False),
        ({"top_p_b": torch.tensor([0.5, 1.0])}, False),
        ({"lower": lambda logits: None}, False),
        ({"generators": {1: torch.Generator()}}, False),
        ({"widths": {1: 3}}, False),
    ],
    ids=["temperatures alone", "top_k", "top_p", "penalties", "a seed", "the likeliest"],
)
def test_the_kernel_draws_where_temperatures_alone_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], plain: bool
) -> None:
    draw = FullVocabularyDraw(torch.device("cpu"))
    draw._has_kernel = True
    drawn: list[Any] = []
    monkeypatch.setattr(FullVocabularyDraw, "_in_one_pass", lambda *_: drawn.append("kernel"))

    def in_torch(*_: Any) -> torch.Tensor:
        drawn.append("torch")
        return torch.zeros(2, dtype=torch.int64)

    monkeypatch.setattr(FullVocabularyDraw, "_drawn", in_torch)
    draw(torch.zeros(2, 9), Asked(torch.ones(2), some_greedy=False, **changes))
    assert drawn == ["kernel" if plain else "torch"]
