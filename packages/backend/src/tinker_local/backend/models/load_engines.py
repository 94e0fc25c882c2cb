"""Loads base models: the real engines (vLLM and HF transformers) or the fakes."""

import asyncio
import functools
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_local.backend.adapters.version_content import version_content
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.heap import memory_of_gpus
from tinker_local.backend.kernel_caches import use_writable_caches
from tinker_local.backend.models.adapter_check import TARGETS
from tinker_local.backend.models.gpu_plan import USUAL
from tinker_local.backend.models.model_folder import check_source
from tinker_local.backend.models.place_engines import place_engines
from tinker_local.backend.models.placement import (
    check_precision,
    chosen_precision,
    environment_of,
    layouts,
    replica_gpus,
    shares_weights,
)
from tinker_local.backend.models.positions import verdict_file
from tinker_local.backend.models.served_models import (
    EngineLoader,
    Engines,
    Progress,
    ServedModel,
    ServedModels,
    tokenizer_id,
)
from tinker_local.backend.models.supervision import StallWatch, TrainerSupervision, supervise_sampler
from tinker_local.backend.options import MICRO_BATCH_TOKENS, BackendOptions, DType, EnginePlace, ModelSource
from tinker_local.backend.process.early import started_early
from tinker_local.backend.process.ray_hosts import RayHosts
from tinker_local.backend.process.ray_replicas import RayReplicas
from tinker_local.backend.rendering.grammar import SWITCHED_OFF
from tinker_local.backend.rendering.renderer import CACHE_BYTES, ImageReading, ModelRenderer
from tinker_local.backend.rendering.tools import ToolFormat
from tinker_local.backend.sampling.process_sampler import Elsewhere, ProcessSampler, SamplerFactory, SamplerSeat
from tinker_local.backend.sampling.replica_pool import ReplicaPool, replica_name
from tinker_local.backend.scheduling.memory_sharing import MemorySharing, WakingSampler
from tinker_local.backend.scheduling.train_scheduler import TrainScheduler
from tinker_local.backend.stages import Stage, in_words, stage, taken
from tinker_local.backend.training.process_trainer import ProcessTrainer, TrainerFactory
from tinker_local.backend.training.trainer_config import TRAINERS_IMAGES, TrainerConfig
from tinker_local.backend.weight_files import read_ahead
from tinker_local.backend.weights.joined_names import PROJECTIONS
from tinker_local.backend.weights.memory_holder import MemoryHolder
from tinker_local.backend.weights.precision import DENSE, GROUPS, word_of
from tinker_local.backend.weights.published import WEIGHTS, published_of
from tinker_local.types import UnsupportedError
from tinker_local.types.pictures import MAX_PIXELS

if TYPE_CHECKING:
    from tinker_local.backend.fakes import FakeModel
    from tinker_local.backend.families.family import Family
    from tinker_local.backend.sampling.sampler import Sampler
    from tinker_local.backend.training.trainer import Trainer
    from tinker_local.backend.vllm_engine.build_engine import EngineOptions
    from tinker_local.backend.vllm_engine.engine_thread import EngineThread
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

log = logging.getLogger(__name__)

T = TypeVar("T")

TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""Mean difference (nats) of a probe's logprobs between trainer and sampler above which weights are not served.

