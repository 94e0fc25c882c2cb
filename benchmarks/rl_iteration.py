"""Compare layouts by whole iterations of reinforcement learning: save, sample, gradient, step.

    python benchmarks/rl_iteration.py --out benchmarks/results       # all GPUs of the machine, ten minutes
    python benchmarks/rl_iteration.py --layouts one,colocated        # of one, colocated and split
    python benchmarks/rl_iteration.py --layouts one --way sdk --prompts 32 --samples 16 --prompt-tokens 256
    python benchmarks/rl_iteration.py --tiny                         # the same code on a CPU, some minutes

An iteration saves ephemeral weights, samples one sequence for each of 512 prompts of 128 tokens, 256 tokens each, and
trains on all of them with importance sampling, in process; or as the options say, a group of samples for each prompt,
and the official SDK against `tinker-local serve`. Everything is the server's default, with random weights in the shape
of Qwen3-8B and LoRA of rank 32. `one` is the first GPU alone, `colocated` what the server does with all GPUs, `split`
trains on the first half of them and samples on the other.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from engine import room_for_models
from harness import machine, processes, report
from harness.lines import Line
from harness.ratios import Ratio
from harness.scale import SCALES

LIMIT = 400.0
"""Seconds of a layout, its start included."""
LAYOUTS = ("one", "colocated", "split")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="which, the first is the base")
    parser.add_argument("--iterations", type=int, default=2, metavar="N", help="timed ones (2)")
    parser.add_argument("--prompts", type=int, help="of an iteration (512)")
    parser.add_argument("--samples", type=int, default=1, help="of a prompt (1)")
    parser.add_argument("--prompt-tokens", type=int, help="of a prompt (128)")
    parser.add_argument("--output-tokens", type=int, help="of a sample (256)")
    parser.add_argument("--way", choices=("in-process", "sdk"), default="in-process", help="the client")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where random models are kept and found again")
    parser.add_argument("--log", type=Path, help="file for other output of the measurements (default: a temporary one)")
    options = parser.parse_args()
    options.gpus = machine.gpu_count()
    needed = 1 if options.layouts == "one" else 2
    if not options.tiny and options.gpus < needed:
        parser.error(f"GPUs: {options.gpus}, and {options.layouts} needs {needed}; --tiny runs the same code on a CPU")
    return options


def work_of(options: argparse.Namespace) -> dict[str, int]:
    """Of an iteration, as `Work` in `measurements/rl_layout.py`."""
    scale = SCALES["tiny" if options.tiny else "full"]
    return {
        "prompts": options.prompts or scale.requests,
        "samples": options.samples,
        "prompt_tokens": options.prompt_tokens or max(2, scale.prompt_tokens // 2),
        "output_tokens": options.output_tokens or max(2, scale.output_tokens // 2),
    }


def gpus_of(layout: str, gpus: int) -> tuple[str, str]:
    """`--train-gpus` and `--sample-gpus`, or `-`."""
    if layout != "split":
        return "-", "-"
    numbers = [str(number) for number in range(max(2, gpus))]
    half = len(numbers) // 2
    return ",".join(numbers[:half]), ",".join(numbers[half:])


def main() -> int:
    options = arguments()
    scale, lines = "tiny" if options.tiny else "full", list[Line]()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models(), prefix="bench-") as folder:
        models = options.models.resolve() if options.models else Path(folder)
        models.mkdir(parents=True, exist_ok=True)
        with (options.log or Path(tempfile.gettempdir()) / "tinker-local-bench.log").open("w") as log:
            fault = processes.run(["measurements.models", scale, str(models), "text"], LIMIT, log).fault
            for layout in options.layouts.split(",") if not fault else []:
                if layout == "one" and options.gpus:
                    os.environ["CUDA_VISIBLE_DEVICES"] = (visible or "0").split(",")[0]
                command = ["measurements.rl_layout", scale, str(models / "text"), f"rl.{layout}"]
                places = gpus_of(layout, options.gpus)
                command += [str(options.iterations), *places, json.dumps(work_of(options)), options.way]
                outcome = processes.run(command, LIMIT, log)
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                if visible is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible
                lines += outcome.lines
                if outcome.fault and not outcome.lines:
                    lines.append(Line(f"rl.{layout}", error=outcome.fault[:300]))
                    processes.show(lines[-1])
            if fault:
                lines.append(Line("rl", error=fault[:300]))
    base, *others = options.layouts.split(",")
    compared = [
        Ratio(f"{name} / {base}, an iteration's tokens/s", f"rl.{name}", (f"rl.{base}",), None) for name in others
    ]
    work = work_of(options)
    others = [
        f"{options.gpus} GPUs",
        f"{work['prompts']} prompts of {work['prompt_tokens']} tokens, {work['samples']} samples of each, of "
        f"{work['output_tokens']} tokens, {options.way}",
    ]
    report.show("rl_iteration", lines, options.out, tiny=options.tiny, ratios=compared, others=others)
    print(f"other output of the measurements: {log.name}")
    return 1 if any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
