"""Measures a base model that is served in this process: agreement, gradients, memory, speed, mismatch of samples."""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.heap import memory_of_gpus, memory_of_processes
from tinker_local.backend.models.adapter_check import TARGETS, adapter_on, flags_of, whole
from tinker_local.backend.models.agreement import Comparison, sampler_logprobs
from tinker_local.backend.models.positions import long_text, parts
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.report.example_inputs import PROMPT, examples, text_of, with_drawing
from tinker_local.backend.report.reference import Computed
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.trainer import TrainDatum, Trainer, TrainResult, TrainWork
from tinker_local.types import AdamParams, ApiError, LoraConfig, SamplingParams

T = TypeVar("T")

_ID = "report"


@dataclass(frozen=True, slots=True)
class Sizes:
    """`sequences` of `positions` in a step of training; `samples` of `tokens` at once; a `long` text, in positions."""

    sequences: int
    positions: int
    samples: int
    tokens: int
    long: int


ON_GPU = Sizes(sequences=32, positions=1024, samples=64, tokens=256, long=8192)
ON_CPU = Sizes(sequences=4, positions=128, samples=8, tokens=32, long=512)
"""What two cores do in some seconds with a model of 100 million parameters."""

RANK = 32
"""Of the adapter that is trained, or `--max-rank` if that is less."""
STEPS = 3
"""Timed, after one that is not."""
TIMED_SECONDS = 90.0
"""Of all steps of one measurement: where one takes long, fewer are timed."""
LOOKS = 0.25
"""Seconds from one look at the memory to the next."""


class MemoryWatch:
    """While open, watches what all GPUs together have in use, or on a CPU this process and its children; `peak()`,
    the most since it was last `reset`, and `now()`, in bytes."""

    def __init__(self) -> None:
        self.gpu = bool(memory_of_gpus())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memory-watch")
        self._peak = self.now()

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> int:
        return sum(used for used, _ in memory_of_gpus().values()) if self.gpu else memory_of_processes()

    def peak(self) -> int:
        self._peak = max(self._peak, self.now())
        return self._peak

    def reset(self) -> None:
        self._peak = self.now()

    def _watch(self) -> None:
        while not self._stop.wait(LOOKS):
            self.peak()


@dataclass(frozen=True, slots=True)
class PartOfText:
    """Differences of logprobs (nats) at positions [start, stop): between trainer and sampler, the `mean` and the
    `largest`, and the same of what other rounding alone makes in the trainer."""

    start: int
    stop: int
    mean: float
    largest: float
    mean_by_rounding: float
    largest_by_rounding: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of `tokens` sampled by the sampler. `v1`: mean of log p_sampler - log p_trainer, and `v2`: half of the mean of
    its square, as `compute_kl_sample_train` of the cookbook; `largest`: difference of a token's logprobs (nats)."""

    what: str
    tokens: int
    v1: float
    v2: float
    largest: float


@dataclass(frozen=True, slots=True)
class Speed:
    """`tokens` of one step, and the `seconds` that each of several took."""

    what: str
    tokens: int
    seconds: Sequence[float]

    @property
    def rate(self) -> float:
        """Tokens per second, of the step in the middle."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest step, in tokens per second."""
        return self.tokens / max(self.seconds), self.tokens / min(self.seconds)


