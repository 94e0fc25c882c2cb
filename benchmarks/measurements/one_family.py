"""One shape of `families.py`, as lines: `python -m measurements.one_family SCALE SHAPE FOLDER [trace] [parts]
[only_parts] [without_loops]`."""

import dataclasses
import itertools
import json
import os
import sys
import time
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
from measurements.training import collect, make_trainer, parameters_of, rate_line, text_datum, train_step, work


def write_model(scale: Scale, shape: Shape, out: Path, *, weights: bool = True) -> dict[str, Any]:
    """Write a model of `shape` (at tiny scale the family's tiny one) into `out`, unless without `weights`; return its
    configuration."""
    import transformers
    from random_model import random_model
    from tinker_local.backend.tiny_models import make_tiny_text_model
    from tinker_local.backend.tiny_models.shapes import TextShape
    from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES

    # 32 divides the rows of these experts, so that they can be packed.
    tiny = TextShape(intermediate_size=256) if shape.family == "qwen3_moe" else None
    make_tiny_text_model(out, family=shape.family, tie_word_embeddings=False, shape=tiny)
    config = json.loads((out / "config.json").read_text())
    if scale.name == "full":
        for old in out.glob("*.safetensors"):
            old.unlink()
        config.pop("num_local_experts", None)  # another name of `num_experts` in some configs
        config.pop("layer_types", None)  # as many as the tiny model has
        config |= shape.settings | {"dtype": "bfloat16"}
        if not weights:
            return config
        model_class: Any = getattr(transformers, TEXT_FAMILIES[shape.family].model_class)
        model = random_model(model_class, model_class.config_class(**config))
        model.save_pretrained(out, max_shard_size="4GB")
        config = json.loads((out / "config.json").read_text())
    return config


def computed(config: dict[str, Any], parameters: int) -> int:
    """Of `parameters`, those that compute a token: of experts, the ones it is sent to."""
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    chosen = config.get("num_experts_per_tok", 0)
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    each = 3 * config["hidden_size"] * width * config["num_hidden_layers"]
    return parameters - (experts - chosen) * each


def ours(
    scale: Scale, name: str, shape: Shape, folder: Path, parameters: int, embedding: int, words: list[str]
) -> None:
    """One adapter of rank 32 on all but the LM head, then the same tokens spread over several, and one adapter again
    with less memory. `embedding`: of the `parameters`, those that only look tokens up."""
    trainer = make_trainer(scale, folder)
    with adapters_of(scale, trainer) as names:
        rate = one_and_all(scale, trainer, names, (f"{name}.ours", f"{name}.co_batched"), parameters)
        note = "4 FLOP per token and parameter that multiplies"
        Line(f"{name}.flops", 4e-12 * (parameters - embedding) * rate, "TFLOP/s", note=note).emit()
        if "parts" in words:
            halves_of_a_step(scale, name, trainer, names)
    if shape.memory_gib is not None:
        try:
            limited(scale, name, trainer, parameters, shape.memory_gib)
        except Exception as error:
            traceback.print_exc()
            failed(f"{name}.limited", error).emit()
    if "trace" in words:
        tracing.measure(scale, folder, trainer, f"{name}.trace")
    trainer.close()


def limited(scale: Scale, name: str, trainer: Any, parameters: int, gib: int) -> None:
    """One adapter alone, with `gib` GiB for the whole process: weights, activations and what the driver takes."""
    import torch

    collect()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        driver = total - free - torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((gib * 2**30 - driver) / total)
    one = dataclasses.replace(scale, adapters=1)
    data = [text_datum(sequence) for sequence in workloads.ragged_sequences(scale)]
    with adapters_of(one, trainer) as names:
        seconds = timing.median_seconds(lambda: train_step(trainer, [work(names[0], data)]), scale)
    tokens = sum(datum.input.length for datum in data)
    note = f"1 adapter, at most {gib} GiB, {allocator()}, micro-batches of {trainer.micro_batch_tokens}"
    rate_line(f"{name}.limited", tokens, seconds, parameters, note).emit()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def allocator() -> str:
    """How often torch's allocator had to empty its cache, and ran out of memory, since the process began."""
    import torch

    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return f"{stats.get('num_alloc_retries', 0)} allocator retries, {stats.get('num_ooms', 0)} out of memory"


def halves_of_a_step(scale: Scale, name: str, trainer: Any, names: list[str]) -> None:
    """Milliseconds of the gradients and of the updates of a step, under one adapter and under all."""
    from tinker_local.types import AdamParams

    data = [text_datum(sequence) for sequence in workloads.ragged_sequences(scale)]
    for owners in (names[:1], names):
        works = [work(adapter, data[index :: len(owners)]) for index, adapter in enumerate(owners)]

        def gradients(works: list[Any] = works) -> None:
            for adapter in names:
                trainer.discard_gradients(adapter)
            for result in trainer.forward_backward(works):
                if isinstance(result, Exception):
                    raise result

        def updates(owners: list[str] = owners) -> None:
            for adapter in owners:
                trainer.optim_step(adapter, AdamParams(learning_rate=0.0))

        for half, run in (("gradients", gradients), ("updates", updates)):
            seconds = timing.median_seconds(run, scale, warmup=1)
            note = f"{len(owners)} adapters, {allocator()}"
            Line(f"{name}.{half}_{len(owners)}", 1000 * seconds, "ms a step", note=note).emit()


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


