"""Curves as text."""

import math

from hypothesis import given
from hypothesis import strategies as st
from tinker_local.client.train.curve import draw_curve


def test_a_falling_curve_falls() -> None:
    assert draw_curve([(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], width=4, height=2) == [
        "        4 |█▃",
        "        1 |██▆▁",
        "           1  4",
    ]


def test_no_point_is_no_curve_and_equal_points_are_a_line() -> None:
    assert draw_curve([]) == []
    assert draw_curve([(1, math.nan)]) == []
    assert draw_curve([(1, 2.0), (2, 2.0)], height=1) == ["        2 |▁▁", "           12"]


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=300), st.integers(1, 80), st.integers(1, 10))
def test_any_curve_fits_its_width_and_height(values: list[float], width: int, height: int) -> None:
    lines = draw_curve(list(enumerate(values)), width, height)
    assert len(lines) == height + 1
    assert all(len(line) <= len(" -1.234e-300 |") + width for line in lines[:-1])
