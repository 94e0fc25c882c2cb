"""Products of a decoder's linear layers with LoRA, in CUDA graphs: this project's kernels beside vLLM's, and beside
dense products, which know the only adapter before they are launched.

    python benchmarks/lora_products.py                # a GPU with 40 GiB, a minute
    TRITON_INTERPRET=1 python benchmarks/lora_products.py --tiny       # the same code on a CPU

Each line is a way to compute all four linear layers of all layers of an 8B model, each with its own weights, for so
many rows with an adapter of rank 32 in one of four slots: milliseconds of a step, what it takes beyond the base model's
products, and the largest difference from float64 relative to the largest value.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
TINY = {"qkv": (64, (64, 32, 32)), "down": (96, (64,))}
OF_A: dict[str, dict[str, int]] = {
    "32 rows by 128, 1 part": {"parts": 1},
    "32 rows by 128, 2 parts": {"parts": 2},
    "32 rows by 128, 4 parts": {"parts": 4},
    "32 rows by 128, 8 parts": {"parts": 8},
    "32 rows by 128, 16 parts": {"parts": 16},
    "32 rows by 64, 4 parts": {"parts": 4, "reads": 64, "stages": 4},
    "32 rows by 64, 8 parts": {"parts": 8, "reads": 64, "stages": 4},
    "32 rows by 256, 4 parts": {"parts": 4, "reads": 256, "stages": 2},
    "32 rows by 256, 8 parts": {"parts": 8, "reads": 256, "stages": 2},
    "16 rows by 256, 2 parts": {"tile": 16, "parts": 2, "reads": 256},
    "16 rows by 256, 4 parts": {"tile": 16, "parts": 4, "reads": 256},
    "16 rows by 128, 4 parts": {"tile": 16, "parts": 4},
    "64 rows by 128, 4 parts": {"tile": 64, "parts": 4},
    "64 rows by 128, 8 parts": {"tile": 64, "parts": 8},
    "64 rows by 64, 8 parts": {"tile": 64, "parts": 8, "reads": 64, "stages": 4},
    "128 rows by 64, 8 parts": {"tile": 128, "parts": 8, "reads": 64, "warps": 8},
    "128 rows by 64, 16 parts": {"tile": 128, "parts": 16, "reads": 64, "warps": 8},
}
"""Sizes of our kernels of many rows: how A x is divided."""
OF_B: dict[str, dict[str, int]] = {
    "32 rows, 4 x 128": {"span": 128},
    "32 rows, 4 x 128, 4 warps": {"span": 128, "warps": 4},
    "32 rows, 2 x 128": {"span": 128, "spans": 2},
    "32 rows, 2 x 128, 4 warps": {"span": 128, "spans": 2, "warps": 4},
    "32 rows, 1 x 128, 4 warps": {"span": 128, "spans": 1, "warps": 4},
    "32 rows, 8 x 128": {"span": 128, "spans": 8},
    "32 rows, 8 x 64, 4 warps": {"span": 64, "spans": 8, "warps": 4},
    "32 rows, 1 x 256": {"span": 256, "spans": 1},
    "32 rows, 2 x 256": {"span": 256, "spans": 2},
    "32 rows, 4 x 256": {"span": 256, "spans": 4},
    "16 rows, 2 x 256, 4 warps": {"tile": 16, "span": 256, "spans": 2, "warps": 4},
    "16 rows, 4 x 256, 4 warps": {"tile": 16, "span": 256, "spans": 4, "warps": 4},
    "64 rows, 1 x 128": {"span": 128, "tile": 64, "spans": 1},
    "64 rows, 2 x 128": {"span": 128, "tile": 64, "spans": 2},
    "64 rows, 4 x 128": {"span": 128, "tile": 64, "spans": 4},
    "64 rows, 2 x 64, 4 warps": {"tile": 64, "span": 64, "spans": 2, "warps": 4},
    "64 rows, 8 x 64, 4 warps": {"tile": 64, "span": 64, "spans": 8, "warps": 4},
    "128 rows, 1 x 128": {"span": 128, "tile": 128, "spans": 1},
    "128 rows, 2 x 128": {"span": 128, "tile": 128, "spans": 2},
}
"""And how B h is."""
PARTS_OF_B = (4, 8)
RANK, SLOTS = 32, 4


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A layer of several slices and its adapters. `joined`: A of all slices, of slot 1."""

    weight: torch.Tensor
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    widths: tuple[int, ...]
    joined: torch.Tensor


