"""The losses equal the documented formulas, and masked positions add exactly nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.fakes.fake_trainer import evaluate
from tinker_local.backend.training.losses import LOSSES, loss_of
from tinker_local.backend.training.losses.loss_evaluation import with_per_datum

from tests.training.loss_reference import reference


def settings_of(loss_fn: str) -> list[dict[str, float]]:
    """The default settings; for `gspo`, thresholds that contain the ratios of random data; for `stable_reinforce`, ones
    that leave the sequence out."""
    further = {
        "gspo": [{"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}],
        "stable_reinforce": [{"kl_coeff": 0.3, "max_sequence_ratio": 1.0}, {"max_ratio": 1.1}],
    }
    return [loss_of(loss_fn).complete_settings(given) for given in ({}, *further.get(loss_fn, []))]


def random_inputs(loss_fn: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    logprobs = -rng.uniform(0.1, 4, n)
    inputs = {name: rng.standard_normal(n) for name in LOSSES[loss_fn].inputs}
    if "logprobs" in inputs:
        inputs["logprobs"] = logprobs + rng.normal(0, 0.5, n)
    for mask in {"sequence_ratio_mask", "sampled"} & {*inputs}:
        inputs[mask] = (rng.random(n) < 0.7).astype(float)
    return logprobs, inputs


def run(
    loss_fn: str,
    logprobs: Any,
    inputs: dict[str, Any],
    config: dict[str, float],
    dtype: torch.dtype,
    lengths: tuple[int, ...] = (),
) -> Any:
    """Values and derivative for one datum, or for several of these `lengths`."""
    tensors = {name: torch.tensor(np.asarray(value), dtype=dtype) for name, value in inputs.items()}
    own = torch.tensor(np.asarray(logprobs), dtype=dtype)
    datum_of = torch.repeat_interleave(torch.tensor(lengths or (len(own),)))
    loss = LOSSES[loss_fn]
    values, derivative = loss.evaluate(torch, own, with_per_datum(loss, own, tensors, datum_of), config)
    return values.numpy(), derivative.numpy()


@pytest.mark.mutation(
    "importance-sampling-clipped",
    "importance_sampling.terms",
    'weighted = -xp.exp(logprobs - inputs["logprobs"])',
    'weighted = -xp.clip(xp.exp(logprobs - inputs["logprobs"]), 0.8, 1.2)',
    cases=("importance_sampling",),
)
@pytest.mark.mutation(
    "negative-weights-dropped",
    "cross_entropy.terms",
    '    weights = inputs["weights"]\n',
    '    weights = xp.clip(inputs["weights"], 0, None)\n',
    cases=("cross_entropy",),
)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_values_equal_a_numpy_reference(loss_fn: Any) -> None:
    rng = np.random.default_rng(1)
    for config in settings_of(loss_fn):
        logprobs, inputs = random_inputs(loss_fn, 200, rng)
        values, _ = run(loss_fn, logprobs, inputs, config, torch.float64)
        assert values.sum() == pytest.approx(reference(loss_fn, logprobs, inputs, config), rel=1e-12)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_derivatives_equal_finite_differences(loss_fn: Any) -> None:
    rng = np.random.default_rng(2)
    for config in settings_of(loss_fn):
        logprobs, inputs = random_inputs(loss_fn, 50, rng)
        _, derivative = run(loss_fn, logprobs, inputs, config, torch.float64)
        assert derivative.any()
        for t in range(len(logprobs)):
            step = np.zeros_like(logprobs)
            step[t] = 1e-6
            above = reference(loss_fn, logprobs + step, inputs, config, fixed=logprobs)
            below = reference(loss_fn, logprobs - step, inputs, config, fixed=logprobs)
            assert derivative[t] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-6)


def test_cispo_derivative_takes_the_clipped_ratio_for_a_constant() -> None:
    rng = np.random.default_rng(3)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    logprobs, inputs = random_inputs("cispo", 50, rng)
    _, derivative = run("cispo", logprobs, inputs, config, torch.float64)
    ratio = np.clip(np.exp(logprobs - inputs["logprobs"]), 0.9, 1.1)
    np.testing.assert_allclose(derivative, -ratio * inputs["advantages"], rtol=1e-12)


@pytest.mark.mutation("ppo-gradient-where-clipped", "clipped_surrogate", "xp.where(free <= bound, -free, 0.0)", "-free")
@pytest.mark.parametrize(
    ("advantage", "ratio", "kept"),
    [(1, 1.5, False), (1, 0.5, True), (-1, 1.5, True), (-1, 0.5, False), (1, 1.0, True), (-1, 1.0, True)],
)
def test_ppo_has_no_gradient_where_the_clipped_term_is_smaller(advantage: Any, ratio: Any, kept: Any) -> None:
    inputs = {"logprobs": [-1.0], "advantages": [float(advantage)]}
    config = loss_of("ppo").complete_settings({})
    _, derivative = run("ppo", [-1.0 + np.log(ratio)], inputs, config, torch.float64)
    assert derivative[0] == pytest.approx(-ratio * advantage if kept else 0.0, rel=1e-12)


def test_ppo_survives_a_ratio_that_overflows_where_it_is_clipped() -> None:
    values, derivative = run(
        "ppo", [-1.0], {"logprobs": [-300.0], "advantages": [2.0]}, loss_of("ppo").complete_settings({}), torch.float32
    )
    assert values.tolist() == pytest.approx([-2.4])
    assert derivative.tolist() == [0.0]


@pytest.mark.mutation(
    "log-ratio-clamped",
    "importance_sampling.terms",
    'xp.exp(logprobs - inputs["logprobs"])',
    'xp.exp(xp.clip(logprobs - inputs["logprobs"], -20, 20))',
    cases=("importance_sampling",),
)
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_a_ratio_that_overflows_is_not_clamped(loss_fn: Any) -> None:
    inputs = {"logprobs": [-300.0], "advantages": [-2.0]}
    values, _ = run(loss_fn, [-1.0], inputs, loss_of(loss_fn).complete_settings({}), torch.float32)
    assert np.isinf(values[0])


@pytest.mark.parametrize("advantage", [0.0, 2.0])
def test_dro_pulls_to_the_sampler_but_leaves_a_prompt_alone(advantage: Any) -> None:
    """Sampled tokens are penalised whatever their advantage; prompts arrive with advantage and logprob both 0."""
    config = {"beta": 0.4}
    inputs = {"logprobs": [-2.0, 0.0], "advantages": [advantage, 0.0]}
    values, derivative = run("dro", [-3.0, -5.0], inputs, config, torch.float64)
    assert values.tolist() == pytest.approx([3 * advantage + 0.2, 0.0])
    assert derivative.tolist() == pytest.approx([-advantage - 0.4, 0.0])


def test_gspo_has_one_ratio_for_each_datum() -> None:
    """It is the mean over the datum's own marked positions, and also applies to advantages outside of them."""
    inputs = {
        "logprobs": [0.0, -1.0, -1.0, -2.0, -2.0],
        "advantages": [1.0, 1.0, -2.0, 1.0, 3.0],
        "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0, 0.0],
    }
    logprobs = [-4.0, -1.1, -1.3, -2.5, -7.0]
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 2.0}
    values, derivative = run("gspo", logprobs, inputs, config, torch.float64, lengths=(3, 2))
    first, second = np.exp(-0.2), np.exp(-0.5)
    assert values.tolist() == pytest.approx([-first, -first, 2 * first, -second, -3 * second])
    assert derivative.tolist() == pytest.approx(values.tolist())


