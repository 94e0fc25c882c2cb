"""Order, schedule and held-out rows depend on the settings and the step alone."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.client.train.schedule import Plan, learning_rate, row_order, split_rows
from tinker_local.client.train.settings import TrainSettings
from tinker_local.types import InvalidRequestError


def plan(rows: int, **settings: float) -> Plan:
    chosen: dict[str, float] = {"learning_rate": 1e-3, "batch_size": 4, **settings}
    return Plan(np.arange(rows), TrainSettings(**chosen))  # type: ignore[arg-type]


def test_learning_rate_rises_to_the_peak_and_falls_as_a_cosine() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.1, "cosine") for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)], rel=1e-12)
    expected = [1 + math.cos(math.pi * done / 90) for done in range(90)]
    assert rates[10:] == pytest.approx(expected, rel=1e-12)
    assert rates[9] == rates[10] == 2.0


def test_learning_rate_falls_as_a_line_or_stays() -> None:
    line = [learning_rate(step, 10, 1.0, 0.0, "linear") for step in range(1, 11)]
    assert line == pytest.approx([1 - done / 10 for done in range(10)], rel=1e-12)
    assert [learning_rate(step, 10, 1.0, 0.2, "constant") for step in (1, 2, 3, 10)] == [0.5, 1.0, 1.0, 1.0]


@given(total=st.integers(1, 300), warmup=st.floats(0, 1), step=st.data())
def test_no_step_has_a_learning_rate_of_zero_or_above_the_peak(total: int, warmup: float, step: st.DataObject) -> None:
    number = step.draw(st.integers(1, total))
    for shape in ("cosine", "linear", "constant"):
        rate = learning_rate(number, total, 3.0, warmup, shape)  # type: ignore[arg-type]
        assert 0 < rate <= 3.0


@given(rows=st.integers(1, 40), size=st.integers(1, 50), epochs=st.integers(1, 3))
def test_each_epoch_visits_each_row_once(rows: int, size: int, epochs: int) -> None:
    steps = plan(rows, batch_size=size, epochs=epochs)
    assert steps.total == epochs * math.ceil(rows / size)
    seen: dict[int, list[int]] = {}
    for step in range(1, steps.total + 1):
        seen.setdefault(steps.epoch_of(step), []).extend(steps.rows_of(step))
    assert sorted(seen) == list(range(1, epochs + 1))
    assert all(sorted(visited) == list(range(rows)) for visited in seen.values())


def test_rows_of_a_step_do_not_depend_on_the_steps_before() -> None:
    """As after a resume, which begins in the middle."""
    steps, again = plan(37, epochs=3), plan(37, epochs=3)
    wanted = {step: steps.rows_of(step) for step in range(1, steps.total + 1)}
    assert {step: again.rows_of(step) for step in reversed(range(1, steps.total + 1))} == wanted


def test_the_order_differs_by_epoch_and_seed_and_is_the_same_in_any_version() -> None:
    assert len({tuple(row_order(10, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # Numpy promises these numbers for ever: a run that was begun with another version goes on in the same order.
    assert row_order(10, 7, 2).tolist() == ORDER


ORDER = [6, 1, 5, 0, 3, 9, 4, 7, 2, 8]


def test_a_run_that_ends_within_the_first_epoch_uses_the_rows_of_its_steps() -> None:
    steps = plan(20, steps=2)
    used = [*steps.rows_of(1), *steps.rows_of(2)]
    assert steps.rows_used().tolist() == sorted(used)
    assert len(used) == 8
    assert plan(20).rows_used().tolist() == list(range(20))


@pytest.mark.parametrize(("epochs", "total"), [(0.5, 3), (1, 5), (1.1, 6), (2, 10), (0.01, 1)])
def test_epochs_may_be_a_fraction(epochs: float, total: int) -> None:
    assert plan(20, epochs=epochs).total == total


@pytest.mark.parametrize(("held_out", "count"), [(0.0, 0), (0.05, 5), (0.001, 1), (7, 7), (0.99, 99)])
def test_held_out_rows_are_a_share_or_a_number(held_out: float, count: int) -> None:
    train, held = split_rows(100, held_out, seed=3)
    assert len(held) == count
    assert Counter([*train, *held]) == Counter(range(100))


def test_held_out_rows_differ_by_seed() -> None:
    assert not np.array_equal(split_rows(100, 10, 0)[1], split_rows(100, 10, 1)[1])


@pytest.mark.parametrize("held_out", [5, 8, 0.95])
def test_holding_out_all_rows_is_refused_with_the_numbers(held_out: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"held_out: .* of 5 rows"):
        split_rows(5, held_out, 0)