In float32 they agree to 1e-5. bfloat16 keeps 8 bits, and differences of 0.05 to 0.2 can be rounding. When a base model
starts, the limit is lower: a few times what rounding alone moves its logprobs by (`agreement.judge`).
"""

LEAST_ROUNDING: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.01}
"""A difference (nats) that is always normal: some models move their logprobs hardly at all by rounding, and kernels
that approximate a function are that far apart."""


async def load_base_models(
    models: ServedModels,
    sources: Mapping[str, Sequence[str]],
    options: BackendOptions,
    load: EngineLoader | None,
    progress: Progress,
) -> None:
    """Load the weights of each path in turn, under all their names, and add them to `models`.

    `load`: makes the engines of one (None: the real ones). If one fails, those before it are in `models`. ValueError if
    trainer and sampler compute a model differently.
    """
    if load is None:
        await in_daemon_thread(_check_others, sources, options)
    for place, (path, names) in enumerate(sources.items()):
        share = options.gpu_memory_utilization / (len(sources) - place)  # of what the models before it left
        sleeps = options.sampler_sleeps and len(sources) == 1
        part = replace(options, gpu_memory_utilization=share, sampler_sleeps=sleeps)
        lasting = asyncio.create_task(_tell_that_it_lasts(names[0], progress), name="start")
        try:
            await _load_base_model(models, path, names, part, load, progress)
        finally:
            lasting.cancel()
    await _compare_again(models, options)


LASTING = 10.0
"""Seconds from one line to the next while a model starts."""


async def _tell_that_it_lasts(name: str, progress: Progress) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(LASTING)
        progress(f"{name}: still starting, {time.monotonic() - began:.0f} s so far")


async def _load_base_model(
    models: ServedModels,
    path: str,
    names: Sequence[str],
    options: BackendOptions,
    load: EngineLoader | None,
    progress: Progress,
) -> None:
    """One of them."""
    began = time.monotonic()
    loader = load or functools.partial(load_real, progress=progress)
    engines, seconds = await in_daemon_thread(load_engines, loader, path, names, options, progress)
    memory_sharing = MemorySharing(engines.trainer, engines.sampler)
    scheduler = TrainScheduler(
        memory_sharing,
        batch_tokens=options.batch_tokens,
        quantum=max(2, options.micro_batch_tokens or MICRO_BATCH_TOKENS),
    )
    trainer, sampler = engines.trainer, engines.sampler
    of_trainer = TrainerSupervision(trainer, memory_sharing) if isinstance(trainer, ProcessTrainer) else None
    of_sampler = supervise_sampler(sampler, memory_sharing)
    pool = sampler if isinstance(sampler, ReplicaPool) else None
    stalls = StallWatch(sampler)
    engines = replace(engines, sampler=WakingSampler(sampler, memory_sharing))
    ident = tokenizer_id(path, options.data_dir)
    start = time.monotonic()
    model = ServedModel(
        tuple(names), path, ident, engines, scheduler, memory_sharing, seconds, of_trainer, of_sampler, pool, stalls
    )
    models.add(model)  # from here on `models` closes it
    with stage("positions"):
        positions = await model.compare_positions()
    with stage("logprobs"):
        base = await model.check_agreement(options.max_image_pixels)
    difference = base.worst.difference
    model.check_positions(positions)
    if engines.unknown_adapters or engines.targets:
        with stage("adapters"):
            difference = max(difference, await model.check_adapters())
    for target, why in model.unsampled.items():
        progress(f"{names[0]}: runs with {target} are refused: {why}")
    if model.routed is not None:
        with stage("experts"):
            await model.check_routes()
    with stage("long text"):
        reached = await model.check_far(verdict_file(options.data_dir, path, _settings(model, options)))
    model.start = {**engines.stages, "comparisons": taken()}
    parts = [f"{part}: {words}" for part, stages in model.start.items() if (words := in_words(stages))]
    of_these = f" ({'; '.join(parts)})" if parts else ""
    progress(f"{names[0]}: started in {time.monotonic() - began:.1f} s{of_these}")
    progress(f"{names[0]}: {engines.trainer.trains}; {model.context_in_words()}")
    if of_routes := model.routes_in_words():
        progress(f"{names[0]}: {of_routes}")
    progress(
        f"{names[0]}: trainer and sampler agree to {max(difference, reached.difference):.1g} nats where rounding "
        f"alone makes {base.rounding.mean:.1g} nats, checked in {time.monotonic() - start:.1f} s: {reached}; "
        f"{positions.in_words(model.max_context_length)}"
    )


def _settings(model: ServedModel, options: BackendOptions) -> Mapping[str, Any]:
    """All that a verdict on a model depends on, besides its files and versions."""
    torch: Any = sys.modules.get("torch")  # fakes do without
    device = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "positions": model.max_context_length,
        "scaled": model.scaled,
        "replicas": model.replicas,
        "trains": model.engines.trainer.trains,
        **{name: getattr(options, name) for name in _DECISIVE},
    }


_DECISIVE = (
    *(
        "dtype",
        "base_precision",
        "head_precision",
        "decoder",
        "max_context_length",
        "max_rank",
        "train_vision",
        "train_gpus",
        "sample_gpus",
    ),
    *("sample_tp", "sampler", "trainer", "shared_weights", "compare_seconds"),
)
"""Options that change what is compared."""


async def _compare_again(models: ServedModels, options: BackendOptions) -> None:
    """Compare models with an engine in this process once more, as what was loaded after them may have changed what
    libraries share; ValueError if they differ now."""
    for model in models.distinct()[:-1]:
        if not (model.supervision and model.sampler_supervisions):
            compared = await model.compare_positions()
            await model.check_agreement(options.max_image_pixels)
            model.check_positions(compared)


def load_engines(
    loader: EngineLoader, path: str, names: Sequence[str], options: BackendOptions, progress: Progress
) -> tuple[Engines, float]:
    """Load one copy and report to `progress`; returns the engines and the seconds it took."""
    progress(f"loading {', '.join(names)} from {path}")
    start = time.monotonic()
    engines = loader(ModelSource(names[0], path), options)
    seconds = time.monotonic() - start
    progress(f"{names[0]}: trainer and sampler are up in {seconds:.1f} s, {resident_mib():.0f} MiB resident in all")
    return engines, seconds


def resident_mib() -> float:
    """Resident memory of this process in MiB (Linux)."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@functools.cache