def experts(scale: Scale, name: str, shape: Shape, config: dict[str, Any], *, parts: bool) -> None:
    """Forward and backward of a layer's experts with an adapter, and the grouped products in them alone: those of the
    frozen matrices with activations and with their gradients. In rows per second of a micro-batch, in turns, as many
    layers in a row as the model has. `parts`: also of several adapters, without the fused kernels, and the kernels'
    times."""
    import torch
    from tinker_local.backend.training.kernels.choose_kernels import kernels_for
    from tinker_local.backend.training.model.experts import SILU, ClampedGating, ExpertWeights, Routing
    from tinker_local.backend.weights.dense import DenseStack

    device, dtype = timing.device(), torch.bfloat16 if timing.device() == "cuda" else torch.float32
    count, chosen = config.get("num_local_experts", config.get("num_experts")), config["num_experts_per_tok"]
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    rows, layers = scale.micro_batch_tokens, config["num_hidden_layers"]

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype) * sizes[-1] ** -0.5

    torch.manual_seed(0)
    gating = ClampedGating(1.702, 7.0) if shape.family == "gpt_oss" else SILU
    weights = ExpertWeights(
        DenseStack(random(count, 2 * width, hidden)), DenseStack(random(count, hidden, width)), gating=gating
    )
    x, grad = random(rows, hidden), random(rows, hidden)
    scores, places = torch.rand(rows, count, device=device).topk(chosen)
    layer = ExpertsLayer(x, grad, scores.to(dtype), places, weights, scale.rank)
    routing = Routing.of(places, count, None, kernels_for(torch.device(device), dtype))
    pairs, wide, narrow = x[routing.tokens], random(len(routing.tokens), 2 * width), random(len(routing.tokens), width)

    def products() -> None:
        weights.gate_up.times(pairs, routing.groups)
        weights.down.times(narrow, routing.groups)
        weights.down.back(pairs, routing.groups)
        weights.gate_up.back(wide, routing.groups)

    alone = layer.pass_of(1)
    plain = ", without fused kernels"

    def measure(steps: dict[str, tuple[str, Callable[[], None]]]) -> None:
        found = timing.seconds_in_turns(
            {line: run for line, (_, run) in steps.items()}, scale, at_once=layers, warmup=5, repeats=15
        )
        for line, seconds in found.items():
            note = f"{rows} rows to {chosen} of {count} experts, {1000 * seconds:.2f} ms, {layers} layers in a row"
            Line(f"{name}.{line}", rows / seconds, "rows/s", note=note + steps[line][0]).emit()

    measure({"products": ("", products), "experts": ("", alone)})
    if parts:
        several = {f"experts_of_{n}": (f", {n} adapters", layer.pass_of(n)) for n in sorted({3, scale.adapters})}
        measure(several)
        measure(
            {
                "experts_plain": (plain, layer.pass_of(1, fused=False)),
                "experts_plain_of_3": (f", 3 adapters{plain}", layer.pass_of(3, fused=False)),
            }
        )
    waits_for_device(f"{name}.experts", alone)
    if parts:
        for line, run in (("experts", alone), ("experts_of_3", layer.pass_of(3))):
            tracing.kernels(run, f"{name}.{line}")


def linear_attention(scale: Scale, name: str, config: dict[str, Any]) -> None:
    """The part of a layer of linear attention between its projections, forward and backward, in rows per second of a
    micro-batch, whether it waits for the device, and the kernels' times."""
    import torch
    from tinker_local.backend.training.kernels.delta_rule import DeltaRule, MixInputs, kernels_for, mix, mix_backward
    from tinker_local.backend.training.model.segments import Segments

    device, dtype = torch.device(timing.device()), torch.bfloat16 if timing.device() == "cuda" else torch.float32
    heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    sizes = config["linear_key_head_dim"], config["linear_value_head_dim"]
    values = heads[1] * sizes[1]
    channels = 2 * heads[0] * sizes[0] + values
    lengths = workloads.ragged_lengths(scale)
    lengths = lengths[: sum(end <= scale.micro_batch_tokens for end in itertools.accumulate(lengths))]
    rows = sum(lengths)
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    rate = torch.rand(heads[1], device=device)
    rule = DeltaRule(random(channels, 4), rate, random(heads[1]), random(sizes[1]), 1e-6, *heads, *sizes)
    inputs = MixInputs(random(rows, channels), random(rows, values), random(rows, heads[1]), random(rows, heads[1]))
    grad, segments = random(rows, values), Segments(tuple(lengths), device)

    def run() -> None:
        mix(inputs, segments, rule)
        mix_backward(grad, inputs, segments, rule)

    start = time.perf_counter()
    run()
    timing.synchronize()
    first = time.perf_counter() - start
    seconds = timing.median_seconds(run, dataclasses.replace(scale, repeats=20, warmup=5))
    note = f"one layer, {len(lengths)} segments, {1000 * seconds:.2f} ms, the first time {first:.0f} s"
    Line(f"{name}.delta_rule", rows / seconds, "rows/s", note=f"{note}; {kernels_for(device, dtype)[1]}").emit()
    waits_for_device(f"{name}.delta_rule", run)
    tracing.kernels(run, f"{name}.delta_rule")


