"""A product with a matrix of 8 or 4 bits against the same with one of 16, for the matrices of an 8B model's layer.

    python benchmarks/packed_products.py [--out benchmarks/results] [--tiny]

Milliseconds of all products of a layer in a CUDA graph (median of repeats in turn, each behind a buffer larger than the
caches, as a step of a whole model finds them). `16 bits`: torch's product. `torch`: the matrix made in torch, then the
same product. `one pass`: made by a kernel. `few rows`: the kernel that multiplies as it reads. Needs a GPU; `--tiny`
runs what is in torch on a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import machine
from rich.console import Console
from rich.table import Table
from tinker_local.backend.weights.codes import in_torch, to_codes
from tinker_local.backend.weights.precision import BITS

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
"""[out, in] of qkv, o, gate_up and down of Qwen3-8B."""

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
FEW = 256
CACHES = 2**28
"""Bytes that are written between two measurements."""

Ways = dict[str, Callable[[], object]]


def ways(rows: int, bits: str, shapes: list[tuple[int, int]], device: str, dtype: torch.dtype) -> Ways:
    """By name, all products of a layer."""
    dense = [torch.randn(shape, device=device, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]
    packed = [to_codes(each, BITS[bits]) for each in dense]
    given = [torch.randn(rows, inputs, device=device, dtype=dtype) for _, inputs in shapes]
    found: Ways = {
        "16 bits": lambda: [x @ w.T for x, w in zip(given, dense, strict=True)],
        "torch": lambda: [x @ in_torch(w, dtype).T for x, w in zip(given, packed, strict=True)],
    }
    if device == "cuda":
        from tinker_local.backend.weights.triton_codes import times_few, unpacked

        found["one pass"] = lambda: [
            x @ unpacked(w.codes, w.scales, dtype, curved=w.curved).T for x, w in zip(given, packed, strict=True)
        ]
        if rows <= FEW:
            found["few rows"] = lambda: [
                times_few(x, w.codes, w.scales, curved=w.curved) for x, w in zip(given, packed, strict=True)
            ]
    return found


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The same as a CUDA graph, as the sampler runs it: without the time that launches take."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(_: object = kept) -> None:
        graph.replay()

    return replay


def milliseconds(each: Ways, repeats: int, device: str) -> dict[str, float]:
    """Medians, measured in turn."""
    if device == "cuda":
        each = {name: captured(run) for name, run in each.items()}
    caches = torch.empty(CACHES if device == "cuda" else 1, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in each}
    for repeat in range(repeats + 3):
        for name, run in each.items():
            caches.zero_()
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    shapes = [(96, 128), (128, 64)] if options.tiny else [*SHAPES]
    names = ["16 bits", "torch", "one pass", "few rows"]
    table = Table("bits", "rows", *names, title=f"a layer's products, ms, {dtype}, {machine.gpu() or device}")
    lines = ["| | rows | " + " | ".join(names) + " |", "| --- " * (len(names) + 2) + "|"]
    for bits in BITS:
        for rows in ROWS[:2] if options.tiny else ROWS:
            took = milliseconds(ways(rows, bits, shapes, device, dtype), 3 if options.tiny else options.repeats, device)
            cells = [f"{took[name]:.3f}" if name in took else "" for name in names]
            table.add_row(bits, str(rows), *cells)
            lines.append(f"| {bits} | {rows} | " + " | ".join(cells) + " |")
    Console(width=110).print(table)
    if options.out:
        (options.out / "packed_products.md").write_text(f"# {table.title}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