def engine_thread() -> "EngineThread":
    """The one thread of this process that steps vLLM engines; vLLM's forward context is a global."""
    from tinker_local.backend.vllm_engine.engine_thread import EngineThread

    return EngineThread()


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """Samplers on `sample_gpus`: what makes each, on `sample_tp` of them; as many on each of `sample_hosts`. Each is to
    run `sequences` at once."""

    factories: Sequence[SamplerFactory]
    sequences: int = 256


@contextmanager
def starting(
    options: BackendOptions,
    sampler_place: EnginePlace,
    make_sampler: SamplerFactory | Replicas,
    trainer_place: EnginePlace,
    make_trainer: TrainerFactory,
) -> Iterator[tuple[SamplerFactory, TrainerFactory]]:
    """Functions that make both engines, each at its place; call them within the context, the sampler's first, or both
    at once if the memory of each is planned.

    With `options.train_gpus`, `make_trainer` makes a rank of several from its `Seat`, or the only one without.

    Processes start and import at once, but allocate nothing on the device before these calls: a trainer without a limit
    takes what the sampler has really left. They end if the context fails.
    """
    with ExitStack() as failed:
        if isinstance(make_sampler, Replicas):
            make_sampler = _loading_replicas(failed, options, make_sampler)
        elif sampler_place == "process":
            make_sampler = _loading(failed, ProcessSampler(make_sampler, timeout=options.sampler_timeout))
        if options.train_gpus:
            make_trainer = _loading(failed, _ranks(options, make_trainer))
        elif trainer_place == "process":
            make_trainer = _loading(failed, ProcessTrainer(make_trainer, timeout=options.trainer_timeout))
        yield make_sampler, make_trainer
        failed.pop_all()


def load_both(
    load_sampler: SamplerFactory, load_trainer: TrainerFactory, *, at_once: bool, lends: bool = False
) -> "Callable[[], tuple[Sampler, Sequence[Stage], Trainer, Sequence[Stage]]]":
    """A function that returns both engines of `starting`, each with the stages of its start, or raises the first error.

    `at_once`: both load from now on, each in a thread, for engines in processes whose memory is planned. Otherwise the
    sampler loads when the function is called, and then the trainer; the other way round if the trainer `lends` it the
    weights.
    """
    if not at_once:

        def in_turn() -> "tuple[Sampler, Sequence[Stage], Trainer, Sequence[Stage]]":
            if lends:
                trainer = load_trainer()
                of_trainer = _stages(trainer)
                try:
                    sampler = load_sampler()
                except BaseException:
                    trainer.close()
                    raise
                return sampler, _stages(sampler), trainer, of_trainer
            sampler = load_sampler()
            of_sampler = _stages(sampler)
            trainer = load_trainer()
            return sampler, of_sampler, trainer, _stages(trainer)

        return in_turn
    of_sampler, of_trainer = _in_daemon_thread(load_sampler), _in_daemon_thread(load_trainer)

    def both() -> "tuple[Sampler, Sequence[Stage], Trainer, Sequence[Stage]]":
        loading: list[Future[Any]] = [of_sampler, of_trainer]
        for ended in wait(loading, return_when=FIRST_EXCEPTION).done:
            ended.result()
        sampler, trainer = of_sampler.result(), of_trainer.result()
        return sampler, _stages(sampler), trainer, _stages(trainer)

    return both


