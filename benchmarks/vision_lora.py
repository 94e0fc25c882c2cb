"""Digits on a tiny model whose vision tower is random: read with LoRA on the decoder alone, and on the tower, too.

    python benchmarks/vision_lora.py benchmarks/results/vision_lora-20261124

The model is `tinker-local tiny-model --kind vl`, whose tower is not laid out for anything, unlike the demo's. One
server with `--train-vision` serves all runs; both kinds of a run have the same seed, data, steps and settings. Appends
a line per run to NAME.jsonl, and writes the table of all lines there to NAME.txt.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import demo  # noqa: E402

SETTINGS = ["--rank", "16", "--learning-rate", "3e-3", "--clip", "0.5", "--epochs", "6", "--side", "32"]


def table(rows: list[dict]) -> str:
    lines = [f"{'seed':>4} {'trained':>16} {'held-out':>9} {'blank':>7} {'NLL':>7} {'images/s':>9}"]
    lines += [
        f"{row['seed']:4} {'decoder, tower' if row['train_vision'] else 'decoder':>16} {row['accuracy']:9.1%} "
        f"{row['blank_accuracy']:7.1%} {row['nll']:7.3f} {row['train_images_per_second']:9.0f}"
        for row in sorted(rows, key=lambda row: (row["seed"], row["train_vision"]))
    ]
    lines.append(f"settings: {' '.join(SETTINGS)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", type=Path, help="of the result, without suffix")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    results = options.name.with_name(options.name.name + ".jsonl")
    with tempfile.TemporaryDirectory() as folder:
        cli, model = [sys.executable, "-m", "tinker_local.backend.cli.main"], f"{folder}/model"
        subprocess.run([*cli, "tiny-model", "--kind", "vl", "--out", model], check=True)
        server, url = demo.serve(f"local/tiny={model}", f"{folder}/data", Console(), "--train-vision")
        try:
            for seed in options.seeds:
                for further in ([], ["--train-vision"]):
                    out = f"{folder}/out"
                    command = [sys.executable, str(EXAMPLES / "vlm_classifier.py"), "--model", "local/tiny"]
                    command += ["--base-url", url, "--out", out, "--seed", str(seed), *SETTINGS, *further]
                    subprocess.run(command, check=True)
                    report = json.loads(Path(out, "report.json").read_text())
                    row = {"seed": seed, "train_vision": bool(further), **report}
                    with results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        finally:
            server.terminate()
            server.wait()
    text = table([json.loads(line) for line in results.read_text().splitlines()])
    options.name.with_name(options.name.name + ".txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
