"""Settings that were not chosen: by the model's size and family, and by the number of rows; each with its reason."""

from typing import Any

import pytest
from tinker_local.client.train.guidance import advise, facts_of
from tinker_local.types import InvalidRequestError

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def test_learning_rates_equal_the_cookbooks() -> None:
    """Of the models for which it has a formula."""
    from tinker_cookbook.hyperparam_utils import get_lr

    for name, family, width in (
        ("Qwen/Qwen3-32B", "qwen3", 5120),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe", 2048),
        ("meta-llama/Llama-3.1-8B", "llama", 4096),
        ("meta-llama/Llama-3.1-70B", "llama", 8192),
    ):
        config = {**QWEN3_4B, "model_type": family, "hidden_size": width}
        advice = advise(facts_of(name, config), "sft", 1000, {})
        assert advice.settings.learning_rate == pytest.approx(get_lr(name), rel=1e-12)
        assert "get_lr" in advice.why["learning_rate"]


def test_defaults_for_preferences_equal_the_cookbooks() -> None:
    from tinker_cookbook.preference.train_dpo import Config

    advice = advise(facts_of("Qwen/Qwen3-4B", QWEN3_4B), "preference", 5000, {})
    defaults = {each.logical_name: each._default for each in Config.__chz_fields__.values()}  # type: ignore[attr-defined]
    assert advice.settings.learning_rate == defaults["learning_rate"]
    assert advice.settings.dpo_beta == defaults["dpo_beta"]
    assert advice.settings.epochs == defaults["num_epochs"]
    assert advice.settings.rank == defaults["lora_rank"]
    assert advice.settings.ttl_seconds == defaults["ttl_seconds"]
    assert (advice.settings.beta1, advice.settings.beta2) == (defaults["adam_beta1"], defaults["adam_beta2"])


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3_4B, 4.02e9),
        (SMOLLM2, 134.5e6),
        ({"model_type": "qwen3_vl", "text_config": QWEN3_4B}, 4.02e9),
        ({**QWEN3_4B, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
         | {"num_experts": 128, "moe_intermediate_size": 768, "tie_word_embeddings": False}, 30.5e9),
    ],
)  # fmt: skip
def test_parameters_are_counted_from_a_config(config: dict[str, Any], parameters: float) -> None:
    """Within 2 % of what the models' cards say."""
    assert facts_of("any", config).parameters == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen3-4B", 4e9), ("org/Model-0.6B-Base", 6e8), ("HuggingFaceTB/SmolLM2-135M", 135e6), ("a/gpt-4", None)],
)
def test_a_name_may_have_the_size(name: str, parameters: float | None) -> None:
    assert facts_of(name, None).parameters == parameters


def test_tiny_and_small_models_have_values_of_their_class() -> None:
    tiny = facts_of("tiny/text", {**SMOLLM2, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512})
    assert tiny.tiny
    small = facts_of("SmolLM2", SMOLLM2)
    assert small.small
    large = facts_of("Qwen3-4B", QWEN3_4B)
    for kind in ("sft", "preference"):
        rates = [advise(each, kind, 300, {}).settings.learning_rate for each in (tiny, small, large)]  # type: ignore[arg-type]
        assert rates[0] > rates[1] > rates[2]
    assert "our measurement" in advise(tiny, "sft", 300, {}).why["learning_rate"]


@pytest.mark.parametrize(
    ("rows", "chosen", "batch_size", "steps"),
    [(5, {}, 4, 6), (300, {}, 8, 108), (2000, {}, 16, 119), (100_000, {}, 128, 743), (2000, {"epochs": 3.0}, 32, 180)],
)
def test_batches_leave_a_hundred_steps_where_the_rows_allow_it(
    rows: int, chosen: dict[str, Any], batch_size: int, steps: int
) -> None:
    advice = advise(facts_of("Qwen3-4B", QWEN3_4B), "sft", rows, chosen)
    assert advice.settings.batch_size == batch_size
    assert advice.settings.evaluate_every == max(1, steps // 10)
    assert advice.settings.save_every == max(1, steps // 5)


def test_chosen_values_stay_and_are_not_explained() -> None:
    advice = advise(facts_of("Qwen3-4B", QWEN3_4B), "sft", 300, {"learning_rate": 3e-5, "save_every": 0})
    assert advice.settings.learning_rate == 3e-5
    assert advice.settings.save_every == 0
    assert {"rank", "epochs", "batch_size", "evaluate_every"} == set(advice.why)
    with pytest.raises(InvalidRequestError, match="epochs: must be more than 0"):
        advise(facts_of("Qwen3-4B", QWEN3_4B), "sft", 300, {"epochs": -1})


def test_short_runs_unknown_sizes_and_full_adapters_are_noted() -> None:
    known, unknown = facts_of("Qwen3-4B", QWEN3_4B), facts_of("org/model", None)
    assert advise(known, "sft", 300, {}).notes == []
    assert "24 steps are few" in advise(known, "sft", 60, {}).notes[0]
    assert "its size is not known" in advise(unknown, "sft", 300, {}).notes[0]
    assert "compare held-out losses with rank 64" in advise(known, "sft", 100_000, {}, 500_000_000).notes[0]


def test_of_a_single_row_none_is_held_out() -> None:
    """The default of at least one left none to train on, and the run ended with an error about a setting."""
    model = facts_of("Qwen3-4B", QWEN3_4B)
    advice = advise(model, "sft", 1, {})
    assert advice.settings.held_out == 0
    assert "held_out 0: there is one row" in advice.lines()
    assert advise(model, "sft", 2, {}).settings.held_out == 0.05
    assert advise(model, "sft", 1, {"held_out": 0.5}).settings.held_out == 0.5
