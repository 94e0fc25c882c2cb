"""Loaded base models: one renderer, trainer and sampler for each copy of the weights, under all its names."""

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterVersion
from tinker_local.backend.models.adapter_check import TARGETS, adapter_on, largest_difference
from tinker_local.backend.models.agreement import (
    DRAWS,
    Comparison,
    Probes,
    judge,
    make_probes,
    sampler_logprobs,
    trainer_draws,
)
from tinker_local.backend.models.metrics import Counts, ModelMetrics, ReplicaMetrics
from tinker_local.backend.models.positions import (
    Reached,
    compare_far,
    compare_positions,
    read_verdict,
    refusal,
    write_verdict,
)
from tinker_local.backend.models.routes_check import RoutesCheck, check_routes
from tinker_local.backend.models.supervision import SamplerSupervision, StallWatch, TrainerSupervision
from tinker_local.backend.options import BackendOptions, ModelSource
from tinker_local.backend.rendering.rendered_input import RenderedInput, Renderer
from tinker_local.backend.rendering.text import TextCodec
from tinker_local.backend.rendering.tools import ToolFormat
from tinker_local.backend.sampling.replica_pool import ReplicaPool
from tinker_local.backend.sampling.sampler import Sampler, SampleWork
from tinker_local.backend.scheduling.memory_sharing import MemorySharing
from tinker_local.backend.scheduling.sample_turns import PROMPTS_AHEAD, SampleTurns
from tinker_local.backend.scheduling.train_scheduler import TrainScheduler
from tinker_local.backend.stages import Stage
from tinker_local.backend.threads import without_pool
from tinker_local.backend.training.module_outputs import first_difference
from tinker_local.backend.training.rotations import Compared, Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.training.trainer import Trainer
from tinker_local.backend.weights.memory_holder import MemoryHolder
from tinker_local.types import ApiError, InvalidRequestError, LoraConfig, SamplingParams
from tinker_local.types.errors import brief

log = logging.getLogger(__name__)

