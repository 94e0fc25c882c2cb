"""What the benchmark of replayed experts makes of its numbers."""

import numpy as np
import pytest
import replayed_routes  # type: ignore[import-not-found]
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.trainer import TrainDatum, TrainResult


def test_an_interval_holds_the_mean_of_differences_as_students_t_says() -> None:
    """scipy.stats.t.interval(0.95, 4, mean, sem) of these numbers."""
    assert replayed_routes.interval([0.1, 0.2, 0.3, 0.2, 0.4]) == "+0.2400 (+0.0984 to +0.3816)"
    assert replayed_routes.interval([0.5]) == "+0.5000"


def test_kl_is_of_sampled_tokens_alone() -> None:
    inputs = {"logprobs": np.array([0, -1, -2], np.float32), "advantages": np.array([0, 1, -1], np.float32)}
    datum = TrainDatum(RenderedInput(np.arange(3, dtype=np.int32)), np.arange(3), inputs)
    result = TrainResult([{"logprobs": np.array([-9, -1, -2.5], np.float32)}], {})
    kl, clipped = replayed_routes.kl(result, [datum])
    assert kl == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 2)
    assert clipped == 0.5


def test_advantages_are_less_the_mean_of_a_group_and_never_zero() -> None:
    found = replayed_routes.advantages_of(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), 2)
    assert found.tolist() == [[0.5, -0.5], [-0.5, 0.5], [1e-9, 1e-9], [1e-9, 1e-9]]
