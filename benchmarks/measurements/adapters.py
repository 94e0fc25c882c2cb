"""Many adapters in one pass: against one adapter, against PEFT one by one, and against our own single calls."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import timing, workloads
from harness.lines import Line
from harness.scale import Scale

from measurements.training import collect, parameters_of, rate_line, text_datum, train_step, work


def bare(scale: Scale, models: Path) -> None:
    """Several small runs one after another in a bare HF + PEFT loop; adapters in float32 and in the model's type."""
    from baselines.adapters_loop import AdaptersLoop

    length = scale.small_runs[0]
    for kind, bf16 in (("float32", False), ("bf16", True)):
        loop = AdaptersLoop(scale, length, bf16_adapters=bf16)
        seconds = timing.median_seconds(loop.step, scale, warmup=1)
        name = f"adapters.bare_{kind}"
        tokens = scale.adapters * length
        note = f"{scale.adapters} runs of {length} tokens, one after the other"
        Line(name, tokens / seconds, "tokens/s", seconds, timing.peak_gib(), note).emit()
        del loop
        collect()


def autograd(scale: Scale, models: Path, trainer: Any) -> None:
    """Prints `adapters.autograd_one` and `adapters.autograd_co_batched`."""
    with adapters_of(scale, trainer) as names:
        _one_and_all(scale, models, trainer, names, "adapters.autograd_")


def ours(scale: Scale, models: Path, trainer: Any) -> None:
    """Prints `adapters.one` and `.co_batched`, and small runs together in one call and apart in one call each."""
    with adapters_of(scale, trainer) as names:
        _one_and_all(scale, models, trainer, names, "adapters.")
        _small_runs(scale, models, trainer, names)


@contextlib.contextmanager
def adapters_of(scale: Scale, trainer: Any) -> Iterator[list[str]]:
    from tinker_local.types import LoraConfig

    names = [f"run_{index}" for index in range(scale.adapters)]
    for name in names:
        trainer.create_adapter(name, LoraConfig(rank=scale.rank, train_unembed=False))
    yield names
    for name in names:
        trainer.remove_adapter(name)


def _one_and_all(scale: Scale, models: Path, trainer: Any, names: list[str], prefix: str) -> None:
    lines = (f"{prefix}one", f"{prefix}co_batched")
    one_and_all(scale, trainer, names, lines, parameters_of(models / "text"))


def one_and_all(scale: Scale, trainer: Any, names: list[str], lines: tuple[str, str], parameters: int) -> float:
    """The same tokens in one step, under one adapter and spread over all, in turns; `lines` are the names of both.
    Returns the tokens per second of the first."""
    data = [text_datum(sequence) for sequence in workloads.ragged_sequences(scale)]
    tokens = sum(datum.input.length for datum in data)
    owners = dict(zip(lines, (names[:1], names), strict=True))
    steps = {
        line: functools.partial(
            train_step, trainer, [work(name, data[index :: len(each)]) for index, name in enumerate(each)]
        )
        for line, each in owners.items()
    }
    found = timing.seconds_in_turns(steps, scale, at_once=1, warmup=scale.warmup, repeats=2 * scale.repeats + 1)
    for line, step in steps.items():
        timing.forget_peak()
        step()
        count = len(owners[line])
        note = f"{count} adapter{'s' * (count > 1)}, {tokens} tokens in all"
        rate_line(line, tokens, found[line], parameters, note).emit()
    return tokens / found[lines[0]]


def _small_runs(scale: Scale, models: Path, trainer: Any, names: list[str]) -> None:
    parameters = parameters_of(models / "text")
    for kind, length in zip(("small", "smallest"), scale.small_runs, strict=True):
        sequences = workloads.sequences(scale, [length] * scale.adapters)
        works = [work(name, [text_datum(sequence)]) for name, sequence in zip(names, sequences, strict=True)]
        together = timing.median_seconds(lambda works=works: train_step(trainer, works), scale, repeats=5)

        def alone(works: list[object] = works) -> None:
            for item in works:
                train_step(trainer, [item])

        apart = timing.median_seconds(alone, scale, repeats=5)
        for way, seconds in (("together", together), ("apart", apart)):
            note = f"{scale.adapters} runs of {length} tokens"
            rate_line(f"adapters.{kind}_{way}", scale.adapters * length, seconds, parameters, note).emit()
