"""Every architecture that transformers and vLLM both have, tiny, with random weights: what a server makes of it.

    python benchmarks/served_architectures.py --out benchmarks/results    # all; a CPU, a quarter of an hour
    python benchmarks/served_architectures.py --only gemma,internvl
    python benchmarks/served_architectures.py --rows /tmp/rows.jsonl          # goes on where a run ended

A row is a `model_type`, or a recipe of `tiny_models` for one; its process and its time are limited. It is *served*,
*refused* with the reason, *not made* if this command finds no tiny model of it, or it *fails* or *differs*, which are
faults. The columns are the largest differences: of the loss per token and of adapters' gradients from transformers' own
forward and autograd, in float64 (gradients as a part of the largest one; two adapters and several sequences share
rows); of logprobs in sampler and trainer, in float32 and nats; and of what PEFT and transformers compute with the
exports from the trainer's logprobs.
"""

import argparse
import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import machine, report
from harness.lines import Line

SECONDS = 300.0
"""Most that a row may take."""
LIMITS = {"loss": 1e-10, "gradient": 1e-9, "sampler": 5e-4, "peft": 5e-4, "merged": 5e-4}
"""The columns; larger differences are faults. Exports are computed in float64: a tiny Gemma 4 rounds by 1e-4 in
float32."""

LONGEST = 400
"""Of a reason, in characters."""

Found = Mapping[str, Any]


def outcome(found: Found) -> str:
    """Of a row, in words."""
    said = str(found.get("outcome", "fails"))
    if said == "served" and not all(found[column] <= limit for column, limit in LIMITS.items()):
        return "differs"
    return said


def of_row(name: str, say: Callable[[str, Any], None]) -> None:
    """Measure a row in this process."""
    from measurements.one_architecture import NAME, measure
    from measurements.tiny_architectures import make
    from tinker_local.types import UnsupportedError

    with tempfile.TemporaryDirectory(prefix="architecture-") as root:
        folder = Path(root) / "model"

        def reason(error: Exception) -> None:
            traceback.print_exc()
            told = (str(error).strip() or type(error).__name__).replace(f"{folder}: ", "").partition("\n")[0]
            say("reason", told if len(told) <= LONGEST else f"{told[:LONGEST]} …")

        try:
            make(name, folder)
        except Exception as error:  # of any type: transformers' classes check little
            say("outcome", "not made")
            reason(error)
            return
        try:
            measure(Path(root), folder, say)
        except Exception as error:  # what is not a refusal is a fault, which the table shows
            if isinstance(error, UnsupportedError) or str(error).startswith(f"{NAME}: "):  # at a start
                # A processor is missing where this command writes none.
                say("outcome", "not made" if "makes no processor" in str(error) else "refused")
            reason(error)


def in_a_child(name: str, log: int) -> dict[str, Any]:
    """What is found of a row in a child of this process, which has imported all that it takes. `log`: the file of its
    other output."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        with os.fdopen(writing, "w") as pipe:
            of_row(name, lambda column, value: print(json.dumps([column, value]), file=pipe, flush=True))
        os._exit(0)
    os.close(writing)
    text, end = b"", time.monotonic() + SECONDS
    while ready := select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (read := os.read(reading, 2**16)):
            break
        text += read
    os.close(reading)
    os.killpg(child, signal.SIGKILL)  # with what it started; it is there until it is waited for
    _, status = os.waitpid(child, 0)
    found = dict(map(json.loads, text.decode().splitlines()))
    if not ready:
        found |= {"outcome": "fails", "reason": f"ended at its limit of {SECONDS:.0f} s"}
    elif "outcome" not in found and "reason" not in found:
        found["reason"] = f"its process ended with status {status}"
    return found


def table(rows: Mapping[str, Found]) -> str:
    """One row for each architecture, and the reasons."""
    text = ""
    for kind, title in (("sees", "Read images and text"), ("reads", "Read text")):
        own = {name: found for name, found in rows.items() if found["kind"] == kind}
        counts = Counter(map(outcome, own.values()))
        cells = [["architecture", "model_type", "outcome", "trained", "rows", *LIMITS]]
        for name, found in own.items():
            numbers = [f"{found[column]:.0e}" if column in found else "" for column in LIMITS]
            told = [found["model_type"], outcome(found), found.get("trained", ""), found.get("rows", "")]
            cells.append([name, *told, *numbers])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        reasons = [f"{name}, {outcome(found)}: {found['reason']}" for name, found in own.items() if "reason" in found]
        text += f"\n{title}: {', '.join(f'{count} {each}' for each, count in counts.most_common())}\n\n"
        text += "\n".join([*lines, "", *reasons]) + "\n"
    return text


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,…", help="rows (default: all)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="of rows so far, to which others are added")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", TOKENIZERS_PARALLELISM="false")
    from tinker_local.backend.vllm_engine.build_engine import prepare_environment

    prepare_environment()
    import measurements.one_architecture  # noqa: F401  (children have it then)
    from measurements.tiny_architectures import rows

    known = rows()
    names = options.only.split(",") if options.only else [*known]
    if unknown := {*names} - {*known}:
        parser.error(f"--only {min(unknown)}: no such row; there are {', '.join(known)}")
    found: dict[str, Found] = {}
    if options.rows is not None and options.rows.exists():
        found = dict(map(json.loads, options.rows.read_text().splitlines()))
    log = options.log or Path(tempfile.mkdtemp(prefix="served-")) / "log"
    print(f"the log is {log}")
    for name in names:
        if name in found and not options.only:
            continue
        start = time.monotonic()
        with log.open("a") as file:
            print(f"==== {name}", file=file, flush=True)
            found[name] = {**known[name], **in_a_child(name, file.fileno())}
        took = f"{time.monotonic() - start:.0f} s"
        print(f"{name}: {outcome(found[name])}, {took} {found[name].get('reason', '')}", flush=True)
        if options.rows is not None:
            with options.rows.open("a") as kept:
                print(json.dumps([name, found[name]]), file=kept)
    measured = {name: found[name] for name in known if name in found}
    head = machine.describe()
    text = "\n".join(head) + "\n" + table(measured)
    print(text)
    if options.out is not None:
        lines = [Line(name, note=json.dumps(each)) for name, each in measured.items()]
        print(f"written to {report.keep(options.out, text, lines, head, 'served_architectures')}")


if __name__ == "__main__":
    main()
