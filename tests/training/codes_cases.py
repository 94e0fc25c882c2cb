"""Compare the kernels of matrices of few bits with plain torch, on a GPU or with Triton's interpreter on a CPU.

An environment variable selects the interpreter before Triton is imported, for the whole process. Run as a program, this
file checks all cases on the CPU.
"""

import itertools

import torch
from tinker_local.backend.weights.codes import Packed, in_torch, to_codes
from tinker_local.backend.weights.precision import BITS, Bits

Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]
"""Codes, scales, zero points, and whether codes are curved."""


def matrices(outputs: int, inputs: int, bits: Bits, device: str) -> list[Matrix]:
    """Without zero points and with some; of 4 bits, curved ones, too. Of random numbers whose rows differ in size, some
    of them 0. On a CPU scales are powers of two, since the interpreter cuts numbers off where they are rounded to
    bfloat16."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 3, outputs)[:, None]
    weight[0] = 0.0
    stored = to_codes(weight.to(device), bits)
    codes, scales = stored.codes, stored.scales
    zeros = torch.randint(-8, 8, scales.shape, dtype=torch.int16, generator=generator)
    if device == "cpu":
        codes, scales = (
            codes.clamp(-100, 100) if bits == 8 else codes,
            (scales.float().abs().log2().round().exp2() * scales.sign()).bfloat16(),
        )
    codes, scales, zeros = codes.to(device), scales.to(device), zeros.to(device)
    curved = [(codes, scales, None, True)] if bits == 4 else []
    return [(codes, scales, None, False), (codes, scales, zeros, False), *curved]


def own_matrix(outputs: int, inputs: int, bits: Bits, device: str) -> Matrix:
    """The one of `matrices` that this project makes."""
    return matrices(outputs, inputs, bits, device)[-1 if bits == 4 else 0]


def plain(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, zeros: torch.Tensor | None, *, curved: bool
) -> torch.Tensor:
    """The matrix, number by number: what a code stands for less its zero point, times scale, in float64, which is
    exact, rounded once."""
    if codes.dtype == torch.uint8:  # of each 32 numbers the first 16 in the low halves of 16 bytes
        codes = (
            torch.cat([part for each in codes.split(16, 1) for part in (each & 15, each >> 4)], 1).to(torch.int16) - 8
        )
    group = codes.shape[1] // scales.shape[1]
    if zeros is not None:
        codes = codes.to(torch.int16) - zeros.repeat_interleave(group, 1)
    if curved:
        codes = codes.to(torch.int16) * (10 + codes.abs())
    return (codes.double() * scales.double().repeat_interleave(group, 1)).to(dtype)


def check_unpacked(device: str, outputs: int, inputs: int, bits: Bits, dtype: torch.dtype) -> None:
    """To the bit, by the kernel and by torch."""
    from tinker_local.backend.weights.triton_codes import unpacked

    for codes, scales, zeros, curved in matrices(outputs, inputs, bits, device):
        expected = plain(codes, scales, dtype, zeros, curved=curved)
        assert torch.equal(unpacked(codes, scales, dtype, zeros, curved=curved), expected)
        assert torch.equal(in_torch(Packed(codes, scales, zeros, curved=curved), dtype), expected)


def check_product(device: str, rows: int, outputs: int, inputs: int, bits: Bits) -> None:
    """As exact as a sum in float32, rounded once; the identity gives the numbers themselves, to the bit; rows do not
    depend on how far they lie apart."""
    from tinker_local.backend.weights.triton_codes import times_few

    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the interpreter has no products of bfloat16
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 8, generator=generator).to(device, dtype)[:, :inputs]
    for codes, scales, zeros, curved in matrices(outputs, inputs, bits, device):
        weight = plain(codes, scales, dtype, zeros, curved=curved)
        found = times_few(x, codes, scales, zeros, curved=curved)
        assert found.dtype == dtype
        assert found.shape == (rows, outputs)
        exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        # A sum of K products in float32 in any order, then one rounding to `dtype`.
        allowed = size * inputs * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps
        assert bool(((found.double() - exact).abs() <= allowed).all())
        assert torch.equal(times_few(x.clone(), codes, scales, zeros, curved=curved), found)
        first = torch.eye(inputs, device=device, dtype=dtype)[:rows]
        assert torch.equal(times_few(first, codes, scales, zeros, curved=curved), weight[:, :rows].T)


def check_all(device: str, shapes: tuple[tuple[int, int, int], ...]) -> None:
    """`shapes`: rows of activations, and of the matrix, and numbers in one."""
    for (rows, outputs, inputs), bits in itertools.product(shapes, BITS.values()):
        for dtype in (torch.bfloat16, torch.float32):
            check_unpacked(device, outputs, inputs, bits, dtype)
        check_product(device, rows, outputs, inputs, bits)


if __name__ == "__main__":
    check_all("cpu", ((1, 70, 128), (3, 130, 96), (17, 5, 1152), (70, 140, 320)))
