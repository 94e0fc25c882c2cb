"""lm-eval and inspect judge a base model and a checkpoint through the endpoints, by the commands of docs/judge.md.

Both are run by the Python of `make judges`, or by that of `JUDGE_PYTHON`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from transformers import AutoTokenizer

from tests.conftest import TEXT, Server
from tests.float64 import TIMES, Exact

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
JUDGE = ROOT / "examples" / "judge"
LIMIT = 6
"""Rows of each task."""


def ended(command: list[str], **environment: str) -> str:
    """What a command prints; fails with it if the command fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_with(package: str) -> str:
    """A Python that has `package`."""
    python = os.environ.get("JUDGE_PYTHON", str(ROOT / ".test-files" / "judges" / "bin" / "python"))
    has = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if not Path(python).exists() or subprocess.run([python, "-c", has], stdin=subprocess.DEVNULL).returncode:
        pytest.skip(f"{python} has no {package}: make judges, or JUDGE_PYTHON names a Python that has it")
    return python


@pytest.fixture(scope="module")
def checkpoint(real_server: Server) -> str:
    """Two steps on sums: enough to be another model than the base."""
    command = [sys.executable, "-W", "ignore", str(JUDGE / "sums.py"), "--base-url", real_server.url]
    printed = ended([*command, "--model", TEXT, "--steps", "2", "--batch-size", "4", "--learning-rate", "1e-2"])
    path = printed.split()[-1]
    assert re.fullmatch(r"tinker://\S+/sampler_weights/sums", path)
    return path


def lm_eval(server: Server, model: str, tokenizer: Path, out: Path) -> dict[str, Any]:
    """The results, and in `samples` those of each task by row."""
    python = python_with("lm_eval")
    given = f"model={model},base_url={server.url}/v1/completions,tokenizer={tokenizer},max_length=1024,max_retries=1"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", given]
    command += ["--tasks", "sums_choice,sums_answer", "--include_path", "examples/judge", "--apply_chat_template"]
    command += ["--batch_size", "8", "--limit", str(LIMIT), "--log_samples", "--output_path", str(out)]
    ended(command, OPENAI_API_KEY="tml-local", HF_HOME=str(out.parent / "cache"), HF_DATASETS_CACHE=str(out.parent))
    (results,) = out.rglob("results_*.json")
    told: dict[str, Any] = json.loads(results.read_text())
    lines = {file.name.split("_2")[0]: file.read_text().splitlines() for file in out.rglob("samples_*.jsonl")}
    told["samples"] = {name.removeprefix("samples_"): list(map(json.loads, rows)) for name, rows in lines.items()}
    return told


def inspect(server: Server, model: str, out: Path) -> dict[str, Any]:
    """The log of one evaluation."""
    python = python_with("inspect_ai")
    command = [
        python,
        "-m",
        "inspect_ai",
        "eval",
        "examples/judge/sums_inspect.py",
        "--model",
        f"openai-api/local/{model}",
    ]
    command += ["--temperature", "0", "--max-tokens", "16", "--seed", "1", "--limit", str(LIMIT)]
    command += ["--log-dir", str(out), "--log-format", "json", "--display", "none"]
    ended(command, LOCAL_BASE_URL=f"{server.url}/v1", LOCAL_API_KEY="tml-local")
    (log,) = out.glob("*.json")
    return json.loads(log.read_text())


def test_lm_evals_likelihoods_are_the_models(
    real_server: Server, tiny_models: Mapping[str, Path], checkpoint: str, tmp_path: Path
) -> None:
    """Each choice's likelihood is the sum of the logprobs of its tokens after the prompt's, computed in float64; and
    the checkpoint's are others."""
    folder = tiny_models[TEXT]
    before = lm_eval(real_server, TEXT, folder, tmp_path / "before")
    trainer = HFTrainer(TrainerConfig(str(folder), name=TEXT, dtype="float32", device="cpu"))
    exact, tokenizer = Exact(trainer), AutoTokenizer.from_pretrained(folder)
    greedy = 0
    for row in before["samples"]["sums_choice"]:
        for number, choice in enumerate(row["doc"]["choices"]):
            text, answer = (row["arguments"][f"gen_args_{number}"][f"arg_{part}"] for part in (0, 1))
            assert answer == choice
            asked = [{"role": "user", "content": row["doc"]["question"]}]
            assert text == tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            # lm-eval counts blanks at the end of a prompt as the answer's, here the line break of the template
            first, whole = (
                tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text.rstrip(), text + answer)
            )
            assert whole[: len(first)] == first
            logprobs, moved = exact.logprobs(None, RenderedInput(np.array(whole, np.int32)))
            ((said, likeliest),) = row["resps"][number]
            answered = logprobs[len(first) - 1 :]
            assert abs(float(said) - float(answered.sum())) <= TIMES * moved * len(answered)
            greedy += str(likeliest) == "True"
        assert row["acc"] == float(np.argmax([float(each[0][0]) for each in row["resps"]]) == row["doc"]["label"])
    assert greedy == 0  # random weights do not think of numbers
    after = lm_eval(real_server, checkpoint, folder, tmp_path / "after")
    for old, new in zip(before["samples"]["sums_choice"], after["samples"]["sums_choice"], strict=True):
        assert old["doc"] == new["doc"]
        assert old["resps"] != new["resps"]
    for told, model in ((before, TEXT), (after, checkpoint)):
        assert told["model_name"] == model
        assert told["n-samples"] == {
            name: {"original": 100, "effective": LIMIT} for name in ("sums_choice", "sums_answer")
        }
    command = [sys.executable, str(JUDGE / "before_and_after.py"), str(tmp_path / "before"), str(tmp_path / "after")]
    table = ended(command).splitlines()
    assert table[0] == "| task | metric | rows | before | after | change |"
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| sums_answer (lm-eval)", "| sums_choice (lm-eval)"]
    assert table[-3:] == [f"before: {TEXT}", "", f"after: {checkpoint}"]


def test_inspect_asks_a_base_model_and_a_checkpoint(real_server: Server, checkpoint: str, tmp_path: Path) -> None:
    for model, name in ((TEXT, "before"), (checkpoint, "after")):
        log = inspect(real_server, model, tmp_path / name)
        assert log["status"] == "success"
        assert log["eval"]["model"] == f"openai-api/local/{model}"
        (scorer,) = log["results"]["scores"]
        assert scorer["scored_samples"] == LIMIT
        for sample in log["samples"]:
            answer = sample["output"]["choices"][0]["message"]["content"]
            last = re.search(r"(-?\d+)\D*$", answer)
            right = last is not None and last[1] == sample["target"]
            assert sample["scores"]["pattern"]["value"] == ("C" if right else "I")
    command = [sys.executable, str(JUDGE / "before_and_after.py"), str(tmp_path / "before"), str(tmp_path / "after")]
    assert ended(command).splitlines()[2].startswith(f"| sums (inspect) | accuracy (pattern) | {LIMIT} | ")
