"""One shape of `families.py`: `python -m measurements.one_family SCALE SHAPE FOLDER [trace] [without_loops]` prints its
lines."""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import timing, workloads
from harness.lines import Line, failed
from harness.model_shapes import SHAPES, Shape
from harness.scale import SCALES, Scale

from measurements import tracing
from measurements.adapters import adapters_of, one_and_all
from measurements.training import collect, make_trainer, parameters_of, rate_line


def write_model(scale: Scale, shape: Shape, out: Path) -> int:
    """Write a model of `shape` (at tiny scale the family's tiny one) into `out`; return the size of its vocabulary."""
    import transformers
    from random_model import random_model
    from tinker_local.backend.tiny_models import make_tiny_text_model
    from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES

    make_tiny_text_model(out, family=shape.family, tie_word_embeddings=False)
    config = json.loads((out / "config.json").read_text())
    if scale.name == "full":
        for old in out.glob("*.safetensors"):
            old.unlink()
        config.pop("num_local_experts", None)  # another name of `num_experts` in some configs
        config |= shape.settings | {"dtype": "bfloat16"}
        model_class: Any = getattr(transformers, TEXT_FAMILIES[shape.family].model_class)
        model = random_model(model_class, model_class.config_class(**config))
        model.save_pretrained(out, max_shard_size="4GB")
    return int(config["vocab_size"])


def computed(config: dict[str, Any], parameters: int) -> int:
    """Of `parameters`, those that compute a token: of experts, the ones it is sent to."""
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    chosen = config.get("num_experts_per_tok", 0)
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    each = 3 * config["hidden_size"] * width * config["num_hidden_layers"]
    return parameters - (experts - chosen) * each


def ours(scale: Scale, name: str, folder: Path, parameters: int, *, embedding: int, trace: bool) -> None:
    """One adapter of rank 32 on all but the LM head, then the same tokens spread over several. `embedding`: of the
    `parameters`, those that only look tokens up."""
    trainer = make_trainer(scale, folder)
    with adapters_of(scale, trainer) as names:
        rate = one_and_all(scale, trainer, names, (f"{name}.ours", f"{name}.co_batched"), parameters)
    note = "4 FLOP per token and parameter that multiplies"
    Line(f"{name}.flops", 4e-12 * (parameters - embedding) * rate, "TFLOP/s", note=note).emit()
    if trace:
        tracing.measure(scale, folder, trainer, f"{name}.trace")
    trainer.close()


def loops(scale: Scale, name: str, folder: Path, parameters: int) -> None:
    """Packed loops by hand with adapters in bfloat16, without and with recomputation; linear attention by fla's kernels
    with the bounds of segments."""
    from baselines.family_loop import FamilyLoop

    data = workloads.ragged_sequences(scale)
    for line, recompute in (("packed_bf16", False), ("packed_bf16_recompute", True)):
        try:
            packed = FamilyLoop(scale, folder, data, recompute=recompute)
            seconds = timing.median_seconds(packed.step, scale, warmup=1)
            rate_line(f"{name}.{line}", sum(map(len, data)), seconds, parameters, packed.note).emit()
        except Exception as error:
            traceback.print_exc()
            failed(f"{name}.{line}", error).emit()
        packed = None
        collect()


