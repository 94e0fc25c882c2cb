"""What an embedding and an LM head in 8 bits cost in quality, beside layers in any precision.

    python benchmarks/head_quality.py benchmarks/results/head_quality-DATE.md --model .test-files/smollm2

Nats per token of the texts of `precision_quality.py`, and KL of whole distributions, each beside the same layers with
embedding and head as the model has them. By transformers' modules in float32, on a CPU. Some minutes on one core.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import machine
from harness.precision_tables import SIZES, between, interval, table
from measurements.precision_text import divergence, load, log_probabilities, nats, packed, windows
from tinker_local.backend.weights.packed_vocabulary import is_tied, pack_vocabulary

LAYERS = ("dense", "int8", "int4")
HEAD = "int8"


def of_layers(layers: str, model_path: str, found: dict[str, list[torch.Tensor]]) -> list[str]:
    """A row: with embedding and head in 8 bits, and without."""
    model = packed(load(model_path), layers)
    ids_of = [ids for windows_of in found.values() for ids in windows_of]
    before = [log_probabilities(model, ids) for ids in ids_of]
    pack_vocabulary(model, HEAD)
    moved, kl, others = [], [], []
    for ids, rows in zip(ids_of, before, strict=True):
        after = log_probabilities(model, ids)
        moved.append(nats(after, ids) - nats(rows, ids))
        kl.append(divergence(rows, after))
        others.append(after.argmax(-1) != rows.argmax(-1))
    every = torch.cat(kl)
    return [
        layers,
        f"{statistics.fmean(nats(rows, ids) for ids, rows in zip(ids_of, before, strict=True)):.4f}",
        between(interval(moved)),
        f"{float(every.mean()):.5f}, {float(every.median()):.5f}, {float(every.quantile(0.99)):.4f}",
        f"{100 * float(torch.cat(others).float().mean()):.1f} %",
    ]


def measure(options: argparse.Namespace) -> Iterator[str]:
    path, began = str(options.model), time.monotonic()
    model = load(path)
    tied = "tied" if is_tied(model) else "not tied"
    yield from ("# What an embedding and an LM head in 8 bits cost", "")
    yield from (f"- {line}" for line in machine.describe())
    sizes = f"{model.lm_head.out_features:,} x {model.lm_head.in_features:,}, {tied}"
    yield f"- model: {options.model.name}, float32; embedding and head {sizes}"
    del model
    found = windows(path, SIZES, options.windows)
    count = sum(map(len, found.values()))
    yield from ("", f"{count} windows of {SIZES['window']} tokens of {', '.join(found)}.", "")
    header = [
        "layers",
        "nats per token",
        "more with the head in int8",
        "KL: mean, median, 99 %",
        "other likeliest token",
    ]
    yield from table(header, [of_layers(layers, path, found) for layers in LAYERS])
    yield "Means, with the 95 % interval of differences paired by window (Student's t). Both have the same layers."
    yield f"{time.monotonic() - began:.0f} s."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of the result")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--windows", type=int, default=SIZES["windows"], help="of each text")
    options = parser.parse_args()
    text = "\n".join(measure(options)) + "\n"
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
