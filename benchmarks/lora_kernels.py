"""Products of a decoder's linear layers with LoRA, in CUDA graphs: vLLM's kernels in several sizes, and this project's.

    python benchmarks/lora_kernels.py                # a GPU with 40 GiB, a minute
    TRITON_INTERPRET=1 python benchmarks/lora_kernels.py --tiny       # the same code on a CPU

Each line is a way to compute all four linear layers of all layers of an 8B model, each with its own weights, for so
many rows: milliseconds of a step, what it takes beyond the base model's products, and the largest difference from
float64 relative to the largest value.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
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
MANY = (
    ((8, 32, 128, 4, 3), (32, 128, 4, 8)),
    ((4, 32, 128, 4, 3), (32, 128, 4, 4)),
    ((8, 64, 128, 4, 3), (64, 64, 4, 8)),
    ((4, 16, 128, 4, 3), (32, 64, 8, 4)),
    ((8, 32, 64, 4, 4), (32, 256, 2, 8)),
    ((1, 64, 64, 4, 4), (64, 64, 16, 8)),
)
"""Of our kernels for many rows: parts, rows, columns, warps and stages of shrinking; rows, columns, how often, and
warps of expanding."""
RANK, SLOTS, DTYPE = 32, 4, torch.bfloat16


@dataclass
class Linear:
    weight: torch.Tensor
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    widths: tuple[int, ...]


def linears(shapes: dict[str, Any], layers: int, device: str) -> list[Linear]:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPE, device=device).normal_(0, shape[-1] ** -0.5)

    return [
        Linear(
            numbers(sum(widths), wide),
            tuple(numbers(SLOTS, 1, RANK, wide) for _ in widths),
            tuple(numbers(SLOTS, 1, width, RANK) for width in widths),
            widths,
        )
        for _ in range(layers)
        for wide, widths in shapes.values()
    ]


class Meta:
    """What vLLM's kernels read: all rows belong to the adapter in slot 1. `axis`: of how many adapters a launch is."""

    def __init__(self, rows: int, axis: int, device: str) -> None:
        ids = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
        counts, starts = torch.zeros(SLOTS + 1, dtype=torch.int32), torch.zeros(SLOTS + 2, dtype=torch.int32)
        ids[0], counts[0], starts[1:] = 1, rows, rows
        self.slots = torch.full((rows,), 1, dtype=torch.int32, device=device)
        order = torch.arange(rows, dtype=torch.int32, device=device)
        self.arguments = (
            self.slots, order, counts.to(device), starts.to(device), ids.to(device), torch.tensor([False]),
            torch.tensor([axis], dtype=torch.int32),
        )  # fmt: skip


def set_configs(shrink: dict[str, int] | None, expand: dict[str, int] | None) -> None:
    """Have vLLM's operators take these tile sizes instead of their defaults."""
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils

    original = utils.get_lora_op_configs.__wrapped__

    def configs(op_type: str, **sizes: Any) -> Any:
        found = dict(original(op_type, **sizes))
        return found | ((shrink if op_type == "shrink" else expand) or {})

    lora_shrink_op.get_lora_op_configs = configs
    lora_expand_op.get_lora_op_configs = configs


def vllm_pair(linear: Linear, x: torch.Tensor, y: torch.Tensor, meta: Meta, parts: str) -> None:
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    h = torch.empty((len(linear.a), len(x), RANK), dtype=torch.float32, device=x.device)
    if "s" in parts:
        _lora_shrink(x, list(linear.a), h, *meta.arguments, 1.0)
    if "e" in parts:
        _lora_expand(h, list(linear.b), y, *meta.arguments, offset_start=0, add_inputs=True)


def dense(linear: Linear, x: torch.Tensor, y: torch.Tensor, meta: Meta) -> None:
    h = x @ linear.joined.T  # type: ignore[attr-defined]
    first = 0
    for at, (b, width) in enumerate(zip(linear.b, linear.widths, strict=True)):
        y[:, first : first + width].addmm_(h[:, at * RANK : (at + 1) * RANK], b[1, 0].T)
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


