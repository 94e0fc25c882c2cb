"""Train models of several families in real shapes: tokens per second of a step of LoRA, and peak memory.

    python benchmarks/families.py --out benchmarks/results                    # a GPU with 140 GiB, about ten minutes
    python benchmarks/families.py --shapes qwen3.5-9b --out benchmarks/results
    python benchmarks/families.py --sampling --shapes qwen3.5-9b --out benchmarks/results
    python benchmarks/families.py --shapes qwen3-30b-a3b --parts       # and where a layer of experts spends its time
    python benchmarks/families.py --shapes qwen3.5-9b --only-parts     # what is special in a layer, in half a minute
    python benchmarks/families.py --tiny                                      # the same code on a CPU

Random weights, written one after the other and deleted again. The step is that of `text.ours` in engine.py.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from engine import room_for_models
from harness import machine, processes, report
from harness.lines import Line
from harness.model_shapes import SHAPES
from harness.ratios import Ratio

SECONDS = 400.0
"""Most that a shape may take, its weights included."""
RATIOS = [
    *(
        Ratio(
            f"{name}: ours / packed loop",
            f"{name}.ours",
            (f"{name}.packed_bf16", f"{name}.packed_bf16_recompute"),
            1.15,
        )
        for name, shape in SHAPES.items()
        if shape.loop
    ),
    *(
        Ratio(f"{name}: 8 adapters / one", f"{name}.co_batched", (f"{name}.ours",), 0.9)
        for name, shape in SHAPES.items()
    ),
    *(
        Ratio(f"{name}: experts / their grouped products alone", f"{name}.experts", (f"{name}.products",), 0.7)
        for name, shape in SHAPES.items()
        if shape.experts
    ),
    *(
        Ratio(f"{name}: FLOP/s of matrix products / Qwen3-8B's", f"{name}.flops", ("qwen3-8b.flops",), 0.95)
        for name in ("llama-3.1-8b", "mistral-7b", "gemma-3-12b")
    ),
    *(
        Ratio(f"{name}: our sampler / vLLM alone", f"{name}.sampling_ours", (f"{name}.sampling_alone",), 0.97)
        for name, shape in SHAPES.items()
        if shape.family == "qwen3_5_text"
    ),
    *(
        Ratio(f"{name}: tokens/s in at most {shape.memory_gib} GiB", f"{name}.limited", (), shape.limited_tokens)
        for name, shape in SHAPES.items()
        if shape.memory_gib
    ),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument("--shapes", default=",".join(SHAPES), metavar="NAME,…", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--trace", action="store_true", help="also print where the time of a step goes")
    parser.add_argument("--without-loops", action="store_true", help="leave out the loops by hand")
    parser.add_argument("--sampling", action="store_true", help="measure the sampler in place of training")
    parser.add_argument("--parts", action="store_true", help="also print the parts of a step and of single layers")
    parser.add_argument("--only-parts", action="store_true", help="those of single layers alone, without a model")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    options = parser.parse_args()
    options.parts |= options.only_parts
    options.chosen = options.shapes.split(",")
    for name in options.chosen:
        if name not in SHAPES:
            parser.error(f"--shapes {name}: no such shape; there are {', '.join(SHAPES)}")
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    return options


def main() -> int:
    options = arguments()
    scale = "tiny" if options.tiny else "full"
    lines: list[Line] = []
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-families.log"
    with log_file.open("w") as log:
        for name in options.chosen:
            # Every process has all of the GPU's memory, and its weights are gone before the next one writes.
            folder = Path(tempfile.mkdtemp(dir=None if options.tiny else room_for_models(), prefix="family-"))
            if options.sampling:
                parts = [["measurements.family_sampling", scale, name, str(folder), who] for who in ("alone", "ours")]
            else:
                words = [word for word in ("trace", "parts", "only_parts", "without_loops") if getattr(options, word)]
                parts = [["measurements.one_family", scale, name, str(folder), *words]]
            try:
                for part in parts:
                    outcome = processes.run(part, SECONDS, log)
                    lines += outcome.lines
                    if outcome.fault:
                        lines.append(Line(name, error=outcome.fault[:300]))
                        processes.show(lines[-1])
                    print(f"-- {name}: {outcome.seconds:.0f} s", flush=True)
            finally:
                shutil.rmtree(folder)
    report.show("families", lines, options.out, tiny=options.tiny, ratios=RATIOS)
    print(f"other output: {log_file}")
    return 1 if options.tiny and any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
