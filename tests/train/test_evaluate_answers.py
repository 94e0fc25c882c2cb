"""Scores of answers: exact, choice, and functions of the user's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from tinker_local.client.train.evaluate import Answerer, choice, exact, read_evaluation
from tinker_local.types import InvalidRequestError

ROW: dict[str, Any] = {"prompt": "?", "level": 3}


@pytest.mark.parametrize(("said", "right"), [("blue", 1.0), (" blue\n", 1.0), ("Blue", 0.0), ("blue.", 0.0), ("", 0.0)])
def test_exact_ignores_blanks_around_an_answer_alone(said: str, right: float) -> None:
    assert exact()(said, "blue ", ROW) == right


@pytest.mark.parametrize(
    ("said", "wanted", "right"),
    [
        ("B", "B", 1.0),
        ("The answer is (b).", "B", 1.0),
        ("A or B", "B", 0.0),
        ("Abba", "A", 0.0),
        ("I do not know", "A", 0.0),
        ("", "A", 0.0),
        ("not sure", "not sure", 1.0),
        ("It is not.", "not sure", 0.0),
    ],
)
def test_choice_takes_the_first_known_answer_as_a_whole_word(said: str, wanted: str, right: float) -> None:
    assert choice(["A", "B", "C", "B", "not", "not sure"])(said, wanted, ROW) == right


def test_choice_knows_signs_and_refuses_free_answers() -> None:
    assert choice(["C++", "C"])("I like C++ best", "C++", ROW) == 1.0
    with pytest.raises(InvalidRequestError, match=r"eval: choice is for at most 64 different answers, and .* have 65"):
        choice([str(number) for number in range(65)])


def test_a_function_of_the_users_gets_the_reply_and_the_row(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def right(reply, row):\n    return len(reply) == row['level']\n")
    score = read_evaluation(f"{tmp_path / 'judge.py'}:right").score_of(["ignored"])
    assert score("abc", "x", ROW) == 1.0
    assert score("ab", "x", ROW) == 0.0


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (None, "right", "does not exist"),
        ("x = 1\n", "right", "has no function right"),
        ("right = 3\n", "right", "has no function right"),
        ("def right(reply): return 1\n", "right", "right must take a reply and a row"),
        ("raise OSError('no disk')\n", "right", "ends with OSError: no disk"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused_with_a_reason(
    tmp_path: Path, code: str | None, name: str, words: str
) -> None:
    file = tmp_path / "judge.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(InvalidRequestError, match=words):
        read_evaluation(f"{file}:{name}")


@pytest.mark.parametrize("text", ["bleu", "judge.py", "judge.py:", "judge.txt:right", "judge.py:no name"])
def test_an_unknown_evaluation_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"eval: must be exact, choice or FILE\.py:FUNCTION, not"):
        read_evaluation(text)


@pytest.mark.parametrize(
    ("result", "words"),
    [("'good'", "returned 'good', which is not a number"), ("None", "returned None"), ("float('nan')", "returned nan")],
)
def test_a_judge_must_return_a_number(tmp_path: Path, result: str, words: str) -> None:
    (tmp_path / "judge.py").write_text(f"def right(reply, row):\n    return {result}\n")
    score = read_evaluation(f"{tmp_path / 'judge.py'}:right").score_of([])
    with pytest.raises(InvalidRequestError, match=words):
        score("reply", "x", ROW)


def test_an_error_in_a_judge_names_it_and_the_reply(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def right(reply, row):\n    return row['none']\n")
    score = read_evaluation(f"{tmp_path / 'judge.py'}:right").score_of([])
    with pytest.raises(InvalidRequestError, match="ends with KeyError: 'none' on the reply 'green'"):
        score("green", "x", ROW)


def test_a_judge_that_ends_the_program_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def right(reply, row):\n    raise SystemExit(0)\n")
    score = read_evaluation(f"{tmp_path / 'judge.py'}:right").score_of([])
    with pytest.raises(InvalidRequestError, match="ends with SystemExit: 0 on the reply 'green'"):
        score("green", "x", ROW)


@pytest.mark.parametrize(("kind", "longest"), [("sft", 48), ("preference", 13)])
def test_answers_may_be_longer_than_the_one_that_is_asked_for_on_a_fake_sampler(kind: str, longest: int) -> None:
    """A row of several sequences is asked for its last answer, and a pair for the chosen one."""
    asked: list[tinker.SamplingParams] = []

    def sample(_prompt: Any, _count: int, params: tinker.SamplingParams) -> Any:
        asked.append(params)
        answer = SimpleNamespace(sequences=[SimpleNamespace(tokens=[1])])
        return SimpleNamespace(result=lambda: answer)

    rows: Any = SimpleNamespace(
        kind=kind, lengths=lambda _row: [(20, 5), (90, 40)], prompt=lambda _row: (tinker.ModelInput.empty(), "x")
    )
    sampler: Any = SimpleNamespace(sample=sample)
    Answerer(rows, lambda _tokens: "x").answers(sampler, [0], None)
    assert [params.max_tokens for params in asked] == [longest]