def _stages(engine: "Sampler | Trainer") -> Sequence[Stage]:
    """Of the start of `engine`, which was the last in this process if it is here; of replicas, that of the slowest."""
    if isinstance(engine, ReplicaPool):
        return max((_stages(replica) for replica in engine.replicas), key=_seconds)
    return engine.stages if isinstance(engine, ProcessSampler | ProcessTrainer) else taken()


def _seconds(stages: Sequence[Stage]) -> float:
    return sum(each.seconds for each in stages)


def _in_daemon_thread(load: Callable[[], T]) -> "Future[T]":
    """Does not keep this process from ending: if the start fails, what the thread waits for is ended."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(load())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="load").start()
    return outcome


Engine = TypeVar("Engine", ProcessSampler, ProcessTrainer)


def _loading(failed: ExitStack, engine: Engine) -> Callable[[], Engine]:
    """A function that loads `engine` and returns it. `failed` ends its process."""
    failed.callback(engine.end)

    def load() -> Engine:
        engine.load()
        return engine

    return load


def _loading_replicas(failed: ExitStack, options: BackendOptions, replicas: Replicas) -> SamplerFactory:
    """A function that loads all replicas on `sample_gpus` at once. `failed` ends their processes."""
    if options.sampler == "inline":
        option = f"--sample-hosts {options.sample_hosts}" if options.sample_hosts > 1 else "--sample-gpus"
        raise ValueError(f"--sampler inline and {option} exclude each other: replicas are processes")
    started = []
    size = options.sample_tp or 1
    groups = replica_gpus(options.sample_gpus, size)
    here, count = len(groups), len(groups) * options.sample_hosts
    hosts = other_hosts(options, options.sample_hosts, here)
    places = None if hosts is None else RayReplicas(hosts, size)
    for at in range(count):
        started.append(
            ProcessSampler(
                replicas.factories[at % here],
                timeout=options.sampler_timeout,
                name=replica_name(at) if count > 1 else "sampler",
                environment=environment_of(groups[at % here]),
                ranks=size,
                elsewhere=None if places is None or at < here else Elsewhere(places, at - here, version_content),
            )
        )
        failed.callback(started[-1].end)

    def load() -> "Sampler":
        with ThreadPoolExecutor(len(started)) as threads:
            try:
                for loading in as_completed([threads.submit(replica.load) for replica in started]):
                    loading.result()
            except BaseException:
                for replica in started:  # one of them may be waiting for a host
                    replica.end()
                raise
        return started[0] if len(started) == 1 else ReplicaPool(started, replicas.sequences)

    return load


def _ranks(options: BackendOptions, make_trainer: TrainerFactory) -> ProcessTrainer:
    """A trainer with a process for each of `train_gpus`, on each of the hosts."""
    if options.trainer == "inline":
        raise ValueError("--trainer inline and --train-gpus exclude each other: each rank is a process")
    environments = [environment_of([gpu]) for gpu in options.train_gpus]
    others = other_hosts(options, options.train_hosts, len(environments))
    return ProcessTrainer(
        make_trainer,
        ranks=len(environments) * options.train_hosts,
        timeout=options.trainer_timeout,
        environments=environments,
        others=others,
    )


def other_hosts(options: BackendOptions, count: int, processes: int) -> RayHosts | None:
    """All but this one of `count` hosts, with so many ranks or replicas on each; ValueError in one line if they cannot
    be used."""
    if count == 1:
        return None
    assert options.ray_address is not None
    torch: Any = sys.modules.get("torch")  # fakes do without
    gpus = torch is not None and bool(torch.cuda.is_available())
    hosts = RayHosts(options.ray_address, count - 1, processes, gpus)
    hosts.check()
    return hosts


def engine_place(chosen: EnginePlace | None) -> EnginePlace:
    """Where a real engine runs: as `chosen`, otherwise in a separate process if there is a GPU."""
    import torch

    return chosen or ("process" if torch.cuda.is_available() else "inline")


def make_vllm_sampler(engine: "EngineOptions") -> "VLLMSampler":
    """The sampler of this process, with others on one thread."""
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

    return VLLMSampler(engine, engine_thread())


def make_vllm_rank(engine: "EngineOptions", seat: SamplerSeat) -> Any:
    """The `VLLMSampler` of rank 0, or the `Follower` of another rank."""
    from tinker_local.backend.vllm_engine.rank_follower import Follower
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

    return Follower(engine, seat) if seat.rank else VLLMSampler(engine, engine_thread(), seat)


def load_real(source: ModelSource, options: BackendOptions, progress: Progress) -> Engines:
    """vLLM for sampling and HF transformers for training. Tells `progress` where they are if there are several GPUs,
    and what they share of the weights."""
    kept = _kept(source.path, options)
    use_writable_caches(options.data_dir, progress)
    read_ahead(source.path)
    with started_early(_imports(options)):
        if not shares_weights(options, len(memory_of_gpus()), published=kept is not None):
            return _load_real(source, options, progress, None)
        try:
            holder = MemoryHolder()
        except OSError as error:
            if kept is not None:
                raise
            progress(f"{source.name}: trainer and sampler have a copy of the weights each: {error}")
            return _load_real(source, options, progress, None)
        try:
            engines = _load_real(source, options, progress, holder)
        except BaseException as error:
            holder.close()
            if holder.refusal is None or not isinstance(error, Exception):
                raise
            if kept is not None:
                raise UnsupportedError(
                    f"{source.path}: {kept}: trainer and sampler cannot read one copy of it: {holder.refusal}"
                ) from error
        else:
            if engines.holder is None:
                holder.close()
            else:
                shared, whole = (number / 2**20 for number in holder.read or (0, 0))
                progress(
                    f"{source.name}: trainer and sampler share {shared:.0f} of {whole:.0f} MiB of weights"
                    f"{_in_fewer_bits(source.path, options)}"
                )
            return engines
        progress(f"{source.name}: trainer and sampler have a copy of the weights each: {holder.refusal}")
        return _load_real(source, options, progress, None)


def _kept(path: str, options: BackendOptions) -> str | None:
    """What says in which fewer bits the model at `path` is, if it is; ValueError or UnsupportedError in a sentence if
    it cannot be."""
    published = published_of(path)
    check_precision(options, len(memory_of_gpus()), published=None if published is None else published.told)
    told = [*([] if published is None else [published.told]), chosen_precision(options)]
    return " ".join(filter(None, told)) or None


def _in_fewer_bits(path: str, options: BackendOptions) -> str:
    """In which fewer bits parts of the served model are, in words; empty if none are."""
    published = published_of(path)
    layers = options.base_precision if published is None else published.told
    told = [f"the layers in {layers}"] if layers else []
    told += [f"embedding and LM head in {options.head_precision}"] if options.head_precision else []
    return "".join(f", {each}" for each in told)


def _imports(options: BackendOptions) -> Mapping[str, str]:
    """What processes that the engines will surely have import, while this one does, by their names. Imports neither
    torch nor vLLM itself."""
    gpus = len(memory_of_gpus())
    if gpus > 1 or options.train_gpus or options.sample_gpus:  # ranks and replicas: each has another environment
        return {}
    places = {
        "sampler": (options.sampler, "tinker_local.backend.vllm_engine.build_engine:import_vllm"),
        "trainer": (options.trainer, "tinker_local.backend.training.run.worker"),
    }
    return {
        name: function
        for name, (place, function) in places.items()
        if place == "process" or (gpus == 1 and place is None)
    }


def _load_real(
    source: ModelSource, options: BackendOptions, progress: Progress, holder: MemoryHolder | None
) -> Engines:
    """`holder`: of the weights that both engines read, if they share them."""
    taken()
    with stage("imports"):
        import torch
        from tinker_local.backend.rendering.hf_text import HFText
        from tinker_local.backend.training.run.worker import HFTrainer, trainer_of_rank
        from tinker_local.backend.vllm_engine import build_engine, compat_vllm

    check_source(source)
    dtype = options.dtype or compat_vllm.default_dtype()
    config, family = check_model(source.path, options)
    text_config = config.get_text_config()
    gpus = 0 if compat_vllm.runs_on_cpu() else torch.cuda.device_count()
    packs_experts = options.base_precision is not None and family.lora.experts is not None
    if gpus and not (family.one_copy and _keeps_experts(family)) and not packs_experts:
        if (kept := _kept(source.path, options)) is not None:
            raise UnsupportedError(
                f"{source.path}: {kept}: on this GPU vLLM has a second copy of the weights of {config.model_type} "
                f"models, and packed ones are in one; {_way_out(family, options)}"
            )
        holder = None
    published = published_of(source.path)
    weights = options.base_precision or (DENSE if published is None else WEIGHTS)
    longest = int(text_config.max_position_embeddings)
    options = replace(options, max_context_length=options.max_context_length or longrope_context(text_config))
    engine = build_engine.EngineOptions(
        source.path,
        dtype=dtype,
        max_context_length=options.max_context_length,
        kv_cache_bytes=options.kv_cache_bytes,
        max_rank=options.max_rank,
        sleeps=options.sampler_sleeps,
        train_vision=options.train_vision and family.vision is not None and not family.vision.frozen,
        shared_weights=None if holder is None else holder.address,
        weights=weights,
        head_weights=options.head_precision or DENSE,
        record_routes=options.replay_routes == "auto" and family.lora.experts is not None,
        moves_keys=options.in_flight_cache == "recompute",
    )
    placed = place_engines(config, engine, options, gpus)
    layout, engines = placed.layout, placed.engines
    if layout.train_gpus or layout.sample_gpus:  # ranks and replicas have copies
        holder, engines = None, [replace(each, shared_weights=None) for each in engines]
    if gpus > 1:
        progress(f"{source.name} {placed}")
    if placed.reserves != USUAL:
        progress(f"{source.name}: memory is short, so that less is set aside {placed.reserves}")
    options = replace(options, train_gpus=layout.train_gpus, sample_gpus=layout.sample_gpus, sample_tp=layout.sample_tp)
    config_of_trainer = TrainerConfig(
        source.path,
        name=source.name,
        dtype=dtype,
        max_context_length=options.max_context_length,
        micro_batch_tokens=options.micro_batch_tokens or placed.micro_batch_tokens,
        max_rank=options.max_rank,
        activation_memory_bytes=placed.activation_bytes,
        logit_chunk_elements=placed.reserves.logits if gpus else None,
        image_cache_bytes=min(TRAINERS_IMAGES, placed.reserves.image_cache),
        spare_bytes=placed.spare_bytes,
        module_gradient_norms=options.module_gradient_norms,
        decoder=options.decoder,
        weights=weights,
        head_weights=options.head_precision or DENSE,
        shards=layout.shards,
        context_parallel=layout.context_parallel,
        share_prefixes=options.share_prefixes == "auto",
        replay_routes=options.replay_routes == "auto",
        shared_weights=None if holder is None else holder.address,
    )
    several = len(options.train_gpus) * options.train_hosts > 1
    make_trainer: TrainerFactory = functools.partial(trainer_of_rank if several else HFTrainer, config_of_trainer)
    make_one: SamplerFactory = make_vllm_sampler if layout.sample_tp == 1 else make_vllm_rank
    factories = [functools.partial(make_one, engine) for engine in engines]
    sequences = engines[0].max_sequences
    make_sampler: SamplerFactory | Replicas = Replicas(factories, sequences) if options.sample_gpus else factories[0]
    sampler_place, trainer_place = engine_place(options.sampler), engine_place(options.trainer)
    places = sampler_place, make_sampler, trainer_place, make_trainer
    if max(options.train_hosts, options.sample_hosts) > 1:
        ranks, replicas = len(options.train_gpus), len(engines)
        progress(
            f"{source.name} trains on {options.train_hosts} hosts, with ranks on each: {ranks}; and samples on "
            f"{options.sample_hosts}, with replicas on each: {replicas}"
        )
    with starting(options, *places) as (load_sampler, load_trainer):
        # Without a plan, the trainer takes what the sampler leaves.
        planned = not gpus or placed.activation_bytes is not None
        both = load_both(
            load_sampler, load_trainer, at_once=planned and "inline" not in places, lends=holder is not None
        )
        with stage("processors"):
            renderer = load_renderer(source.path, dtype=dtype, max_pixels=options.max_image_pixels)
            text = HFText.load(source.path, renderer.tokens)
            tools = load_tools(source.path, config.model_type, options.tool_parser)
        stages: dict[str, Sequence[Stage]] = {"server": taken()}
        sampler, stages["sampler"], trainer, stages["trainer"] = both()
    return Engines(
        renderer,
        trainer,
        sampler,
        arch=config.model_type,
        tolerance=TOLERANCE[dtype],
        least_rounding=LEAST_ROUNDING[dtype],
        sliding_window=sliding_window(text_config),
        sequences=sequences * len(engines) * options.sample_hosts,
        text=text,
        no_grammars=compat_vllm.why_no_grammars(options.grammars),
        tools=tools,
        targets=(*TARGETS, "train_vision") if engine.train_vision else TARGETS,
        unknown_adapters=family.unwritten,
        compare_seconds=options.compare_seconds,
        kv_cache_bytes=min(each.kv_cache_bytes or 0 for each in engines),
        wanted_context=min(options.max_context_length or longest, longest),
        stages=stages,
        holder=holder,
        base_precision=word_of(
            options.base_precision or (None if published is None else published.word), options.head_precision
        ),
    )


def check_model(path: str, options: BackendOptions) -> "tuple[Any, Family]":
    """transformers' config of the model at `path`, and its family; UnsupportedError in a sentence if an engine is known
    not to run it as `options` say, or if its files do not hold what its class needs. Starts no engine and reads headers
    alone."""
    from tinker_local.backend.training.model.load_model import check_weights, config_of, supported_family

    config = config_of(path)
    family = supported_family(config, path)
    check_packable(config, family, options)
    check_weights(path, config, family)
    if family.vision is not None and family.vision.by_processor:
        family.vision.processor(path, config)
    if importlib.util.find_spec("vllm"):  # `check` may run before it is installed
        from tinker_local.backend.vllm_engine.refusals import check_runs

        check_runs(path, config, family)
    return config, family


def _way_out(family: "Family", options: BackendOptions) -> str:
    """What serves a model whose weights vLLM has twice, and some of which were to be packed."""
    if options.head_precision is not None and family.one_copy and family.lora.experts is not None:
        return "--base-precision int8 as well packs its experts, which vLLM then reads as they are"
    return "serve it without the option, or from a folder that is not quantized"


def check_packable(config: Any, family: "Family", options: BackendOptions) -> None:
    """UnsupportedError in a sentence if `base_precision` or `head_precision` is chosen, and a model of `config` has
    nothing to pack."""
    from tinker_local.backend.training.model.load_model import has_second_embedding, packable, packable_head

    if options.head_precision is not None:
        where = f"{config.name_or_path}: --head-precision {options.head_precision}"
        if not family.one_copy:
            raise UnsupportedError(
                f"{where}: vLLM has another form of the weights of {config.model_type} models than the trainer, and "
                "packed ones are in one copy; serve it without the option"
            )
        if has_second_embedding(config):
            raise UnsupportedError(
                f"{where}: its layers read a second embedding (hidden_size_per_layer_input), which cannot be packed, "
                "and vLLM packs both or neither; serve it without the option"
            )
        if packable_head(config) is None:
            raise UnsupportedError(
                f"{where}: rows of its embedding and LM head have {config.get_text_config().hidden_size} numbers, "
                f"which cannot be divided into groups of {GROUPS[-1]}; serve it without the option"
            )
    if options.base_precision is None:
        if family.lora.experts is not None and published_of(config.name_or_path) is not None:
            raise UnsupportedError(
                f"{config.name_or_path}: mixtures of experts cannot be served with quantized weights yet"
            )
        return
    where = f"{config.name_or_path}: --base-precision {options.base_precision}"
    if packable(config) is None and family.lora.experts is not None:
        text = config.get_text_config()
        width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        raise UnsupportedError(
            f"{where}: rows of its experts have {text.hidden_size} and {width} numbers, and experts are packed where "
            "groups of 32 divide both"
        )
    if packable(config) is None:
        raise UnsupportedError(
            f"{where}: nothing of a model of type {config.model_type} is packed: projections are, in attention and MLP "
            f"of its layers, that are named {', '.join(sorted(PROJECTIONS))}, and whose rows can be divided into "
            "groups of 32"
        )


def _check_others(sources: Mapping[str, Sequence[str]], options: BackendOptions) -> None:
    """Before the first of several models takes minutes to load: the same for the others."""
    for path, names in list(sources.items())[1:]:
        check_source(ModelSource(names[0], path))
        check_model(path, options)


def _keeps_experts(family: "Family") -> bool:
    """Whether vLLM leaves experts as it has loaded them. On Blackwell it may lay them out anew for FlashInfer."""
    import torch

    return family.lora.experts is None or torch.cuda.get_device_capability()[0] < 10


def load_tools(model: str, model_type: str, chosen: str | None) -> ToolFormat | str:
    """How `model` writes calls of tools, or why that is not known. `chosen`: the operator's parser, which must do."""
    from tinker_local.backend.families import family_of
    from tinker_local.backend.vllm_engine.vllm_tools import VLLMTools

    name = chosen or family_of(model_type, model).tool_parser
    if name is None:
        return f"models of the type {model_type!r} have no usual form of calls; --tool-parser can name one of vLLM's"
    tools = VLLMTools(name, model)
    if chosen:
        tools.load()
    return tools


