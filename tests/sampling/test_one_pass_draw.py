"""Tokens that are drawn in one pass: the kernel equals plain torch, and vLLM's sampler uses it where it may."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinker_local.backend.vllm_engine.draw_tokens import FullVocabularyDraw

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


def settings(**changes: Any) -> Any:
    """What vLLM hands its sampler for two requests at T = 1."""
    plain = {"temperature": torch.ones(2), "top_k": None, "top_p": None, "generators": {}, "no_penalties": True}
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.mutation(
    "one-pass-ignores-seeds", "FullVocabularyDraw.in_one_pass", "or changed or settings.generators or", "or changed or"
)
@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"top_k": torch.tensor([5, 5])}, {}),
        ({"top_p": torch.tensor([0.5, 1.0])}, {}),
        ({"no_penalties": False}, {}),
        ({"generators": {1: torch.Generator()}}, {}),
        ({}, {1: 3}),
    ],
    ids=["top_k", "top_p", "penalties", "a seed", "the likeliest"],
)
def test_what_the_kernel_cannot_do_goes_through_vllm(changes: dict[str, Any], widths: dict[int, int]) -> None:
    draw = FullVocabularyDraw(torch.device("cpu"), lambda: widths)
    seen: list[Any] = []
    asked = settings(**changes)
    draw._has_kernel = True
    draw.in_one_pass(lambda *args: seen.append(args), torch.zeros(2, 9), asked)
    assert len(seen) == 1
    assert seen[0][1] is asked
