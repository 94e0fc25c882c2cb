"""Each setting is checked, with one sentence that names it and its value."""

import math
from typing import Any

import pytest
from tinker_local.client.train.settings import FREE_TO_CHANGE, TrainSettings, check_unchanged, made_of
from tinker_local.types import InvalidRequestError

GOOD: dict[str, Any] = {"learning_rate": 1e-4, "batch_size": 16}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rate", 0.0, "learning_rate: must be more than 0, not 0"),
        ("learning_rate", 3.0, "learning_rate: must be at most 1, not 3"),
        ("learning_rate", math.nan, "learning_rate: must be a number, not nan"),
        ("learning_rate", "1e-4", "learning_rate: must be a number, not '1e-4'"),
        ("batch_size", 0, "batch_size: must be at least 1, not 0"),
        ("batch_size", 8.0, "batch_size: must be a whole number, not 8.0"),
        ("batch_size", True, "batch_size: must be a whole number, not True"),
        ("rank", 0, "rank: must be at least 1, not 0"),
        ("epochs", 0, "epochs: must be more than 0, not 0"),
        ("epochs", math.inf, "epochs: must be a number, not inf"),
        ("steps", 0, "steps: must be at least 1, not 0"),
        ("seed", -1, "seed: must be at least 0, not -1"),
        ("warmup", 1.5, "warmup: must be at most 1, not 1.5"),
        ("shape", "step", "shape: must be cosine, linear or constant, not 'step'"),
        ("weight_decay", -0.1, "weight_decay: must be at least 0, not -0.1"),
        ("clip", -1.0, "clip: must be at least 0, not -1"),
        ("beta1", 1.0, "beta1: must be less than 1, not 1"),
        ("beta2", 1.0, "beta2: must be less than 1, not 1"),
        ("eps", 0.0, "eps: must be more than 0, not 0"),
        ("dpo_beta", 0.0, "dpo_beta: must be more than 0, not 0"),
        ("held_out", 2.5, "held_out: must be a share below 1 or a whole number of rows, not 2.5"),
        ("evaluate_every", -1, "evaluate_every: must be at least 0, not -1"),
        ("save_every", -1, "save_every: must be at least 0, not -1"),
        ("keep_days", 0.01, "keep_days: must be at least 0.04167, not 0.01"),
        ("keep_days", 4000.0, "keep_days: must be at most 3650, not 4000"),
        ("answer_tokens", 0, "answer_tokens: must be at least 1, not 0"),
        ("answer_rows", 0, "answer_rows: must be at least 1, not 0"),
        ("samples_shown", -1, "samples_shown: must be at least 0, not -1"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        TrainSettings(**{**GOOD, name: value})
    assert str(refused.value) == message


def test_a_lifetime_becomes_seconds() -> None:
    assert TrainSettings(**GOOD, keep_days=0.5).ttl_seconds == 43200
    assert TrainSettings(**GOOD, keep_days=None).ttl_seconds is None


def test_an_unknown_or_missing_setting_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="learning_rat: is not a setting; they are answer_rows, "):
        made_of({**GOOD, "learning_rat": 1})
    with pytest.raises(InvalidRequestError, match="batch_size: is missing"):
        made_of({"learning_rate": 1e-4})


def test_a_resumed_run_keeps_what_changes_the_numbers_and_may_change_the_rest() -> None:
    began = TrainSettings(**GOOD)
    other: dict[str, Any] = dict.fromkeys(FREE_TO_CHANGE, 5)
    again = check_unchanged(began, {**other, "batch_size": 16}, "runs/a")
    assert {name: getattr(again, name) for name in FREE_TO_CHANGE} == other
    assert again.learning_rate == began.learning_rate
    with pytest.raises(InvalidRequestError) as refused:
        check_unchanged(began, {"learning_rate": 2e-4}, "runs/a")
    assert str(refused.value) == (
        "learning_rate: the run in runs/a began with 0.0001 and cannot go on with 0.0002; leave it out, or begin in "
        "another folder"
    )