def waits_for_device(line: str, run: Callable[[], None]) -> None:
    """Whether an operation of `run`, which has run before, makes the host wait: an error then."""
    import torch

    if timing.device() != "cuda":
        return
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
        Line(f"{line}_wait", 0, "operations that wait for the device").emit()
    except Exception as error:
        traceback.print_exc()
        failed(f"{line}_wait", error).emit()
    torch.cuda.set_sync_debug_mode("default")


@dataclasses.dataclass(frozen=True)
class ExpertsLayer:
    """Rows [T, H], their gradient, scores and experts [T, K], frozen matrices, and the rank of adapters."""

    x: Any
    grad: Any
    scores: Any
    experts: Any
    weights: Any
    rank: int

    def pass_of(self, adapters: int, *, fused: bool = True) -> Callable[[], None]:
        """Forward and backward with as many adapters, each of as many rows."""
        import torch
        from tinker_local.backend.training.kernels.choose_kernels import kernels_for
        from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, Target, groups_of, layout
        from tinker_local.backend.training.lora.lora_batch import LoraBatch
        from tinker_local.backend.training.model.experts import (
            ExpertsKept,
            Routing,
            down,
            experts_backward,
            gate_and_up,
        )
        from tinker_local.types import LoraConfig

        (tokens, hidden), down_matrices = self.x.shape, self.weights.down
        count, width = down_matrices.count, down_matrices.inputs
        targets = [
            Target("w1", "experts.gate_up", "w1", 0, hidden, width, "mlp", count, "A"),
            Target("w3", "experts.gate_up", "w3", 0, hidden, width, "mlp", count, "A"),
            Target("w2", "experts.down", "w2", 0, width, hidden, "mlp", count, "B"),
        ]
        config = LoraConfig(rank=self.rank)
        specs = layout(targets, config)
        slices = []
        for index in range(adapters):
            numbers = torch.randn(specs[-1].stop, device=self.x.device) * 0.02
            start, stop = (tokens * at // adapters for at in (index, index + 1))
            slices.append(AdapterSlice(Adapter(config, specs, numbers), start, stop))
        batch = LoraBatch(groups_of(targets), slices, self.x.dtype, torch.float32, gradient=True)
        first, second = batch.group("experts.gate_up"), batch.group("experts.down")
        assert first is not None
        kernels: Any = kernels_for(self.x.device, self.x.dtype)
        if not fused:
            kernels = type("Plain", (type(kernels),), {"experts": None})()

        def run() -> None:
            routing = Routing.of(self.experts, count, first.owners, kernels)
            h, gate_up = gate_and_up(self.x, routing, self.weights, first, kernels)
            mid, _ = down(gate_up, h, self.scores, routing, self.weights, first, second, kernels)
            kept = ExpertsKept(gate_up, h, mid)
            experts_backward(self.grad, self.x, self.scores, routing, self.weights, kept, first, second, kernels)

        return run


def main(arguments: list[str]) -> None:
    scale, name, folder, words = SCALES[arguments[0]], arguments[1], Path(arguments[2]) / "model", arguments[3:]
    shape, steps = SHAPES[name], list[tuple[str, Callable[[], None]]]()
    config = write_model(scale, shape, folder, weights="only_parts" not in words)
    collect()
    scale = dataclasses.replace(scale, text=dataclasses.replace(scale.text, vocab=config["vocab_size"]))
    if "only_parts" not in words:
        whole = parameters_of(folder)
        parameters, embedding = computed(config, whole), config["vocab_size"] * config["hidden_size"]
        Line(
            f"{name}.parameters", whole / 1e9, "billion", note=f"{parameters / 1e9:.2f} of them compute a token"
        ).emit()
        steps.append(("ours", lambda: ours(scale, name, shape, folder, parameters, embedding, words)))
        if shape.loop and "without_loops" not in words:
            steps.append(("packed_bf16", lambda: loops(scale, name, folder, parameters)))
    if "parts" in words and "linear_num_key_heads" in config:
        steps.append(("delta_rule", lambda: linear_attention(scale, name, config)))
    if shape.experts:
        steps.append(("experts", lambda: experts(scale, name, shape, config, parts="parts" in words)))
    if not steps:
        Line(name, skipped="none of its layers is measured alone").emit()
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
