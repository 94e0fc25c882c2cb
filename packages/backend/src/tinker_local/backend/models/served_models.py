"""Loaded base models: one renderer, trainer and sampler for each copy of the weights, under all its names."""

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tinker_local.backend.models.agreement import (
    Agreement,
    Probes,
    compare,
    make_probes,
    rounding_limit,
    sampler_logprobs,
    with_random_b,
    worst,
)
from tinker_local.backend.models.metrics import Counts, ModelMetrics, ReplicaMetrics
from tinker_local.backend.models.supervision import SamplerSupervision, StallWatch, TrainerSupervision
from tinker_local.backend.options import BackendOptions, ModelSource
from tinker_local.backend.rendering.rendered_input import Renderer
from tinker_local.backend.rendering.text import TextCodec
from tinker_local.backend.rendering.tools import ToolFormat
from tinker_local.backend.sampling.replica_pool import ReplicaPool
from tinker_local.backend.sampling.sampler import AdapterVersion, Sampler
from tinker_local.backend.scheduling.memory_sharing import MemorySharing
from tinker_local.backend.scheduling.sample_turns import PROMPTS_AHEAD, SampleTurns
from tinker_local.backend.scheduling.train_scheduler import TrainScheduler
from tinker_local.backend.training.trainer import AdapterState, Trainer
from tinker_local.types import ApiError, InvalidRequestError, LoraConfig
from tinker_local.types.errors import brief