def dtype_of(device: str) -> torch.dtype:
    """Triton's interpreter has no products of bfloat16."""
    return torch.bfloat16 if device == "cuda" else torch.float16


def linears(shapes: dict[str, Any], layers: int, room: int, device: str) -> list[Linear]:
    """`room`: ranks of a slot, of which an adapter has `RANK`."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype_of(device), device=device).normal_(0, shape[-1] ** -0.5)

    made = []
    for _ in range(layers):
        for wide, widths in shapes.values():
            a = tuple(numbers(SLOTS, 1, room, wide) for _ in widths)
            b = tuple(numbers(SLOTS, 1, width, room) for width in widths)
            for each in (*a, *(of_b.mT for of_b in b)):
                each[:, :, RANK:] = 0
            joined = torch.cat([each[1, 0, :RANK] for each in a])
            made.append(Linear(numbers(sum(widths), wide), a, b, widths, joined))
    return made


class Meta:
    """What the kernels read: all rows belong to the adapter in slot 1."""

    def __init__(self, rows: int, device: str) -> None:
        from tinker_local.backend.vllm_engine.lora_kernels import Rows

        ids = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
        counts, starts = torch.zeros(SLOTS + 1, dtype=torch.int32), torch.zeros(SLOTS + 2, dtype=torch.int32)
        ids[0], counts[0], starts[1:] = 1, rows, rows
        slots = torch.full((rows,), 1, dtype=torch.int32, device=device)
        order = torch.arange(rows, dtype=torch.int32, device=device)
        ranks = torch.full((SLOTS,), RANK, dtype=torch.int32, device=device)
        self.rows = Rows(slots, order, counts.to(device), starts.to(device), ids.to(device), ranks)
        axis = torch.tensor([SLOTS + 1], dtype=torch.int32)
        self.of_vllm = slots, order, *(each.to(device) for each in (counts, starts, ids)), torch.tensor([False]), axis


def by_vllm(linear: Linear, x: torch.Tensor, y: torch.Tensor, meta: Meta) -> None:
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    h = torch.empty((len(linear.a), len(x), linear.a[0].shape[-2]), dtype=torch.float32, device=x.device)
    _lora_shrink(x, list(linear.a), h, *meta.of_vllm, 1.0)
    _lora_expand(h, list(linear.b), y, *meta.of_vllm, offset_start=0, add_inputs=True)


def dense(linear: Linear, x: torch.Tensor, y: torch.Tensor, _: Meta) -> None:
    h = x @ linear.joined.T
    first = 0
    for at, (b, width) in enumerate(zip(linear.b, linear.widths, strict=True)):
        y[:, first : first + width].addmm_(h[:, at * RANK : (at + 1) * RANK], b[1, 0, :, :RANK].T)
        first += width


def milliseconds(step: Callable[[], None], device: str, repeats: int = 10) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


Way = Callable[[Linear, torch.Tensor], torch.Tensor]


def ways_of(rows: int, device: str, *, sizes: bool) -> dict[str, Way]:
    """By name: what makes y [M, O] of a layer and x."""
    from tinker_local.backend.vllm_engine import lora_kernels as kernels

    meta, tables = Meta(rows, device), kernels.Tables()
    side = torch.cuda.Stream() if device == "cuda" else None

    def base(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight)

    def after(add: Callable[[Linear, torch.Tensor, torch.Tensor, Meta], None]) -> Way:
        def way(linear: Linear, x: torch.Tensor) -> torch.Tensor:
            y = base(linear, x)
            add(linear, x, y, meta)
            return y

        return way

    def parts(names: str) -> Way:
        """Of ours, alone: y is wrong."""

        def add(linear: Linear, x: torch.Tensor, y: torch.Tensor, meta: Meta) -> None:
            if "a" in names:
                h = kernels.shrink(x, linear.a, meta.rows, tables)
            else:
                room = linear.a[0].shape[-2]
                h = torch.empty((1, len(linear.a), len(x), room), dtype=torch.float32, device=x.device)
            if "b" in names:
                kernels.expand(y, h, linear.b, linear.widths, meta.rows, tables)

        return after(add)

    def beside(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if side is None:
            return parts("ab")(linear, x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            h = kernels.shrink(x, linear.a, meta.rows, tables)
        y = base(linear, x)
        torch.cuda.current_stream().wait_stream(side)
        kernels.expand(y, h, linear.b, linear.widths, meta.rows, tables)
        return y

    def a_alone(sizes: dict[str, int]) -> Way:
        def add(linear: Linear, x: torch.Tensor, _: torch.Tensor, meta: Meta) -> None:
            kernels.shrink_many(x, linear.a, meta.rows, tables, **sizes)

        return after(add)

    def b_alone(sizes: dict[str, int], count: int) -> Way:
        made: dict[int, torch.Tensor] = {}

        def add(linear: Linear, x: torch.Tensor, y: torch.Tensor, meta: Meta) -> None:
            slices = len(linear.b)
            if slices not in made:  # before a graph is captured
                made[slices] = torch.zeros((count, slices, len(x), linear.a[0].shape[-2]), device=x.device)
            kernels.expand_many(y, made[slices], linear.b, linear.widths, meta.rows, tables, **sizes)

        return after(add)

    ways = {"base": base, "vLLM": after(by_vllm), "ours": parts("ab"), "ours, A beside the base": beside}
    ways |= {"ours, A alone": parts("a"), "ours, B alone": parts("b"), "dense": after(dense)}
    if sizes and rows > kernels.FEW_ROWS:
        ways |= {f"A alone, {name}": a_alone(each) for name, each in OF_A.items()}
        for count in PARTS_OF_B:
            ways |= {f"B alone, {count} parts, {name}": b_alone(each, count) for name, each in OF_B.items()}
    return ways


def difference(way: Callable[..., torch.Tensor], linear: Linear, x: torch.Tensor) -> float:
    """From float64, relative to the largest value."""
    found, wide = way(linear, x).double(), x.double()
    parts = [wide @ a[1, 0].double().T @ b[1, 0].double().T for a, b in zip(linear.a, linear.b, strict=True)]
    right = wide @ linear.weight.double().T + torch.cat(parts, dim=1)
    return float((found - right).abs().max() / right.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU, with Triton's interpreter")
    parser.add_argument("--rows", default="1,16,64,512,8192", help="of a step")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--room", type=int, default=RANK, help="ranks for which a slot has room")
    parser.add_argument("--sizes", action="store_true", help="also other sizes of the kernels of many rows")
    parser.add_argument("--budget-seconds", type=float, default=1e9)
    options = parser.parse_args()
    began = time.monotonic()
    device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        from tinker_local.backend.vllm_engine import triton_on_cpu

        triton_on_cpu.interpret()
        options.rows, options.layers = "1,3,20", 1
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.manual_seed(0)
    layers = linears(TINY if options.tiny else SHAPES, options.layers, options.room, device)
    lines, faults = list[str](), 0
    counts = [int(rows) for rows in options.rows.split(",")]
    for number, rows in enumerate(counts, 1):
        chosen = layers if rows <= 1024 else layers[: 4 * 4]  # so that a step of many rows takes no second
        scale = len(layers) / len(chosen)
        xs = {
            wide: torch.randn(rows, wide, device=device).to(dtype_of(device))
            for wide in {each.weight.shape[1] for each in layers}
        }
        base = 0.0
        for name, way in ways_of(rows, device, sizes=options.sizes).items():
            if options.tiny and name == "vLLM":
                continue  # its products of 16 bits take the interpreter minutes
            if time.monotonic() - began > options.budget_seconds * number / len(counts):
                break

            def step(way: Way = way, chosen: Any = chosen, xs: Any = xs) -> None:
                for linear in chosen:
                    way(linear, xs[linear.weight.shape[1]])

            try:
                took = scale * milliseconds(step, device, 10 if rows <= 1024 else 3)
                some = layers[: len(TINY if options.tiny else SHAPES)]
                wrong = max(difference(way, linear, xs[linear.weight.shape[1]]) for linear in some)
            except Exception as error:
                lines.append(f"{rows:6d}  {name:44} {type(error).__name__}: {str(error)[:200]}")
                faults += 1
            else:
                base = base or took
                lines.append(f"{rows:6d}  {name:44} {took:9.3f} {took - base:+9.3f}   {wrong:.2e}")
            print(lines[-1], flush=True)
    print(f"  rows  way{'':41} ms a step  beyond base  difference; {time.monotonic() - began:.0f} s")
    print("\n".join(lines))
    return 1 if faults and options.tiny else 0


if __name__ == "__main__":
    sys.exit(main())
