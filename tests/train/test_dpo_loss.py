"""DPO's loss and its gradient beside the formula of the paper, computed by other means in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.client.train.preferences import dpo_loss, dpo_metrics


def by_the_paper(sums: np.ndarray, reference: np.ndarray, beta: float) -> float:
    """Equation 7 of Rafailov et al. (2023), pair by pair with Python's floats: float64 [pairs, 2] each."""
    losses = []
    for (chosen, rejected), (chosen_before, rejected_before) in zip(sums.tolist(), reference.tolist(), strict=True):
        inner = beta * (chosen - chosen_before) - beta * (rejected - rejected_before)
        losses.append(-math.log(1 / (1 + math.exp(-inner))))
    return math.fsum(losses) / len(losses)


def batch(pairs: int, seed: int) -> tuple[list[torch.Tensor], list[np.ndarray], np.ndarray]:
    """Logprobs float32 [T] and weights float64 [T] of 2 * pairs answers of different lengths, and reference sums."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 30, size=2 * pairs)
    logprobs = [torch.tensor(-rng.exponential(1.0, size=n), dtype=torch.float32, requires_grad=True) for n in lengths]
    weights = [np.concatenate([np.zeros(2), np.ones(n - 2)]) for n in lengths]
    reference = np.array(
        [float(w @ each.detach().double().numpy()) for w, each in zip(weights, logprobs, strict=True)]
    ).reshape(-1, 2)
    return logprobs, weights, reference + rng.normal(size=reference.shape)


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_loss_equals_the_formula(beta: float, seed: int) -> None:
    logprobs, weights, reference = batch(5, seed)
    loss, metrics = dpo_loss(weights, reference, beta)([], logprobs)
    sums = np.array(
        [math.fsum((w * each.detach().numpy()).tolist()) for w, each in zip(weights, logprobs, strict=True)]
    ).reshape(-1, 2)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(by_the_paper(sums, reference, beta), rel=1e-12)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_differences_of_the_formula(seed: int) -> None:
    """Of the loss by each logprob: central differences in float64, whose error the halved step shows."""
    logprobs, weights, reference = batch(3, seed)
    beta = 0.3
    loss, _ = dpo_loss(weights, reference, beta)([], logprobs)
    loss.backward()
    values = [each.detach().double().numpy() for each in logprobs]

    def at(answer: int, place: int, shift: float) -> float:
        moved = [each.copy() for each in values]
        moved[answer][place] += shift
        sums = np.array([w @ each for w, each in zip(weights, moved, strict=True)]).reshape(-1, 2)
        return by_the_paper(sums, reference, beta)

    for answer, tensor in enumerate(logprobs):
        assert tensor.grad is not None
        for place in range(len(values[answer])):
            wide, narrow = ((at(answer, place, step) - at(answer, place, -step)) / (2 * step) for step in (2e-3, 1e-3))
            bound = abs(wide - narrow) + 1e-9
            assert abs(float(tensor.grad[place]) - narrow) <= bound + 2**-23 * abs(narrow)


def test_at_the_reference_the_loss_is_ln_2_and_no_pair_is_won() -> None:
    same = np.array([[-3.0, -5.0], [-200.0, -1.0]])
    metrics = dpo_metrics(same, same, 0.1)
    assert metrics["loss"] == pytest.approx(math.log(2), rel=1e-15)
    assert metrics["accuracy"] == 0.0


def test_numbers_say_which_answer_gained() -> None:
    reference = np.array([[-10.0, -10.0], [-10.0, -10.0]])
    policy = np.array([[-8.0, -11.0], [-10.5, -10.0]])
    metrics = dpo_metrics(policy, reference, 0.5)
    assert metrics["accuracy"] == 0.5
    assert metrics["chosen_reward"] == pytest.approx(0.5 * (2.0 - 0.5) / 2)
    assert metrics["rejected_reward"] == pytest.approx(0.5 * (-1.0) / 2)
    assert metrics["margin"] == pytest.approx(metrics["chosen_reward"] - metrics["rejected_reward"])


@pytest.mark.parametrize("gap", [-2000.0, 2000.0])
def test_far_apart_answers_have_a_finite_loss_and_gradient(gap: float) -> None:
    values: list[Any] = [torch.tensor([gap], requires_grad=True), torch.tensor([0.0], requires_grad=True)]
    loss, _ = dpo_loss([np.ones(1)] * 2, np.zeros((1, 2)), 1.0)([], values)
    loss.backward()
    assert loss.item() == pytest.approx(max(0.0, -gap), abs=1e-12)
    assert [float(each.grad) for each in values] == pytest.approx([-1.0, 1.0] if gap < 0 else [0.0, 0.0], abs=1e-6)
