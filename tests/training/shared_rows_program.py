"""What one of several trainer ranks that share rows runs in the tests, as `rank_program.py`: EXTENT is "two" for two
ranks, "faults" for two of which one fails, and "four" for four ranks in several layouts.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker_local.backend.options import DecoderName
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.parallel.ranks import ONE_RANK, Ranks
from tinker_local.backend.training.run.packing import items_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import Seat, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import ApiError, LoraConfig

from tests.training import forked_row, rank_program
from tests.training.conftest import Maker
from tests.training.rank_program import IN_A_WALK, KINDS, deep, inject, make_trainer, places, run

FAMILIES = {
    "qwen2_5_vl": "written-out",
    "qwen3_moe": "written-out",
    "gpt_oss": "written-out",
    "gemma3_text": "written-out",
    "qwen3_5_text": "written-out",
    "qwen3_5_text by autograd": "autograd",
}
"""With biases; with experts; with sinks and windows; with layers of two kinds; with linear attention."""

DECODERS: tuple[DecoderName, ...] = ("written-out", "autograd")

IN_FLOAT32 = ("qwen3_moe", "gpt_oss")
"""Experts: torch has no grouped products of float64."""

TWO = ("image in float64", "text")
"""The trainers of two ranks."""

LAYOUTS = {
    "four share": ("image", 4, 1),
    "four share, in float64": ("image in float64", 4, 1),
    "four share, by autograd in float64": ("text in float64", 4, 1),
    "two share": ("image", 2, 1),
    "two share, sharded by four": ("image, sharded", 2, 4),
    "two share, sharded by two": ("text, sharded", 2, 2),
    "four share, sharded by two": ("text, sharded", 4, 2),
}
"""Of four ranks: the trainer, how many ranks share rows, and how many share weights."""


def of_tower(folder: Path, ranks: Ranks = ONE_RANK, context_parallel: int = 1) -> dict[str, Any]:
    """Gradients of adapters of which two train the vision tower, for images that lie where one rank's positions end:
    in one datum, and in another one that only the other adapter reads."""
    trainer = make_trainer(folder, "image in float64", ranks, context_parallel=context_parallel)
    trainer._budget.tokens = 256  # all in one row
    make = Maker(np.random.default_rng(8))
    picture = make.image(8, 8)
    only = {"train_attn": False, "train_mlp": False, "train_unembed": False, "train_vision": True}
    adapters = {"t": {"train_vision": True}, "u": {"train_vision": True}, "plain": {}, "only": only}
    for name, config in adapters.items():
        trainer.create_adapter(name, LoraConfig(rank=3, seed=len(name), **config))
        adapter = trainer._adapters[name]
        adapter.weights.copy_(torch.from_numpy(np.random.default_rng(len(name)).standard_normal(len(adapter.weights))))
        adapter.weights *= 0.05
    # Of one rank's images alone, by an adapter of nothing but the tower: the others go back through the decoder, too.
    alone = [TrainWork("only", [make.datum(40, [(1, (4, 4))])], "cross_entropy")]
    work = [
        TrainWork("t", [make.datum(24, [(4, picture)])], "cross_entropy"),
        TrainWork("u", [make.datum(30, [(3, picture)])], "cross_entropy"),
        TrainWork("plain", [make.datum(22, [(2, picture)]), make.datum(25)], "cross_entropy"),
    ]
    for call in (alone, work):
        results = trainer.forward_backward(call)
        assert not any(isinstance(result, ApiError) for result in results), results
    return {name: rank_program.gradient(trainer, name) for name in adapters}


def of_whole_data(folder: Path, ranks: Ranks = ONE_RANK, context_parallel: int = 1) -> dict[str, Any]:
    """Losses and gradients of one datum, whose positions depend on each other by their logprobs, on several ranks."""
    trainer = make_trainer(folder, "text in float64", ranks, context_parallel=context_parallel)
    rank_program.add_adapters(trainer)
    make = Maker(np.random.default_rng(9))
    found: dict[str, Any] = {}
    for loss in ("gspo", "stable_reinforce"):
        work = make.work("a", [37], loss)
        for backward in (True, False):
            (result,) = trainer.forward_backward([replace(work, backward=backward)])
            assert not isinstance(result, ApiError), result
            found[f"{loss} {backward}"] = np.array(result.metrics["loss:sum"])
        found[loss] = rank_program.gradient(trainer, "a")
        trainer.discard_gradients("a")
    return found


def of_family(folder: Path, family: str, ranks: Ranks = ONE_RANK, context_parallel: int = 1) -> Any:
    """The gradient of an adapter on a model of `family`."""
    decoder: Any = FAMILIES[family]
    path = folder / f"{family.split()[0]}_shared"
    if not path.exists():
        path = folder / family
    trainer = HFTrainer(
        TrainerConfig(
            str(path),
            name=family,
            dtype="float32" if family in IN_FLOAT32 else "float64",
            device="cpu",
            decoder=decoder,
            context_parallel=context_parallel,
        ),
        ranks,
    )
    trainer.create_adapter("a", LoraConfig(rank=4, seed=1))
    adapter = trainer._adapters["a"]
    noise = np.random.default_rng(1).standard_normal(len(adapter.weights))
    adapter.weights.copy_(torch.from_numpy(noise * 0.05))
    make = Maker(np.random.default_rng(7))
    alone = [make.work("a", lengths) for lengths in ([40, 3, 1, 26], [1])]  # also of fewer positions than ranks
    samples = TrainWork("a", make.group(make.input(21), (9, 9, 4)), "cross_entropy")
    # transformers' norms, which round to float32, see other sums of gradients where a group is split.
    for work in (*alone, *([samples] if decoder == "written-out" else [])):
        (result,) = trainer.forward_backward([work])
        assert not isinstance(result, ApiError), result
    return rank_program.gradient(trainer, "a")


def of_forks(folder: Path, ranks: Ranks = ONE_RANK, context_parallel: int = 1) -> dict[str, Any]:
    """Hidden states and gradients of a row where sequences share their beginning, by decoder, with layers of linear and
    of softmax attention."""
    lengths, parents = (20, 30, 1, 3, 2, 5, 40), (NO_PARENT, 0, 0, 1, NO_PARENT, 4, NO_PARENT)
    segments = Segments(lengths, torch.device("cpu"), parents=parents)
    noise = torch.Generator().manual_seed(3)
    found = {}
    for decoder in DECODERS:
        trainer = forked_row.made(folder / "qwen3_5_text_shared", decoder, ranks, context_parallel)
        width = trainer._loaded.model.config.get_text_config().hidden_size
        embeds, grad = torch.randn(2, sum(lengths), width, generator=noise, dtype=torch.float64)
        for name, tensor in forked_row.passed(trainer, segments, embeds, grad)._asdict().items():
            found[f"{name} by {decoder}"] = tensor.numpy()
    return found


def refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except (ApiError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def two(folder: Path, ranks: Ranks) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for label in TWO:
        trainer = make_trainer(folder, label, ranks, context_parallel=2)
        seen[label] = run(trainer, images=label.startswith("image"))
    make = Maker(np.random.default_rng(0))
    of_works = items_of([(0, make.work("a", [50, 60, 40, 2]))])  # micro-batches may have 64 positions on each rank
    planned = trainer._passes._rounds(of_works, beyond=True)
    seen["rounds"] = [[[item.length for item in items] for items in each] for each in planned]
    seen["tower"] = of_tower(folder, ranks, 2)
    seen["whole data"] = of_whole_data(folder, ranks, 2)
    seen["one KV head"] = refusal(
        lambda: HFTrainer(TrainerConfig(str(folder / "gpt_oss"), name="g", device="cpu", context_parallel=2), ranks)
    )
    return seen


def faults(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """What follows when the last rank fails. What allocates nothing cannot lack memory on one rank alone."""
    seen: dict[str, Any] = {}
    for label in ("image", "text", "text, sharded"):
        trainer = make_trainer(folder, label, ranks, context_parallel=2)
        rank_program.add_adapters(trainer)
        for place in places(label):
            for kind in KINDS:
                if (place, kind) != ("adding", "memory"):
                    seen[f"{label}: {kind} in {place}"] = inject(trainer, ranks, place, kind)
    trainer = deep(folder, "autograd", ranks, 2, 2)  # with gathers that others wait in
    rank_program.add_adapters(trainer)
    for place in IN_A_WALK["autograd"]:
        seen[f"deep: exception in {place}"] = inject(trainer, ranks, place, "exception")
    return seen


def four(folder: Path, ranks: Ranks) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for layout, (label, context_parallel, shards) in LAYOUTS.items():
        trainer = make_trainer(folder, label, ranks, shards, context_parallel)
        seen[layout] = run(trainer, images=label.startswith("image"))
    seen["tower"] = of_tower(folder, ranks, 4)
    for family in FAMILIES:
        seen[family] = of_family(folder, family, ranks, 2)
    seen["forks"] = of_forks(folder, ranks, 2)
    seen["three of four"] = refusal(lambda: make_trainer(folder, "text", ranks, context_parallel=3))
    return seen


def main(folder: Path, extent: str, rank: int, size: int, _: None) -> None:
    rank_program.begin(folder / f"{extent}-{rank}.trace")
    from tinker_local.backend.training.parallel.joined_ranks import JoinedRanks

    ranks = JoinedRanks(Seat(rank, size, str(folder / f"meeting-{extent}-{size}")), torch.device("cpu"))
    seen = {"two": two, "faults": faults, "four": four}[extent](folder, ranks)
    (folder / f"{extent}-{rank}-of-{size}.pickle").write_bytes(pickle.dumps(seen))
    os._exit(0)
