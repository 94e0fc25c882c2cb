"""The table of two models: what lm-eval and inspect wrote of both, beside each other, or why that cannot be."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JUDGE = Path(__file__).parents[2] / "examples" / "judge"


def table(before: Path, after: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JUDGE / "before_and_after.py"), str(before), str(after)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def of_lm_eval(folder: Path, value: float, *, rows: int = 100, task: str = "sums", model: str = "m") -> Path:
    """As lm-eval 0.4.13 writes it, below a folder of the model's name."""
    told: Any = {
        "results": {task: {"alias": task, "acc,none": value, "acc_stderr,none": "N/A", "exact_match,number": 0.25}},
        "n-samples": {task: {"original": 100, "effective": rows}},
        "model_name": model,
    }
    told["results"][task]["exact_match_stderr,number"] = 0.05
    (folder / model).mkdir(parents=True, exist_ok=True)
    (folder / model / f"results_{value}.json").write_text(json.dumps(told))
    return folder


def of_inspect(folder: Path, value: float, status: str = "success") -> Path:
    """As inspect 0.3.285 logs it in JSON."""
    metrics = {"accuracy": {"name": "accuracy", "value": value}, "stderr": {"name": "stderr", "value": 0.1}}
    scores = [{"name": "pattern", "scored_samples": 100, "metrics": metrics}]
    told = {"status": status, "eval": {"task": "sums", "model": "local/m"}, "results": {"scores": scores}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.json").write_text(json.dumps(told))
    return folder


def test_both_are_in_one_table_with_their_errors(tmp_path: Path) -> None:
    before, after = (
        of_inspect(of_lm_eval(tmp_path / name, value), value / 2) for name, value in (("b", 0.5), ("a", 0.75))
    )
    done = table(before, after)
    assert done.stdout.splitlines()[2:] == [
        "| sums (inspect) | accuracy (pattern) | 100 | 0.250 ± 0.100 | 0.375 ± 0.100 | +0.125 |",
        "| sums (lm-eval) | acc | 100 | 0.500 | 0.750 | +0.250 |",
        "| sums (lm-eval) | exact_match (number) | 100 | 0.250 ± 0.050 | 0.250 ± 0.050 | +0.000 |",
        "",
        "before: local/m, m",
        "",
        "after: local/m, m",
    ]


def test_the_newest_result_of_a_task_counts(tmp_path: Path) -> None:
    folder = of_lm_eval(of_lm_eval(tmp_path / "b", 0.5), 0.25)
    (folder / "m" / "results_0.25.json").touch()
    assert "| acc | 100 | 0.250 | 0.250 |" in table(folder, folder).stdout


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"rows": 20}, "sums (lm-eval) has 100 rows before and 20 after: judge both by the same"),
        ({"task": "other"}, "no task in common: sums (lm-eval) before, other (lm-eval) after"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(tmp_path: Path, after: dict[str, Any], words: str) -> None:
    done = table(of_lm_eval(tmp_path / "b", 0.5), of_lm_eval(tmp_path / "a", 0.5, **after))
    assert (done.returncode, done.stderr) == (1, f"error: {words}\n")


def test_what_is_missing_or_failed_is_said(tmp_path: Path) -> None:
    before = of_lm_eval(tmp_path / "b", 0.5)
    assert table(before, tmp_path / "none").stderr == f"error: there is no {tmp_path / 'none'}\n"
    (tmp_path / "empty").mkdir()
    assert "has neither lm-eval's results_*.json nor a log of inspect" in table(before, tmp_path / "empty").stderr
    both = of_inspect(of_lm_eval(tmp_path / "a", 0.5), 0.5)
    assert "sums (inspect), accuracy (pattern) is only after" in table(before, both).stderr
    assert "sums of local/m ended with error" in table(before, of_inspect(tmp_path / "f", 0.5, "error")).stderr


def test_the_rows_are_those_that_the_example_does_not_learn(tmp_path: Path) -> None:
    command = [sys.executable, str(JUDGE / "sums.py"), "--model", "none", "--write", str(tmp_path / "sums.jsonl")]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    rows = (JUDGE / "sums.jsonl").read_text()
    assert (tmp_path / "sums.jsonl").read_text() == rows
    for row in map(json.loads, rows.splitlines()):
        first, second = map(int, row["question"].removeprefix("What is ").removesuffix("?").split(" + "))
        assert row["answer"] == row["choices"][row["label"]] == str(first + second)
        assert len(set(row["choices"])) == 4
