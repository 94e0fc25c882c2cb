"""One optimizer step of LoRA training on 64 ragged sequences: hand-written loops and ours."""

import functools
import gc
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import timing, workloads
from harness.lines import Line, failed
from harness.scale import Scale

PEAK_FLOPS = 790e12
"""FLOP/s that an H200 or H100 reaches in bfloat16 matrix products."""


def rate_line(name: str, tokens: int, seconds: float, parameters: int, note: str = "") -> Line:
    """Tokens per second, and the share of the GPU's arithmetic that they use: 4 FLOP per parameter and token (forward,
    and backward to the activations; frozen weights have no gradient)."""
    peak = timing.peak_gib()
    rate = tokens / seconds
    if peak is not None:
        mfu = f"MFU {4 * parameters * rate / PEAK_FLOPS:.0%} of 790 TFLOP/s at 4N"
        note = f"{mfu}, {note}" if note else mfu
    return Line(name, rate, "tokens/s", seconds, peak, note)


def baseline(scale: Scale, models: Path, variant: str) -> None:
    """One hand-written loop."""
    from baselines.text_loop import VARIANTS, TextLoop

    name = f"text.{variant}"
    chosen = VARIANTS[variant]
    if chosen.liger and (timing.device() == "cpu" or importlib.util.find_spec("liger_kernel") is None):
        Line(name, skipped="needs a GPU and liger-kernel").emit()
        return
    data = workloads.ragged_sequences(scale)
    loop = TextLoop(scale, chosen, data)
    seconds = timing.median_seconds(loop.step, scale, warmup=1)
    rate_line(name, sum(map(len, data)), seconds, loop.parameters).emit()


AUTOGRAD = {"decoder": "autograd"}
"""Options of a trainer with the autograd decoder."""


def make_trainer(scale: Scale, folder: Path, *ranks: Any, **options: Any) -> Any:
    """Our trainer of the model in `folder`, on the device, in the baselines' types."""
    from tinker_local.backend.training.run.worker import HFTrainer
    from tinker_local.backend.training.trainer_config import TrainerConfig

    options = {"micro_batch_tokens": scale.micro_batch_tokens, **options}
    return HFTrainer(TrainerConfig(str(folder), name="bench", **options), *ranks)


def parameters_of(folder: Path) -> int:
    """The number of parameters in `folder`."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            total += sum(int(np.prod(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
    return total


def text_datum(tokens: workloads.Int64Array, loss_fn: str = "cross_entropy") -> Any:
    """A rendered datum that predicts at every position, as the hand-written loops do."""
    from tinker_local.backend.rendering.rendered_input import RenderedInput
    from tinker_local.backend.training.trainer import TrainDatum

    ones = np.ones(len(tokens), np.float32)
    inputs = {"weights": ones} if loss_fn == "cross_entropy" else {"logprobs": -12 * ones, "advantages": ones}
    return TrainDatum(RenderedInput(tokens.astype(np.int32)), np.roll(tokens, -1), inputs)


def work(adapter: str, data: Sequence[Any], loss_fn: str = "cross_entropy") -> Any:
    """The request of one client."""
    from tinker_local.backend.training.trainer import TrainWork

    return TrainWork(adapter, data, loss_fn)


def train_step(trainer: Any, works: Sequence[Any]) -> None:
    """Gradients of all works at once, then one update of each adapter; raises what failed."""
    from tinker_local.types import AdamParams

    for result in trainer.forward_backward(works):
        if isinstance(result, Exception):
            raise result
    for adapter in dict.fromkeys(item.adapter_id for item in works):
        trainer.optim_step(adapter, AdamParams(learning_rate=1e-5))


def ours(scale: Scale, models: Path, trainer: Any) -> None:
    """Our `trainer` with its defaults: without and with the LM head trained, another loss, one long sequence."""
    from tinker_local.types import LoraConfig

    parameters = parameters_of(models / "text")
    trainer.create_adapter("no_head", LoraConfig(rank=scale.rank, train_unembed=False))
    data = workloads.ragged_sequences(scale)
    tokens = sum(map(len, data))
    for name, adapter, loss_fn in (
        ("text.ours", "no_head", "cross_entropy"),
        ("text.ours_importance_sampling", "no_head", "importance_sampling"),
        ("text.ours_with_head", "with_head", "cross_entropy"),
    ):
        if adapter == "with_head":
            trainer.create_adapter("with_head", LoraConfig(rank=scale.rank))
        works = [work(adapter, [text_datum(sequence, loss_fn) for sequence in data], loss_fn)]
        try:
            seconds = timing.median_seconds(functools.partial(train_step, trainer, works), scale)
            rate_line(name, tokens, seconds, parameters, "float32 masters").emit()
        except Exception as error:
            failed(name, error).emit()
    _long_sequence(scale, trainer, parameters)
    trainer.remove_adapter("no_head")
    trainer.remove_adapter("with_head")


def autograd(scale: Scale, models: Path, trainer: Any) -> None:
    """Prints `text.autograd`: the autograd decoder with as much memory as it wants."""
    _one_adapter("text.autograd", scale, models, trainer)


def autograd_recompute(scale: Scale, models: Path) -> None:
    """Prints `text.autograd_recompute`: the autograd decoder that recomputes every layer."""
    _recompute("text.autograd_recompute", scale, models, AUTOGRAD)


def ours_recompute(scale: Scale, models: Path) -> None:
    """Prints `text.ours_recompute`: our trainer that recomputes every layer."""
    _recompute("text.ours_recompute", scale, models, {})


def _recompute(name: str, scale: Scale, models: Path, options: Mapping[str, Any]) -> None:
    trainer = make_trainer(
        scale,
        models / "text",
        micro_batch_tokens=scale.recompute_micro_batch_tokens,
        activation_memory_bytes=0,
        **options,
    )
    _one_adapter(name, scale, models, trainer, ", every layer recomputed")


def _one_adapter(name: str, scale: Scale, models: Path, trainer: Any, note: str = "") -> None:
    from tinker_local.types import LoraConfig

    trainer.create_adapter("no_head", LoraConfig(rank=scale.rank, train_unembed=False))
    data = workloads.ragged_sequences(scale)
    works = [work("no_head", [text_datum(sequence) for sequence in data])]
    seconds = timing.median_seconds(lambda: train_step(trainer, works), scale)
    rate_line(name, sum(map(len, data)), seconds, parameters_of(models / "text"), f"float32 masters{note}").emit()
    trainer.remove_adapter("no_head")


def _long_sequence(scale: Scale, trainer: Any, parameters: int) -> None:
    (tokens,) = workloads.sequences(scale, [scale.long_sequence])
    works = [work("no_head", [text_datum(tokens)])]
    try:
        seconds = timing.median_seconds(lambda: train_step(trainer, works), scale, repeats=1)
        rate_line("text.ours_long_sequence", len(tokens), seconds, parameters, f"one of {len(tokens)} tokens").emit()
    except Exception as error:
        failed("text.ours_long_sequence", error).emit()


def collect() -> None:
    """Collect garbage and return its memory to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
