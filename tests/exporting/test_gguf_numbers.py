"""How files of llama.cpp are compared: what a type rounds is allowed, and what it does not round is found."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tinker_local.backend.exporting import llama_cpp_program

TYPES = ("F32", "F16", "BF16", "Q8_0")


def matrix(seed: int = 0, spread: float = 1.0) -> npt.NDArray[np.float32]:
    """[48, 96], with a few numbers that are far above the others."""
    draw = np.random.Generator(np.random.Philox(seed))
    found = draw.normal(0.0, spread, (48, 96)).astype(np.float32)
    found[draw.integers(0, 48, 5), draw.integers(0, 96, 5)] *= 30
    return found


def as_kind(source: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float32]:
    """The numbers that a file of this type has of `source`, by llama.cpp's package."""
    number: Any = gguf.GGMLQuantizationType[kind]
    return np.asarray(gguf.dequantize(gguf.quantize(source, number), number), np.float32).reshape(source.shape).copy()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-7])
def test_numbers_that_a_type_rounds_are_the_same_in_any_order_of_rows_or_columns(kind: str, spread: float) -> None:
    source = matrix(1, spread)
    found, allowed = as_kind(source, kind), llama_cpp_program._rounding(source, kind)
    assert (allowed == 0.0) == (kind == "F32")
    assert np.abs(found - source).max() <= allowed
    order = np.random.Generator(np.random.Philox(2))
    for moved in (found, found[order.permutation(48)], found[:, order.permutation(96)]):
        assert llama_cpp_program._same(source, moved, allowed)


@pytest.mark.parametrize("kind", TYPES)
def test_one_number_that_is_another_is_found(kind: str) -> None:
    source = matrix(3)
    allowed = llama_cpp_program._rounding(source, kind)
    found = as_kind(source, kind)
    found[11, 13] += 4 * allowed * source.shape[1] + 1e-3
    assert not llama_cpp_program._same(source, found, allowed)
    found[11, 13] = np.nan
    assert not llama_cpp_program._same(source, found, allowed)


def test_numbers_of_bfloat16_stay_as_they_are_in_a_file_of_bfloat16() -> None:
    source = as_kind(matrix(4), "BF16")
    assert llama_cpp_program._rounding(source, "BF16") == 0.0
    assert llama_cpp_program._same(source, as_kind(source, "BF16"), 0.0)
    moved = as_kind(source, "BF16")
    moved[0, 0] = np.nextafter(moved[0, 0], np.inf, dtype=np.float32)
    moved[5, 5] *= np.float32(1 + 2**-8)
    assert not llama_cpp_program._same(source, moved, 0.0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("one", [False, True])
def test_quantised_numbers_move_by_less_than_their_bits_allow(kind: str, one: bool) -> None:
    """Also where one number of each block is far above all others, for which the bound is made."""
    source = matrix(5)
    if one:
        source[:, ::32] *= 1000
    found = as_kind(source, kind)
    apart = float(np.sqrt(((found - source).astype(np.float64) ** 2).sum() / (source.astype(np.float64) ** 2).sum()))
    bits = llama_cpp_program._bits(kind)
    assert bits == int(kind[1])
    assert apart <= llama_cpp_program.uniform_noise(bits)
    other = np.roll(found, 1, 0)  # rows of another matrix
    wrong = float(np.sqrt(((other - source).astype(np.float64) ** 2).sum() / (source.astype(np.float64) ** 2).sum()))
    assert wrong > llama_cpp_program.uniform_noise(bits)
