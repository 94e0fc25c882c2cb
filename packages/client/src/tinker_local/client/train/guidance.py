"""Settings for a model and a data set that were not chosen, from published measurements; docs/train.md has each source.

A model that is tiny or small has values of its class, because the published ones are for models of 1B parameters and
more.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tinker_local.client.train.examples import Kind
from tinker_local.client.train.schedule import Plan, held_out_count
from tinker_local.client.train.settings import TrainSettings, made_of

TINY, SMALL = 20_000_000, 500_000_000
"""Parameters below which a model is of the class."""

COOKBOOK = "tinker_cookbook"
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""By family: how the best learning rate falls with the width of a model, `tinker_cookbook.hyperparam_utils.get_lr`."""

STEPS_WANTED = 100
"""Steps that a run should have at least: Tinker's documentation."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What guidance knows of a base model. `width`: its hidden size. `parameters`: about so many. None: unknown."""

    name: str
    family: str = ""
    width: int | None = None
    parameters: int | None = None

    @property
    def tiny(self) -> bool:
        return self.parameters is not None and self.parameters < TINY

    @property
    def small(self) -> bool:
        return not self.tiny and self.parameters is not None and self.parameters < SMALL


def facts_of(name: str, config: Mapping[str, Any] | None) -> ModelFacts:
    """From a model's `config.json`, where the server gives it; else from its name: "Qwen3-4B" has 4e9 parameters."""
    if config is None:
        number = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-z0-9])", name.replace("-", " ").replace("_", " "))
        scale = {"B": 1e9, "M": 1e6}
        parameters = None if number is None else int(float(number[1]) * scale[number[2]])
        family = next((each for each in EXPONENTS if each in name.lower()), "")
        return ModelFacts(name, family, None, parameters)
    text = {**config, **(config.get("text_config") or {})}
    family = str(text.get("model_type") or config.get("model_type") or "")
    return ModelFacts(name, family, text.get("hidden_size"), _parameters(text))


def _parameters(text: Mapping[str, Any]) -> int | None:
    """About: attention with equal heads, three matrices of each MLP, embeddings; nothing of a vision tower."""
    try:
        width, layers, words = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
        heads = text["num_attention_heads"]
        head = text.get("head_dim") or width // heads
        attention = 2 * width * head * (heads + (text.get("num_key_value_heads") or heads))
        experts = text.get("num_experts") or text.get("num_local_experts") or 1
        inner = text.get("moe_intermediate_size") if experts > 1 else None
        mlp = 3 * width * (inner or text["intermediate_size"]) * experts
    except (KeyError, TypeError):
        return None
    return int(layers * (attention + mlp) + words * width * (1 if text.get("tie_word_embeddings") else 2))


