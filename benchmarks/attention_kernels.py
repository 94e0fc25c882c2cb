"""FlashAttention 4 beside FlashAttention 2 in one run: attention alone, and training steps of models.

    python benchmarks/attention_kernels.py --out benchmarks/results                  # a GPU with 140 GiB, five minutes
    python benchmarks/attention_kernels.py --only kernels --out benchmarks/results   # a minute or two
    python benchmarks/attention_kernels.py --only qwen3-8b,gemma-3-12b --layers 6
    python benchmarks/attention_kernels.py --only qwen3.5-9b --rows long
    python benchmarks/attention_kernels.py --tiny                                    # the same code on a CPU

`kernels`: forward and backward of attention in the shapes of models, from which the table in
`training/kernels/flash_attention.py` is made. Then random models in real shapes, some with fewer layers, as the notes
say: a step on ragged sequences, and one on a sequence of 32,768 tokens. Needs `flash-attn-4`; without it the lines of
FlashAttention 2 remain.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from engine import room_for_models
from harness import machine, processes, report
from harness.lines import Line
from harness.ratios import Ratio

SECONDS = 400.0
"""Most that a part may take, its weights included."""
LAYERS = {"qwen3-8b": 0, "gemma-3-12b": 12, "gpt-oss-20b": 8, "qwen3.5-9b": 8}
"""Of each shape; 0: all."""
PARTS = ("kernels", *LAYERS)
ROWS = ("ragged", "long")
RAGGED = {"qwen3-8b": 1.04, "gemma-3-12b": 1.1, "gpt-oss-20b": 1.1, "qwen3.5-9b": 1.05}
RATIOS = [
    *(
        Ratio(f"{name}, ragged: FlashAttention 4 / 2", f"{name}.ragged_fa4", (f"{name}.ragged_fa2",), target)
        for name, target in RAGGED.items()
    ),
    *(
        Ratio(f"{name}, one long sequence: FlashAttention 4 / 2", f"{name}.long_fa4", (f"{name}.long_fa2",))
        for name in LAYERS
    ),
    Ratio("qwen3-8b, one long sequence: tokens/s", "qwen3-8b.long_fa4", (), 6300),
    *(
        Ratio(f"{name}, {row}: peak memory", f"{name}.{row}_fa4", (f"{name}.{row}_fa2",), 1.02, "at most", "peak_gib")
        for name in LAYERS
        for row in ROWS
    ),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument("--only", default=",".join(PARTS), metavar="NAME,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--layers", type=int, help="of each shape, in place of the usual number; 0: all")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,…", help=f"of models: {', '.join(ROWS)}")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    options = parser.parse_args()
    options.chosen = options.only.split(",")
    for name in options.chosen:
        if name not in PARTS:
            parser.error(f"--only {name}: no such part; there are {', '.join(PARTS)}")
    for name in options.rows.split(","):
        if name not in ROWS:
            parser.error(f"--rows {name}: no such rows; there are {', '.join(ROWS)}")
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    return options


def main() -> int:
    options = arguments()
    scale = "tiny" if options.tiny else "full"
    lines: list[Line] = []
    began = time.monotonic()
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-attention.log"
    with log_file.open("w") as log:
        for name in options.chosen:
            folder = Path(tempfile.mkdtemp(dir=None if options.tiny else room_for_models(), prefix="attention-"))
            layers = LAYERS.get(name, 0) if options.layers is None else options.layers
            try:
                outcome = processes.run(
                    ["measurements.attention_ways", scale, name, str(folder), str(layers), options.rows], SECONDS, log
                )
            finally:
                shutil.rmtree(folder)
            lines += outcome.lines
            if outcome.fault:
                lines.append(Line(name, error=outcome.fault[:300]))
                processes.show(lines[-1])
            print(f"-- {name}: {outcome.seconds:.0f} s", flush=True)
    took = time.monotonic() - began
    report.show("attention_kernels", lines, options.out, tiny=options.tiny, seconds=took, ratios=RATIOS)
    print(f"other output: {log_file}")
    return 1 if options.tiny and any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
