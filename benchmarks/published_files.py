"""Files in fewer bits as llm-compressor and AutoRound write them, of real weights: do trainer and sampler compute with
their numbers?

    python benchmarks/published_files.py benchmarks/results/published_files-DATE.md --model models/smollm2
    python benchmarks/published_files.py NAME --model models/smollm2 --only awq,fp8-block

`baselines/published_writers.py` writes each folder in an environment that this command makes (uv, and some GB once), or
in that of --python, and says what logprobs transformers' model in float32 has with the numbers of the files. A server
of the folder in float32 on a CPU is asked for the same, of its sampler and of its trainer. On one core it takes a
minute for each folder. Status 1 if one differs by more than 0.001 nats.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from baselines.published_writers import COMPRESSED, ROUNDED
from control_plane import served
from harness import environments, machine, processes

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "docs" / "losses.md"
WANTED = ("llmcompressor==0.14.0.1", "auto-round==0.15.1", "compressed-tensors==0.19.0", "transformers==5.17.0")
SECONDS = 900
MOST = 1e-3
"""Nats. Rounding in float32 makes 1e-5 to 1e-4, other numbers a tenth and more."""


def logprobs(url: str, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of each token but the first: the sampler's and the trainer's."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    prompt = tinker.ModelInput.from_ints(ids)
    sampled = service.create_sampling_client(base_model="m").result().compute_logprobs(prompt).result()
    inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    run = service.create_lora_training_client(base_model="m", rank=4).result()
    trained = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    return np.asarray(sampled[1:], dtype=float), trained.to_numpy().astype(float)


def row(name: str, options: argparse.Namespace, python: Path, folder: Path) -> tuple[list[str], float]:
    """Of the table, and how far the numbers of a side are off at most."""
    out, log = folder / name, folder / f"{name}.log"
    program = str(ROOT / "benchmarks" / "baselines" / "published_writers.py")
    with log.open("w") as errors:
        command = [str(python), program, str(options.model.resolve()), str(TEXT), str(out), name]
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, stdout=errors, stderr=errors, env=alone, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"{name}: status {done.returncode}\n{log.read_text()[-2000:]}")
    reference = json.loads(out.with_suffix(".json").read_text())
    with served(
        folder / f"{name}-data", "--model", f"m={out}", "--dtype", "float32", "--compare-seconds", "0", log=log
    ) as url:
        found = logprobs(url, reference["ids"])
    (kind,) = [
        line.rpartition(", the layers in ")[2] for line in log.read_text().splitlines() if "sampler share" in line
    ]
    wanted, dense = np.asarray(reference["file"]), np.asarray(reference["dense"])
    apart = [float(np.abs(each - wanted).max()) for each in found]
    moved = np.abs(dense - wanted)
    return [name, kind, f"{moved.mean():.4f}, {moved.max():.2f}", *(f"{each:.1e}" for each in apart)], max(apart)


def measure(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    python = options.python or environments.made(options.work / "env", WANTED)
    yield from ("# Files as llm-compressor and AutoRound write them", "")
    yield from (f"- {line}" for line in machine.describe())
    yield f"- model: {options.model.name}, float32; written by {', '.join(WANTED)}"
    yield from ("", "Nats, of the logprobs of 399 tokens: how far the numbers of the files move them from those of the")
    yield from ("model, mean and most; how far sampler and trainer are from the former at most.", "")
    yield from (
        "| file | what the server says it is | moved | sampler | trainer |",
        "| --- | --- | ---: | ---: | ---: |",
    )
    for name in options.only:
        cells, apart = row(name, options, python, folder)
        options.failed += apart > MOST
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", type=Path, help="the file of the result")
    parser.add_argument("--model", type=Path, required=True, help="folder of a dense model")
    every = [*COMPRESSED, *ROUNDED]
    parser.add_argument("--only", type=lambda text: text.split(","), default=every, help=", ".join(every))
    parser.add_argument("--python", type=Path, help="one that has both writers; none is made then")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "published_files", help="for the environment")
    options = parser.parse_args()
    if unknown := set(options.only) - set(every):
        parser.error(f"--only {', '.join(sorted(unknown))}: these are {', '.join(every)}")
    options.failed = 0
    os.environ.update(processes.environment())
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(options, Path(folder)):
            print(line, flush=True)
            lines.append(line)
    options.name.write_text("\n".join(lines) + "\n")
    return min(1, options.failed)


if __name__ == "__main__":
    sys.exit(main())
