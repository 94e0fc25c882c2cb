"""The tasks of the benchmark beside TRL for `tinker-local train`, without TRL and reasoning-gym: rows and report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

ASKED = "State the final answer to the following arithmetic problem: {} + {} ="


@pytest.fixture(scope="module")
def tokenizer(tiny_models: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(next(iter(tiny_models.values())))


def numbers(**further: Any) -> dict[str, Any]:
    return {"steps": 3, "batch": 2, "held_out": 4, "longest": 200, "learning_rate": 1e-3, **further}


def sums(count: int) -> list[tuple[str, str]]:
    return [(ASKED.format(place, 1), str(place + 1)) for place in range(count)]


def test_rows_are_trained_in_the_order_of_the_plan_and_held_out_ones_are_not(tokenizer: Any, tmp_path: Path) -> None:
    from harness import beside_rows

    path = tmp_path / "rows.jsonl"
    beside_rows.write_rows(path, [beside_rows.sft_row(*each) for each in sums(10)])
    made = beside_rows.in_order(path, tokenizer, numbers())
    learned = []
    for example in made["examples"]:
        begin = next(place for place, label in enumerate(example["labels"]) if label >= 0)
        assert example["labels"] == [-100] * begin + example["input_ids"][begin:]
        assert example["labels"][-1] == tokenizer.eos_token_id
        asked = tokenizer.decode(example["input_ids"][:begin])
        answer = tokenizer.decode(example["input_ids"][begin:-1])
        learned.append(int(answer))
        assert asked == f"{beside_rows.SHOWN}{int(answer) - 1} + 1 ="
    held_out = [int(answer) for answer in made["answers"]]
    assert sorted(learned + held_out) == list(range(1, 11))
    kept = [
        tokenizer.decode([label for label in each["labels"][:-1] if label >= 0], skip_special_tokens=True)
        for each in made["kept"]
    ]
    assert [int(answer) for answer in kept] == held_out
    assert learned != sorted(learned)
    for ids, answer in zip(made["asked"], held_out, strict=True):
        assert tokenizer.decode(ids) == f"{beside_rows.SHOWN}{answer - 1} + 1 ="
    with pytest.raises(ValueError, match="has 10 rows, not 6 and 2"):
        beside_rows.in_order(path, tokenizer, numbers(held_out=2))


def test_a_pair_is_the_best_and_the_worst_of_what_was_sampled() -> None:
    from harness import beside_rows

    found = beside_rows.pair_row(ASKED.format(2, 1), "3", [" 4", " 3.0", " 3", " 5", "  "], [0.0, 0.4, 1.0, 0.0, 0.0])
    assert found == {
        "prompt": beside_rows.SHOWN + "2 + 1 =",
        "chosen": " 3",
        "rejected": " 4",
        "answer": "3",
    }
    assert beside_rows.pair_row(ASKED.format(2, 1), "3", [" 4", " 5", " "], [0.0, 0.0, 1.0]) is None
    assert beside_rows.pair_row(ASKED.format(2, 1), "3", [], []) is None


def test_pairs_have_one_prompt_and_two_answers_that_end(tokenizer: Any, tmp_path: Path) -> None:
    from harness import beside_rows

    path, rows = tmp_path / "pairs.jsonl", []
    for question, answer in sums(10):
        rows.append(beside_rows.pair_row(question, answer, [" 99", f" {answer}"], [0.0, 1.0]))
    beside_rows.write_rows(path, [row for row in rows if row is not None])
    made = beside_rows.in_order(path, tokenizer, numbers())
    assert (len(made["examples"]), len(made["kept"])) == (6, 4)
    kept = [tokenizer.decode(pair["chosen_ids"][:-1]).strip() for pair in made["kept"]]
    assert kept == made["answers"]
    for pair in made["examples"] + made["kept"]:
        right = int(tokenizer.decode(pair["chosen_ids"][:-1]))
        assert tokenizer.decode(pair["prompt_ids"]) == f"{beside_rows.SHOWN}{right - 1} + 1 ="
        assert tokenizer.decode(pair["rejected_ids"][:-1]) == " 99"
        assert pair["chosen_ids"][-1] == pair["rejected_ids"][-1] == tokenizer.eos_token_id


def test_labels_of_a_datum_are_the_tokens_with_a_weight() -> None:
    import numpy as np
    import tinker
    from measurements.beside_train import labelled

    def datum(targets: list[int]) -> tinker.Datum:
        arrays: Any = {"target_tokens": np.array(targets), "weights": np.array([0.0, 0.25, 0.25], np.float32)}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=arrays)

    assert labelled(datum([6, 7, 8])) == [[5, 6, 7, 8], [-100, -100, 7, 8]]
    with pytest.raises(ValueError, match="a target is not the token that follows"):
        labelled(datum([6, 9, 8]))


def test_replies_go_to_the_evaluation_that_they_are_of() -> None:
    from measurements.beside_train import told

    metrics = [
        {"step": 0, "held_out_loss": 2.0, "held_out_judge": 0.0},
        {"step": 1, "loss": 1.0, "margin": 0.5, "grad_norm": 3.0, "learning_rate": 1e-3, "seconds": 4.0, "tokens": 9.0},
        {"step": 1, "held_out_loss": 1.5, "held_out_margin": 0.25, "held_out_accuracy": 0.75, "held_out_judge": 0.5},
    ]
    assert told(metrics, [["1", "a"], ["2", "b"], ["1", "1"], ["2", "d"]]) == [
        {"held_out": 0, "replies": [["1", "a"], ["2", "b"]], "loss": 2.0},
        {"step": 1, "loss": 1.0, "grad_norm": 3.0, "margin": 0.5, "s": 4.0},
        {"held_out": 1, "replies": [["1", "1"], ["2", "d"]], "loss": 1.5, "margin": 0.25, "accuracy": 0.75},
    ]


def test_the_judge_keeps_replies_and_reads_their_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker_local.client.train import read_evaluation

    monkeypatch.setenv("REPLIES", str(tmp_path / "replies.jsonl"))
    judge = read_evaluation(f"{BENCHMARKS / 'measurements' / 'judge_replies.py'}:keep").score_of(["3"])
    assert [judge(reply, "3", {"answer": "3"}) for reply in (" 3\n4", "4\n3", "")] == [1.0, 0.0, 0.0]
    kept = [json.loads(line) for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    assert kept == [["3", " 3\n4"], ["3", "4\n3"], ["3", ""]]


def test_scores_take_the_place_of_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    import beside_trl

    given: list[Any] = []

    def scored(_options: Any, replies: list[list[str]]) -> list[float]:
        given.extend(replies)
        return [1.0, 0.25]

    monkeypatch.setattr(beside_trl, "scored", scored)
    options: Any = None
    row = beside_trl.with_scores({"held_out": [{"held_out": 0, "replies": [["3", " 3\n4 + 5"], ["4", ""]]}]}, options)
    assert row == {"held_out": [{"held_out": 0, "right": 1, "of": 2, "score": 0.625}]}
    assert given == [["3", "3"], ["4", ""]]
    grpo: dict[str, Any] = {"held_out": [{"held_out": 0, "right": 1, "of": 2}]}
    assert beside_trl.with_scores(grpo, options) == grpo


def test_questions_are_all_different() -> None:
    from baselines import gym_rows

    entries = [{"question": "a", "answer": "1"}, {"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    assert gym_rows.different(entries, 2) == [("a", "1"), ("b", "2")]
    with pytest.raises(SystemExit, match="only 2 different questions, not 3"):
        gym_rows.different(entries, 3)


def trained(side: str, seed: int, loss: list[float], right: int, variant: str = "") -> dict[str, Any]:
    steps = [{"loss": each, "grad_norm": 1.0, "margin": 4 * (0.5 - each), "s": 2.0} for each in loss]
    held_out = [
        {"right": 1, "of": 8, "score": 0.2, "loss": 0.69, "margin": 0.0, "accuracy": 0.0},
        {"right": right, "of": 8, "score": 0.5, "loss": 0.6, "margin": 0.25, "accuracy": 0.75},
    ]
    made = {"job": ["dpo", side, seed, variant], "start_s": 3.0, "total_s": 60.0, "peak_gib": 7.0, "others_cores": 0.5}
    return {**made, "steps": steps, "held_out": held_out, "server_s": 40.0 if side == "ours" else None}


def test_the_report_has_losses_and_held_out_answers_of_each_task() -> None:
    from harness import beside

    rows = [trained("trl", 0, [0.5, 0.25], 3), trained("trl", 1, [0.5, 0.75], 5)]
    assert beside.loss_report(rows, "dpo") == []
    rows += [trained("ours", 0, [0.5, 0.5], 4), trained("ours", 0, [0.5, 0.25], 3, "same")]
    lines = beside.text(rows, []).splitlines()
    [ours] = [line for line in lines if line.startswith("  tinker-local  seed 0")]
    assert "held out 1 -> 4 of 8 right, mean score 0.200 -> 0.500, loss 0.6900 -> 0.6000, margin 0.250, 75% of" in ours
    losses, margins = ("two seeds of TRL 0.25000, at most 0.50000", "two seeds of TRL 1.00000, at most 2.00000")
    told = [" ".join(line.split()) for line in lines]
    assert told.index(losses) < told.index(margins)
    assert "one of each, mean of all pairs 0.12500, at most 0.25000" in told
    assert any("first adapter of seed 0" in line and "0.0000000, at most 0.0000000" in line for line in lines)
    begin = told.index("loss of each step:")
    assert told[begin + 1 : begin + 4] == [
        "step trl.0 trl.1 ours.0 ours.0.same",
        "1 0.50000 0.50000 0.50000 0.50000",
        "2 0.25000 0.75000 0.50000 0.25000",
    ]
    begin = told.index("margin of each step:")
    assert told[begin + 3] == "2 1.00000 -1.00000 0.00000 1.00000"


def test_a_report_without_margins_has_none_and_steps_that_a_run_lacks_are_dashes() -> None:
    from harness import beside

    rows = [trained("trl", 0, [0.5], 3), trained("ours", 0, [0.5], 4)]
    for row in rows:
        del row["steps"][0]["margin"], row["held_out"][0]["margin"]
    report = "\n".join(beside.loss_report(rows, "dpo"))
    assert "margin" not in report
    assert "loss of each step" in report
    uneven = beside.step_table([rows[0], trained("ours", 0, [0.5, 0.25], 4)], "loss")
    assert [line.split() for line in uneven[1:]] == [["1", "0.50000", "0.50000"], ["2", "-", "0.25000"]]


@pytest.mark.rotated(2)
@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_command_trains_a_tiny_model_on_just_these_tokens(tmp_path: Path) -> None:
    """The rows are there already: reasoning-gym, which makes and scores them, is not in this environment."""
    from harness import beside_rows

    work = tmp_path / "work"
    work.mkdir()
    beside_rows.write_rows(work / "rows-tiny-12.jsonl", [beside_rows.sft_row(*each) for each in sums(12)])
    pairs = [beside_rows.pair_row(question, answer, [" 99", f" {answer}"], [0.0, 1.0]) for question, answer in sums(12)]
    beside_rows.write_rows(work / "dpo-tiny-12.jsonl", [pair for pair in pairs if pair is not None])
    gym = tmp_path / "gym.py"
    gym.write_text(GYM.format(python=sys.executable))
    gym.chmod(0o755)
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "beside_trl.py"), str(tmp_path / "results"), "--tiny"]
    command += ["--only", "rows.ours.0,dpo.ours.0", "--work", str(work), "--trl-python", str(gym)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["job"] for row in rows] == [["rows", "ours", 0, ""], ["dpo", "ours", 0, ""]]
    assert [[step["step"] for step in row["steps"]] for row in rows] == [[1, 2], [1, 2]]
    assert rows[1]["steps"][0]["loss"] == pytest.approx(0.6931, abs=1e-4)  # ln 2: the reference is the first adapter
    for row in rows:
        assert [measured["of"] for measured in row["held_out"]] == [4, 4]
        assert row["sha256"] == trained_sum(work / f"{row['job'][0]}.ours.0")


GYM = """#!{python}
# Stands for TRL's python: scores replies as reasoning-gym does where they are the answer, or nothing like it.
import json, sys
replies = json.loads(open(sys.argv[-1]).read())
print(json.dumps([float(answer == reply) for answer, reply in replies]))
"""


def trained_sum(folder: Path) -> str:
    """The checksum that TRL would give for the settings in `folder`."""
    import hashlib

    seen = hashlib.sha256()
    for each in json.loads((folder / "settings.json").read_text())["examples"]:
        if "prompt_ids" in each:
            before, answers = each["prompt_ids"], [each["chosen_ids"], each["rejected_ids"]]
            rows = [[before + answer, [-100] * len(before) + answer] for answer in answers]
        else:
            rows = [[each["input_ids"], each["labels"]]]
        for row in rows:
            seen.update(json.dumps(row).encode())
    return seen.hexdigest()
