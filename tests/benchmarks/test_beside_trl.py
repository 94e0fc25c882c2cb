"""The benchmark beside TRL, without TRL: its data, its measures and its table. Our half of it runs on a tiny model."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "beside_trl.py"


@pytest.fixture(scope="module")
def tokenizer(tiny_models: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(next(iter(tiny_models.values())))


def row(task: str, side: str, seed: int, variant: str = "", **curves: list[float]) -> dict[str, Any]:
    """A row whose steps have these numbers, and take 9 s, then 2 s each."""
    steps = [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]
    made = {"job": [task, side, seed, variant], "start_s": 3.0, "total_s": 60.0, "peak_gib": 7.25, "others_cores": 0.5}
    made["steps"] = [{"grad_norm": 1.0, "s": 2.0 if place else 9.0, **step} for place, step in enumerate(steps)]
    made["server_s"] = 40.0 if side == "ours" else None
    return made


def test_worked_sums_are_right_and_are_the_same_in_each_run(tokenizer: Any) -> None:
    import random

    from harness import beside

    chance = random.Random(3)
    for question, answer in (beside.worked_sum(chance) for _ in range(50)):
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        for first, second, total in re.findall(r"(\d+) \+ (\d+) = (\d+)", answer):
            assert int(first) + int(second) == int(total)
        assert answer.endswith(f"The sum is {sum(numbers)}.")
    assert beside.sft_examples(tokenizer, 5) == beside.sft_examples(tokenizer, 5)


def test_only_answers_have_labels_and_their_end_is_one(tokenizer: Any) -> None:
    from harness import beside

    for example in beside.sft_examples(tokenizer, 4):
        tokens, labels = example["input_ids"], example["labels"]
        assert len(tokens) == len(labels)
        begin = next(place for place, label in enumerate(labels) if label >= 0)
        assert labels[:begin] == [-100] * begin
        assert labels[begin:] == tokens[begin:]
        assert labels[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(tokens[begin:-1]).endswith(".")
        assert "Add " in tokenizer.decode(tokens[:begin])


def test_problems_are_those_of_the_example_and_both_sides_reward_as_it_does(tokenizer: Any) -> None:
    from baselines import trl_loop
    from harness import beside
    from measurements import beside_sdk

    made = beside.grpo_problems(tokenizer, learned=3, held_out=2, seed=1)
    rl_sums = importlib.import_module("rl_sums")
    problems = rl_sums.sums(3, 1)
    assert len(made["learned"]) == 3
    assert len(made["held_out"]) == 2
    for each, problem in zip(made["learned"], problems.learned, strict=True):
        assert each["text"].endswith(problem.start)
        for answer in (each["answer"], f" {each['answer']}\n", "1", f"{each['answer']}.", ""):
            assert beside_sdk.sum_reward(answer, each["answer"]) == problem.score(answer)
            assert trl_loop.sum_reward([answer], [each["answer"]]) == [problem.score(answer)]


def test_answers_end_with_their_line(tokenizer: Any) -> None:
    from harness import beside

    stops = beside.stop_tokens(tokenizer)
    assert tokenizer.eos_token_id in stops
    assert tokenizer.encode("\n", add_special_tokens=False)[0] in stops
    assert not {*tokenizer.encode("1234567890 +=", add_special_tokens=False)} & {*stops}


def test_advantages_are_over_the_sample_deviation_as_in_trl() -> None:
    from measurements.beside_sdk import group_advantages

    assert group_advantages([1.0, 0.0]) == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)])
    assert group_advantages([0.1] * 4) == pytest.approx([0.0] * 4)


def test_the_script_for_trl_imports_nothing_of_this_project() -> None:
    tree = ast.parse((BENCHMARK.parent / "baselines" / "trl_loop.py").read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in named} - set(sys.stdlib_module_names) == {
        "datasets",
        "peft",
        "torch",
        "transformers",
        "trl",
    }


def test_jobs_are_chosen_by_task_or_name_in_their_order() -> None:
    from harness import beside

    assert beside.chosen([]) == list(beside.JOBS)
    names = [job.name for job in beside.chosen(["grpo.ours.0", "sft"])]
    assert names[:3] == ["sft.trl.0", "sft.trl.1", "sft.trl.0.checkpointing"]
    assert names[-1] == "grpo.ours.0"  # and not its replay
    with pytest.raises(ValueError, match=r"sft\.mine: no such job"):
        beside.chosen(["sft.mine"])


def test_further_seeds_come_after_those_of_their_side() -> None:
    from harness import beside

    names = [job.name for job in beside.chosen(["grpo"], seeds=4)]
    assert names[:4] == ["grpo.trl.0", "grpo.trl.1", "grpo.trl.2", "grpo.trl.3"]
    assert names[4:] == ["grpo.ours.0", "grpo.ours.1", "grpo.ours.0.replay", "grpo.ours.2", "grpo.ours.3"]


def test_held_out_answers_of_several_seeds_have_an_interval() -> None:
    from harness import beside

    rows = []
    for side, found in (("trl", (30, 36, 33)), ("ours", (28, 40, 37))):
        for seed, right in enumerate(found):
            made = row("grpo", side, seed, reward=[0.1, 0.2, 0.3])
            rows.append(made | {"held_out": [{"right": 10, "of": 100}, {"right": right, "of": 100}]})
    text = beside.text(rows, [])
    assert "TRL           held out after, 3 seeds: mean 33.0, standard deviation 3.0\n" in text
    # Welch: 2 +- 3.0 degrees of freedom, t = 3.2, standard error sqrt(9 / 3 + 39 / 3) = 4
    assert "tinker-local less TRL: +2.0, 95 % between -11.0 and +15.0\n" in text


def test_a_run_that_begins_with_trls_adapter_comes_after_that_run() -> None:
    from harness import beside

    for place, job in enumerate(beside.JOBS):
        if first := job.first():
            assert first in beside.JOBS[:place]


def test_the_table_sets_both_beside_the_noise_of_trls_seeds() -> None:
    from harness import beside

    rows = [
        row("sft", "ours", 0, loss=[1.0, 0.5, 0.25]),
        row("sft", "trl", 1, loss=[1.0, 0.25, 0.25]),
        row("sft", "trl", 0, loss=[1.0, 0.75, 0.25]),
        row("sft", "ours", 0, "same", loss=[1.0, 0.75, 0.5]),
    ]
    rows[3]["steps"][1]["grad_norm"] = 1.5
    text = beside.text(rows, ["a machine"])
    assert text.startswith("a machine\n")
    lines = {
        line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1].strip() for line in text.splitlines() if "  " in line
    }
    assert lines["two seeds of TRL"] == "0.16667, at most 0.50000"
    assert lines["one of each, mean of all pairs"] == "0.08333, at most 0.25000"
    assert lines["tinker-local seed 0 and the mean of TRL"] == "0.00000"
    assert lines["both from TRL's first adapter of seed 0"] == "0.0833333, at most 0.2500000"
    assert lines["norm of the gradient, relative"] == "1.67e-01, at most 5.00e-01"
    [cost] = [line for line in text.splitlines() if line.startswith("sft.ours.0 ")]
    assert cost.split() == ["sft.ours.0", "3", "2.00", "13.0", "40.0", "3.0", "60.0", "7.25", "0.50"]


def test_rewards_are_reported_when_both_sides_are_there() -> None:
    from harness import beside

    rows = [row("grpo", "trl", 0, reward=[0.1, 0.3, 0.5])]
    rows[0]["held_out"] = [{"right": 3, "of": 10}, {"right": 5, "of": 10}]
    assert beside.grpo_report(rows) == []
    rows.append({**row("grpo", "ours", 0, reward=[0.1, 0.3, 0.8]), "held_out": rows[0]["held_out"]})
    text = beside.text(rows, [])
    assert "steps 1-3 0.300" in text
    assert "held out 3 -> 5 of 10" in text
    assert re.search(r"one of each, mean of all pairs +0\.100", text)


def test_what_a_program_prints_becomes_a_row() -> None:
    import beside_trl

    printed: list[dict[str, Any]]
    printed = [{"start_s": 2.0}, {"step": 1, "loss": 1.0, "s": 3.0}, {"held_out": 0, "right": 1}, {"sha256": "ab"}]
    assert beside_trl.gathered([*printed, {"total_s": 9.0}]) == {
        "steps": [{"step": 1, "loss": 1.0, "s": 3.0}],
        "held_out": [{"held_out": 0, "right": 1}],
        "start_s": 2.0,
        "sha256": "ab",
    }


def test_runs_on_other_tokens_end_the_comparison() -> None:
    import beside_trl

    rows: list[dict[str, Any]] = [row("sft", side, 0, loss=[1.0]) | {"sha256": "ab"} for side in ("trl", "ours")]
    shorter = row("sft", "trl", 0, loss=[1.0, 1.0]) | {"sha256": "ef"}
    beside_trl.same_data([*rows, shorter])
    with pytest.raises(SystemExit, match="not all jobs trained on the same tokens: ab, cd"):
        beside_trl.same_data([*rows, {**rows[0], "sha256": "cd"}])


def test_memory_counts_what_a_process_starts() -> None:
    import beside_trl

    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    grandchild = "kept = bytearray(256 * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", child, grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        memory = beside_trl.ResidentMemory([process.pid])
        memory.look()
        process.communicate("\n")
    assert 0.25 < memory.peak_gib < 1


@pytest.mark.rotated(2)
@pytest.mark.more
@pytest.mark.timeout(600)
def test_our_half_runs_on_a_tiny_model_and_is_not_run_again(tmp_path: Path) -> None:
    name, work = tmp_path / "results", str(tmp_path / "work")
    jobs = ["sft.ours.0", "grpo.ours.0"]
    command = [sys.executable, "-W", "ignore", str(BENCHMARK), str(name), "--tiny", "--only", ",".join(jobs)]
    picture = tmp_path / "curves.png"
    for _ in range(2):
        done = subprocess.run(
            [*command, "--work", work, "--plot", str(picture)], capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["job"][:3] for row in rows] == [["sft", "ours", 0], ["grpo", "ours", 0]]
    assert [len(row["steps"]) for row in rows] == [2, 2]
    assert all(step["s"] > 0 for row in rows for step in row["steps"])
    assert [measured["held_out"] for measured in rows[1]["held_out"]] == [0, 2]
    assert all(row["peak_gib"] > 0.5 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
