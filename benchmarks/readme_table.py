"""Print the speed tables of docs/performance.md from results of one commit on one machine.

    python benchmarks/readme_table.py benchmarks/results/engine-DATE-TIME.jsonl [MORE.jsonl ...]

Pass several files if a time limit split the run; of a line in two of them, the last one counts. The rows are fixed, so
the tables also show what is slower than its baseline, and say what has no value.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import report
from harness.lines import Line

TRAINING = (
    ("Hugging Face + PEFT, padded, checkpointing", "text.padded_recompute"),
    ("packed, variable-length attention, adapters in float32", "text.packed"),
    ("packed, adapters in bfloat16 without float32 masters", "text.packed_bf16"),
    ("the same with Liger's kernels", "text.packed_bf16_liger"),
    ("**tinker-local**", "text.ours"),
    ("**tinker-local**, autograd decoder", "text.autograd"),
    ("packed, adapters in bfloat16, checkpointing", "text.packed_bf16_recompute"),
    ("the same with Liger's kernels", "text.packed_bf16_recompute_liger"),
    ("**tinker-local**, every layer recomputed", "text.ours_recompute"),
    ("**tinker-local**, autograd decoder, every layer recomputed", "text.autograd_recompute"),
)
"""Label and line of each row of the first table."""

COMPARED = (
    ("8 adapters in one step, the same tokens", "adapters.co_batched", "one adapter", ("adapters.one",)),
    (
        "8 adapters in one step, autograd decoder",
        "adapters.autograd_co_batched",
        "one adapter",
        ("adapters.autograd_one",),
    ),
    (
        "8 runs of 512 tokens a step, in one call",
        "adapters.small_together",
        "PEFT, one after the other",
        ("adapters.bare_float32", "adapters.bare_bf16"),
    ),
    ("new images of 448 x 448, at the trainer", "images.ours", "packed loop, pixels ready", ("images.packed_bf16",)),
    ("new images, SDK over HTTP", "images.sdk", "packed loop, pixels ready", ("images.packed_bf16",)),
    (
        "new images, SDK over HTTP, each step sent ahead",
        "images.sdk_ahead",
        "packed loop, pixels ready",
        ("images.packed_bf16",),
    ),
    ("a step of 4,096 tokens, SDK over HTTP", "steps.text_sdk", "in process", ("steps.text_in_process",)),
    ("512 samples at once, LoRA, logprobs, SDK over HTTP", "sampling.sdk", "vLLM alone", ("sampling.alone",)),
)
"""Rows of the second table: label, line, baseline, and the lines of that baseline, of which the best counts."""

WAITS = (
    ("new weights to the first token sampled from them, trainer idle", "handover.sdk"),
    ("the same while another model trains", "handover.busy"),
)
"""Rows of the second table without a baseline."""

NOT_MEASURED = "not measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.jsonl")
    options = parser.parse_args()
    runs = [report.read(path) for path in options.results]
    if any(run.head != runs[0].head for run in runs):
        sys.exit("these results are of different commits or machines:\n" + "\n".join(str(run.head) for run in runs))
    lines = {line.name: line for run in runs for line in run.lines}
    print(markdown(runs[0].head, [path.name for path in options.results], lines))


def markdown(head: Sequence[str], files: Sequence[str], lines: Mapping[str, Line]) -> str:
    """Both tables, and below them the source of the numbers."""
    rows = ["| training, 64 sequences, 41,989 tokens a step | tokens/s | peak GiB |", "| --- | ---: | ---: |"]
    rows += [f"| {label} | {_value(lines.get(name))} | {_peak(lines.get(name))} |" for label, name in TRAINING]
    rows += ["", "| | tinker-local | baseline | ratio |", "| --- | ---: | ---: | ---: |"]
    for label, name, other, names in COMPARED:
        ours = lines.get(name)
        measured = [lines[name] for name in names if name in lines and lines[name].value]
        base = max(measured, key=lambda line: line.value or 0.0, default=None)
        ratio = ""
        if ours is not None and ours.value and base is not None and base.value:
            ratio = f"{ours.value / base.value:.2f}"
        rows.append(f"| {label} | {_with_unit(ours)} | {_with_unit(base)}, {other} | {ratio} |")
    rows += [f"| {label} | {_with_unit(lines.get(name))} | | |" for label, name in WAITS]
    links = ", ".join(f"[{file}](benchmarks/results/{file})" for file in files)
    return "\n".join([*rows, "", f"{'; '.join(head)}: {links}"])


def _value(line: Line | None) -> str:
    if line is None or line.value is None:
        return NOT_MEASURED
    return f"{line.value:,.0f}"


def _with_unit(line: Line | None) -> str:
    return _value(line) if line is None or line.value is None else f"{_value(line)} {line.unit}"


def _peak(line: Line | None) -> str:
    return "" if line is None or line.peak_gib is None else f"{line.peak_gib:.1f}"


if __name__ == "__main__":
    main()
