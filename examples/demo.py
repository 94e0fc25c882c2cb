"""Everything in one command: a model, a server, and a program that teaches the model to read digits.

    make demo                                    a tiny vision-language model with random weights, on any laptop
    make demo KIND=qwen3_5                       the same of another family: qwen3_5, qwen3_vl_moe, qwen3_5_moe
    make demo MODEL=Qwen/Qwen3-VL-4B-Instruct    real weights, on a GPU
    python examples/demo.py --data FOLDER ...    a folder of images per class instead of the digits; without a goal
    python examples/demo.py --ask PICTURE        ask the trained model about a picture

Starts `tinker-local serve` and runs `examples/vlm_classifier.py` against it. The goal is to read 95 % of the held-out
digits, and at most 15 % on blank images. The exit status is not zero if the model misses it.

Everything is kept in `--out`: curves, report, pictures, and the server's data folder with the checkpoints (`data`). A
second run replaces curves and report, and adds its checkpoints to those of the first.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

EXAMPLES = Path(__file__).parent
KINDS = ("vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
DEFAULT_OUT = Path("runs/demo")

# Random weights and real weights need different settings.
TINY_SETTINGS = [
    *("--rank", "16", "--learning-rate", "3e-3", "--weight-decay", "1", "--clip", "0.5", "--epochs", "12"),
    *("--side", "32"),
]
TINY_DIGITS = [*TINY_SETTINGS, "--shift"]
REAL_SETTINGS = ["--learning-rate", "2e-4", "--epochs", "2", "--side", "224"]
MARKS = ["--min-accuracy", "0.95", "--max-blank-accuracy", "0.15"]


def serve(model: str, data_dir: str, console: Console, *options: str) -> tuple[subprocess.Popen, str]:
    """Start the server with `options`, show its output, and return the process and URL once it is ready."""
    command = [
        sys.executable,
        "-m",
        "tinker_local.backend.cli.main",
        "serve",
        "--model",
        model,
        "--port",
        "0",
        *options,
    ]
    console.print(f"[bold]$ tinker-local serve {shlex.join(['--model', model, *options])}[/bold]")
    server = subprocess.Popen(
        [*command, "--data-dir", data_dir],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    assert server.stdout is not None
    for line in server.stdout:
        console.print("  " + line.rstrip(), markup=False)
        if found := re.search(r"ready: (http://\S+)", line):
            return server, found[1]
    raise SystemExit("the server did not start")


def classify(
    options: argparse.Namespace, source: str, arguments: list[str], console: Console
) -> subprocess.CompletedProcess:
    """Run the classifier against a server on the data folder of `--out`."""
    server, url = serve(source, str(options.out / "data"), console)
    try:
        command = ["--model", source.partition("=")[0], "--base-url", url, *arguments]
        console.print(f"[bold]$ python examples/vlm_classifier.py {shlex.join(command)}[/bold]", soft_wrap=True)
        return subprocess.run([sys.executable, str(EXAMPLES / "vlm_classifier.py"), *command])
    finally:
        server.terminate()
        server.wait()


def ask(options: argparse.Namespace, console: Console) -> int:
    """Ask the model that the last run trained."""
    try:
        run = json.loads((options.out / "demo.json").read_text())
        sampler = json.loads((options.out / "report.json").read_text())["sampler"]
    except FileNotFoundError as error:
        console.print(f"{error.filename} does not exist: run `make demo` first")
        return 1
    asked = ["--ask", str(options.ask), "--sampler", sampler, *run["data"]]
    return classify(options, run["source"], asked, console).returncode


def make_tiny(kind: str, console: Console) -> str:
    """Write the tiny model, unless it is there; returns its NAME=PATH."""
    folder = Path("models") / f"demo-{kind}"
    if not (folder / "config.json").exists():
        command = ["tiny-model", "--kind", kind, "--preset", "demo", "--out", str(folder)]
        console.print(f"[bold]$ tinker-local {shlex.join(command)}[/bold]")
        subprocess.run([sys.executable, "-m", "tinker_local.backend.cli.main", *command], check=True)
    return f"local/demo-{kind}={folder}"


def next_steps(options: argparse.Namespace, source: str, console: Console) -> None:
    """Three commands that work when they are pasted."""
    state = json.loads((options.out / "report.json").read_text())["checkpoint"]
    picture = min((options.out / "held_out").iterdir())
    data, script = options.out / "data", [".venv/bin/python", "examples/demo.py"]
    out = [] if options.out == DEFAULT_OUT else ["--out", str(options.out)]
    commands = {
        "ask it about a picture": [*script, *out, "--ask", str(picture)],
        "export it": [
            *(".venv/bin/tinker-local", "export", state, str(options.out / "exported"), "--to", "merged"),
            *("--data-dir", str(data)),
        ],
        "serve it": [".venv/bin/tinker-local", "serve", "--model", source, "--data-dir", str(data)],
    }
    for words, command in commands.items():
        console.print(f"\n{words}:\n{shlex.join(command)}", soft_wrap=True, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="NAME or NAME=PATH of a vision-language model; default: a tiny one")
    model.add_argument("--kind", choices=KINDS, default="vl", help="family of the tiny model; default: vl, Qwen3-VL")
    parser.add_argument("--data", type=Path, help="a folder with one folder of images per class; default: the digits")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--ask", type=Path, metavar="PICTURE", help="ask the model that the last run trained")
    parser.add_argument("--seed", type=int, default=1)
    options, further = parser.parse_known_args()
    data, marks = (["--data", str(options.data)], []) if options.data else ([], MARKS)
    console = Console(highlight=False)
    if options.ask is not None:
        return ask(options, console)
    start = time.monotonic()
    if options.model is None:
        source, settings = make_tiny(options.kind, console), TINY_SETTINGS if options.data else TINY_DIGITS
    else:
        source, settings = options.model, REAL_SETTINGS
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps({"source": source, "data": data}))
    arguments = ["--out", str(options.out), "--seed", str(options.seed), *settings, *data, *marks, *further]
    status = classify(options, source, arguments, console).returncode
    if (options.out / "report.json").exists():
        next_steps(options, source, console)
    console.print(f"{'done' if status == 0 else 'the mark was missed'} after {time.monotonic() - start:.0f} s in all")
    return status


if __name__ == "__main__":
    sys.exit(main())
