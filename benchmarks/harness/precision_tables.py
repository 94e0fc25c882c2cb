"""The texts and sizes of `precision_quality.py`, its statistics, and its page. Loads no model."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
BASES = ("dense", "int8", "int4")

SIZES: dict[str, Any] = {
    "windows": 3,
    "window": 256,
    "outlier_windows": 1,
    "factors": [4, 16, 64],
    "channels": 4,
    "random_width": 1024,
    "seeds": 3,
    "steps": 8,
    "batch": 2,
    "held_out": 8,
    "rank": 16,
    "learning_rate": 1e-3,
    "prompts": 8,
    "samples": 2,
    "tokens": 24,
}
"""`windows` of `window` tokens of each text; `outlier_windows` of one text with outliers, of `channels` channels, times
each of `factors` (powers of two, so that the dense function is the same to the bit); SFT of `steps` of `batch` examples
with each of `seeds`, and `held_out` examples; `samples` of `tokens` after each of `prompts`."""


def texts(model: Path) -> dict[str, str]:
    """Real texts by name, those that are there: of the model's folder, of a data set beside it, of Python's own
    documentation, and of this project."""
    import pydoc_data.topics

    found = {
        "Python's documentation": "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())),
        "this project's pages": (ROOT / "docs" / "how-it-works.md").read_text(),
    }
    if (licence := model / "LICENSE").is_file():
        found["Apache License 2.0"] = licence.read_text()
    if (questions := model.parent / "easy-vqa" / "train" / "questions.json").is_file():
        asked = json.loads(questions.read_text())
        found["easy-vqa's questions"] = "\n".join(f"{question} {answer}" for question, answer, _ in asked[:2000])
    return found


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by Student's t; infinite bounds for one number."""
    middle = statistics.fmean(differences)
    if len(differences) < 2:
        return middle, -math.inf, math.inf
    from scipy import stats  # type: ignore[import-untyped]

    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return middle, middle - half, middle + half


