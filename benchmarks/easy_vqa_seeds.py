"""The example of questions about pictures with several seeds: what each answers right, and its processor time.

    python benchmarks/easy_vqa_seeds.py benchmarks/results/easy_vqa-20261128

Seeds change the order of the questions and the first weights of both adapters. Each has its own server and its own
model, made as a user makes it; `processor_s` counts both, and the program. Appends a line per seed to NAME.jsonl, and
writes the table of all lines there to NAME.txt, so that several of these with different `--seeds` can share a NAME.
Further options go to the example.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import demo_seeds
import psutil
from rich.console import Console

EXAMPLES = demo_seeds.EXAMPLES


def table(rows: list[dict[str, Any]]) -> str:
    """As it is kept in benchmarks/results."""
    lines = [
        "seed  held out  most frequent  by question  questions alone  with pictures  yes or no   shape  colour"
        "  processor s    s  again    SDK   chat  openai  other answers  other prompts"
    ]
    lines += [
        f"{row['seed']:4} {row['held_out']:9,} {row['most_frequent']:14.1%} "
        f"{row['most_frequent_by_question']:12.1%} {row['questions_alone']:16.1%} "
        f"{row['with_pictures']:14.1%} {row['kinds']['yes or no']:10.1%} {row['kinds']['shape']:7.1%} "
        f"{row['kinds']['colour']:7.1%} {row['processor_s']:12.0f} {row['seconds']:4.0f} {row['asked_again']:6} "
        f"{row['sdk']:6.1%} {row['chat']:6.1%} {row['openai']:7.1%} {row['other_answers']:14} {row['other_prompts']:14}"
        for row in sorted(rows, key=lambda row: row["seed"])
    ]
    found = [row["with_pictures"] for row in rows]
    lines.append(f"with pictures: mean {mean(found):.1%}, minimum {min(found):.1%}, maximum {max(found):.1%}")
    return "\n".join(lines) + "\n"


def run(seed: int, folder: Path, further: list[str]) -> dict[str, Any]:
    """Model, server and example; its report with the time of all three."""
    begin, started = demo_seeds.children_s(), time.monotonic()
    model, out = folder / "model", folder / "report.json"
    make = ["tiny-model", "--kind", "vl", "--preset", "drawings", "--out", str(model)]
    subprocess.run([sys.executable, "-m", "tinker_local.backend.cli.main", *make], check=True)
    server, url = demo_seeds.demo.serve(f"local/drawings-vl={model}", str(folder / "data"), Console(highlight=False))
    try:
        command = [sys.executable, str(EXAMPLES / "easy_vqa.py"), "--base-url", url, "--seed", str(seed)]
        subprocess.run([*command, "--out", str(out), *further], check=True)
        used = demo_seeds.server_s(psutil.Process(server.pid)) + demo_seeds.children_s() - begin
    finally:
        server.terminate()
        server.wait()
    report: dict[str, Any] = json.loads(out.read_text())
    return report | {"processor_s": used, "seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", type=Path, help="of the result, without suffix")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options, further = parser.parse_known_args()
    results = options.name.with_name(options.name.name + ".jsonl")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            row = run(seed, Path(folder), further)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    options.name.with_name(options.name.name + ".txt").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