_CONTEXT_VARIANT = re.compile(r"(.+):peft:([1-9]\d{0,11})", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Engines:
    """What serves one copy of the weights.

    `tolerance`: largest mean difference of logprobs (nats) between trainer and sampler on a probe. `least_rounding`: a
    difference that rounding always explains, also where the trainer's own moves logprobs less. `sliding_window`: of
    the base model's attention, in positions; None if it has none. `sequences`: how many the sampler is to run at once;
    it has room for `RESERVED` more. `text`: None for a model without a tokenizer, which clients must bring.
    `no_grammars`: why samples cannot follow a grammar; empty if they can. `tools`: how it writes calls of tools, or why
    that is not known. `targets`: the fields of `LoraConfig` that the trainer trains, of which an adapter is compared at
    the start, too. `unknown_adapters`: whether it must agree on all of them, since it is not known what the sampler's
    class of this architecture does with any. `compare_seconds`: how long the start may take to compare their logprobs
    on long texts; 0: it does not. `kv_cache_bytes`: of the sampler, on each of its GPUs; 0:
    not known. `wanted_context`: positions that the model and the options allow; 0: not known. `stages`: where the time
    of loading went, of the server, the sampler and the trainer. `holder`: of the weights that both share, if they do.
    `base_precision`: in what the base is, as `precision.word_of` says it of its layers (one of `precision.WORDS` or
    `Published.word`) and of embedding and LM head; None: dense.
    """

    renderer: Renderer
    trainer: Trainer
    sampler: Sampler
    arch: str
    tolerance: float
    least_rounding: float = 1e-4
    sliding_window: int | None = None
    sequences: int = 256
    text: TextCodec | None = None
    no_grammars: str = ""
    tools: ToolFormat | str = "not loaded"
    targets: Sequence[str] = ()
    unknown_adapters: bool = False
    compare_seconds: float = 0.0
    kv_cache_bytes: int = 0
    wanted_context: int = 0
    stages: Mapping[str, Sequence[Stage]] = field(default_factory=dict)
    holder: MemoryHolder | None = None
    base_precision: str | None = None


EngineLoader = Callable[[ModelSource, BackendOptions], Engines]
"""Loads the weights behind a source; blocks."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """`matrices`: how many both engines read; `seconds` that computing their checksums took. `problem`: why they may
    not be what was written, or empty."""

    matrices: int
    seconds: float
    problem: str


SAME_OUTPUT: Mapping[AdapterDType, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""By which part of its norm a module's output may differ in two engines, by dtype."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One copy of a base model's weights with its engines and scheduler.

    `supervision`: of a trainer in a separate process, else None. `sampler_supervisions`: of each separate process of
    the sampler. `pool`: the sampler if it is several replicas, else None. `stalls`: sees when it makes no progress.
    `check_agreement` sets `probes`, the prompts on which trainer and sampler must agree, `comparison`, how they do, and
    `images_of_start`, the counts of `images()` until then. `unsampled`: fields of `LoraConfig` that `check_adapters`
    found must be off, with the reasons. `replicas`: how many the sampler has. `scaled`: the first position at which
    queries get longer, if `check_positions` has seen one. `check_agreement` sets `base_seconds`, how long it took.
    `start`: where the time of the start went, by part. `routed`: the layers whose recorded experts are taken in
    training; None: of no layer. `routes`: what `check_routes` found, if it looked.
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
    comparison: Comparison | None = None
    counts: Counts = field(default_factory=Counts)
    images_of_start: tuple[int, int, int] = (0, 0, 0)
    unsampled: dict[str, str] = field(default_factory=dict)
    max_context_length: int = field(init=False)
    sample_turns: SampleTurns = field(init=False)
    replicas: int = field(init=False)
    routed: RoutedLayers | None = field(init=False)
    routes: RoutesCheck | None = None
    scaled: int | None = None
    base_seconds: float = 0.0
    start: Mapping[str, Sequence[Stage]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = 1 if self.pool is None else len(self.pool.replicas)
        self.sample_turns = SampleTurns(self.engines.sequences, self.replicas * PROMPTS_AHEAD)
        self.max_context_length = min(self.engines.trainer.max_context_length, self.engines.sampler.max_context_length)
        trains, samples = self.engines.trainer.routed, self.engines.sampler.routed
        self.routed = trains if trains == samples else None

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

    async def compare_positions(self) -> Compared:
        """Compare trainer and sampler at every position that is served. ValueError in one line if the sampler lacks
        one, since nothing may be computed there."""
        trainer, sampler, limit = self.engines.trainer, self.engines.sampler, self.max_context_length
        all_found = []

        async def of_trainer(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
            return await self.scheduler.call(trainer.rotations, layers, positions)

        for replica in range(self.replicas):

            async def of_sampler(
                layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = replica
            ) -> Rotations:
                return await sampler.rotations(layers, positions, replica)

            with self._comparing(" at all positions"):
                found = await compare_positions(
                    of_trainer, of_sampler, limit, sampler.adapter_dtype, images=self.engines.renderer.takes_images
                )
            if found.differing is not None and found.differing.missing_in_second:
                self.check_positions(found)
            all_found.append(found)
        first = min(all_found, key=lambda each: limit if each.differing is None else each.differing.position)
        self.scaled = first.scaled
        return first

    def check_positions(self, compared: Compared) -> None:
        """ValueError in one line if the engines differ at a position."""
        if (why := refusal(compared, self.max_context_length)) is not None:
            raise ValueError(f"{self.names[0]}: {why}")

    async def check_far(self, verdict: Path | None) -> Reached:
        """Compare logprobs on as long a text as `compare_seconds` allow, unless an earlier start has left its
        `verdict`; ValueError in one line if they differ. After `check_agreement`."""
        engines, earlier = self.engines, read_verdict(verdict)
        known = Reached(max(probe.length for probe in self.probes.base), 0.0)
        if earlier is not None or engines.compare_seconds <= 0:
            return earlier or known
        window = engines.sliding_window
        marks = [mark for mark in (self.scaled, window) if mark is not None]

        async def logprobs(
            text: RenderedInput,
        ) -> tuple[npt.NDArray[np.float32], Sequence[npt.NDArray[np.float32]]]:
            ours = await self.scheduler.call(engines.trainer.logprobs, None, text)
            return ours, await sampler_logprobs(engines.sampler, None, [text], self.replicas)

        with self._comparing(" on a long text"):
            length, worst_part = await compare_far(
                logprobs,
                self.probes.base,
                self.base_seconds,
                self.max_context_length - 1,
                marks,
                engines.compare_seconds,
            )
        if worst_part is None:
            return known
        # A long text has more tokens whose experts change by rounding, and the worst of many parts counts.
        mean_limit = 0.0 if self.comparison is None else self.comparison.mean_limit
        normal = min(engines.tolerance, max(10 * engines.least_rounding, 2 * mean_limit))
        if not worst_part.difference <= normal:
            raise ValueError(
                f"{self.names[0]}: trainer and sampler compute long texts differently: {worst_part}; around it they "
                f"differ by {worst_part.difference:.3g} on average (at most {normal:.3g} is normal)"
            )
        reached = Reached(length, worst_part.difference)
        write_verdict(verdict, reached)
        return reached

    async def check_weights(self) -> WeightsCheck:
        """Whether the frozen weights that both engines read are what was written."""

        def check() -> WeightsCheck:
            start = time.monotonic()
            matrices, changed = self.engines.trainer.check_weights()
            problem = f"{self.names[0]}: {changed}; start the server again" if changed else ""
            return WeightsCheck(matrices, time.monotonic() - start, problem)

        try:
            return await self.scheduler.call(check)
        except (ApiError, RuntimeError) as error:  # the trainer's process has ended, for instance
            return WeightsCheck(0, 0.0, f"{self.names[0]}: the frozen weights were not checked: {error}")

    async def check_agreement(self, max_image_pixels: int) -> Comparison:
        """Make the probes; ValueError in one line if trainer and sampler compute the base model differently.
        `max_image_pixels`: the renderer's."""
        engines, limit = self.engines, self.max_context_length - 1
        vocab_size, window = engines.trainer.vocab_size, engines.sliding_window
        with self._comparing():
            self.probes = await asyncio.to_thread(
                without_pool,
                make_probes,
                engines.renderer,
                vocab_size,
                limit,
                window,
                max_image_pixels,
                several=engines.unknown_adapters,
            )
            start = time.monotonic()
            draws = await self.scheduler.call(trainer_draws, engines.trainer, None, self.probes.base)
            self.comparison = await self._compared(None, draws, "this model")
            self.base_seconds = (time.monotonic() - start) / (1 + DRAWS)  # of one pass
        self.images_of_start = self.images()
        return self.comparison

    async def check_adapters(self) -> float:
        """Compare trainer and sampler with an adapter on all targets, after `check_agreement`; the mean difference of
        logprobs (nats). If they differ, or the sampler does not take it, compare each target alone and set `unsampled`;
        ValueError in one line if nothing can be both trained and sampled, or if the model's adapters are not known."""
        engines = self.engines
        targets = engines.targets or TARGETS
        try:
            compared = await self.compare_adapter(targets)
        except ValueError:
            if engines.unknown_adapters:
                raise
            for target in targets:
                try:
                    await self.compare_adapter([target])
                except ValueError as error:
                    self.unsampled[target] = str(error).removeprefix(f"{self.names[0]}: ")
            rest = [target for target in targets if target not in self.unsampled]
            if len(rest) in (0, len(targets)):
                raise
            compared = await self.compare_adapter(rest)
        self.images_of_start = self.images()
        return compared.worst.difference

    async def check_routes(self) -> None:
        """See whether the experts that the sampler records are those it takes, after `check_agreement`. If not, or if
        that cannot be seen, none are taken in training. It ends no start."""
        engines = self.engines
        for replica in range(self.replicas):
            if self.routed is None:
                return
            try:
                found = await check_routes(
                    engines.trainer,
                    engines.sampler,
                    self.scheduler.call,
                    self.routed,
                    self.probes.base,
                    self.max_context_length,
                    engines.least_rounding,
                    replica,
                )
            except ApiError as error:
                found = RoutesCheck(math.nan, math.nan, math.nan, f"they could not be checked: {error}")
            if self.routes is None or found.problem or found.other > self.routes.other:
                self.routes = found
            if found.problem:
                self.routed = None

    def check_sampled(self, config: LoraConfig) -> None:
        """InvalidRequestError if `config` trains what the sampler would not compute."""
        for target, why in self.unsampled.items():
            if getattr(config, target):
                raise InvalidRequestError(
                    f"lora_config.{target}: {self.names[0]} would train it and could not sample it; leave {target} off "
                    f"({why})"
                )

    async def compare_adapter(self, targets: Sequence[str]) -> Comparison:
        """Compare trainer and sampler with an adapter on `targets`, after `check_agreement`; ValueError in one line if
        they compute it differently, or if the sampler cannot take it."""
        engines = self.engines
        with self._comparing(" with an adapter"):
            state, draws, effect = await self.scheduler.call(
                adapter_on, targets, engines.trainer, self.probes.base, engines.sampler.adapter_dtype
            )
            name = f"{self.names[0]} with {', '.join(targets)}"
            version = AdapterVersion(name, Path("compared-at-the-start"), lambda: state)
            limit = 0.0 if engines.unknown_adapters else largest_difference(engines.tolerance, effect)
            try:
                return await self._compared(version, draws, "adapters of this model", limit)
            finally:
                await engines.sampler.remove_version(version)

    @contextmanager
    def _comparing(self, how: str = "") -> Iterator[None]:
        """Errors of the engines end the start."""
        try:
            yield
        except ApiError as error:
            raise ValueError(f"{self.names[0]}: trainer and sampler could not be compared{how}: {error}") from error

    async def _compared(
        self, version: AdapterVersion | None, draws: Sequence[npt.NDArray[np.float32]], what: str, limit: float = 0.0
    ) -> Comparison:
        """How the sampler's logprobs of the base model's probes differ from the trainer's, in the replica that differs
        most; ValueError if by more than rounding explains and by more than `limit` on average. `draws`: of
        `trainer_draws`."""
        engines, probes = self.engines, self.probes.base
        found = await sampler_logprobs(engines.sampler, version, probes, self.replicas)
        comparisons = [judge(probes, draws, each, engines.least_rounding, engines.tolerance) for each in found]
        for replica, comparison in enumerate(comparisons):
            if comparison.problem is not None and not comparison.worst.difference <= limit:
                first = "" if version else await self._first_module(probes[0], replica)
                raise ValueError(
                    f"{self.names[0]}: trainer and sampler compute {what} differently: {comparison.problem}{first}"
                )
        return max(comparisons, key=lambda comparison: comparison.worst.difference)

    async def _first_module(self, text: RenderedInput, replica: int) -> str:
        """Which module differs first on a probe of text, behind a semicolon; empty if that is not known."""
        engines = self.engines
        work = SampleWork(text, None, SamplingParams(max_tokens=1), prompt_logprobs=True, replica=replica)
        try:
            ours = await self.scheduler.call(engines.trainer.module_outputs, text)
            theirs = await engines.sampler.module_outputs(work)
            told = first_difference(ours, theirs, SAME_OUTPUT[engines.sampler.adapter_dtype])
        except Exception:  # of any architecture, and the refusal says enough without
            log.warning("the modules of trainer and sampler cannot be looked at", exc_info=True)
            return ""
        return told and f"; {told}"

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
            in_flight_published=counts.in_flight_published,
            in_flight_tokens=counts.in_flight_tokens,
            tokens_on_older_keys=counts.tokens_on_older_keys,
            sequences=self.sample_turns.sequences,
            kv_cache_used=engines.sampler.kv_cache_used,
            kv_cache_bytes=engines.kv_cache_bytes,
            trainer_cached_bytes=engines.trainer.cached_bytes,
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

    def routes_in_words(self) -> str:
        """Whether experts that samples took are taken in training; empty for a model without routed experts."""
        trains, samples = self.engines.trainer.routed, self.engines.sampler.routed
        if self.routed is not None:
            return (
                f"gradients on recorded samples take the experts that they took, of {len(self.routed.layers)} layers "
                f"({self.routed.position_bytes} bytes a position)" + (f": {self.routes}" if self.routes else "")
            )
        if self.routes is not None:
            return f"gradients do not take the experts that samples took: {self.routes.problem}"
        if trains is None and samples is None:
            return ""
        why = "have different layers of them" if trains and samples else "do not both say which these are"
        return f"gradients do not take the experts that samples took: trainer and sampler {why}"

    def context_in_words(self) -> str:
        """What context is served, and why it is shorter than the model's, if it is."""
        words = f"serves contexts of up to {self.max_context_length} positions"
        if self.max_context_length >= self.engines.wanted_context:
            return words
        cache = self.engines.kv_cache_bytes / 2**30
        return (
            f"{words} and not of {self.engines.wanted_context}: its KV cache of {cache:.2f} GiB holds no more, and "
            f"--kv-cache {cache * self.engines.wanted_context / self.max_context_length + 0.005:.2f} would"
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
        if self.engines.holder is not None:
            self.engines.holder.close()


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