@dataclass(slots=True, eq=False)
class Measuring:
    """Measures `model`. `max_rank`: of its adapters. `targets`: the fields of `LoraConfig` that are both trained and
    sampled."""

    model: ServedModel
    sizes: Sizes
    max_rank: int
    targets: Sequence[str] = field(init=False)
    _adapters: dict[tuple[str, ...], AdapterState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.model.engines.targets or TARGETS
        self.targets = tuple(target for target in known if target not in self.model.unsampled)

    async def by_target(self) -> dict[str, Comparison | str]:
        """How trainer and sampler agree on the base model, with an adapter on each target, and on all; or why they do
        not."""
        found: dict[str, Comparison | str] = {}
        if self.model.comparison is not None:
            found["none"] = self.model.comparison
        for targets in (*([target] for target in self.targets), self.targets):
            name = ", ".join(targets)
            try:
                found[name] = await self.model.compare_adapter(targets)
            except ValueError as error:
                found[name] = str(error)
        return found

    async def by_position(self) -> list[PartOfText]:
        """How they agree on each part of a text of random tokens, without an adapter, in the replica that differs
        most."""
        model, engines = self.model, self.model.engines
        length = min(self.sizes.long, model.max_context_length - 1)
        text = long_text(model.probes.base, length)
        ours = await self._in_trainer(engines.trainer.logprobs, None, text)
        nudged = await self._in_trainer(partial(engines.trainer.logprobs, nudge=1), None, text)
        theirs = await sampler_logprobs(engines.sampler, None, [text], model.replicas)
        apart = max((np.abs(ours - each) for each in theirs), key=lambda each: float(np.nan_to_num(each).mean()))
        marks = [mark for mark in (model.scaled, engines.sliding_window) if mark is not None]
        return [
            PartOfText(
                start, stop, *_mean_and_largest(apart, start, stop), *_mean_and_largest(ours - nudged, start, stop)
            )
            for start, stop in parts(length, marks)
        ]

    async def examples(self) -> list[TrainDatum]:
        """For gradients."""
        return await asyncio.to_thread(examples, self.model.engines, self.model.max_context_length - 1)

    async def adapter(self, targets: Sequence[str]) -> AdapterState:
        """Of rank 1 with random B, that changes logprobs but not by much."""
        if (key := tuple(targets)) not in self._adapters:
            sampler, trainer, probes = self.model.engines.sampler, self.model.engines.trainer, self.model.probes
            state, _, _ = await self._in_trainer(adapter_on, targets, trainer, probes.base, sampler.adapter_dtype)
            self._adapters[key] = state
        return self._adapters[key]

    async def gradients(self, state: AdapterState, data: Sequence[TrainDatum]) -> Computed:
        """The trainer's, of `data` with `state`."""
        return await self._in_trainer(_gradients, self.model.engines.trainer, state, data)

    async def training(self) -> Speed:
        """Steps of the trainer, forward, backward and AdamW, with an adapter of rank `RANK` on all targets."""
        trainer, sizes, rank = self.model.engines.trainer, self.sizes, min(RANK, self.max_rank)
        length = min(sizes.positions, self.model.max_context_length - 1)
        texts = [long_text(self.model.probes.base, length + 1).token_ids] * sizes.sequences
        data = [
            TrainDatum(RenderedInput(ids[:-1]), ids[1:].astype(np.int64), {"weights": np.ones(length, np.float32)})
            for ids in texts
        ]
        lora = LoraConfig(rank=rank, seed=0, **flags_of(self.targets))
        await self._in_trainer(trainer.create_adapter, _ID, lora)
        try:
            seconds = [await self._timed(_step, trainer, data)]  # compiles and captures
            while _go_on(seconds):
                seconds.append(await self._timed(_step, trainer, data))
        finally:
            await self._in_trainer(trainer.remove_adapter, _ID)
        what = f"training, {sizes.sequences} sequences of {length} tokens a step, rank {rank}"
        return Speed(what, sizes.sequences * length, seconds[1:])

    async def sampling(self, state: AdapterState) -> tuple[list[Speed], list[Mismatch]]:
        """Samples with `state`, one alone and many at once, and how the trainer's logprobs of them differ; of models
        that see, also of samples after a drawing."""
        engines, sizes = self.model.engines, self.sizes
        version = AdapterVersion("report", Path("report"), lambda: state)
        text = await asyncio.to_thread(engines.renderer.render, text_of(engines, PROMPT), "report")
        tokens = min(sizes.tokens, self.model.max_context_length - text.length)
        speeds, mismatches = [], []
        try:
            for samples in (1, sizes.samples):
                speed, found = await self._samples(text, version, samples, tokens)
                speeds.append(speed)
            mismatches.append(await self._mismatch("text", state, text, found))
            if engines.renderer.takes_images:
                seen = with_drawing(engines, "A drawing: ", " In words, it shows")
                image = await asyncio.to_thread(engines.renderer.render, seen, "report")
                if image.length + tokens <= self.model.max_context_length:
                    _, found = await self._samples(image, version, min(8, sizes.samples), tokens)
                    mismatches.append(await self._mismatch("after an image", state, image, found))
        finally:
            await engines.sampler.remove_version(version)
        return speeds, mismatches

    async def _samples(
        self, prompt: RenderedInput, version: AdapterVersion, samples: int, tokens: int
    ) -> "tuple[Speed, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]]":
        """The speed, and tokens and logprobs of the last of several requests for as many `samples` at once."""
        seconds: list[float] = []
        while _go_on(seconds):
            params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=len(seconds))
            start = time.monotonic()
            output = await self.model.engines.sampler.sample(SampleWork(prompt, version, params, samples))
            seconds.append(time.monotonic() - start)
            count = sum(len(each.tokens) for each in output.sequences)
        found = [(np.asarray(each.tokens, np.int32), np.asarray(each.logprobs)) for each in output.sequences]
        what = f"sampling, {samples} at once of up to {tokens} tokens"
        return Speed(what, count, seconds[1:]), found

    async def _mismatch(
        self,
        what: str,
        state: AdapterState,
        prompt: RenderedInput,
        samples: "Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]",
    ) -> Mismatch:
        trainer = self.model.engines.trainer
        await self._in_trainer(trainer.load_adapter, _ID, whole(state))
        apart = []
        try:
            for tokens, logprobs in samples:
                read = RenderedInput(np.concatenate([prompt.token_ids, tokens]), prompt.images)
                ours = await self._in_trainer(trainer.logprobs, _ID, read)
                apart.append(logprobs - ours[prompt.length - 1 :])
        finally:
            await self._in_trainer(trainer.remove_adapter, _ID)
        all_tokens = np.concatenate(apart).astype(np.float64)
        v1, v2 = float(all_tokens.mean()), float(np.square(all_tokens).mean() / 2)
        return Mismatch(what, all_tokens.size, v1, v2, float(np.abs(all_tokens).max()))

    async def _timed(self, function: Callable[..., object], *args: object) -> float:
        start = time.monotonic()
        await self._in_trainer(function, *args)
        return time.monotonic() - start

    async def _in_trainer(self, function: Callable[..., T], *args: object) -> T:
        return await self.model.scheduler.call(function, *args)