def test_gspo_keeps_or_drops_the_whole_sequence() -> None:
    inputs = {"logprobs": [-1.0] * 4, "advantages": [1.0, -1.0] * 2, "sequence_ratio_mask": [1.0] * 4}
    logprobs = [-0.5, -0.9, -2.0, -3.0]
    values, derivative = run(
        "gspo", logprobs, inputs, loss_of("gspo").complete_settings({}), torch.float64, lengths=(2, 2)
    )
    above, below = np.exp(0.3), np.exp(-1.5)
    assert values.tolist() == pytest.approx([-1.0004, above, -below, 0.9997])
    assert derivative.tolist() == pytest.approx([0.0, above, -below, 0.0])


def test_stable_reinforce_cuts_weights_off_and_leaves_out_sequences_that_drifted() -> None:
    inputs = {"logprobs": [-3.0, -1.0, -1.0, -3.0], "advantages": [1.0] * 4, "sampled": [1.0] * 4}
    config = loss_of("stable_reinforce").complete_settings({"kl_coeff": 0})
    # The first datum's ratios are e and 1, their geometric mean 1.65; the second's are 1 and e^2, and e.
    logprobs = [-2.0, -1.0, -1.0, -1.0]
    values, derivative = run("stable_reinforce", logprobs, inputs, config, torch.float64, lengths=(2, 2))
    assert derivative.tolist() == pytest.approx([-2.0, -1.0, 0.0, 0.0])
    assert values.tolist() == pytest.approx([4.0, 1.0, 0.0, 0.0])
    config = loss_of("stable_reinforce").complete_settings({"kl_coeff": 0.5})
    _, derivative = run("stable_reinforce", logprobs, inputs, config, torch.float64, lengths=(2, 2))
    assert derivative.tolist() == pytest.approx([-1.5, -1.0, 0.0, 0.5])  # the pull stays, also where it is left out


