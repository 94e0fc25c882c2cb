"""One of several trainer ranks: python -m measurements.scaling_rank JOB RANK SIZE

JOB is a file of `Job`. Each rank makes the same steps, and writes what it saw into the job's folder.
"""

import functools
import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import timing, workloads
from harness.scale import SCALES, Scale

from measurements.images import examples, with_new_image
from measurements.training import make_trainer, text_datum, work

ADAPTER = "one"


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks do. `layout`: "one" rank, or several that have the weights "replicated" or "sharded", or that
    compute each micro-batch together ("context"). `data`: "text" or "images". `tokens`: least positions of a step.
    `model`, `folder`: paths. `micro_batch_tokens`: None for those of the scale."""

    scale: str
    layout: str
    data: str
    model: str
    folder: str
    tokens: int
    steps: int
    micro_batch_tokens: int | None = None


@dataclass(slots=True)
class Seen:
    """What a rank saw. `seconds` of each timed step; `gathers`: seconds of each in which the computation waits for a
    gather, and `others`: for another rank; each is empty if there are none. `bytes`: the most that its tensors took (on
    a CPU: that its process took), and `weights` what they took once the model was loaded. `norms`: of the gradient of
    each step. `again`, `reordered`, `repeated`: how far the gradient of the same data is from the first one, a second
    time, in other micro-batches, and after the same first step of another such adapter, as (largest difference /
    largest element, norm of the difference / norm)."""

    positions: int
    examples: int
    seconds: list[float] = field(default_factory=list)
    gathers: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    weights: int = 0
    bytes: int = 0
    norms: list[float] = field(default_factory=list)
    again: tuple[float, float] | None = None
    reordered: tuple[float, float] | None = None
    repeated: tuple[float, float] | None = None
    load_seconds: float = 0.0


def data_of(scale: Scale, job: Job) -> list[Any]:
    """The data of a step: the same on all ranks, and in all layouts."""
    if job.data == "text":
        found: list[Any] = []
        left = job.tokens
        for seed in itertools.count():
            for length in workloads.ragged_lengths(scale, seed):
                (tokens,) = workloads.sequences(scale, [min(max(length, 2), left)], seed=len(found))
                found.append(text_datum(tokens))
                left -= len(tokens)
                if left < 2:
                    return found
    images = examples(scale, Path(job.model))
    times = -(-job.tokens // sum(datum.input.length for datum in images))
    numbers = itertools.count()
    return [with_new_image(datum, next(numbers)) for _ in range(times) for datum in images]


def deviation(found: Any, wanted: Any) -> tuple[float, float]:
    """The largest difference over the largest element, and the norm of the difference over the norm."""
    difference = found - wanted
    largest = float(difference.abs().max() / wanted.abs().max())
    return largest, float(difference.double().norm() / wanted.double().norm())


def rank_trainer(scale: Scale, job: Job, rank: int, size: int) -> Any:
    """The trainer of this rank, after all others have come."""
    import torch
    from tinker_local.backend.training.parallel.joined_ranks import JoinedRanks
    from tinker_local.backend.training.parallel.ranks import ONE_RANK
    from tinker_local.backend.training.trainer import Seat

    device = torch.device(timing.device())
    if device.type == "cpu":
        torch.set_num_threads(1)
    seat = Seat(rank, size, str(Path(job.folder) / f"meeting-{job.layout}"))
    ranks = ONE_RANK if size == 1 else JoinedRanks(seat, device)
    options: dict[str, Any] = {"device": device.type}
    if job.layout == "sharded":
        options["shards"] = size
    if job.layout == "context":
        options["context_parallel"] = size
    if job.micro_batch_tokens is not None:
        options["micro_batch_tokens"] = job.micro_batch_tokens
    return make_trainer(scale, Path(job.model), ranks, **options)


class Waits:
    """Times how long the computation waits in the methods that it watches: on a GPU by events in its stream around each
    call, on a CPU by the clock around each call."""

    def __init__(self) -> None:
        self._waits: list[tuple[Any, Any]] = []
        self._seconds = 0.0
        self.there = False

    def watch(self, owner: type, name: str) -> None:
        """Watch all calls of the method `name` of `owner` in this process from now on."""
        import torch

        cuda = torch.cuda.is_available()
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*given: Any, **named: Any) -> Any:
            if cuda:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                result = original(*given, **named)
                after.record()
                self._waits.append((before, after))
                return result
            start = time.perf_counter()
            result = original(*given, **named)
            self._seconds += time.perf_counter() - start
            return result

        setattr(owner, name, timed)
        self.there = True

    def take(self) -> float:
        """Seconds since the last call of this; the device has done its work."""
        seconds = self._seconds + sum(before.elapsed_time(after) for before, after in self._waits) / 1e3
        self._waits.clear()
        self._seconds = 0.0
        return seconds


def watched(layout: str) -> tuple[Waits, Waits]:
    """Waits for the gathers of sharded weights, and for what the other ranks have yet to compute or to say: neither is
    there with one rank."""
    import torch

    gathers, others = Waits(), Waits()
    if layout != "one":
        from tinker_local.backend.training.parallel.joined_ranks import JoinedRanks

        others.watch(JoinedRanks, "gather")
        others.watch(JoinedRanks, "add_up")
    if layout == "sharded":
        from tinker_local.backend.training.parallel.sharded_weights import ShardedWeights

        gathers.watch(ShardedWeights, "wait" if torch.cuda.is_available() else "gather")
    return gathers, others


def process_bytes() -> int:
    """The most that this process took on a CPU."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(scale: Scale, job: Job, rank: int, size: int) -> Seen:
    """Gradients of one pass, then some steps."""
    import torch
    from tinker_local.types import AdamParams, LoraConfig

    data = data_of(scale, job)
    seen = Seen(sum(datum.input.length for datum in data), len(data))
    cuda = torch.cuda.is_available()
    start = time.perf_counter()
    trainer = rank_trainer(scale, job, rank, size)
    gathers, others = watched(job.layout)
    seen.load_seconds = time.perf_counter() - start
    seen.weights = torch.cuda.memory_allocated() if cuda else process_bytes()
    settings = LoraConfig(rank=scale.rank, seed=1, train_unembed=False)
    trainer.create_adapter(ADAPTER, settings)
    numbers = itertools.count(10**9)

    def backward(examples: Sequence[Any]) -> None:
        # Images that the trainer has not seen, as in every new batch.
        fresh = [with_new_image(each, next(numbers)) for each in examples] if job.data == "images" else examples
        for result in trainer.forward_backward([work(ADAPTER, fresh)]):
            if isinstance(result, Exception):
                raise result

    def gradient(examples: Sequence[Any]) -> Any:
        backward(examples)
        return trainer._adapters[ADAPTER].gradient.clone()

    def step() -> None:
        backward(data)
        seen.norms.append(trainer.optim_step(ADAPTER, AdamParams(learning_rate=1e-4))["grad_norm"])

    # B is 0 at first, and with it the gradient of A: compare gradients after a step, when all are there.
    step()
    first = gradient(data)
    trainer.discard_gradients(ADAPTER)
    if job.layout == "one":
        seen.again = deviation(gradient(data), first)
        trainer.discard_gradients(ADAPTER)
        order = np.random.default_rng(4).permutation(len(data))
        seen.reordered = deviation(gradient([data[at] for at in order]), first)
        trainer.discard_gradients(ADAPTER)
        # As the other layouts are compared: after a first step, whose AdamW turns noise around 0 into whole steps.
        trainer.remove_adapter(ADAPTER)
        trainer.create_adapter(ADAPTER, settings)
        step()
        seen.norms.pop()
        seen.repeated = deviation(gradient(data), first)
        trainer.discard_gradients(ADAPTER)
    if rank == 0:
        torch.save(first.cpu(), Path(job.folder) / f"{job.layout}.gradient")
    del first
    timing.forget_peak()
    for _ in range(job.steps):
        timing.synchronize()
        gathers.take()
        others.take()
        start = time.perf_counter()
        step()
        timing.synchronize()
        seen.seconds.append(time.perf_counter() - start)
        if gathers.there:
            seen.gathers.append(gathers.take())
        if others.there:
            seen.others.append(others.take())
    seen.bytes = torch.cuda.max_memory_allocated() if cuda else process_bytes()
    return seen


def main(file: Path, rank: int, size: int) -> None:
    job = Job(**json.loads(file.read_text()))
    seen = measure(SCALES[job.scale], job, rank, size)
    (Path(job.folder) / f"{job.layout}-{rank}.json").write_text(json.dumps(asdict(seen)))
    print(f"rank {rank} of {size}, {job.layout}: median {statistics.median(seen.seconds or [0.0]):.2f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # an interpreter that has joined others may hang at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