def ways_of(rows: int, device: str) -> dict[str, tuple[Any, Any, Callable[..., torch.Tensor]]]:
    """By name: tile sizes of vLLM's operators, and what makes y [M, O] of a layer and x."""
    from tinker_local.backend.vllm_engine import lora_kernels

    metas = {axis: Meta(rows, axis, device) for axis in (1, 2, 5)}

    def base(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight)

    def vllm(axis: int, parts: str = "se") -> Callable[..., torch.Tensor]:
        def way(linear: Linear, x: torch.Tensor) -> torch.Tensor:
            y = base(linear, x)
            vllm_pair(linear, x, y, metas[axis], parts)
            return y

        return way

    def few(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        y, slots = base(linear, x), metas[1].slots
        lora_kernels.expand(y, lora_kernels.shrink(x, linear.a, slots, 1.0), linear.b, linear.widths, slots)
        return y

    def dense_way(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        y = base(linear, x)
        dense(linear, x, y, metas[1])
        return y

    def one(span: int, reads: int, warps: int) -> Callable[..., torch.Tensor]:
        def way(linear: Linear, x: torch.Tensor) -> torch.Tensor:
            h = lora_kernels.shrink(x, linear.a, metas[1].slots, 1.0)
            return lora_kernels.one_row(
                x, linear.weight, h, linear.b, linear.widths, metas[1].slots, span, reads, warps
            )

        return way

    def many(shrink_sizes: tuple[int, ...], expand_sizes: tuple[int, ...]) -> Callable[..., torch.Tensor]:
        _, order, counts, starts, ids, *_ = metas[1].arguments

        def way(linear: Linear, x: torch.Tensor) -> torch.Tensor:
            y = base(linear, x)
            h = lora_kernels.shrink_many(x, linear.a, (order, counts, starts, ids), 1, *shrink_sizes)
            lora_kernels.expand_many(y, h, linear.b, linear.widths, (order, counts, starts, ids), 1, *expand_sizes)
            return y

        return way

    side = torch.cuda.Stream() if device == "cuda" else None

    def beside(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """The shrinking beside the base model's product, on another stream."""
        if side is None:
            return few(linear, x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            h = lora_kernels.shrink(x, linear.a, metas[1].slots, 1.0)
        y = base(linear, x)
        torch.cuda.current_stream().wait_stream(side)
        lora_kernels.expand(y, h, linear.b, linear.widths, metas[1].slots)
        return y

    ways: dict[str, tuple[Any, Any, Callable[..., torch.Tensor]]] = {
        "base": (None, None, base),
        "vLLM, axis 5": (None, None, vllm(5)),
        "vLLM, axis 2": (None, None, vllm(2)),
        "vLLM, axis 1": (None, None, vllm(1)),
        "vLLM, axis 1, shrink": (None, None, vllm(1, "s")),
        "vLLM, axis 1, expand": (None, None, vllm(1, "e")),
    }

    def sizes(**given: int) -> dict[str, int]:
        return given

    if rows <= lora_kernels.MOST_ROWS:
        for split, block in ((16, 256), (8, 512)):
            shrink = sizes(block_m=16, block_n=32, block_k=block, split_k=split)
            ways[f"vLLM, axis 1, shrink {split} x {block}"] = shrink, None, vllm(1, "s")
        for wide in (64, 256):
            ways[f"vLLM, axis 1, expand 16 x {wide}"] = None, sizes(block_m=16, block_n=wide), vllm(1, "e")
        ways["ours, few rows"] = None, None, few
        ways["ours, few rows, two streams"] = None, None, beside
    if rows == 1:
        for span, reads, warps in ((8, 1024, 4), (4, 1024, 4), (16, 512, 4), (4, 2048, 4), (8, 512, 2)):
            ways[f"ours, one row, {span} x {reads}, {warps} warps"] = None, None, one(span, reads, warps)
    if rows > lora_kernels.MOST_ROWS:
        ways["dense products"] = None, None, dense_way
        for shrink_sizes, expand_sizes in MANY:
            name = f"ours, shrink {shrink_sizes}, expand {expand_sizes}"
            ways[name] = None, None, many(shrink_sizes, expand_sizes)
        for m, k, split, warps in (
            (32, 64, 8, 4), (64, 64, 8, 4), (64, 128, 8, 4), (128, 64, 8, 4), (64, 64, 4, 4), (64, 64, 16, 4),
            (128, 128, 16, 8),
        ):  # fmt: skip
            shrink = sizes(block_m=m, block_n=32, block_k=k, split_k=split, num_warps=warps, num_stages=3)
            ways[f"vLLM, axis 1, shrink {m} x 32 x {k}, {split} parts, {warps} warps"] = shrink, None, vllm(1, "s")
        for m, n, warps in ((32, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (16, 256, 4)):
            expand = sizes(block_m=m, block_n=n, num_warps=warps)
            ways[f"vLLM, axis 1, expand {m} x {n}, {warps} warps"] = None, expand, vllm(1, "e")
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
    parser.add_argument("--rows", default="1,512,8192", help="of a step, as 1,16,512,8192")
    parser.add_argument("--layers", type=int, default=36)
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
    lines: Sequence[str] = []
    layers = linears(TINY if options.tiny else SHAPES, options.layers, device)
    for linear in layers:
        linear.joined = torch.cat([a[1, 0] for a in linear.a])  # type: ignore[attr-defined]
    faults = 0
    counts = [int(rows) for rows in options.rows.split(",")]
    for number, rows in enumerate(counts, 1):
        chosen = layers if rows <= 1024 else layers[: 4 * 4]
        scale = len(layers) / len(chosen)
        xs = {
            wide: torch.randn(rows, wide, device=device).to(DTYPE) for wide in {each.weight.shape[1] for each in layers}
        }
        base = 0.0
        for name, (shrink, expand, way) in ways_of(rows, device).items():
            if time.monotonic() - began > options.budget_seconds * number / len(counts):
                break
            try:
                if not name.startswith(("base", "ours", "dense")):
                    set_configs(shrink, expand)

                def step(way: Any = way, chosen: Any = chosen, xs: Any = xs) -> None:
                    for linear in chosen:
                        way(linear, xs[linear.weight.shape[1]])

                took = scale * milliseconds(step, device, 10 if rows <= 1024 else 3)
                wrong = max(difference(way, linear, xs[linear.weight.shape[1]]) for linear in layers[: len(SHAPES)])
            except Exception as error:
                print(f"{rows:6d}  {name:50} {type(error).__name__}: {str(error)[:200]}", flush=True)
                faults += 1
                continue
            base = base or took
            lines = [*lines, f"{rows:6d}  {name:50} {took:9.3f} {took - base:+9.3f}   {wrong:.2e}"]
            print(lines[-1], flush=True)
    print(f"rows    way{'':48} ms a step   beyond the base, difference; {time.monotonic() - began:.0f} s")
    print("\n".join(lines))
    return 1 if faults and options.tiny else 0


if __name__ == "__main__":
    sys.exit(main())
