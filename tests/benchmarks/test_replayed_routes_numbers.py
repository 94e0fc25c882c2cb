"""What the benchmark of replayed experts makes of its numbers."""

import numpy as np
import pytest
import replayed_routes  # type: ignore[import-not-found]
import transformers
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


@pytest.mark.parametrize(("layers", "experts", "chosen"), [(None, 8, 4), (3, 128, 8)])
def test_the_model_has_as_many_experts_as_the_benchmark_says(layers: int | None, experts: int, chosen: int) -> None:
    """transformers saves their number by another name, which was taken in place of that of the shape."""
    saved = transformers.Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2).to_dict()
    config = transformers.Qwen3MoeConfig(**replayed_routes.settings_of(saved, layers))
    assert (config.num_experts, config.num_experts_per_tok) == (experts, chosen)
