"""Data of earlier commits: what a program of the SDK does with them, and how they are made.

    git worktree add /tmp/earlier COMMIT
    python -m tests.storage.earlier_data /tmp/earlier COMMIT      # writes tests/storage/earlier/COMMIT.tar.xz

An archive has a data folder of `--fake`, a backup of it, an adapter that was exported for PEFT from a tiny model of
family qwen3, and `expected.json`: the losses and the sample that the commit's own server gave.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import tinker

from tests.conftest import start_server

EARLIER = Path(__file__).with_name("earlier")
MODEL = "fake/bigram"
CLI = (sys.executable, "-m", "tinker_local.backend.cli.main")


def step(client: tinker.TrainingClient, first: int) -> float:
    """The loss of eight tokens in a row from `first`, of which a step of the optimizer follows."""
    tokens = list(range(first, first + 8))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 7},  # type: ignore[dict-item]
    )
    gradient = client.forward_backward([datum], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    return float(gradient.result().metrics["loss:sum"])


def greedy(sampler: tinker.SamplingClient) -> dict[str, Any]:
    """Six tokens at temperature 0, and their logprobs."""
    params = tinker.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    sequence = sampler.sample(tinker.ModelInput.from_ints([3, 4, 5]), 1, params).result().sequences[0]
    return {"tokens": list(sequence.tokens), "logprobs": list(sequence.logprobs or ())}


def make(out: Path) -> None:
    """Write the archive `out` with the packages that `PYTHONPATH` leads to, in this process's environment."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fake = start_server(folder / "data", "--fake", "--model", MODEL)
        service = tinker.ServiceClient(base_url=fake.url)
        client = service.create_lora_training_client(
            base_model=MODEL, rank=1, seed=7, user_metadata={"of": "a fixture"}
        )
        for first in (10, 20, 30):
            step(client, first)
        expected: dict[str, Any] = {"state": client.save_state("kept").result().path}
        expected["sampler"] = client.save_weights_for_sampler("served").result().path
        expected["sample"] = greedy(service.create_sampling_client(model_path=expected["sampler"]))
        expected["losses after"] = [step(client, first) for first in (40, 50)]
        fake.stop()
        subprocess.run([*CLI, "backup", "--data-dir", folder / "data", "--to", folder / "backup"], check=True)

        subprocess.run([*CLI, "tiny-model", "--kind", "qwen3", "--out", folder / "tiny"], check=True)
        real = start_server(folder / "real", "--model", f"tiny/qwen3={folder / 'tiny'}")
        service = tinker.ServiceClient(base_url=real.url)
        client = service.create_lora_training_client(base_model="tiny/qwen3", rank=1, seed=7, train_unembed=False)
        step(client, 10)
        exported = client.save_state("exported").result().path
        real.stop()
        export = [*CLI, "export", exported, folder / "export", "--data-dir", folder / "real", "--to", "peft"]
        subprocess.run(export, check=True)
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))
        with tarfile.open(out, "w:xz") as archive:
            for part in ("data", "backup", "export", "expected.json"):
                archive.add(folder / part, part)


if __name__ == "__main__":
    checkout, commit = sys.argv[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in Path(checkout).glob("packages/*/src"))
    make(EARLIER / f"{commit}.tar.xz")
