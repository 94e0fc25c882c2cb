"""What one of several trainer ranks runs in the tests, each in a process that runs `main`.

Each rank makes the same calls, and writes what it saw into `FOLDER/EXTENT-RANK-of-SIZE.pickle`. EXTENT: "all", or
"short" for a part of them, or "copies" for those of sharded weights of which two ranks hold a copy.
"""

import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.training.lora import lora
from tinker_local.backend.training.lora.lora import Adapter
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.model.decoders import autograd
from tinker_local.backend.training.model.decoders.autograd import AutogradPass
from tinker_local.backend.training.model.decoders.written_out.attention_block import AttentionPass
from tinker_local.backend.training.model.decoders.written_out.layers import WrittenOutPass
from tinker_local.backend.training.model.decoders.written_out.mlp_block import MlpPass
from tinker_local.backend.training.optimizers.adamw import ADAMW
from tinker_local.backend.training.parallel.peer_memory import Handle, HostMemory
from tinker_local.backend.training.parallel.ranks import ONE_RANK, Ranks
from tinker_local.backend.training.run import passes, worker
from tinker_local.backend.training.run.micro_batch import MicroBatchRunner
from tinker_local.backend.training.run.passes import Passes
from tinker_local.backend.training.run.tally import Tally
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import Seat, TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import AdamParams, ApiError, LoraConfig

from tests.training.conftest import Maker
from tests.training.shard_memory import measured

TRAINERS = {
    "image": ("qwen3_vl", "written-out", "float32"),
    "image in float64": ("qwen3_vl", "written-out", "float64"),
    "text": ("qwen3_untied", "autograd", "float32"),
    "text in float64": ("qwen3_untied", "autograd", "float64"),
}
"""Model, decoder, dtype."""

SHARDED = {f"{label}, sharded": label for label in TRAINERS}
"""The same with weights of which each rank holds a part."""

BY_COLLECTIVES = ("text, sharded", "image in float64, sharded", "gemma3_text", "autograd")
"""Labels, models and decoders whose parts FSDP2 gathers; the others are read from the memory of other ranks."""

LABELS = [*TRAINERS, *SHARDED]