def experts(scale: Scale, name: str, shape: Shape, config: dict[str, Any]) -> None:
    """Forward and backward of one layer's experts with an adapter, and the grouped products in them alone: those of
    the frozen matrices with activations and with their gradients. In rows per second of a micro-batch."""
    import torch
    from tinker_local.backend.training.experts import (
        SILU,
        ClampedGating,
        ExpertsKept,
        ExpertWeights,
        Routing,
        down,
        experts_backward,
        gate_and_up,
    )
    from tinker_local.backend.training.kernels import kernels_for
    from tinker_local.backend.training.lora_batch import LowRank

    device, dtype = timing.device(), torch.bfloat16 if timing.device() == "cuda" else torch.float32
    count, chosen = config.get("num_local_experts", config.get("num_experts")), config["num_experts_per_tok"]
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    rows, rank = scale.micro_batch_tokens, scale.rank

    def random(*sizes: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=like) * sizes[-1] ** -0.5

    torch.manual_seed(0)
    gating = ClampedGating(1.702, 7.0) if shape.family == "gpt_oss" else SILU
    weights = ExpertWeights(random(count, 2 * width, hidden), random(count, hidden, width), gating=gating)
    grads = {"like": torch.float32}
    first = LowRank(
        random(2 * rank, hidden),
        (random(count, width, rank), random(count, width, rank)),
        None,
        random(2 * rank, hidden, **grads),
        (random(count, width, rank, **grads), random(count, width, rank, **grads)),
    )
    second = LowRank(
        random(count, rank, width),
        (random(hidden, rank),),
        None,
        random(count, rank, width, **grads),
        (random(hidden, rank, **grads),),
    )
    x, grad = random(rows, hidden), random(rows, hidden)
    scores, places = torch.rand(rows, count, device=device).topk(chosen)
    scores = scores.to(dtype)
    kernels = kernels_for(torch.device(device), dtype)

    def both() -> None:
        routing = Routing.of(places, count)
        h, gate_up = gate_and_up(x, routing, weights, first)
        mid, _ = down(gate_up, scores, routing, weights, second, kernels)
        kept = ExpertsKept(gate_up, h, mid)
        experts_backward(grad, x, scores, routing, weights, kept, first, second, kernels)

    routing = Routing.of(places, count)
    pairs, wide, narrow = x[routing.tokens], random(len(routing.tokens), 2 * width), random(len(routing.tokens), width)

    def products() -> None:
        routing.groups.multiply(pairs, weights.gate_up.transpose(1, 2))
        routing.groups.multiply(narrow, weights.down.transpose(1, 2))
        routing.groups.multiply(pairs, weights.down)
        routing.groups.multiply(wide, weights.gate_up)

    for line, run in (("products", products), ("experts", both)):
        seconds = timing.median_seconds(run, dataclasses.replace(scale, repeats=20, warmup=5))
        note = f"one layer, {rows} rows to {chosen} of {count} experts, {1000 * seconds:.2f} ms"
        Line(f"{name}.{line}", rows / seconds, "rows/s", note=note).emit()


def main(arguments: list[str]) -> None:
    scale, name, folder = SCALES[arguments[0]], arguments[1], Path(arguments[2]) / "model"
    shape, trace = SHAPES[name], "trace" in arguments[3:]
    vocab = write_model(scale, shape, folder)
    collect()
    scale = dataclasses.replace(scale, text=dataclasses.replace(scale.text, vocab=vocab))
    config = json.loads((folder / "config.json").read_text())
    whole = parameters_of(folder)
    parameters = computed(config, whole)
    Line(f"{name}.parameters", whole / 1e9, "billion", note=f"{parameters / 1e9:.2f} of them compute a token").emit()
    steps: list[tuple[str, Callable[[], None]]] = [
        ("ours", lambda: ours(scale, name, folder, parameters, embedding=vocab * config["hidden_size"], trace=trace)),
    ]
    if shape.loop and "without_loops" not in arguments[3:]:
        steps.append(("packed_bf16", lambda: loops(scale, name, folder, parameters)))
    if shape.experts:
        steps.append(("experts", lambda: experts(scale, name, shape, config)))
    for line, step in steps:
        try:
            step()
        except Exception as error:
            traceback.print_exc()
            failed(f"{name}.{line}", error).emit()
        collect()
    sys.stdout.flush()
    os._exit(0)  # threads may hang a process that ends; all lines are printed by now


if __name__ == "__main__":
    np.random.seed(0)
    main(sys.argv[1:])
