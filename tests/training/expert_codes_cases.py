"""Compare products with packed stacks of experts in Triton with plain torch, on a GPU or with Triton's interpreter on a
CPU, as `codes_cases.py` does with matrices. Run as a program, this file checks all cases on the CPU."""

import itertools

import torch
from tinker_local.backend.weights.precision import BITS, Bits

from tests.training.codes_cases import own_matrix, plain

Shape = tuple[int, int, int, int, int]
"""T tokens, K experts of each, E experts, and [out, in] of a matrix."""


def aligned(experts: torch.Tensor, size: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What vLLM's `moe_align_block_size` gives for the `experts` [T, K] of tokens, of `count`: as many places as there
    may be, with numbers out of all bounds where it leaves them as they were."""
    flat = experts.flatten().cpu()
    most = len(flat) + count * (size - 1)
    pairs, of_blocks = torch.full((most,), 2**30), torch.full((-(-most // size),), 2**30)
    filled = 0
    for expert in flat.unique().tolist():
        (own,) = torch.nonzero(flat == expert, as_tuple=True)
        blocks = -(-len(own) // size)
        pairs[filled : filled + blocks * size] = len(flat)
        pairs[filled : filled + len(own)] = own
        of_blocks[filled // size : filled // size + blocks] = expert
        filled += blocks * size
    found = pairs, of_blocks, torch.tensor([filled])
    return tuple(each.to(experts.device, torch.int32) for each in found)  # type: ignore[return-value]  # three


class Case:
    """Random numbers of one shape. On a CPU in float32 with scales that are powers of two, as in `codes_cases.py`."""

    def __init__(self, device: str, shape: Shape, bits: Bits) -> None:
        tokens, chosen, count, outputs, inputs = shape
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        codes, scales, _, self.curved = own_matrix(count * outputs, inputs, bits, device)
        self.codes, self.scales = codes.view(count, outputs, -1), scales.view(count, outputs, -1)
        self.weight = plain(codes, scales, self.dtype, None, curved=self.curved).view(count, outputs, inputs)
        generator = torch.Generator().manual_seed(tokens)

        def some(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(device, self.dtype)

        self.x, self.of_pairs, self.bias = some(tokens, inputs), some(tokens * chosen, inputs), some(count, outputs)
        self.scores = some(tokens, chosen).float()
        rows = [torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]
        self.experts = torch.stack(rows).to(device)

    def new(self) -> torch.Tensor:
        """For a product of each pair."""
        return self.x.new_full((*self.experts.shape, self.codes.shape[1]), torch.nan)

    def exact(self, x: torch.Tensor, bias: bool, scores: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Products in float64 [T, K, out], and the sum of what adds up to each, without signs."""
        rows = x.double().view(len(self.experts), -1, x.shape[1]).expand(*self.experts.shape, -1)
        found = rows.new_empty(*self.experts.shape, self.weight.shape[1])
        size = torch.empty_like(found)
        for expert, weight in enumerate(self.weight):  # all at once would be a matrix for each token
            own = self.experts == expert
            found[own] = rows[own] @ weight.double().T
            size[own] = rows[own].abs() @ weight.double().abs().T
        if bias:
            added = self.bias.double()[self.experts]
            found, size = found + added, size + added.abs()
        factor = self.scores.double()[:, :, None] if scores else torch.ones_like(found)
        return found * factor, size * factor.abs()


def check_product(device: str, shape: Shape, bits: Bits, size: int) -> None:
    """As exact as a sum in float32, rounded once; equal inputs have equal results."""
    from tinker_local.backend.weights.triton_experts_codes import Blocks, times_experts

    case = Case(device, shape, bits)
    pairs, experts, filled = aligned(case.experts, size, len(case.codes))
    blocks = Blocks(pairs, experts, filled, size)
    for x, bias, scores in itertools.product((case.x, case.of_pairs), (False, True), (False, True)):
        given = case.bias if bias else None, case.scores if scores else None
        found, again = case.new(), case.new()
        for out in (found, again):
            times_experts(x, case.codes, case.scales, blocks, out, *given, curved=case.curved)
        assert torch.equal(found, again)
        exact, most = case.exact(x, bias, scores)
        allowed = most * (shape[4] + 2) * 2.0**-24 + exact.abs() * torch.finfo(case.dtype).eps
        assert bool(((found.double() - exact).abs() <= allowed).all())


def check_all(device: str, shapes: tuple[Shape, ...]) -> None:
    for shape, bits, size in itertools.product(shapes, BITS.values(), (16, 64)):
        check_product(device, shape, bits, size)


if __name__ == "__main__":
    check_all("cpu", ((1, 2, 8, 70, 128), (5, 3, 4, 130, 96), (40, 2, 3, 20, 320)))