_CHECKED = "checked-at-the-start"
"""The id of the adapter that `ServedModel.check_adapter` makes."""
_CONTEXT_VARIANT = re.compile(r"(.+):peft:([1-9]\d{0,11})", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Engines:
    """What serves one copy of the weights.

    `tolerance`: largest mean difference of logprobs (nats) between trainer and sampler on a probe. `sliding_window`: of
    the base model's attention, in positions; None if it has none. `sequences`: how many the sampler is to run at once;
    it has room for `RESERVED` more. `text`: None for a model without a tokenizer, which clients must bring.
    `no_grammars`: why samples cannot follow a grammar; empty if they can. `tools`: how it writes calls of tools, or why
    that is not known. `unknown_adapters`: whether trainer and sampler must be compared with an adapter at the start,
    since they may not reach the same modules with it.
    """

    renderer: Renderer
    trainer: Trainer
    sampler: Sampler
    arch: str
    tolerance: float
    sliding_window: int | None = None
    sequences: int = 256
    text: TextCodec | None = None
    no_grammars: str = ""
    tools: ToolFormat | str = "not loaded"
    unknown_adapters: bool = False


EngineLoader = Callable[[ModelSource, BackendOptions], Engines]
"""Loads the weights behind a source; blocks."""

Progress = Callable[[str], None]


@dataclass(slots=True, eq=False)
class ServedModel:
    """One copy of a base model's weights with its engines and scheduler.

    `supervision`: of a trainer in a separate process, else None. `sampler_supervisions`: of each separate process of
    the sampler. `pool`: the sampler if it is several replicas, else None. `stalls`: sees when it makes no progress.
    `check_agreement` sets `probes`, the prompts on which trainer and sampler must agree, and `images_of_start`, the
    counts of `images()` until then. `replicas`: how many the sampler has.
    """

    names: tuple[str, ...]
    path: str
    tokenizer_id: str
    engines: Engines
    scheduler: TrainScheduler
    memory_sharing: MemorySharing
    load_seconds: float
    supervision: TrainerSupervision | None = None
    sampler_supervisions: tuple[SamplerSupervision, ...] = ()
    pool: ReplicaPool | None = None
    stalls: StallWatch | None = None
    probes: Probes = field(default_factory=lambda: Probes((), ()))
    counts: Counts = field(default_factory=Counts)
    images_of_start: tuple[int, int, int] = (0, 0, 0)
    max_context_length: int = field(init=False)
    sample_turns: SampleTurns = field(init=False)
    replicas: int = field(init=False)

    def __post_init__(self) -> None:
        self.replicas = 1 if self.pool is None else len(self.pool.replicas)
        self.sample_turns = SampleTurns(self.engines.sequences, self.replicas * PROMPTS_AHEAD)
        self.max_context_length = min(self.engines.trainer.max_context_length, self.engines.sampler.max_context_length)

    @property
    def problem(self) -> str | None:
        """What does not work now but will again; None if everything works. Sampling works while one replica does."""
        trainer = None if self.supervision is None else self.supervision.problem
        samplers = [each.problem for each in self.sampler_supervisions]
        stalls = None if self.stalls is None else self.stalls.problem
        return "; ".join(filter(None, [trainer, *(samplers if all(samplers) else []), stalls])) or None

    def images(self) -> tuple[int, int, int]:
        """Images that were rendered, encoded by the sampler, and encoded by the trainer, the probe's included."""
        engines = self.engines
        return engines.renderer.images_processed, engines.sampler.images_encoded, engines.trainer.images_encoded

    async def check_agreement(self, max_image_pixels: int) -> Agreement:
        """Make the probes; ValueError in one line if trainer and sampler compute the base model differently.
        `max_image_pixels`: the renderer's."""
        engines, limit = self.engines, self.max_context_length - 1
        vocab_size, window = engines.trainer.vocab_size, engines.sliding_window
        with self._comparing():
            self.probes = await asyncio.to_thread(
                make_probes, engines.renderer, vocab_size, limit, window, max_image_pixels
            )
            trainer = await self.scheduler.call(engines.trainer.logprobs, None, *self.probes.base)
            agreement = await self._compared(None, trainer, "this model")
        self.images_of_start = self.images()
        return agreement

    async def check_adapter(self) -> Agreement:
        """ValueError in one line if trainer and sampler compute an adapter on all modules differently, or if the
        sampler cannot take it. After `check_agreement`."""
        trainer, sampler = self.engines.trainer, self.engines.sampler

        def on_trainer() -> tuple[AdapterState, npt.NDArray[np.float32]]:
            trainer.create_adapter(_CHECKED, LoraConfig(rank=1, seed=0))
            try:
                trainer.load_adapter(_CHECKED, with_random_b(trainer.capture(_CHECKED, optimizer=False)))
                logprobs = trainer.logprobs(_CHECKED, *self.probes.base)
                return trainer.capture(_CHECKED, optimizer=False, dtype=sampler.adapter_dtype), logprobs
            finally:
                trainer.remove_adapter(_CHECKED)

        with self._comparing(" with an adapter"):
            state, logprobs = await self.scheduler.call(on_trainer)
            version = AdapterVersion(f"{self.names[0]} {_CHECKED}", Path(_CHECKED), lambda: state)
            try:
                return await self._compared(version, logprobs, "adapters of this model")
            finally:
                await sampler.remove_version(version)

    @contextmanager
    def _comparing(self, how: str = "") -> Iterator[None]:
        """Errors of the engines end the start."""
        try:
            yield
        except ApiError as error:
            raise ValueError(f"{self.names[0]}: trainer and sampler could not be compared{how}: {error}") from error

    async def _compared(self, version: AdapterVersion | None, trainer: npt.NDArray[np.float32], what: str) -> Agreement:
        """How the sampler's logprobs of the base model's probes differ from `trainer`; ValueError if too much."""
        probes = self.probes.base
        found = await sampler_logprobs(self.engines.sampler, version, probes, self.replicas)
        agreements = [each for logprobs in found for each in compare(probes, trainer, logprobs)]
        agreement, normal = worst(agreements), rounding_limit(agreements, self.engines.tolerance)
        if not agreement.difference <= normal:
            raise ValueError(
                f"{self.names[0]}: trainer and sampler compute {what} differently: {agreement}; they differ by "
                f"{agreement.difference:.3g} on average (at most {normal:.3g} is normal)"
            )
        return agreement

    def metrics(self) -> ModelMetrics:
        """Current counts of its parts; never blocks."""
        counts, scheduler, engines = self.counts, self.scheduler, self.engines
        rendered, by_sampler, by_trainer = (
            now - before for now, before in zip(self.images(), self.images_of_start, strict=True)
        )
        return ModelMetrics(
            images_rendered=rendered,
            images_encoded_by_sampler=by_sampler,
            images_encoded_by_trainer=by_trainer,
            samples=counts.samples,
            prompt_tokens=counts.prompt_tokens,
            sampled_tokens=counts.sampled_tokens,
            trained_tokens=scheduler.trained_tokens,
            optimizer_steps=counts.optimizer_steps,
            submits_refused=counts.submits_refused,
            failures=dict(counts.failures),
            samples_running=self.sample_turns.requests,
            ephemeral_bytes=counts.ephemeral_bytes,
            versions_dropped=counts.versions_dropped,
            sequences=self.sample_turns.sequences,
            kv_cache_used=engines.sampler.kv_cache_used,
            samples_waiting=counts.samples_accepted - self.sample_turns.requests,
            commands_running=scheduler.commands_running,
            commands_waiting=scheduler.commands_waiting,
            adapters=scheduler.adapters,
            sampler_versions=engines.sampler.versions_loaded,
            sampler_sleeps=self.memory_sharing.sleeps,
            sampler_asleep=self.memory_sharing.asleep,
            trainer_restarts=0 if self.supervision is None else self.supervision.restarts,
            trainer_works=self.memory_sharing.trainer_gate.is_open,
            sampler_restarts=sum(each.restarts for each in self.sampler_supervisions),
            sampler_works=self.memory_sharing.sampler_gate.is_open,
            replicas=self._replicas(),
        )

    def give_up_sampler(self, seconds: float) -> None:
        """From `seconds` on, let the trainer not wait for the sampler's memory. A sampler in a process is ended the
        first time that it would."""
        self.memory_sharing.give_up_sampler(seconds, self._end_sampler if self.sampler_supervisions else None)

    async def _end_sampler(self) -> None:
        for each in self.sampler_supervisions:
            each.close()
        await self.engines.sampler.close()

    def _replicas(self) -> dict[int, ReplicaMetrics]:
        """Of each replica."""
        if self.pool is None:
            return {}
        parts = zip(self.pool.sequences, self.pool.replicas, self.sampler_supervisions, strict=True)
        return {
            at: ReplicaMetrics(sequences, replica.kv_cache_used, process.restarts, process.works)
            for at, (sequences, replica, process) in enumerate(parts)
        }

    async def close(self) -> None:
        """Stop the scheduler, then the engines. One in a separate process may hang, and ends with its calls, for which
        the scheduler waits."""
        stops = [self.scheduler.close()]
        if self.stalls is not None:
            self.stalls.close()
        if self.supervision is not None:
            self.supervision.close()
            stops.append(asyncio.to_thread(self.engines.trainer.close))
        for each in self.sampler_supervisions:
            each.close()
        if self.sampler_supervisions:
            stops.append(self.engines.sampler.close())
        await asyncio.gather(*stops)
        if not self.sampler_supervisions:
            await self.engines.sampler.close()
        if self.supervision is None:
            await asyncio.to_thread(self.engines.trainer.close)


class ServedModels:
    """The base models of a server, by each of their names."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServedModel] = {}

    def add(self, model: ServedModel) -> None:
        for name in model.names:
            self._by_name[name] = model

    def get(self, name: str) -> ServedModel:
        """The model that `name` means (`served_name`)."""
        return self._by_name[self.served_name(name)]

    def served_name(self, name: str) -> str:
        """`name` if it is served, or what is before `:peft:N` in it, as the hosted service names a model with a context
        of N positions: if that is served, with so many. Otherwise InvalidRequestError with names or numbers."""
        if name in self._by_name:
            return name
        match = _CONTEXT_VARIANT.fullmatch(name)
        if match is None or match[1] not in self._by_name:
            served = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidRequestError(f"base_model: {brief(name)} is not served here; served are: {served}")
        context = self._by_name[match[1]].max_context_length
        if int(match[2]) > context:
            raise InvalidRequestError(
                f"base_model: {name!r} names a context of {match[2]} positions, and {match[1]!r} has {context} here; "
                "name it without :peft:, or serve it with a longer context"
            )
        return match[1]

    def names(self) -> list[str]:
        return list(self._by_name)

    def distinct(self) -> list[ServedModel]:
        """Each loaded copy once."""
        return list({id(model): model for model in self._by_name.values()}.values())

    @property
    def longest_context(self) -> int:
        """Of the models that are served."""
        return max((model.max_context_length for model in self.distinct()), default=0)

    @property
    def take_images(self) -> bool:
        """Whether one of them takes images."""
        return any(model.engines.renderer.takes_images for model in self.distinct())

    async def close(self) -> None:
        """Stop all models at once: the seconds after which engines that hang are given up do not add up."""
        await asyncio.gather(*(model.close() for model in self.distinct()))


def by_path(sources: Sequence[ModelSource]) -> dict[str, list[str]]:
    """Names of each copy of weights, in order; ValueError if two copies share a name."""
    names: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for source in sources:
        path = str(Path(source.path).resolve()) if Path(source.path).is_dir() else source.path
        if owner.setdefault(source.name, path) != path:
            raise ValueError(f"the model name {source.name!r} is given twice, for {owner[source.name]} and {path}")
        if source.name not in names.setdefault(path, []):
            names[path].append(source.name)
    return names


def tokenizer_id(path: str, data_dir: Path) -> str:
    """A name under which the SDK's loader finds the tokenizer of `path`.

    A hub name is its own id. The SDK drops everything after a colon, so a folder with one in its path gets a link in
    the data folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    absolute = str(folder.resolve())
    if ":" not in absolute:
        return absolute
    link = data_dir / "tokenizers" / hashlib.sha256(absolute.encode()).hexdigest()[:16]
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(absolute)
    return str(link)
