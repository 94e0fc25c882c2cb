"""Perplexity, KL, errors of matrices of a model in fewer bits: `python -m measurements.precision_text SETTINGS PART`.

PART is `text`, or `outliers`: the same of models with outlier channels.

transformers' own modules, with the project's codes in place of their matrices: the numbers by which both engines
multiply. The result goes into the file of the settings.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.precision_tables import BASES, texts
from tinker_local.backend.weights.codes import to_codes
from tinker_local.backend.weights.packed import pack_layers, packable_modules
from tinker_local.backend.weights.precision import BITS, group_of

from measurements import roundings

Model = Any
"""Of transformers, with its decoder as `model`."""


def load(path: str) -> Model:
    """The dense model, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def packed(model: Model, base: str) -> Model:
    """`model` in `base`, which changes it."""
    if base != "dense":
        pack_layers(model.model, base)
    return model


def windows(path: str, settings: dict[str, Any], count: int) -> dict[str, list[torch.Tensor]]:
    """`count` windows of token ids of each text, from its begin."""
    from transformers import AutoTokenizer

    tokenizer, length = AutoTokenizer.from_pretrained(path), settings["window"]
    found = {}
    for name, text in texts(Path(path)).items():
        ids = torch.tensor(tokenizer.encode(text[: 20 * length * count], add_special_tokens=False))
        if len(ids) < length * count:
            raise ValueError(f"{name}: {len(ids)} tokens, {length * count} are needed")
        found[name] = list(ids[: length * count].view(count, length))
    return found