def distance(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> dict[str, float]:
    """`cosine` of two gradients, and the `relative` norm of their difference by that of `other`."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(one), np.linalg.norm(other)
    return {
        "cosine": float(one @ other / (norms[0] * norms[1])),
        "relative": float(np.linalg.norm(one - other) / norms[1]),
        "norms": float(norms[0] / norms[1]),
    }


def gradient_distances(work: Path) -> dict[str, dict[str, dict[str, float]]]:
    """How far the gradients on packed bases are from those on the dense one, by adapter and by base; and those of
    another batch on the dense one, which is how far data alone moves them."""
    kept = {base: np.load(work / f"gradients-{base}.npz") for base in BASES}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for adapter in ("new", "trained"):
        dense = kept["dense"][f"{adapter}.0"]
        found[adapter] = {base: distance(kept[base][f"{adapter}.0"], dense) for base in BASES[1:]}
        found[adapter]["another batch, dense"] = distance(kept["dense"][f"{adapter}.1"], dense)
    return found


def page(found: Mapping[str, Any]) -> str:
    """The tables, as Markdown."""
    parts, sizes = found["parts"], found["sizes"]
    lines = ["# What a base in 8 or 4 bits costs", "", *(f"- {line}" for line in found["machine"])]
    lines += [f"- model: {found['model']}, float32", ""]
    if "text" in parts:
        lines += _text(parts["text"], sizes)
    if "outliers" in parts:
        lines += _outliers(parts["outliers"], sizes)
    if "gradients" in parts:
        lines += _engines(parts, sizes)
    took = [(name, part) for name, part in parts.items() if "seconds" in part]
    words = (f"{name} {part['seconds']:.0f} ({part['processor_seconds']:.0f})" for name, part in took)
    lines += [f"Seconds, and in brackets those of processors: {', '.join(words)}."]
    return "\n".join(lines) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---", *["---:"] * (len(header) - 1)]
    return [*(f"| {' | '.join(row)} |" for row in (header, marks, *rows)), ""]


def between(three: Sequence[float], digits: int = 4) -> str:
    """A mean and its interval."""
    return f"{three[0]:+.{digits}f} ({three[1]:+.{digits}f} to {three[2]:+.{digits}f})"


def _text(part: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    lines = ["## Perplexity and KL", ""]
    rows = []
    for name, by_base in part["texts"].items():
        perplexities = [f"{math.exp(statistics.fmean(by_base[base]['nats'])):.2f}" for base in BASES]
        rows.append([name, *perplexities, *(f"{by_base[base]['kl']:.4f}" for base in BASES[1:])])
    nats = {base: [n for by_base in part["texts"].values() for n in by_base[base]["nats"]] for base in BASES}
    kls = {base: statistics.fmean(by_base[base]["kl"] for by_base in part["texts"].values()) for base in BASES[1:]}
    rows.append(
        ["all", *(f"{math.exp(statistics.fmean(nats[b])):.2f}" for b in BASES), *(f"{kls[b]:.4f}" for b in BASES[1:])]
    )
    lines += table(["text", "dense", "int8", "int4", "KL(dense, int8)", "KL(dense, int4)"], rows)
    for base in BASES[1:]:
        paired = interval([b - a for a, b in zip(nats["dense"], nats[base], strict=True)])
        tails = part["tails"][base]
        lines.append(
            f"- {base}: {between(paired)} nats per token more than dense, the mean of {len(nats[base])} windows of "
            f"{sizes['window']} tokens and its 95 % interval; KL of a token: median {tails['median']:.4f}, 99 % below "
            f"{tails['99']:.3f}; the likeliest token is another at {100 * tails['other']:.1f} % of positions"
        )
    lines += ["", "### Matrices", ""]
    rows = [[base, *(f"{part['matrices'][base][of]:.4f}" for of in ("all", "largest", "normal"))] for base in BASES[1:]]
    lines += table(["", "error of all, by norm", "of the worst matrix", "of normal numbers in these shapes"], rows)
    groups = (f"of {' and '.join(map(str, part['groups'][base]))} in {base}" for base in BASES[1:])
    lines += [f"Groups {', '.join(groups)}.", "", "### Ways to round in 4 bits", ""]
    rows = [
        [
            each["name"],
            f"{each['bits']:g}",
            "another" if each["shuffled"] else "theirs",
            f"{each['error']:.4f}",
            f"{each['nats']:+.4f}",
            f"{each['kl']:.4f}",
        ]
        for each in part["roundings"]
    ]
    lines += table(["", "bits", "order of columns", "error, by norm", "nats, less dense", "KL(dense, it)"], rows)
    lines += [
        "Matrices with their columns in another order have the same function, and other groups: none is one that a "
        "file in fewer bits had before. NF4 is emulated, as bitsandbytes loads it without double quantization.",
        "",
    ]
    return lines


def _outliers(part: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    channels = sizes["channels"]
    lines = [
        "## Outlier channels",
        "",
        f"{channels} input channels of q, k, v, gate and up of each layer times a factor, and those of the norm before "
        "them by it: the dense function stays.",
        "",
    ]
    rows = [
        [
            row["model"],
            str(row["factor"]),
            *(f"{row[base]['nats'] - row['dense_nats']:+.4f}" for base in BASES[1:]),
            *(f"{row[base]['kl']:.4f}" for base in BASES[1:]),
            *(f"{row[base]['logits']:.3f}" for base in BASES[1:]),
        ]
        for row in part["rows"]
    ]
    header = ["model", "factor", "nats, int8 less dense", "int4 less dense", "KL(dense, int8)", "KL(dense, int4)"]
    return (
        lines + table([*header, "logits, int8", "int4"], rows) + ["Logits: the norm of their difference by theirs.", ""]
    )


def _engines(parts: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    of = {base: parts[f"engines.{base}"] for base in BASES}
    lines = ["## Gradients of the adapter", ""]
    rows = [
        [adapter, other, f"{each['cosine']:.4f}", f"{each['relative']:.4f}", f"{each['norms']:.4f}"]
        for adapter, by_base in parts["gradients"].items()
        for other, each in by_base.items()
    ]
    lines += table(["adapter", "beside dense", "cosine", "norm of the difference", "norm"], rows)
    lines += ["Norms by that of dense.", "", "## SFT", ""]
    rows = []
    for base in BASES:
        before, after = of[base]["before"], of[base]["after"]
        moved = [] if base == "dense" else [of["dense"]["moved"][base]]
        cells = [f"{before:.4f}", f"{statistics.fmean(after):.4f}"]
        cells.append("" if base == "dense" else between(_paired(after, of["dense"]["after"])))
        cells.append(between(_paired(moved[0], of["dense"]["after"])) if moved else "")
        rows.append([base, *cells])
    header = ["base", "held out before", "after", "after, less dense", "on the dense base after, less dense"]
    lines += table(header, rows)
    lines += [
        f"Nats per token of the answers to {sizes['held_out']} worked sums; {sizes['steps']} steps of "
        f"{sizes['batch']}, rank {sizes['rank']}, learning rate {sizes['learning_rate']:g}; means of {sizes['seeds']} "
        "seeds, and differences paired by seed with their 95 % interval (Student's t). Last column: the adapter that "
        "learned on the packed base, with the dense one.",
        "",
        "## Samples",
        "",
    ]
    rows = [
        [
            base,
            str(of[base]["samples"]["count"]),
            *(f"{of[base]['samples'][key]:.1e}" for key in ("v1", "v2", "largest")),
            *(f"{of[base]['samples'][key]:.1f}" for key in ("many", "one")),
            f"{of[base]['training']:.0f}",
        ]
        for base in BASES
    ]
    at_once = sizes["prompts"] * sizes["samples"]
    header = ["base", "tokens", "KL v1", "KL v2", "largest", f"{at_once} at once, tokens/s", "one, tokens/s"]
    lines += table([*header, "training, tokens/s"], rows)
    lines += [
        "KL(sampler, trainer) of sampled tokens in nats: v1 the mean of the difference, v2 half its mean square.",
        "",
    ]
    return lines


def _paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    return interval([a - b for a, b in zip(one, other, strict=True)])