def _mean_and_largest(differences: npt.NDArray[np.float32], start: int, stop: int) -> tuple[float, float]:
    """At positions [start, stop) of `differences`, which begin with position 1."""
    part = np.abs(differences[start - 1 : stop - 1])
    return float(part.mean()), float(part.max())


def _go_on(seconds: Sequence[float]) -> bool:
    """Whether another step is timed, after steps of so many `seconds`, the first of which does not count."""
    return len(seconds) <= STEPS and (len(seconds) < 2 or sum(seconds) < TIMED_SECONDS)


def _step(trainer: Trainer, data: Sequence[TrainDatum]) -> None:
    _loss(trainer, data)
    trainer.optim_step(_ID, AdamParams(learning_rate=1e-4))


def _loss(trainer: Trainer, data: Sequence[TrainDatum]) -> TrainResult:
    (result,) = trainer.forward_backward([TrainWork(_ID, data, "cross_entropy")])
    if isinstance(result, ApiError):
        raise result
    return result


def _gradients(trainer: Trainer, state: AdapterState, data: Sequence[TrainDatum]) -> Computed:
    """By the contract of a trainer alone, so of one in other processes, too: AdamW's first moment after one step with
    beta1 = 0 is the gradient."""
    trainer.load_adapter(_ID, whole(state))
    try:
        result = _loss(trainer, data)
        trainer.optim_step(_ID, AdamParams(learning_rate=0.0, beta1=0.0))
        moments = trainer.capture(_ID, optimizer=True).optimizer
        assert moments is not None
        gradients = {name: np.array(moments[f"exp_avg.{name}"]) for name in state.tensors}
        logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
        return Computed(logprobs, gradients)
    finally:
        trainer.remove_adapter(_ID)
