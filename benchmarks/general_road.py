"""Models whose images transformers' classes read, beside a loop over transformers and PEFT as users write it.

    python benchmarks/general_road.py --out benchmarks/results          # a GPU with 140 GiB, about five minutes
    python benchmarks/general_road.py --shapes internvl3.5-8b --layers 12
    python benchmarks/general_road.py --tiny                            # the same code on a CPU

Random weights in the shapes of published models, some with fewer layers, as the notes say. A step of LoRA on the same
pictures and texts: 32 of them, of several sizes.
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
from harness.seeing_shapes import SEEING_SHAPES

SECONDS = 400.0
"""Most that a shape may take, its weights included, unless told otherwise."""
RATIOS = [
    ratio
    for name, shape in SEEING_SHAPES.items()
    for way, target in (("ours", shape.target), ("autograd", 1.0))
    for ratio in (
        Ratio(f"{name}: {way} / padded loop", f"{name}.{way}", (f"{name}.padded_recompute",), target),
        Ratio(f"{name}: {way}, features cached / loop", f"{name}.{way}_cached", (f"{name}.padded_recompute",)),
        Ratio(f"{name}: {way}, nats from the loop's first loss", f"{name}.{way}_apart", (), 0.05, "at most"),
    )
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument(
        "--shapes", default=",".join(SEEING_SHAPES), metavar="NAME,…", help=f"of {', '.join(SEEING_SHAPES)}"
    )
    parser.add_argument("--layers", type=int, help="of each shape, in place of the usual number; 0: all")
    parser.add_argument(
        "--autograd", action="store_true", help="also measure the autograd decoder, beside the usual one"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most that a shape may take")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    options = parser.parse_args()
    options.chosen = options.shapes.split(",")
    for name in options.chosen:
        if name not in SEEING_SHAPES:
            parser.error(f"--shapes {name}: no such shape; there are {', '.join(SEEING_SHAPES)}")
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    return options


def main() -> int:
    options = arguments()
    scale = "tiny" if options.tiny else "full"
    lines: list[Line] = []
    began = time.monotonic()
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-general-road.log"
    with log_file.open("w") as log:
        for name in options.chosen:
            # Every process has all of the GPU's memory, and its weights are gone before the next one writes.
            folder = Path(tempfile.mkdtemp(dir=None if options.tiny else room_for_models(), prefix="general-road-"))
            layers = SEEING_SHAPES[name].layers if options.layers is None else options.layers
            words = ["autograd"] if options.autograd else []
            part = ["measurements.seeing_ways", scale, name, str(folder), str(layers), *words]
            try:
                outcome = processes.run(part, options.seconds, log)
            finally:
                shutil.rmtree(folder)
            lines += outcome.lines
            if outcome.fault:
                lines.append(Line(name, error=outcome.fault[:300]))
                processes.show(lines[-1])
            print(f"-- {name}: {outcome.seconds:.0f} s", flush=True)
    took = time.monotonic() - began
    report.show("general_road", lines, options.out, tiny=options.tiny, seconds=took, ratios=RATIOS)
    print(f"other output: {log_file}")
    return 1 if options.tiny and any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
