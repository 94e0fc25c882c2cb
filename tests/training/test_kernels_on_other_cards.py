"""Every Triton kernel compiles for GPUs that no test runs on, and fits their shared memory and registers."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.training.kernels_on_cards import (
    CARDS,
    REGISTERS,
    Card,
    Compiler,
    compiled_for,
    functions_of_triton,
    launch_all,
    launch_each_once,
)

SPILLED = 256
"""Bytes of a thread. They stay in the caches; no kernel had more than 200 when this was written."""


def check(compiler: Compiler) -> None:
    card = compiler.card
    assert not [kernel for kernel in compiler.kernels if kernel.shared > card.shared]
    assert not [kernel for kernel in compiler.kernels if kernel.registers * 32 * kernel.warps > REGISTERS]
    assert not [kernel for kernel in compiler.kernels if kernel.spilled > SPILLED]
    forgotten = sorted(functions_of_triton() - compiler.seen)
    assert not forgotten, f"kernels_on_cards.py launches none of {', '.join(forgotten)}"


@pytest.mark.more
def test_every_kernel_fits_a_card_with_little_shared_memory(tmp_path: Path) -> None:
    check(compiled_for(CARDS[89], launch_each_once, tmp_path))


@pytest.mark.rotated(6)
@pytest.mark.more
@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: f"sm_{card.capability}")
def test_every_kernel_fits_every_card_for_all_models_and_ranks(card: Card, tmp_path: Path) -> None:
    check(compiled_for(card, launch_all, tmp_path))
