"""The example of RL with checkable answers: its parts, and two steps against a server."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import TEXT

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import rl_sums  # type: ignore[import-not-found]

    return rl_sums


@pytest.mark.parametrize(
    ("answer", "worth"), [("48", 1.0), (" 48\n", 1.0), ("54", 0.1), ("48.", 0.0), ("48 + 2", 0.0), ("", 0.0)]
)
def test_only_the_sum_itself_is_right(example: ModuleType, answer: str, worth: float) -> None:
    problem = example.sum_problem(10, 38)
    assert problem.question == "What is 10 + 38?"
    assert problem.start == "10 + 38 = "
    assert problem.score(answer) == worth


def test_seeds_learn_from_different_sums_and_none_that_are_held_out(example: ModuleType) -> None:
    one, same, other = example.sums(300, 1), example.sums(300, 1), example.sums(300, 2)
    asked = [[problem.question for problem in made.learned] for made in (one, same, other)]
    assert asked[0] == asked[1] != asked[2]
    held_out = [[problem.question for problem in made.held_out] for made in (one, other)]
    assert held_out[0] == held_out[1]
    assert len(set(held_out[0])) == 200
    assert not set(held_out[0]) & {*asked[0], *asked[2]}


def test_advantages_compare_a_group_with_its_mean_and_are_none_without_spread(example: ModuleType) -> None:
    assert example.advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    scaled = example.advantages([0.1, 0.0, 0.1, 1.0])
    assert np.mean(scaled) == pytest.approx(0)
    assert np.std(scaled) == pytest.approx(1)
    assert example.advantages([0.1] * 7) == []


def test_a_datum_holds_what_was_sampled_after_its_prompt(example: ModuleType) -> None:
    datum = example.datum([5, 6, 7], SimpleNamespace(tokens=(8, 9), logprobs=(-0.5, -0.25)), 2.0)
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert inputs == {
        "target_tokens": [6, 7, 8, 9],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "advantages": [0.0, 0.0, 2.0, 2.0],
    }


def test_a_missing_package_is_named(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match=r"chain_sum needs reasoning-gym .*pip install reasoning-gym"):
        example.gym_problems("chain_sum", 1, 0)


def test_reasoning_gym_scores_its_own_tasks(example: ModuleType) -> None:
    pytest.importorskip("reasoning_gym")
    problems = example.gym_problems("chain_sum", 20, 1)
    asked = [problem.question for problem in problems.held_out]
    assert len(asked) == 200
    assert len(problems.learned) == 20
    assert not {problem.question for problem in problems.learned} & {*asked}
    for problem in problems.learned:
        right = str(eval(problem.question.split(":")[1].rstrip("= ")))
        assert problem.score(f" {right}\n") == 1.0
        assert problem.score("no number") < 1


@pytest.mark.more
def test_a_short_run_writes_its_curve(real_server: Any, tmp_path: Path) -> None:
    """Random weights do not learn to add in two steps: this runs the loop, and measures before, between and after."""
    curve, picture = tmp_path / "curve.jsonl", tmp_path / "curve.png"
    settings = ["--steps", "2", "--prompts", "2", "--group-size", "4", "--eval-every", "1", "--seed", "3"]
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "rl_sums.py"), "--base-url", real_server.url]
    done = subprocess.run(
        [*command, "--model", TEXT, *settings, "--out", str(curve), "--plot", str(picture)],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held out: 0.0% right before, 0.0% after 2 steps" in done.stdout
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["of"] for line in lines] == [200, 50, 200]
    assert [line["accuracy"] for line in lines] == [0, 0, 0]
    assert ["reward" in line for line in lines] == [False, True, True]
    assert picture.read_bytes().startswith(b"\x89PNG")
