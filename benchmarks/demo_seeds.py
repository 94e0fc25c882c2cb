"""The demo with several seeds: how many held-out digits each reads, and its processor time.

    python benchmarks/demo_seeds.py benchmarks/results/demo-20261124

Seeds change the order of the images, their augmentation and the adapter's first weights. One server serves all seeds;
`processor_s` counts its start for each seed, as `make demo` pays for it. Appends a line per seed to NAME.jsonl, and
writes the table of all lines there to NAME.txt, so that several of these with different `--seeds` can share a NAME.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import psutil
from rich.console import Console

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import demo  # noqa: E402


def children_s() -> float:
    """Processor seconds, user and system, of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def server_s(server: psutil.Process) -> float:
    """Processor seconds of the server and its processes."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def table(rows: list[dict[str, float]]) -> str:
    lines = [f"{'seed':>4} {'held-out':>9} {'blank':>7} {'NLL':>7} {'processor s':>12}"]
    lines += [
        f"{row['seed']:4.0f} {row['accuracy']:9.1%} {row['blank_accuracy']:7.1%} {row['nll']:7.3f} "
        f"{row['processor_s']:12.0f}"
        for row in sorted(rows, key=lambda row: row["seed"])
    ]
    accuracies = [row["accuracy"] for row in rows]
    lines.append(f"mean {mean(accuracies):9.1%}, minimum {min(accuracies):.1%}, maximum {max(accuracies):.1%}")
    lines.append(f"settings: {' '.join(demo.TINY_DIGITS)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", type=Path, help="of the result, without suffix")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    options, further = parser.parse_known_args()
    console, results = Console(highlight=False), options.name.with_name(options.name.name + ".jsonl")
    source = demo.make_tiny("vl", console)
    with tempfile.TemporaryDirectory() as folder:
        server, url = demo.serve(source, folder, console)
        start_s = server_s(psutil.Process(server.pid))
        for seed in options.seeds:
            begin = children_s() + server_s(psutil.Process(server.pid))
            command = [sys.executable, str(EXAMPLES / "vlm_classifier.py"), "--base-url", url, "--out", folder]
            command += ["--model", source.partition("=")[0], "--seed", str(seed), *demo.TINY_DIGITS, *further]
            subprocess.run(command, check=True)
            used = children_s() + server_s(psutil.Process(server.pid)) - begin
            row = json.loads((Path(folder) / "report.json").read_text()) | {"seed": seed, "processor_s": start_s + used}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        server.terminate()
        server.wait()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    options.name.with_name(options.name.name + ".txt").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