OTHER_FAMILIES = {"qwen2_5_vl": "written-out", "gemma3_text": "written-out", "gpt_oss": "written-out"}
"""With biases; with layers of two kinds and a tied LM head; with experts."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"rank": 4},
    "b": {"rank": 1, "seed": 2, "train_unembed": False},
    "c": {"rank": 9, "seed": 3, "train_mlp": False},
    "head": {"rank": 2, "seed": 4, "train_attn": False, "train_mlp": False},
}

POLICY_LOSSES = [name for name in LOSSES if name != "cross_entropy"]

STEP = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)


def works(seed: int, *, images: bool) -> dict[str, list[TrainWork]]:
    """Calls of `forward_backward` by what they try; the same for the same seed."""
    make = Maker(np.random.default_rng(seed))
    calls = {
        "several adapters": [make.work(name, [5 + 3 * at, 20, 7, 31, 12, 9]) for at, name in enumerate(ADAPTERS)],
        "all losses": [make.work("abc"[at % 3], [9, 17, 6 + at], name) for at, name in enumerate(POLICY_LOSSES)],
        "candidates": [TrainWork("a", [make.datum(n, candidates=3) for n in (11, 6, 25)], "cross_entropy")],
        "one datum": [make.work("c", [40])],
        "two data": [make.work("a", [13]), make.work("b", [8])],
        "forward only": [make.work("a", [10, 20, 33], backward=False), make.work("b", [10, 14])],
        "a request that fails": [make.work("a", [12, 9]), _infinite(make), make.work("c", [14, 21, 7])],
        "a datum that is too long": [make.work("a", [600]), make.work("b", [6])],
    }
    if images:
        picture = make.image(4, 4)
        mixed = [make.datum(20, [(2, picture)]), make.datum(9), make.datum(33, [(1, (4, 8)), (20, picture)])]
        alone = [make.datum(9), make.datum(9), make.datum(30, [(4, (8, 8))]), make.datum(9)]
        calls["images and text"] = [TrainWork("a", mixed, "cross_entropy"), make.work("b", [15, 11, 6])]
        calls["an image on one rank"] = [TrainWork("c", alone, "cross_entropy")]
        both = [make.datum(30, [(4, (8, 8))]), make.datum(29, [(2, (4, 8))])]
        calls["images on two ranks"] = [TrainWork("a", both, "cross_entropy")]
        # Larger than a micro-batch. transformers' norms round to float32, and what they round depends on the split.
        group = make.group(make.input(30), (5, 9, 9, 14, 1, 20, 3))
        calls["samples of one prompt"] = [TrainWork("a", group, "cross_entropy")]
    return calls


def _infinite(make: Maker) -> TrainWork:
    """A request whose loss is not finite, in its second datum."""
    work = make.work("b", [10, 11, 12])
    weights = np.full(11, np.inf, np.float32)
    return replace(work, data=[work.data[0], replace(work.data[1], loss_inputs={"weights": weights}), work.data[2]])


@dataclass
class Seen:
    """What one rank saw of a trainer: `results` of each call, `gradients` and `norms` by a label and adapter, the
    adapters at the end, and the errors of injected faults with what the next call computed."""

    results: dict[str, list[TrainResult | str]] = field(default_factory=dict)
    gradients: dict[tuple[str, str], Any] = field(default_factory=dict)
    norms: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    logprobs: Any = None
    images_encoded: int = 0
    saved: dict[str, AdapterState] = field(default_factory=dict)
    trained: dict[str, AdapterState] = field(default_factory=dict)
    faults: dict[str, "Fault"] = field(default_factory=dict)


@dataclass
class Fault:
    """`error`: of the call in which rank `size - 1` failed; None if it succeeded. `same`: whether the adapter, its
    moments and its gradient were then as before (or, after a success, as they must be). `again`: whether the same call
    without the fault gave what it gives without faults."""

    error: str | None
    same: bool
    again: bool


def add_adapters(trainer: HFTrainer) -> None:
    """The adapters of `ADAPTERS`, with a B that is not 0."""
    for name, config in ADAPTERS.items():
        trainer.create_adapter(name, LoraConfig(**{"seed": 1, **config}))
        state, rng = trainer.capture(name, optimizer=False), np.random.default_rng(len(name))
        tensors = dict(state.tensors)
        for key, array in state.tensors.items():
            if "lora_B" in key:
                tensors[key] = (rng.standard_normal(array.shape) * 0.03).astype(np.float32)
        trainer.load_adapter(name, replace(state, tensors=tensors))


def gradient(trainer: HFTrainer, name: str) -> Any:
    adapter = trainer._adapters[name]
    found = torch.zeros_like(adapter.weights) if adapter.gradient is None else adapter.gradient
    return found.numpy().copy()


def portable(results: Sequence[TrainResult | ApiError]) -> list[TrainResult | str]:
    return [f"{type(each).__name__}: {each}" if isinstance(each, ApiError) else each for each in results]


def train(trainer: HFTrainer, seen: Seen, steps: Sequence[int], *, images: bool) -> None:
    for step in steps:
        trainer.forward_backward(works(100 + step, images=images)["several adapters"])
        for name in ADAPTERS:
            seen.norms[step, name] = trainer.optim_step(name, STEP)


def run(trainer: HFTrainer, *, images: bool) -> Seen:
    """All calls, then three steps, a save, and two steps more."""
    seen = Seen()
    add_adapters(trainer)
    for label, call in works(0, images=images).items():
        seen.results[label] = portable(trainer.forward_backward(call))
        for name in ADAPTERS:
            seen.gradients[label, name] = gradient(trainer, name)
            trainer.discard_gradients(name)
    train(trainer, seen, range(3), images=images)
    seen.saved = captured(trainer)
    train(trainer, seen, range(3, 5), images=images)
    seen.trained = captured(trainer)
    seen.logprobs = trainer.logprobs("a", Maker(np.random.default_rng(5)).input(19))
    seen.images_encoded = trainer.images_encoded
    return seen


def captured(trainer: HFTrainer) -> dict[str, AdapterState]:
    """The adapters with their moments, in arrays that own their memory."""
    found = {}
    for name in ADAPTERS:
        state = trainer.capture(name, optimizer=True)
        tensors: dict[str, Any] = {key: np.array(array) for key, array in state.tensors.items()}
        moments = {key: np.array(array) for key, array in (state.optimizer or {}).items()}
        found[name] = replace(state, tensors=tensors, optimizer=moments)
    return found


def resumed(trainer: HFTrainer, saved: Mapping[str, AdapterState], *, images: bool) -> Seen:
    """Load the adapters `saved`, and take the two steps that follow."""
    seen = Seen()
    for name, state in saved.items():
        trainer.load_adapter(name, state)
    seen.saved = captured(trainer)
    train(trainer, seen, range(3, 5), images=images)
    seen.trained = captured(trainer)
    return seen


# Faults on one rank -------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Exception]] = {
    "memory": lambda: torch.OutOfMemoryError("injected"),
    "exception": lambda: ZeroDivisionError("injected"),
}

PLACES: dict[str, tuple[Any, str]] = {
    "check": (HFTrainer, "_checked"),
    "forward": (MicroBatchRunner, "run"),
    "backward": (WrittenOutPass, "backward"),
    "backward of autograd": (AutogradPass, "backward"),
    "a layer": (MlpPass, "forward"),
    "a layer's backward": (AttentionPass, "backward"),
    "a layer of autograd": (autograd, "project"),
    "a layer's backward of autograd": (autograd, "project_backward"),
    "starting sums": (Tally, "start_gradients"),
    "packing": (passes, "pack"),
    "adding": (Tally, "add_gradients"),
    "joining": (Passes, "_joined"),
    "finish": (Tally, "add_all"),
    "gradient check": (HFTrainer, "_gradient_fault"),
    "create_adapter": (lora, "initial_weights"),
    "load_adapter": (lora, "flatten"),
    "norm": (lora, "gradient_norm"),
    "copy": (Adapter, "copied"),
    "update": (ADAMW, "update"),
    "fingerprint": (worker, "fingerprint"),
}
"""What fails, once, by the name of the place."""

IN_A_WALK = {
    "written-out": ("starting sums", "packing", "forward", "a layer", "a layer's backward", "backward", "adding"),
    "autograd": (
        "forward",
        "a layer of autograd",
        "a layer's backward of autograd",
        "backward of autograd",
    ),
}
"""Places in a micro-batch, by decoder."""

OF_ADAPTERS = ("create_adapter", "load_adapter", "norm", "update")
"""Places in calls that run no model; the last two are in `optim_step`."""

RETRIED = {*IN_A_WALK["written-out"], *IN_A_WALK["autograd"]}
"""Places where lack of memory makes micro-batches smaller, and nothing fails."""


@contextmanager
def failing(place: str, kind: str, *, here: bool) -> Iterator[None]:
    """The first call at `place` fails, after all that it does, if this is the rank where it shall."""
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(place)
        if len(calls) > 1:
            return original(*args, **kwargs)
        if place not in ("adding", "finish"):  # these must change nothing when they fail
            original(*args, **kwargs)
        raise KINDS[kind]()

    if not here:
        yield
        return
    object.__setattr__(owner, name, broken) if owner is ADAMW else setattr(owner, name, broken)
    try:
        yield
    finally:
        object.__setattr__(owner, name, original) if owner is ADAMW else setattr(owner, name, original)
    assert calls, f"{place} was not reached"


def bits(trainer: HFTrainer, name: str) -> list[bytes]:
    """The adapter, its moments and its gradient."""
    if name not in trainer._adapters:
        return []
    adapter = trainer._adapters[name]
    vectors = [adapter.weights, *adapter.optimizer_state.tensors.values()]
    step = bytes([adapter.optimizer_state.step])
    return [step, *(vector.numpy().tobytes() for vector in vectors), gradient(trainer, name).tobytes()]


def inject(trainer: HFTrainer, ranks: Ranks, place: str, kind: str) -> Fault:
    """Let `place` fail on the last rank; then make the same call again."""
    data: list[TrainDatum] = [*works(0, images=False)["several adapters"][0].data]
    work = [TrainWork("a", data, "cross_entropy")]
    state = trainer.capture("a", optimizer=True)
    trainer._budget.tokens = 64  # so that the rank which fails has two data
    expected = trainer.forward_backward(work)
    wanted = gradient(trainer, "a")
    if place in ("norm", "copy", "update", "fingerprint"):
        call: Callable[[], Any] = partial(trainer.optim_step, "a", STEP)
    elif place == "create_adapter":
        call = partial(trainer.create_adapter, "new", LoraConfig(rank=2))
    elif place == "load_adapter":
        call = partial(trainer.load_adapter, "a", state)
    else:
        trainer.discard_gradients("a")
        call = partial(trainer.forward_backward, work)
    before, error = [bits(trainer, name) for name in ("a", "new")], None
    with failing(place, kind, here=ranks.rank == ranks.size - 1):
        try:
            call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    if error is None:
        same = bool(np.abs(gradient(trainer, "a") - wanted).max() <= 1e-5 * np.abs(wanted).max())
    elif place in ("norm", "copy", "update", "fingerprint"):  # the gradient is discarded, as on one rank
        same = [bits(trainer, "a")[:-1], []] == [before[0][:-1], []]
        trainer.forward_backward(work)
    else:
        same = [bits(trainer, name) for name in ("a", "new")] == before
    trainer.discard_gradients("a")
    again = trainer.forward_backward(work)
    losses = [
        [each.metrics["loss:sum"] for each in found if isinstance(each, TrainResult)] for found in (again, expected)
    ]
    close = len(losses[0]) == len(losses[1]) == 1 and abs(losses[0][0] - losses[1][0]) < 1e-3
    close = close and bool(np.abs(gradient(trainer, "a") - wanted).max() <= 1e-5 * np.abs(wanted).max())
    trainer.optim_step("a", STEP)
    trainer.create_adapter("new", LoraConfig(rank=2))
    trainer.remove_adapter("new")
    trainer.load_adapter("a", state)
    return Fault(error, same, close)


def fatal_step(trainer: HFTrainer) -> tuple[str, bool, bool]:
    """A step that would divide 0 by 0: its error, whether adapter and moments are as before, and whether the gradient
    is gone."""
    trainer.create_adapter("new", LoraConfig(rank=2, seed=1))
    data = works(0, images=False)["several adapters"][0].data
    trainer.forward_backward([TrainWork("new", data, "cross_entropy")])
    before, error = bits(trainer, "new"), ""
    try:
        trainer.optim_step("new", AdamParams(eps=0.0))
    except ApiError as raised:
        error = str(raised)
    found = error, bits(trainer, "new")[:-1] == before[:-1], not gradient(trainer, "new").any()
    trainer.remove_adapter("new")
    return found


def diverge(trainer: HFTrainer, ranks: Ranks) -> str:
    """The error of a step after one bit of a weight has changed on the last rank."""
    if ranks.rank == ranks.size - 1:
        trainer._adapters["a"].weights.view(torch.int32)[7] ^= 1
    try:
        trainer.optim_step("a", STEP)
    except ApiError as error:
        return str(error)
    return "nothing"


def gathering(what: str, ranks: Ranks) -> None:
    """Let the next sharded trainer gather as `BY_COLLECTIVES` has it."""
    if ranks.size > 1:
        os.environ["NCCL_P2P_DISABLE"] = str(int(what in BY_COLLECTIVES))


def make_trainer(
    folder: Path, label: str, ranks: Ranks = ONE_RANK, shards: int | None = None, context_parallel: int | None = None
) -> HFTrainer:
    """With `context_parallel`, of a model with four KV heads."""
    gathering(label, ranks)
    model, decoder, dtype = TRAINERS[SHARDED.get(label, label)]
    if context_parallel is not None:
        model = f"{model}_kv4"
    return HFTrainer(
        TrainerConfig(
            str(folder / model),
            name=model,
            dtype=dtype,
            device="cpu",
            decoder="autograd" if decoder == "autograd" else "written-out",
            micro_batch_tokens=64,
            shards=shards or ranks.size if label in SHARDED else 1,
            context_parallel=context_parallel or 1,
        ),
        ranks,
    )


def places(label: str) -> list[str]:
    """Where a rank of this trainer fails."""
    _, decoder, dtype = TRAINERS[SHARDED.get(label, label)]
    if dtype == "float64":
        return []
    if label in SHARDED:
        return [*IN_A_WALK[decoder], *OF_ADAPTERS]
    of_other = set(IN_A_WALK["autograd" if decoder == "written-out" else "written-out"]) - set(IN_A_WALK[decoder])
    seen = {"create_adapter", "load_adapter"} if decoder == "autograd" else set()
    return [place for place in PLACES if place not in of_other | seen]


def deep(folder: Path, decoder: Any, ranks: Ranks, shards: int, context_parallel: int = 1) -> HFTrainer:
    """A sharded trainer of ten layers."""
    gathering(decoder, ranks)
    return HFTrainer(
        TrainerConfig(
            str(folder / "qwen3_deep"),
            name="d",
            device="cpu",
            decoder=decoder,
            shards=shards,
            context_parallel=context_parallel,
        ),
        ranks,
    )


def probed(folder: Path, ranks: Ranks = ONE_RANK, *, shards: int = 1) -> dict[str, Any]:
    """Logprobs of `OTHER_FAMILIES`."""
    found = {}
    for model, decoder in OTHER_FAMILIES.items():
        chosen: Any = decoder
        gathering(model, ranks)
        trainer = HFTrainer(
            TrainerConfig(str(folder / model), name=model, device="cpu", decoder=chosen, shards=shards), ranks
        )
        found[model] = trainer.logprobs(None, Maker(np.random.default_rng(6)).input(23))
    return found


def copies_of_two(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """What trainers see of which two ranks hold a copy of the weights, also when the last rank fails."""
    seen: dict[str, Any] = {"opened": noted_processes()}
    for label in ("image, sharded", "text, sharded"):
        trainer = make_trainer(folder, label, ranks, shards=2)
        seen[label] = run(trainer, images=label.startswith("image"))
        for place in places(label):
            seen[label].faults[place] = inject(trainer, ranks, place, "exception")
    seen["memory"] = [measured(partial(deep, folder, decoder, ranks, 2)) for decoder in IN_A_WALK]
    try:
        make_trainer(folder, "text, sharded", ranks, shards=4)
    except ValueError as error:
        seen["over both hosts"] = str(error)
    return {**seen, "process": os.getpid(), "opened": [*seen["opened"]]}


def noted_processes() -> set[int]:
    """The processes whose memory this one opens from now on."""
    opened: set[int] = set()
    original = HostMemory.open

    def noted(self: HostMemory, handle: Handle, nbytes: int) -> Any:
        opened.add(int(handle[0].decode().split("/")[2]))
        return original(self, handle, nbytes)

    HostMemory.open = noted  # type: ignore[method-assign]
    return opened


def alone(folder: Path) -> None:
    """One rank trains in this process, which ends with 0 if it has not imported what joins several, and else with 1."""
    torch.set_num_threads(1)
    trainer = make_trainer(folder, "text")
    add_adapters(trainer)
    train(trainer, Seen(), range(1), images=False)
    sys.exit("tinker_local.backend.training.parallel.joined_ranks" in sys.modules)


def begin(trace: Path) -> None:
    """What each rank does first. SIGUSR1 makes it write into `trace` where it is."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, trace.open("w"))
    faulthandler.dump_traceback_later(1500, exit=True)  # one that nothing waits for any more ends


