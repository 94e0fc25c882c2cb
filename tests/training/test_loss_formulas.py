"""The losses are the documented formulas, and switched-off positions add exactly nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.fakes.losses import loss_terms
from tinker_local.backend.training.loss_specs import LOSS_SPECS, check_config
from tinker_local.backend.training.losses import LOSSES, loss_and_derivative


def reference(loss_fn: str, logprobs: np.ndarray, inputs: dict[str, np.ndarray], config: dict[str, float]) -> float:
    """The sum over positions, written from the formulas in float64, position by position. sg() is not expressed."""
    total = 0.0
    for t in range(len(logprobs)):
        if loss_fn == "cross_entropy":
            total -= inputs["weights"][t] * logprobs[t]
            continue
        advantage = inputs["advantages"][t]
        ratio = np.exp(logprobs[t] - inputs["logprobs"][t])
        if loss_fn == "importance_sampling":
            total -= ratio * advantage
            continue
        clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
        if loss_fn == "ppo":
            total -= min(ratio * advantage, clipped * advantage)
        else:
            total -= clipped * logprobs[t] * advantage
    return total


def random_inputs(loss_fn: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    logprobs = -rng.uniform(0.1, 4, n)
    inputs = {name: rng.standard_normal(n) for name in LOSS_SPECS[loss_fn].inputs}
    if "logprobs" in inputs:
        inputs["logprobs"] = logprobs + rng.normal(0, 0.5, n)
    return logprobs, inputs


def run(loss_fn: str, logprobs: Any, inputs: dict[str, Any], config: dict[str, float], dtype: torch.dtype) -> Any:
    tensors = {name: torch.tensor(np.asarray(value), dtype=dtype) for name, value in inputs.items()}
    values, derivative = loss_and_derivative(loss_fn, torch.tensor(np.asarray(logprobs), dtype=dtype), tensors, config)
    return values.numpy(), derivative.numpy()


def test_every_known_loss_has_a_formula():
    assert LOSSES.keys() == LOSS_SPECS.keys()


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_values_equal_a_numpy_reference(loss_fn):
    rng = np.random.default_rng(1)
    config = check_config(loss_fn, {})
    logprobs, inputs = random_inputs(loss_fn, 200, rng)
    values, _ = run(loss_fn, logprobs, inputs, config, torch.float64)
    assert values.sum() == pytest.approx(reference(loss_fn, logprobs, inputs, config), rel=1e-12)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_derivatives_equal_finite_differences(loss_fn):
    rng = np.random.default_rng(2)
    config = check_config(loss_fn, {})
    logprobs, inputs = random_inputs(loss_fn, 50, rng)
    _, derivative = run(loss_fn, logprobs, inputs, config, torch.float64)
    for t in range(len(logprobs)):
        step = np.zeros_like(logprobs)
        step[t] = 1e-6
        above = reference(loss_fn, logprobs + step, inputs, config)
        below = reference(loss_fn, logprobs - step, inputs, config)
        assert derivative[t] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-6)


def test_cispo_derivative_takes_the_clipped_ratio_for_a_constant():
    rng = np.random.default_rng(3)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    logprobs, inputs = random_inputs("cispo", 50, rng)
    _, derivative = run("cispo", logprobs, inputs, config, torch.float64)
    ratio = np.clip(np.exp(logprobs - inputs["logprobs"]), 0.9, 1.1)
    np.testing.assert_allclose(derivative, -ratio * inputs["advantages"], rtol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "kept"),
    [(1, 1.5, False), (1, 0.5, True), (-1, 1.5, True), (-1, 0.5, False), (1, 1.0, True), (-1, 1.0, True)],
)
def test_ppo_has_no_gradient_where_the_clipped_term_is_smaller(advantage, ratio, kept):
    inputs = {"logprobs": [-1.0], "advantages": [float(advantage)]}
    config = check_config("ppo", {})
    _, derivative = run("ppo", [-1.0 + np.log(ratio)], inputs, config, torch.float64)
    assert derivative[0] == pytest.approx(-ratio * advantage if kept else 0.0, rel=1e-12)


def test_ppo_survives_a_ratio_that_overflows_where_it_is_clipped():
    values, derivative = run(
        "ppo", [-1.0], {"logprobs": [-300.0], "advantages": [2.0]}, check_config("ppo", {}), torch.float32
    )
    assert values.tolist() == pytest.approx([-2.4])
    assert derivative.tolist() == [0.0]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_a_ratio_that_overflows_is_not_clamped(loss_fn):
    inputs = {"logprobs": [-300.0], "advantages": [-2.0]}
    values, _ = run(loss_fn, [-1.0], inputs, check_config(loss_fn, {}), torch.float32)
    assert np.isinf(values[0])


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("hostile", [-np.inf, -1e30, -200.0, 200.0, 1e30])
def test_a_position_with_coefficient_zero_adds_exactly_nothing(loss_fn, hostile):
    rng = np.random.default_rng(4)
    config = check_config(loss_fn, {})
    logprobs, inputs = random_inputs(loss_fn, 20, rng)
    clean_values, clean_derivative = run(loss_fn, logprobs, inputs, config, torch.float32)
    off = np.zeros(40, bool)
    off[::2] = True

    def spread(array: np.ndarray, fill: float) -> np.ndarray:
        full = np.full(40, fill)
        full[~off] = array
        return full

    hostile_inputs = {
        name: spread(
            array, 0.0 if name == LOSS_SPECS[loss_fn].coefficient else -hostile if np.isfinite(hostile) else 0.0
        )
        for name, array in inputs.items()
    }
    values, derivative = run(loss_fn, spread(logprobs, hostile), hostile_inputs, config, torch.float32)
    assert not values[off].any()
    assert not derivative[off].any()
    np.testing.assert_array_equal(values[~off], clean_values)
    np.testing.assert_array_equal(derivative[~off], clean_derivative)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_fake_trainer_has_the_same_losses(loss_fn):
    rng = np.random.default_rng(5)
    config = check_config(loss_fn, {})
    logprobs, inputs = random_inputs(loss_fn, 100, rng)
    inputs[LOSS_SPECS[loss_fn].coefficient][::7] = 0
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    values, derivative = run(loss_fn, logprobs, inputs, config, torch.float64)
    fake = loss_terms(loss_fn, logprobs, inputs, config)
    np.testing.assert_allclose(values, fake.values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(derivative, fake.derivative, rtol=1e-9, atol=1e-12)
