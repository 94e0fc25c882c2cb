"""Gradients of groups of samples that begin with one prompt: each prompt computed once, and with each sample again.

Tokens count as the client sends them, prompts of all samples included."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import timing, workloads
from harness.lines import Line
from harness.scale import Scale

from measurements.images import examples
from measurements.training import make_trainer, parameters_of, rate_line, text_datum, work

Step = Callable[[], Sequence[Any]]

GROUPS = {
    "full": {"long": (2, 16, 2048, 512), "short": (8, 16, 256, 256)},
    "tiny": {"long": (1, 4, 64, 16), "short": (2, 4, 16, 16)},
}
"""How many groups, samples of each, tokens of a prompt and of a sample."""
PICTURES = {"full": (8, 16, 1024), "tiny": (2, 4, 128)}
"""How many groups, samples of each, and pixels of a side of its picture: 1,024 positions at full scale."""


def text(scale: Scale, models: Path) -> None:
    """Prints `prompts.long`, `.short` and `.apart` (sequences that share nothing), each with sharing and without."""
    steps = {name: _same(groups(scale, *sizes)) for name, sizes in GROUPS[scale.name].items()}
    steps["apart"] = _same([text_datum(each, "importance_sampling") for each in workloads.ragged_sequences(scale)])
    measure(scale, models / "text", steps)


def pictures(scale: Scale, models: Path) -> None:
    """Prints `prompts.pictures`, with pictures that are new in each step, and `.cached`."""
    count, samples, side = PICTURES[scale.name]
    shown = examples(dataclasses.replace(scale, images=count, image_side=side), models / "vl")
    data = [_sampled(datum, scale.image_text, seed) for datum in shown for seed in range(samples)]
    numbers = itertools.count()

    def new() -> Sequence[Any]:
        number = next(numbers)
        return [_renamed(datum, number) for datum in data]

    measure(scale, models / "vl", {"pictures": new, "cached": _same(data)})


def measure(scale: Scale, folder: Path, steps: dict[str, Step]) -> None:
    """Tokens per second of each step, in turns of both ways, and the peak memory of each."""
    from tinker_local.types import LoraConfig

    trainers = {way: make_trainer(scale, folder, share_prefixes=way == "shared") for way in ("alone", "shared")}
    for trainer in trainers.values():
        trainer.create_adapter("a", LoraConfig(rank=scale.rank, train_unembed=False))
    parameters = parameters_of(folder)
    for name, data_of in steps.items():
        peaks = dict.fromkeys(trainers, 0.0)

        def run(way: str, peaks: dict[str, float] = peaks, data_of: Step = data_of) -> None:
            timing.forget_peak()
            (result,) = trainers[way].forward_backward([work("a", data_of(), "importance_sampling")])
            if isinstance(result, Exception):
                raise result
            trainers[way].discard_gradients("a")
            timing.synchronize()
            peaks[way] = max(peaks[way], timing.peak_gib() or 0.0)

        ways = {way: (lambda way=way, run=run: run(way)) for way in trainers}
        found = timing.seconds_in_turns(ways, scale, at_once=1, warmup=scale.warmup, repeats=5)
        data = data_of()
        tokens = sum(datum.input.length for datum in data)
        for way, seconds in found.items():
            line = rate_line(f"prompts.{name}_{way}", tokens, seconds, parameters, f"{len(data)} data, {tokens} tokens")
            Line(line.name, line.value, line.unit, line.seconds, peaks[way] or None, line.note).emit()
    for trainer in trainers.values():
        trainer.close()


def groups(scale: Scale, count: int, samples: int, prompt: int, sampled: int) -> list[Any]:
    """Data of importance sampling with advantages on the sampled tokens alone."""
    prompts = workloads.sequences(scale, [prompt] * count)
    tails = iter(workloads.sequences(scale, [sampled] * (count * samples), seed=2))
    data = []
    for tokens in (np.concatenate([each, next(tails)]) for each in prompts for _ in range(samples)):
        datum = text_datum(tokens, "importance_sampling")
        datum.loss_inputs["advantages"][: prompt - 1] = 0
        data.append(datum)
    return data


def _sampled(datum: Any, length: int, seed: int) -> Any:
    """`datum` with `length` other tokens at its end, which alone count."""
    tokens = datum.input.token_ids.copy()
    tokens[-length:] = np.random.default_rng(seed).permutation(tokens[-length:])
    advantages = np.zeros(len(tokens), np.float32)
    advantages[-length - 1 : -1] = 1
    inputs = {"logprobs": np.full(len(tokens), -12, np.float32), "advantages": advantages}
    given = dataclasses.replace(datum.input, token_ids=tokens)
    return dataclasses.replace(
        datum, input=given, target_tokens=np.roll(tokens, -1).astype(np.int64), loss_inputs=inputs
    )


def _renamed(datum: Any, number: int) -> Any:
    """`datum` with a picture that no cache has."""
    placed = [
        dataclasses.replace(
            each, image=dataclasses.replace(each.image, content_hash=f"{each.image.content_hash}/{number}")
        )
        for each in datum.input.images
    ]
    return dataclasses.replace(datum, input=dataclasses.replace(datum.input, images=tuple(placed)))


def _same(data: Sequence[Any]) -> Step:
    return lambda: data
