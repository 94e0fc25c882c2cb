"""The products of adapters on a CPU, beside float64."""

import pytest
import torch
from tinker_local.backend.vllm_engine.lora_operators import Factors, TrimmedSlots

WIDTHS, INPUTS, ROOM, SLOTS, ROWS = (12, 5, 7), 10, 8, 3, 4


def slots_with(ranks: tuple[int, ...], slot: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A [slots, 1, room, in] and B [slots, 1, width, room] per slice; one slot has adapters of `ranks`."""
    random = torch.Generator().manual_seed(sum(ranks))
    stacked = []
    for rank, width in zip(ranks, WIDTHS, strict=True):
        a, b = torch.zeros(SLOTS, 1, ROOM, INPUTS), torch.zeros(SLOTS, 1, width, ROOM)
        a[slot, 0, :rank] = torch.randn(rank, INPUTS, generator=random)
        b[slot, 0, :, :rank] = torch.randn(width, rank, generator=random)
        stacked.append((a, b))
    return [a for a, _ in stacked], [b for _, b in stacked]


def in_float64(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], slot: int) -> torch.Tensor:
    parts = zip(a, b, strict=True)
    return torch.cat([x.double() @ of_a[slot, 0].double().T @ of_b[slot, 0].double().T for of_a, of_b in parts], 1)


def added(factors: Factors, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    y = torch.zeros(len(x), sum(WIDTHS) + 2)
    factors.add(y, x, scale)
    assert not y[:, sum(WIDTHS) :].any()
    return y[:, : sum(WIDTHS)]


@pytest.mark.parametrize("ranks", [(3, 3, 3), (8, 1, 2), (2, 0, 4), (0, 0, 5), (0, 0, 0)])
def test_slices_of_any_rank_get_their_products(ranks: tuple[int, ...]) -> None:
    a, b = slots_with(ranks)
    x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))
    expected = in_float64(x, a, b, 1)
    trimmed = TrimmedSlots().of(a, b, WIDTHS, 1)
    assert trimmed.a.shape == (sum(ranks), INPUTS)
    untrimmed = Factors.of([of_a[1, 0] for of_a in a], [of_b[1, 0] for of_b in b], WIDTHS)
    for factors in (trimmed, untrimmed):
        torch.testing.assert_close(added(factors, x).double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(added(factors, x, 0.5).double(), 0.5 * expected, atol=1e-5, rtol=1e-5)


@pytest.mark.mutation(
    "changed-slots-keep-their-copy", "TrimmedSlots.of", "if found is None or found[0] != changes:", "if found is None:"
)
def test_a_slot_that_another_adapter_takes_computes_with_that_one() -> None:
    slots, x = TrimmedSlots(), torch.ones(ROWS, INPUTS)
    a, b = slots_with((3, 3, 3))
    before = added(slots.of(a, b, WIDTHS, 1), x)
    assert slots.of(a, b, WIDTHS, 1) is slots.of(a, b, WIDTHS, 1)
    others = slots_with((2, 5, 1))
    with torch.inference_mode():  # as vLLM copies adapters
        for stacked, other in zip([*a, *b], [*others[0], *others[1]], strict=True):
            stacked[1] = 0
            stacked[1].copy_(other[1])
    after = added(slots.of(a, b, WIDTHS, 1), x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.double(), in_float64(x, *others, 1), atol=1e-5, rtol=1e-5)


def test_an_adapter_of_a_padded_vocabulary_reaches_the_words_that_the_model_has() -> None:
    a, b, x = torch.randn(2, INPUTS), torch.randn(9, 2), torch.randn(ROWS, INPUTS)
    for width in (6, 9, 12):
        y = torch.zeros(ROWS, width)
        Factors.of([a], [b], [width]).add(y, x)
        used = min(width, 9)
        torch.testing.assert_close(y[:, :used], (x @ a.T @ b.T)[:, :used])
        assert not y[:, used:].any()


def test_rows_in_float32_take_an_adapter_in_bfloat16() -> None:
    a, b = torch.randn(2, INPUTS).bfloat16(), torch.randn(6, 2).bfloat16()
    x, y = torch.randn(ROWS, INPUTS).bfloat16(), torch.zeros(ROWS, 6)
    Factors.of([a], [b], [6]).add(y, x)
    expected = x.double() @ a.double().T @ b.double().T
    torch.testing.assert_close(y.double(), expected, atol=2**-8 * float(expected.abs().max()), rtol=0.0)


@pytest.mark.parametrize("rows", [1, 32, 33])
def test_rows_of_16_bits_get_their_products_however_few_they_are(rows: int) -> None:
    a, b = ([tensor.bfloat16() for tensor in stacked] for stacked in slots_with((8, 1, 2)))
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, width, generator=random).bfloat16() for width in (INPUTS, sum(WIDTHS) + 2))
    expected, added_to = 0.5 * in_float64(x, a, b, 1), y.clone()
    TrimmedSlots().of(a, b, WIDTHS, 1).add(added_to, x, 0.5)
    assert torch.equal(added_to[:, sum(WIDTHS) :], y[:, sum(WIDTHS) :])
    found = added_to[:, : sum(WIDTHS)].double()
    wanted = y[:, : sum(WIDTHS)].double() + expected
    torch.testing.assert_close(found, wanted, atol=2**-7 * float(wanted.abs().max()), rtol=0.0)