def test_stable_reinforce_survives_ratios_that_overflow() -> None:
    inputs = {"logprobs": [-300.0, -1.0], "advantages": [-2.0, 1.0], "sampled": [1.0, 1.0]}
    config = loss_of("stable_reinforce").complete_settings({})
    values, derivative = run("stable_reinforce", [-1.0, -300.0], inputs, config, torch.float32)
    assert np.isfinite(values).all()
    assert np.isfinite(derivative).all()


def test_gspo_survives_a_datum_without_a_marked_position() -> None:
    inputs = {
        "logprobs": [-1.0] * 4,
        "advantages": [0.0, 0.0, 1.0, 1.0],
        "sequence_ratio_mask": [0.0, 0.0, 1.0, 1.0],
    }
    values, derivative = run(
        "gspo", [-1.0] * 4, inputs, loss_of("gspo").complete_settings({}), torch.float32, lengths=(2, 2)
    )
    assert values.tolist() == derivative.tolist() == [0.0, 0.0, -1.0, -1.0]


def test_the_ratio_of_a_long_sequence_is_exact_in_float32() -> None:
    """Sums of 100 000 float32 numbers would be off by more than the default thresholds are from 1."""
    rng = np.random.default_rng(6)
    logprobs = -rng.uniform(0, 20, 100_000).astype(np.float32)
    sampled = (logprobs - rng.normal(3.5e-4, 3, 100_000)).astype(np.float32)
    inputs = {"logprobs": sampled, "advantages": np.ones(100_000), "sequence_ratio_mask": np.ones(100_000)}
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 10.0}
    values, _ = run("gspo", logprobs, inputs, config, torch.float32)
    exact = np.exp((logprobs.astype(np.float64) - sampled).mean())
    assert values[0] == pytest.approx(-exact, rel=1e-6)
    assert (values == values[0]).all()


@pytest.mark.mutation(
    "zero-times-infinity",
    "Loss.evaluate",
    "Terms(xp.where(active, values, 0.0), xp.where(active, derivative, 0.0))",
    "Terms(active * values, active * derivative)",
)
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("hostile", [-np.inf, -1e30, -200.0, 200.0, 1e30])
def test_a_position_with_coefficient_zero_adds_exactly_nothing(loss_fn: Any, hostile: Any) -> None:
    rng = np.random.default_rng(4)
    config = loss_of(loss_fn).complete_settings({})
    logprobs, inputs = random_inputs(loss_fn, 20, rng)
    clean_values, clean_derivative = run(loss_fn, logprobs, inputs, config, torch.float32)
    off = np.zeros(40, bool)
    off[::2] = True

    def spread(array: np.ndarray, fill: float) -> np.ndarray:
        full = np.full(40, fill)
        full[~off] = array
        return full

    zero = (*LOSSES[loss_fn].mask_inputs, LOSSES[loss_fn].per_datum_input)
    hostile_inputs = {
        name: spread(array, 0.0 if name in zero else -hostile if np.isfinite(hostile) else 0.0)
        for name, array in inputs.items()
    }
    values, derivative = run(loss_fn, spread(logprobs, hostile), hostile_inputs, config, torch.float32)
    assert not values[off].any()
    assert not derivative[off].any()
    np.testing.assert_array_equal(values[~off], clean_values)
    np.testing.assert_array_equal(derivative[~off], clean_derivative)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_fake_trainer_has_the_same_losses(loss_fn: Any) -> None:
    rng = np.random.default_rng(5)
    config = loss_of(loss_fn).complete_settings({})
    logprobs, inputs = random_inputs(loss_fn, 100, rng)
    for name in LOSSES[loss_fn].mask_inputs:
        inputs[name][::7] = 0
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    values, derivative = run(loss_fn, logprobs, inputs, config, torch.float64)
    fake = evaluate(LOSSES[loss_fn], logprobs, inputs, config)
    np.testing.assert_allclose(values, fake.values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(derivative, fake.derivative, rtol=1e-9, atol=1e-12)
