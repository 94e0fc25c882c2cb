"""Everything in one command: a model, a server, and a program that teaches the model to read digits.

    make demo                                    a tiny vision-language model with random weights, on any laptop
    make demo MODEL=Qwen/Qwen3-VL-4B-Instruct    real weights, on a GPU
    python examples/demo.py --data FOLDER ...    a folder of images per class instead of the digits; without a goal

Starts `tinker-local serve` and runs `examples/vlm_classifier.py` against it. The goal is to read 95 % of the held-out
digits, and at most 15 % on blank images. The exit status is not zero if the model misses it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

EXAMPLES = Path(__file__).parent
TINY = Path("models/demo-vl")

# Random weights and real weights need different settings.
TINY_SETTINGS = ["--learning-rate", "3e-3", "--clip", "0.5", "--epochs", "24", "--side", "32"]
REAL_SETTINGS = ["--learning-rate", "2e-4", "--epochs", "2", "--side", "224"]
MARKS = ["--min-accuracy", "0.95", "--max-blank-accuracy", "0.15"]


def serve(model: str, data_dir: str, console: Console) -> tuple[subprocess.Popen, str]:
    """Start the server, show its output, and return the process and URL once it is ready."""
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", "--model", model, "--port", "0"]
    console.print(f"[bold]$ tinker-local serve --model {model}[/bold]")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="NAME or NAME=PATH of a vision-language model; default: a tiny one")
    parser.add_argument("--data", type=Path, help="a folder with one folder of images per class; default: the digits")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=1)
    options, further = parser.parse_known_args()
    data, marks = (["--data", str(options.data)], []) if options.data else ([], MARKS)
    console = Console(highlight=False)
    start = time.monotonic()
    if options.model is None:
        if not (TINY / "config.json").exists():
            command = [sys.executable, "-m", "tinker_local.backend.cli.main", "tiny-model"]
            console.print(f"[bold]$ tinker-local tiny-model --kind vl --preset demo --out {TINY}[/bold]")
            subprocess.run([*command, "--kind", "vl", "--preset", "demo", "--out", str(TINY)], check=True)
        source, settings = f"local/demo-vl={TINY}", TINY_SETTINGS if options.data else [*TINY_SETTINGS, "--shift"]
    else:
        source, settings = options.model, REAL_SETTINGS
    with tempfile.TemporaryDirectory() as data_dir:
        server, url = serve(source, data_dir, console)
        try:
            name = source.partition("=")[0]
            command = ["--model", name, "--base-url", url, "--out", str(options.out), "--seed", str(options.seed)]
            command += [*settings, *data, *further]
            console.print(f"[bold]$ python examples/vlm_classifier.py {' '.join(command)}[/bold]")
            status = subprocess.run([sys.executable, str(EXAMPLES / "vlm_classifier.py"), *marks, *command]).returncode
        finally:
            server.terminate()
            server.wait()
    console.print(f"{'done' if status == 0 else 'the mark was missed'} after {time.monotonic() - start:.0f} s in all")
    return status


if __name__ == "__main__":
    sys.exit(main())