@torch.no_grad()
def log_probabilities(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Of all tokens [V] at each position but the last: what follows the first, the first two, …"""
    return model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)


def nats(rows: torch.Tensor, ids: torch.Tensor) -> float:
    """The mean of -log p of the tokens after the first."""
    return float(-rows.gather(1, ids[1:, None]).double().mean())


def divergence(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """KL(rows, others) of each position."""
    return (rows.double().exp() * (rows - others).double()).sum(-1)


def of_texts(models: dict[str, Model], found: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """By text and base, nats of each window, the mean KL(dense, base), and its tails over all positions."""
    result: dict[str, Any] = {}
    all_kl: dict[str, list[torch.Tensor]] = {base: [] for base in BASES[1:]}
    others: dict[str, list[torch.Tensor]] = {base: [] for base in BASES[1:]}
    for name, ids_of in found.items():
        result[name] = {base: {"nats": []} for base in BASES}
        of_text: dict[str, list[torch.Tensor]] = {base: [] for base in BASES[1:]}
        for ids in ids_of:
            dense = log_probabilities(models["dense"], ids)
            result[name]["dense"]["nats"].append(nats(dense, ids))
            for base in BASES[1:]:
                rows = log_probabilities(models[base], ids)
                result[name][base]["nats"].append(nats(rows, ids))
                of_text[base].append(divergence(dense, rows))
                others[base].append(rows.argmax(-1) != dense.argmax(-1))
        for base in BASES[1:]:
            result[name][base]["kl"] = float(torch.cat(of_text[base]).mean())
            all_kl[base] += of_text[base]
    tails = {
        base: {
            "median": float(torch.cat(all_kl[base]).median()),
            "99": float(torch.cat(all_kl[base]).quantile(0.99)),
            "other": float(torch.cat(others[base]).float().mean()),
        }
        for base in BASES[1:]
    }
    return {"texts": result, "tails": tails}


def error(weight: torch.Tensor, base: str) -> tuple[float, float]:
    """Squared norms of what rounding `weight` changes, and of it."""
    return lost(to_codes(weight, BITS[base]).numbers(torch.float32), weight), float(weight.square().sum())


def lost(rounded: torch.Tensor, weight: torch.Tensor) -> float:
    """The squared norm of what rounding changes."""
    return float((rounded - weight).square().sum())


def of_matrices(model: Model) -> dict[str, dict[str, float]]:
    """Errors by norm: of all packed matrices together, of the worst, and of numbers drawn from a normal distribution
    in the same shapes, whose rounding depends on the size of groups alone."""
    modules = [module for _, module in packable_modules(model.model)]
    shapes = sorted({tuple(module.weight.shape) for module in modules})
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    found = {}
    for base in BASES[1:]:
        pairs = [error(module.weight, base) for module in modules]
        count = {shape: sum(tuple(module.weight.shape) == shape for module in modules) for shape in shapes}
        normal = [[count[s] * each for each in error(w, base)] for s, w in zip(shapes, drawn, strict=True)]
        found[base] = {
            "all": math.sqrt(sum(a for a, _ in pairs) / sum(b for _, b in pairs)),
            "largest": max(math.sqrt(a / b) for a, b in pairs),
            "normal": math.sqrt(sum(a for a, _ in normal) / sum(b for _, b in normal)),
        }
    return found


@torch.no_grad()
def rounding_rows(model: Model, found: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """A row for each way to round in 4 bits, with the columns of the matrices as they are and in another order, which
    changes nothing but what is in a group. Changes `model`, and leaves it as it was."""
    modules = [module for _, module in packable_modules(model.model)]
    weights = [module.weight.clone() for module in modules]
    dense = [log_probabilities(model, ids) for ids in found]
    size = float(sum(weight.square().sum() for weight in weights))
    for name, (bits, rounded) in roundings.WAYS.items():
        for shuffled in (False, True):
            for module, weight in zip(modules, weights, strict=True):
                module.weight.copy_(roundings.shuffled(rounded, weight) if shuffled else rounded(weight))
            error = sum(lost(module.weight, weight) for module, weight in zip(modules, weights, strict=True))
            rows = [log_probabilities(model, ids) for ids in found]
            pairs = list(zip(dense, rows, found, strict=True))
            yield {
                "name": name,
                "bits": bits,
                "shuffled": shuffled,
                "error": math.sqrt(error / size),
                "nats": float(np.mean([nats(other, ids) - nats(one, ids) for one, other, ids in pairs])),
                "kl": float(torch.cat([divergence(one, other) for one, other, _ in pairs]).mean()),
            }
    for module, weight in zip(modules, weights, strict=True):
        module.weight.copy_(weight)


@torch.no_grad()
def put_outliers(model: Model, factor: float, channels: Sequence[int]) -> None:
    """Divide these channels of each norm before attention and MLP by `factor`, and multiply the columns of the
    projections that read them: the same function, to the bit where `factor` is a power of two."""
    at = list(channels)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[at] /= factor
            for reader in readers:
                reader.weight[:, at] *= factor


def random_model(width: int) -> Model:
    """Normal weights in the proportions of an 8B model, four layers: its width is divided by 128, as theirs are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def outlier_rows(
    name: str, fresh: Callable[[], Model], found: list[torch.Tensor], settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each factor, and for none."""
    for factor in (1, *settings["factors"]):
        dense = fresh()
        width = dense.config.hidden_size
        channels = np.random.default_rng(0).choice(width, settings["channels"], replace=False).tolist()
        put_outliers(dense, factor, channels)
        rows_of = [log_probabilities(dense, ids) for ids in found]
        row: dict[str, Any] = {"model": name, "factor": factor}
        row["dense_nats"] = float(np.mean([nats(rows, ids) for rows, ids in zip(rows_of, found, strict=True)]))
        for base in BASES[1:]:
            model = fresh()
            put_outliers(model, factor, channels)
            others = [log_probabilities(packed(model, base), ids) for ids in found]
            pairs = list(zip(rows_of, others, strict=True))
            row[base] = {
                "nats": float(np.mean([nats(rows, ids) for rows, ids in zip(others, found, strict=True)])),
                "kl": float(torch.cat([divergence(*pair) for pair in pairs]).mean()),
                "logits": float(torch.stack([_apart(*pair) for pair in pairs]).mean()),
            }
        yield row


def _apart(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Logits without their means, which mean nothing: the norm of the difference by theirs."""
    one, other = (each - each.mean(-1, keepdim=True) for each in (rows, others))
    return (one - other).norm() / one.norm()


def measure_text(settings: dict[str, Any]) -> dict[str, Any]:
    path = settings["model"]
    models = {base: packed(load(path), base) for base in BASES}
    found = windows(path, settings, settings["windows"])
    inputs = {module.in_features for _, module in packable_modules(models["dense"].model)}
    return {
        **of_texts(models, found),
        "matrices": of_matrices(models["dense"]),
        "groups": {base: sorted({group_of(each, BITS[base]) or 0 for each in inputs}) for base in BASES[1:]},
        "roundings": list(rounding_rows(models["dense"], [ids for each in found.values() for ids in each])),
    }


def measure_outliers(settings: dict[str, Any]) -> dict[str, Any]:
    path, count = settings["model"], settings["outlier_windows"]
    found = windows(path, settings, count)["Python's documentation"]
    rows = list(outlier_rows(Path(path).name, lambda: load(path), found, settings))
    width, drawn = settings["random_width"], torch.Generator().manual_seed(1)
    ids = [torch.randint(4096, (settings["window"],), generator=drawn) for _ in range(count)]
    rows += outlier_rows(f"random, width {width}", lambda: random_model(width), ids, settings)
    return {"rows": rows}


if __name__ == "__main__":
    file, measure = Path(sys.argv[1]), {"text": measure_text, "outliers": measure_outliers}[sys.argv[2]]
    file.write_text(json.dumps(measure(json.loads(file.read_text()))))