@dataclass(slots=True)
class Advice:
    """Settings to train with. `why`: for each that was not chosen, by its name, the reason in words. `notes`: what else
    is worth knowing."""

    settings: TrainSettings
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """To print: one line for each setting that was not chosen, then the notes."""
        values = self.settings.as_json()
        return [f"{name} {_short(values[name])}: {why}" for name, why in self.why.items()] + self.notes


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def advise(facts: ModelFacts, kind: Kind, rows: int, chosen: Mapping[str, Any], trained_tokens: int = 0) -> Advice:
    """Settings for `rows` rows of `kind`, of which `chosen` are given by name. `trained_tokens`: of one epoch, 0 if
    they are not known. InvalidRequestError for a chosen value that cannot be."""
    values = dict(chosen)
    why: dict[str, str] = {}

    def offer(name: str, value: Any, reason: str) -> None:
        if name not in values:
            values[name], why[name] = value, reason

    if rows == 1:
        offer("held_out", 0.0, "there is one row")
    offer("rank", *rank_for(facts))
    offer("learning_rate", *learning_rate_for(facts, kind))
    offer("epochs", *epochs_for(facts, kind, rows))
    # A first guess, with which all that was chosen is checked before anything is computed from it.
    settings = made_of({"batch_size": 1, **values})
    trained = max(1, rows - held_out_count(rows, settings.held_out))
    offer("batch_size", *batch_size_for(trained, settings.epochs))
    settings = made_of(values)
    total = Plan(np.arange(trained), settings).total
    offer("evaluate_every", max(1, total // 10), f"a tenth of {total} steps")
    offer("save_every", max(1, total // 5), f"a fifth of {total} steps")
    settings = replace(settings, evaluate_every=values["evaluate_every"], save_every=values["save_every"])
    return Advice(settings, why, _notes(facts, kind, settings, total, trained_tokens))


def rank_for(facts: ModelFacts) -> tuple[int, str]:
    """A LoRA rank, and why."""
    if facts.tiny:
        return 16, "a tiny model: our measurement"
    return (
        32,
        f"the default of Tinker and {COOKBOOK}; below an adapter's capacity, ranks learn alike (LoRA without regret)",
    )


def learning_rate_for(facts: ModelFacts, kind: Kind) -> tuple[float, str]:
    """A peak learning rate, and why."""
    if kind == "preference":
        if facts.tiny:
            return 3e-3, "DPO of a tiny model: our measurement"
        if facts.small:
            return 1e-4, "DPO of a small model: our measurement"
        return 1e-5, f"DPO in {COOKBOOK} (train_dpo); Unsloth's guide has 5e-6"
    if facts.tiny:
        return 3e-3, "a tiny model: our measurement"
    exponent = next((EXPONENTS[each] for each in EXPONENTS if each in f"{facts.family} {facts.name}".lower()), None)
    if exponent is not None and facts.width is not None:
        rate = 5e-4 * (2000 / facts.width) ** exponent
        return rate, f"5e-5 * 10 * (2000 / {facts.width}) ** {exponent}: {COOKBOOK}.hyperparam_utils.get_lr"
    if facts.small:
        return 1e-3, "a small model of another family: our measurement with SmolLM2-135M"
    return 2e-4, "where the cookbook has no formula: Unsloth's and TRL's guides for LoRA"


def epochs_for(facts: ModelFacts, kind: Kind, rows: int) -> tuple[float, str]:
    """How many epochs, and why."""
    if facts.tiny:
        return 10.0, "a tiny model: our measurement"
    if kind == "preference":
        return (
            (1.0, f"DPO in {COOKBOOK} (train_dpo)") if rows >= 1000 else (3.0, "fewer than 1000 pairs; Unsloth: 1 to 3")
        )
    return (
        (3.0, "fewer than 1000 rows; Unsloth: 1 to 3") if rows < 1000 else (1.0, "1000 rows or more; Unsloth: 1 to 3")
    )


def batch_size_for(trained: int, epochs: float) -> tuple[int, str]:
    """Rows of a step for `trained` rows to train on, and why: a power of two from 8 to 128 (or all rows, if fewer)."""
    wanted = trained * epochs / STEPS_WANTED
    size = 8
    while size * 2 <= min(wanted, 128):
        size *= 2
    if size > trained:
        return trained, "all rows: there are fewer than 8"
    return size, (
        f"at least {STEPS_WANTED} steps where the rows allow it, and 8 to 128 rows each (Tinker's documentation; LoRA "
        "bears large batches less than full fine-tuning)"
    )


def _notes(facts: ModelFacts, kind: Kind, settings: TrainSettings, total: int, trained_tokens: int) -> list[str]:
    notes = []
    if facts.parameters is None:
        notes.append(
            f"{facts.name}: its size is not known here, so these are values for models of 1B parameters and more"
        )
    if total < STEPS_WANTED:
        notes.append(
            f"{total} steps are few: Tinker's documentation asks for {STEPS_WANTED}; in such short runs a learning "
            "rate 1.5 times as high was best (LoRA without regret)"
        )
    if kind == "sft" and facts.width is not None and trained_tokens > 0 and not facts.tiny:
        smallest = 2 * facts.width * settings.rank  # of one square matrix: an adapter has hundreds of them
        if trained_tokens > 500 * smallest:
            notes.append(
                f"{trained_tokens:,} trained tokens may be more than an adapter of rank {settings.rank} can hold: "
                f"compare held-out losses with rank {settings.rank * 2}"
            )
    return notes
