"""Advantages against their formulas, and the distance of trainer and sampler against numpy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_local.client import rl
from tinker_local.types import InvalidRequestError

from tests.conftest import few

FUNCTIONS = [rl.centered_returns, rl.normalized_returns, rl.centered_returns_to_go]


def trajectory(*rewards: float) -> rl.Trajectory:
    prompt = tinker.ModelInput.from_ints([1])
    turns = tuple(rl.Turn(prompt, (2,), np.zeros(1, np.float32), "", "stop", "", reward=each) for each in rewards)
    return rl.Trajectory(turns, "terminated")


def test_the_formulas() -> None:
    group = [trajectory(1.0), trajectory(0.0, 3.0), trajectory(2.0, 0.0, -3.0)]  # returns 1, 3, -1
    assert rl.centered_returns(group) == [0.0, 2.0, -2.0]
    assert rl.normalized_returns(group) == pytest.approx([0.0, math.sqrt(1.5), -math.sqrt(1.5)])
    # To go: turn 0 has 1, 3, -1; turn 1 has 3 and -3; turn 2 has one.
    assert rl.centered_returns_to_go(group) == [[0.0], [2.0, 3.0], [-2.0, -3.0, 0.0]]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_alone_has_no_advantage(function: Callable[..., Any]) -> None:
    assert np.array(function([trajectory(5.0)])).tolist() in ([0.0], [[0.0]])
    assert function([]) == []


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "rewards",
    [
        [(0.1,), (0.1,), (0.1,)],  # whose mean is not 0.1
        [(0.1, 0.2), (0.2, 0.1), (0.15, 0.15)],  # 0.30000000000000004 and 0.3
        [(0.1, 0.2, -0.3), (0.2, -0.3, 0.1), (0.0, 0.0, 0.0)],  # 5.5e-17 and 0
        [(-0.1,) * 10 + (1.0,), (1.0,) + (-0.1,) * 10],
        [(1e6,), (1e6,)],
        [(0.0,), (-0.0,)],
    ],
)
def test_returns_that_agree_have_no_advantage_exactly(function: Callable[..., Any], rewards: list[Any]) -> None:
    found = function([trajectory(*each) for each in rewards])
    if function is rl.centered_returns_to_go:  # of the first turn: later ones may differ in truth
        found = [each[0] for each in found]
    assert found == [0.0] * len(rewards)


def test_small_and_large_differences_are_differences() -> None:
    for scale in (1e-9, 1e-3, 1.0, 1e30, 1e200):
        group = [trajectory(0.0), trajectory(scale), trajectory(scale), trajectory(0.0)]
        assert rl.normalized_returns(group) == pytest.approx([-1.0, 1.0, 1.0, -1.0])
    assert rl.normalized_returns([trajectory(1e6), trajectory(1e6 + 0.01)]) == pytest.approx([-1.0, 1.0])


@settings(deadline=None, max_examples=few(150))
@given(st.lists(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=4), min_size=1, max_size=6))
def test_advantages_are_finite_and_centered(rewards: list[list[float]]) -> None:
    group = [trajectory(*each) for each in rewards]
    largest = max(sum(map(abs, each)) for each in rewards)
    centered, normalized = np.array(rl.centered_returns(group)), np.array(rl.normalized_returns(group))
    assert np.isfinite(centered).all()
    assert abs(centered.sum()) <= 1e-11 * largest
    assert np.isfinite(normalized).all()
    assert normalized.std() == pytest.approx(1.0) or not normalized.any()
    to_go = rl.centered_returns_to_go(group)
    assert [len(each) for each in to_go] == [len(each) for each in rewards]  # type: ignore[arg-type]
    assert all(np.isfinite(each).all() for each in to_go)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rewards", [(math.nan,), (math.inf,), (math.inf, -math.inf), (1.7e308, 1.7e308)])
def test_rewards_that_are_not_finite_are_refused(function: Callable[..., Any], rewards: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="rewards: must be finite"):
        function([trajectory(0.0), trajectory(*rewards)])


def output(*logprobs: list[float]) -> tinker.ForwardBackwardOutput:
    tensors = [{"logprobs": tinker.TensorData.from_numpy(np.array(each, np.float32))} for each in logprobs]
    return tinker.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=tensors, metrics={})


@pytest.mark.mutation(
    "kl-of-all-positions",
    "measures._sampled",
    "        if isinstance(span, tinker.SampledProvenanceSpan):\n",
    "        if True:\n",
)
def test_the_kl_is_the_mean_over_sampled_tokens_alone(
    turn: Callable[..., rl.Turn], images: list[tinker.types.ImageChunk]
) -> None:
    turns = [turn([images[0], 1], [2, 3], "a"), turn([images[0], 1, 2, 3, 4], [5], "bb")]
    data = [*rl.turns_to_data(turns, 0.0), *rl.turns_to_data([turn([1], [2], "ccc")])]
    # Trainer's numbers; elsewhere than at sampled tokens they are far from 0 and must not count.
    trainer = [[-50.0] * images[0].length + [-1.0, -1.5, -60.0, -2.5], [-3.0]]
    sampler = np.concatenate([each.logprobs for each in (*turns, turn([1], [2], "ccc"))]).astype(np.float64)
    ratio = np.exp(np.array([-1.0, -1.5, -2.5, -3.0]) - sampler)
    expected = np.mean(ratio - 1 - np.log(ratio))
    assert expected > 0.01
    assert rl.sampler_trainer_kl(data, output(*trainer)) == pytest.approx(expected, rel=1e-6)


def test_equal_logprobs_have_no_distance(turn: Callable[..., rl.Turn]) -> None:
    one = turn([1, 2], [3, 4], "a")
    assert rl.sampler_trainer_kl(rl.turns_to_data([one]), output([0.0, *one.logprobs.tolist()])) == 0.0
    near = [0.0, *(one.logprobs + 1e-4).tolist()]
    assert rl.sampler_trainer_kl(rl.turns_to_data([one]), output(near)) == pytest.approx(5e-9, rel=1e-2)


def test_what_the_kl_cannot_be_told_from_is_refused(turn: Callable[..., rl.Turn]) -> None:
    good, nameless = rl.turns_to_data([turn([1], [2], "a")]), rl.turns_to_data([turn([1], [2], "")])
    with pytest.raises(InvalidRequestError, match=r"data\[1\]: has no provenance"):
        rl.sampler_trainer_kl([*good, *nameless], output([0.0], [0.0]))
    supervised = rl.turns_to_data([turn([1], [2], "a")], 1.0, "cross_entropy")
    with pytest.raises(InvalidRequestError, match=r"data\[0\].loss_fn_inputs.logprobs: is missing"):
        rl.sampler_trainer_kl(supervised, output([0.0]))
    with pytest.raises(InvalidRequestError, match="data: is empty"):
        rl.sampler_trainer_kl([], output())
    with pytest.raises(ValueError, match="zip"):
        rl.sampler_trainer_kl(good, output())