def main(folder: Path, extent: str, rank: int, size: int, two_hosts: str | None) -> None:
    """`two_hosts`: where ranks meet of which the first half is on one host, and the others on another."""
    begin(folder / f"{extent}-{rank}.trace")
    if two_hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = two_hosts or str(folder / f"meeting-{extent}-{size}")
    from tinker_local.backend.training.parallel.joined_ranks import JoinedRanks

    ranks = JoinedRanks(Seat(rank, size, meeting, host=2 * rank // size if two_hosts else 0), torch.device("cpu"))
    seen: dict[str, Any] = copies_of_two(folder, ranks) if extent == "copies" else {}
    for label in {"all": LABELS, "short": ["text"], "copies": []}[extent]:
        images = label.startswith("image")
        trainer = make_trainer(folder, label, ranks)
        seen[label] = run(trainer, images=images)
        if size == 2:
            for place in places(label) if extent == "all" else ("check", "update"):
                for kind in KINDS:
                    seen[label].faults[f"{kind} in {place}"] = inject(trainer, ranks, place, kind)
            seen[f"fatal step of {label}"] = fatal_step(trainer)
            if "float64" not in label:
                seen[f"divergence of {label}"] = diverge(trainer, ranks)
        elif label in ("image", "text, sharded"):
            saved = pickle.loads((folder / "all-0-of-2.pickle").read_bytes())[label].saved
            seen[f"resumed {label}"] = resumed(trainer, saved, images=images)
    if extent == "all":
        seen["memory"] = [measured(partial(deep, folder, decoder, ranks, size)) for decoder in IN_A_WALK]
        seen["probed"] = probed(folder, ranks, shards=size)
    (folder / f"{extent}-{rank}-of-{size}.pickle").write_bytes(pickle.dumps(seen))
    os._exit(0)  # without it, an interpreter that has joined others may hang at its end
