"""Compare the LoRA kernels with float64, on a GPU or with Triton's interpreter on a CPU.

An environment variable selects the interpreter before Triton is imported, for the whole process, where bfloat16 has no
products. Run as a program, this file checks all cases on the CPU.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tinker_local.backend.vllm_engine import compat_vllm, triton_on_cpu
from tinker_local.backend.vllm_engine.lora_operators import multiply_by_rows

SLOTS = 3


class Module:
    """A linear layer with slots of adapters. Numbers are of size 1 wherever they are rounded. With `used` less than
    `rank`, adapters have that many, and what lies beyond is NaN: nothing may read it."""

    def __init__(
        self, device: str, dtype: torch.dtype, width: int, widths: Sequence[int], rank: int, used: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(width + rank)

        def numbers(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

        self.widths, self.width, self._numbers = tuple(widths), width, numbers
        self.a = tuple(numbers(SLOTS, 1, rank, width) for _ in widths)
        self.b = tuple(numbers(SLOTS, 1, each, rank) for each in widths)
        self.used = rank if used is None else used
        for a, b in zip(self.a, self.b, strict=True):
            a[:, :, self.used :] = torch.nan
            b[..., self.used :] = torch.nan

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of so many rows; those of y lie apart."""
        return self._numbers(count, self.width) * self.width**0.5, self._numbers(count, sum(self.widths) + 8)[:, :-8]

    def expected(self, x: torch.Tensor, y: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """y + B A x in float64, and the sum of the absolute values that each number is made of."""
        found, sizes = y.double(), y.double().abs()
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            wide, first = x[row].double(), 0
            for a, b in zip(self.a, self.b, strict=True):
                of_a, of_b = a[slot, 0, : self.used].double(), b[slot, 0, :, : self.used].double()
                columns = slice(first, first + len(of_b))
                found[row, columns] += of_b @ (of_a @ wide)
                sizes[row, columns] += of_b.abs() @ (of_a.abs() @ wide.abs())
                first += len(of_b)
        return found, sizes


def added(module: Module, slots: Sequence[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What vLLM's linear layer gives for `x`, where the base model gives `y`. More rows than slots fill up a graph."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.punica_wrapper import punica_gpu

    multiply_by_rows()
    config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=False)
    wrapper: Any = punica_gpu.PunicaWrapperGPU(len(x), len(x), x.device, lora_config=config)
    meta = wrapper.token_mapping_meta
    meta.token_lora_mapping.fill_(77)  # as memory that was not written
    meta.prepare_tensors(torch.tensor(slots, device=x.device))
    for slot in range(SLOTS):
        wrapper.holds(slot, module.used)
    layer = SimpleNamespace(
        punica_wrapper=wrapper,
        base_layer=None,
        lora_a_stacked=module.a,
        lora_b_stacked=module.b,
        output_slices=module.widths,
        _get_quant_method=lambda: SimpleNamespace(apply=lambda *_: y),
    )
    found: torch.Tensor = BaseLinearLayerWithLoRA._apply_sync(layer, x)
    return found


def check_rows(module: Module, slots: Sequence[int]) -> None:
    """Rows get what their own slot adds, and no other row or column changes."""
    padding = 5  # rows that fill up a CUDA graph
    x, y = module.rows(len(slots) + padding)
    expected, sizes = module.expected(x, y, [*slots, *[-1] * padding])
    whole, before = y._base, y.clone()
    assert whole is not None
    beside = whole[:, y.shape[1] :].clone()
    found = added(module, slots, x, y)
    assert found.data_ptr() == y.data_ptr()
    # y is rounded once, and h where rows share tiles; the sums are in float32.
    bound = torch.finfo(y.dtype).eps * (sizes if len(x) > 16 else expected.abs() + 2**-10 * sizes)
    wrong = (y.double() - expected).abs()
    assert (wrong <= bound).all(), float((wrong / bound).max())
    untouched = torch.tensor([slot < 0 for slot in slots] + [True] * padding)
    assert torch.equal(y[untouched], before[untouched])
    assert torch.equal(whole[:, y.shape[1] :], beside)


def check_repeats(module: Module, rows: int) -> None:
    """The same rows give the same numbers each time, to the bit."""
    x, y = module.rows(rows)
    first, *others = (added(module, [1] * rows, x, y.clone()) for _ in range(3))
    assert not torch.equal(first, y)
    assert all(torch.equal(first, each) for each in others)


def main() -> None:
    triton_on_cpu.interpret()
    assert compat_vllm.runs_on_cpu()
    dtype = torch.float16
    some = Module("cpu", dtype, 96, (64, 32, 32), 8)
    check_rows(some, [1])
    check_rows(some, [0, -1, 2, 2, 1])
    check_rows(some, [2 - at % 4 for at in range(40)])
    check_rows(Module("cpu", dtype, 300, (200, 40), 17), [2] * 70)
    check_rows(Module("cpu", dtype, 2048, (130,), 100), [1] * 20 + [-1] * 14)
    for room, used in ((20, 0), (20, 1), (20, 17), (100, 5), (100, 32), (100, 33)):
        roomy = Module("cpu", dtype, 300, (200, 40), room, used)
        check_rows(roomy, [0, -1, 2, 2, 1])
        check_rows(roomy, [2 - at % 4 for at in range(40)])
    check_repeats(some, 30)


if __name__ == "__main__":
    main()
