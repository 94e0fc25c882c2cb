"""Compare the kernel that draws tokens with plain torch, on a GPU or with Triton's interpreter on a CPU.

An environment variable selects the interpreter before Triton is imported, for the whole process. Run as a program, this
file checks all cases on the CPU.
"""

import torch


def check_logprobs(device: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """Logprobs of the drawn ids are those of the softmax; rows at T = 0 take the likeliest at T = 1."""
    from tinker_local.backend.vllm_engine.one_pass_draw import draw

    generator = torch.Generator().manual_seed(width)
    logits = (5 * torch.randn(rows, width + 3, generator=generator)).to(device, dtype)[:, :width]
    logits[0, : width // 2] = float("-inf")
    temperature = torch.tensor([(0.0, 1.0, 0.3, 2.5)[row % 4] for row in range(rows)], device=device)
    ids, logprobs = draw(logits, temperature, 7)
    assert ids.dtype == torch.int32
    scaled = logits.float() / temperature.where(temperature > 0, 1.0)[:, None]
    expected = scaled.log_softmax(-1).gather(-1, ids.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(ids[::4].long(), logits[::4].float().argmax(-1))


def check_distribution(device: str, draws: int) -> None:
    """Frequencies of many draws follow the softmax, also where it is cut into lanes, and of another seed are others."""
    from tinker_local.backend.vllm_engine.one_pass_draw import draw

    logits = torch.full((3000,), float("-inf"))
    alive = torch.tensor([0, 1, 2, 511, 512, 513, 1500, 2047, 2048, 2999])
    logits[alive] = torch.linspace(-2.0, 2.0, len(alive))
    rows = logits.to(device).expand(draws, -1).contiguous()
    for t in (1.0, 0.5) if draws > 1000 else (0.5,):
        temperature = torch.full((draws,), t, device=device)
        first, _ = draw(rows, temperature, 1)
        second, _ = draw(rows, temperature, 2)
        assert (first != second).any()
        counts = torch.bincount(torch.cat([first, second]).long().cpu(), minlength=3000)[alive].double()
        assert counts.sum() == 2 * draws  # nothing of probability 0
        expected = 2 * draws * (logits[alive].double() / t).softmax(0)
        # Nine degrees of freedom: above 60 once in 7e8 runs of a right kernel.
        assert ((counts - expected) ** 2 / expected).sum() < 60, (counts, expected)


def check_rows_and_lanes_are_independent(device: str, draws: int) -> None:
    """Two columns that share random numbers, or two rows, are not drawn together: equal logits win equally often."""
    from tinker_local.backend.vllm_engine.one_pass_draw import draw

    rows = torch.zeros(draws, 2048, device=device)
    ids, _ = draw(rows, torch.ones(draws, device=device), 3)
    assert len(ids.unique()) > 0.5 * min(draws, 2048)
    parts = torch.bincount((ids // 512).long().cpu(), minlength=4).double()
    expected = torch.full((4,), draws / 4, dtype=torch.float64)
    assert ((parts - expected) ** 2 / expected).sum() < 45, parts


def check_nan(device: str) -> None:
    """A row with NaN has no logprob and an id of the vocabulary; others are not touched."""
    from tinker_local.backend.vllm_engine.one_pass_draw import draw

    logits = torch.zeros(3, 700, device=device)
    logits[1, 650] = float("nan")
    ids, logprobs = draw(logits, torch.ones(3, device=device), 5)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ((ids >= 0) & (ids < 700)).all()


if __name__ == "__main__":
    for rows, width in ((5, 7), (4, 2049)):
        check_logprobs("cpu", rows, width, torch.float32)
    check_distribution("cpu", 15)  # a program takes 20 ms here
    check_nan("cpu")