def sliding_window(config: Any) -> int | None:
    """The window of a text config of transformers, if one of its layers uses it."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    return None if window is None or (layers and "sliding_attention" not in layers) else int(window)


def longrope_context(config: Any) -> int | None:
    """The length of sequences before they were extended by longrope, if the text config of transformers has that.

    Both engines choose the frequencies of all sequences by the context length. Longer ones would make the short worse,
    so that vLLM's server does not extend it by itself either.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    lengths = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def load_renderer(
    model: str, *, dtype: DType | None = None, max_pixels: int = MAX_PIXELS, cache_bytes: int = CACHE_BYTES
) -> ModelRenderer:
    """The renderer of `model` (a folder or hub name); `dtype` as of the engine."""
    from tinker_local.backend.families import family_of
    from tinker_local.backend.vllm_engine.vllm_images import VLLMImages
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    vision = family_of(config.model_type, model).vision
    images = None
    if vision is not None:
        tokens = vision.tokens(config)
        images = ImageReading(tokens, vision.processor(model, config), VLLMImages(model, dtype, tokens))
    vocab_size = config.get_text_config().vocab_size
    return ModelRenderer(vocab_size, images, max_pixels=max_pixels, cache_bytes=cache_bytes)


def load_fake(source: ModelSource, options: BackendOptions) -> Engines:
    """The numpy model under any name."""
    from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeText, FakeTools, FakeTrainer
    from tinker_local.backend.fakes.fake_trainer import fake_of_rank

    model = FakeModel(source.name)
    sample_tp = options.sample_tp or 1
    (layout,) = layouts(options, 0, kv_heads=sample_tp)
    options = replace(options, sample_tp=sample_tp, train_gpus=layout.train_gpus, sample_gpus=layout.sample_gpus)
    ranks = len(options.train_gpus) * options.train_hosts
    make: Callable[..., FakeTrainer] = fake_of_rank if ranks > 1 else FakeTrainer
    make_trainer = functools.partial(make, model, module_gradient_norms=options.module_gradient_norms)
    make_one = functools.partial(FakeSampler if sample_tp == 1 else make_fake_rank, model)
    groups = replica_gpus(layout.sample_gpus, sample_tp)
    make_sampler = Replicas([make_one] * len(groups)) if groups else make_one
    places = options.sampler or "inline", make_sampler, options.trainer or "inline", make_trainer
    with starting(options, *places) as (load_sampler, load_trainer):
        sampler, trainer = load_sampler(), load_trainer()
    sequences = 256 * max(1, len(groups)) * options.sample_hosts
    return Engines(
        FakeRenderer(model),
        trainer,
        sampler,
        arch="fake",
        tolerance=1e-4,
        sequences=sequences,
        text=FakeText(model),
        no_grammars=SWITCHED_OFF if options.grammars == "never" else "",
        tools=FakeTools(),
        base_precision=word_of(options.base_precision, options.head_precision),
    )


def make_fake_rank(model: "FakeModel", seat: SamplerSeat) -> Any:
    """Rank 0 has no use for the others, which end with it."""
    from tinker_local.backend.fakes import FakeFollower, FakeSampler

    return FakeFollower(seat.links[0]) if seat.rank else FakeSampler(model)
