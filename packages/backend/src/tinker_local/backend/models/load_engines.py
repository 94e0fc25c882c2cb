"""Loads base models: the real engines (vLLM and HF transformers) or the fakes."""

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.models.gpu_plan import COUNTED_RANK, GpuPlan, model_sizes, plan_gpu, step_sizes
from tinker_local.backend.models.placement import check_gpus, check_shares, environment_of, replica_gpus
from tinker_local.backend.models.served_models import (
    EngineLoader,
    Engines,
    Progress,
    ServedModel,
    ServedModels,
    tokenizer_id,
)
from tinker_local.backend.models.supervision import TrainerSupervision, supervise_sampler
from tinker_local.backend.options import BackendOptions, DType, EnginePlace, ModelSource, ShardChoice
from tinker_local.backend.rendering.decoding import MAX_PIXELS
from tinker_local.backend.rendering.renderer import CACHE_BYTES, ImageReading, ModelRenderer
from tinker_local.backend.sampling.process_sampler import ProcessSampler, SamplerFactory, SamplerSeat
from tinker_local.backend.sampling.replica_pool import ReplicaPool, replica_name
from tinker_local.backend.scheduling.memory_sharing import MemorySharing, WakingSampler
from tinker_local.backend.scheduling.train_scheduler import TrainScheduler
from tinker_local.backend.training.process_trainer import ProcessTrainer, TrainerFactory

if TYPE_CHECKING:
    from tinker_local.backend.fakes import FakeModel
    from tinker_local.backend.sampling.sampler import Sampler
    from tinker_local.backend.training.trainer import Trainer
    from tinker_local.backend.vllm_engine.build_engine import EngineOptions
    from tinker_local.backend.vllm_engine.engine_thread import EngineThread
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler

log = logging.getLogger(__name__)

TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""Mean difference (nats) of a probe's logprobs between trainer and sampler above which weights are not served.

In float32 they agree to 1e-5. bfloat16 keeps 8 bits, and differences of 0.05 to 0.2 are rounding. The probes of a base
model are compared with each other as well (`agreement.rounding_limit`).
"""


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
    for place, (path, names) in enumerate(sources.items()):
        share = options.gpu_memory_utilization / (len(sources) - place)  # of what the models before it left
        sleeps = options.sampler_sleeps and len(sources) == 1
        part = replace(options, gpu_memory_utilization=share, sampler_sleeps=sleeps)
        engines, seconds = await in_daemon_thread(load_engines, load or load_real, path, names, part, progress)
        memory_sharing = MemorySharing(engines.trainer, engines.sampler)
        scheduler = TrainScheduler(
            memory_sharing, batch_tokens=options.batch_tokens, quantum=max(2, options.micro_batch_tokens)
        )
        trainer, sampler = engines.trainer, engines.sampler
        of_trainer = TrainerSupervision(trainer, memory_sharing) if isinstance(trainer, ProcessTrainer) else None
        of_sampler = supervise_sampler(sampler, memory_sharing)
        pool = sampler if isinstance(sampler, ReplicaPool) else None
        engines = replace(engines, sampler=WakingSampler(sampler, memory_sharing))
        ident = tokenizer_id(path, options.data_dir)
        start = time.monotonic()
        model = ServedModel(
            tuple(names), path, ident, engines, scheduler, memory_sharing, seconds, of_trainer, of_sampler, pool
        )
        models.add(model)  # from here on `models` closes it
        agreement = await model.check_agreement(options.max_image_pixels)
        progress(
            f"{names[0]}: trainer and sampler agree to {agreement.difference:.1g} nats, "
            f"checked in {time.monotonic() - start:.1f} s"
        )


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
    """Samplers on `sample_gpus`: what makes each, on `sample_tp` of them. Each is to run `sequences` at once."""

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
    """Functions that make both engines, each at its place; call them within the context, the sampler's first.

    With `options.train_gpus`, `make_trainer` makes a rank of several from its `Seat`, or the only one without.

    Processes start and import at once, but allocate nothing on the device before these calls: vLLM refuses to start on
    less free memory than it asks for and counts concurrent changes as its own, and the trainer then sees what is really
    left. They end if the context fails.
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
        raise ValueError("--sampler inline and --sample-gpus exclude each other: replicas are processes")
    started = []
    groups = replica_gpus(options.sample_gpus, options.sample_tp)
    for at, (gpus, make_sampler) in enumerate(zip(groups, replicas.factories, strict=True)):
        started.append(
            ProcessSampler(
                make_sampler,
                timeout=options.sampler_timeout,
                name=replica_name(at) if len(groups) > 1 else "sampler",
                environment=environment_of(gpus),
                ranks=len(gpus),
            )
        )
        failed.callback(started[-1].end)

    def load() -> "Sampler":
        with ThreadPoolExecutor(len(started)) as threads:
            for loading in [threads.submit(replica.load) for replica in started]:
                loading.result()
        return started[0] if len(started) == 1 else ReplicaPool(started, replicas.sequences)

    return load


def _ranks(options: BackendOptions, make_trainer: TrainerFactory) -> ProcessTrainer:
    """A trainer with a process for each of `train_gpus`."""
    if options.trainer == "inline":
        raise ValueError("--trainer inline and --train-gpus exclude each other: each rank is a process")
    environments = [environment_of([gpu]) for gpu in options.train_gpus]
    return ProcessTrainer(
        make_trainer, ranks=len(environments), timeout=options.trainer_timeout, environments=environments
    )


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


def load_real(source: ModelSource, options: BackendOptions) -> Engines:
    """vLLM for sampling and HF transformers for training, each with its own copy of the weights."""
    import torch
    from tinker_local.backend.rendering.hf_text import HFText
    from tinker_local.backend.training.worker import HFTrainer, trainer_of_rank
    from tinker_local.backend.vllm_engine import build_engine, compat_vllm
    from transformers import AutoConfig

    if not compat_vllm.runs_on_cpu():
        for option, gpus in (("--train-gpus", options.train_gpus), ("--sample-gpus", options.sample_gpus)):
            check_gpus(option, gpus, torch.cuda.device_count())
    dtype = options.dtype or compat_vllm.default_dtype()
    config = AutoConfig.from_pretrained(source.path)
    options = replace(
        options, max_context_length=options.max_context_length or longrope_context(config.get_text_config())
    )
    engine = build_engine.EngineOptions(
        source.path,
        dtype=dtype,
        max_context_length=options.max_context_length,
        kv_cache_bytes=options.kv_cache_bytes,
        max_rank=options.max_rank,
        sleeps=options.sampler_sleeps,
        ranks=options.sample_tp,
    )
    check_shares(config.get_text_config(), options.sample_tp)
    groups = replica_gpus(options.sample_gpus, options.sample_tp)
    engines, activation_bytes = [engine] * max(1, len(groups)), None
    shard = check_shard(options) == "always"
    if compat_vllm.runs_on_cpu():
        engines = [replace(each, max_sequences=CPU_SEQUENCES) for each in engines]
    else:
        engines, activation_bytes, shard = sharded_if_needed(config, engine, options)
    make_trainer = functools.partial(
        trainer_of_rank if len(options.train_gpus) > 1 else HFTrainer,
        source.path,
        name=source.name,
        dtype=dtype,
        max_context_length=options.max_context_length,
        micro_batch_tokens=options.micro_batch_tokens,
        max_rank=options.max_rank,
        activation_memory_bytes=activation_bytes,
        module_gradient_norms=options.module_gradient_norms,
        decoder=options.decoder,
        shard=shard,
    )
    make_one: SamplerFactory = make_vllm_sampler if options.sample_tp == 1 else make_vllm_rank
    factories = [functools.partial(make_one, engine) for engine in engines]
    sequences = engines[0].max_sequences
    make_sampler = Replicas(factories, sequences) if options.sample_gpus else factories[0]
    places = engine_place(options.sampler), make_sampler, engine_place(options.trainer), make_trainer
    with starting(options, *places) as (load_sampler, load_trainer):
        sampler: Sampler = load_sampler()
        trainer: Trainer = load_trainer()
    renderer = load_renderer(source.path, dtype=dtype, max_pixels=options.max_image_pixels)
    text = HFText.load(source.path, renderer.tokens)
    return Engines(
        renderer,
        trainer,
        sampler,
        arch=config.model_type,
        tolerance=TOLERANCE[dtype],
        sliding_window=sliding_window(config.get_text_config()),
        sequences=sequences * len(engines),
        text=text,
    )


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
    from tinker_local.backend.rendering.hf_images import HFImages
    from tinker_local.backend.vllm_engine.vllm_images import VLLMImages
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    vision = family_of(config.model_type, model).vision
    images = None
    if vision is not None:
        tokens = vision.tokens(config)
        images = ImageReading(tokens, HFImages(model, vision.read_image), VLLMImages(model, dtype, tokens))
    vocab_size = config.get_text_config().vocab_size
    return ModelRenderer(vocab_size, images, max_pixels=max_pixels, cache_bytes=cache_bytes)


FIRST_GPU = 0
"""The GPU of an engine whose GPUs are not chosen."""

CPU_SEQUENCES = 64
"""In a step. More make it longer, for which everybody waits, and make only tiny models faster."""


def check_shard(options: BackendOptions) -> ShardChoice:
    """`--shard`, checked."""
    if options.shard == "always" and len(options.train_gpus) < 2:
        raise ValueError("--shard always: --train-gpus has to name two GPUs or more")
    return options.shard


def sharded_if_needed(
    config: Any, engine: "EngineOptions", options: BackendOptions
) -> "tuple[list[EngineOptions], int | None, bool]":
    """What `sized_for_gpus` finds, and whether trainer ranks have a part of the layers each: by `--shard`, or because
    whole ones do not fit."""
    ranks = len(options.train_gpus)
    if options.shard != "always":
        try:
            return *sized_for_gpus(config, engine, options), False
        except ValueError:
            if options.shard == "never" or ranks < 2:
                raise
    return *sized_for_gpus(config, engine, options, shards=ranks), True


def sized_for_gpus(
    config: Any, engine: "EngineOptions", options: BackendOptions, *, shards: int = 1
) -> "tuple[list[EngineOptions], int | None]":
    """For each replica `engine` with steps and a KV cache that fit its GPUs, and the limit for activations of each
    trainer rank, which has one of `shards` of the layers. All replicas take the steps of the smallest, and all ranks
    its limit. With a cache of given size nothing is refused, except whole layers that may be shared instead: the limit
    is None, and steps are small if larger ones do not fit. Samplers sleep only if one of them is beside the trainer."""
    gpus = options.sample_gpus or (FIRST_GPU,)
    train_gpus = options.train_gpus or (FIRST_GPU,)
    replicas = replica_gpus(gpus, options.sample_tp)
    engine = replace(engine, sleeps=engine.sleeps and not {*train_gpus}.isdisjoint(gpus))
    try:
        plans = {gpu: plan_for(config, engine, options, gpu, train_gpus, gpus, shards) for gpu in {*train_gpus, *gpus}}
    except ValueError:
        may_be_shared = shards == 1 and options.shard == "auto" and len(train_gpus) > 1
        if engine.kv_cache_bytes is None or may_be_shared:
            raise
        return [engine] * len(replicas), None
    for gpu, plan in sorted(plans.items()):
        log.info(
            "%s, GPU %d: %.1f GiB of KV cache, %.1f of activations, %d sequences and %d positions in a step",
            engine.model,
            gpu,
            plan.kv_cache / 2**30,
            plan.activations / 2**30,
            plan.step.sequences,
            plan.step.positions,
        )
    step = min((plans[gpu].step for gpu in gpus), key=lambda step: step.sequences)
    sized = [
        replace(
            engine,
            kv_cache_bytes=min(plans[gpu].kv_cache for gpu in of_replica),
            max_sequences=step.sequences,
            max_batched_tokens=step.positions,
        )
        for of_replica in replicas
    ]
    activations = min(plans[gpu].activations for gpu in train_gpus)
    return sized, activations if engine.kv_cache_bytes is None else None


def plan_for(
    config: Any,
    engine: "EngineOptions",
    options: BackendOptions,
    gpu: int,
    train_gpus: Sequence[int],
    sample_gpus: Sequence[int],
    shards: int,
) -> GpuPlan:
    """The plan for a model of `config` on a GPU with its free memory. ValueError names the GPU if there are several."""
    import torch
    from tinker_local.backend.training.load_model import decoder_of_sizes
    from tinker_local.backend.training.worker import CUDA_LOGITS

    text_config = config.get_text_config()
    dtype = engine.dtype or options.dtype or "float32"
    decoder, parameters = decoder_of_sizes(config, dtype, options.decoder)
    itemsize = 2 if dtype == "bfloat16" else 4
    free, total = torch.cuda.mem_get_info(gpu)
    try:
        return plan_gpu(
            model_sizes(text_config.to_dict(), parameters, itemsize),
            functools.partial(decoder.memory, columns=min(options.max_rank, COUNTED_RANK)),
            free=int(options.gpu_memory_utilization * free),
            context=min(
                options.max_context_length or text_config.max_position_embeddings, text_config.max_position_embeddings
            ),
            micro_batch_tokens=options.micro_batch_tokens,
            max_rank=options.max_rank,
            adapter_slots=engine.adapters_per_step,
            steps=step_sizes(total, torch.cuda.get_device_name(gpu)),
            image_cache=engine.image_cache_bytes if hasattr(config, "vision_config") else 0,
            logits=CUDA_LOGITS * itemsize,
            kv_cache=engine.kv_cache_bytes,
            ranks=shards,
            sample_ranks=engine.ranks,
            trains=gpu in train_gpus,
            samples=gpu in sample_gpus,
        )
    except ValueError as error:
        if (*train_gpus, *sample_gpus) == (FIRST_GPU, FIRST_GPU):
            raise
        raise ValueError(f"GPU {gpu}: {error}") from None


def load_fake(source: ModelSource, options: BackendOptions) -> Engines:
    """The numpy model under any name."""
    from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeText, FakeTrainer
    from tinker_local.backend.fakes.fake_trainer import fake_of_rank

    model = FakeModel(source.name)
    make: Callable[..., FakeTrainer] = fake_of_rank if len(options.train_gpus) > 1 else FakeTrainer
    make_trainer = functools.partial(make, model, module_gradient_norms=options.module_gradient_norms)
    make_one = functools.partial(FakeSampler if options.sample_tp == 1 else make_fake_rank, model)
    groups = replica_gpus(options.sample_gpus, options.sample_tp)
    make_sampler = Replicas([make_one] * len(groups)) if groups else make_one
    places = options.sampler or "inline", make_sampler, options.trainer or "inline", make_trainer
    with starting(options, *places) as (load_sampler, load_trainer):
        sampler, trainer = load_sampler(), load_trainer()
    sequences = 256 * max(1, len(groups))
    text = FakeText(model)
    return Engines(FakeRenderer(model), trainer, sampler, arch="fake", tolerance=1e-4, sequences=sequences, text=text)


def make_fake_rank(model: "FakeModel", seat: SamplerSeat) -> Any:
    """Rank 0 has no use for the others, which end with it."""
    from tinker_local.backend.fakes import FakeFollower, FakeSampler

    return FakeFollower(seat.links[0]) if seat.rank else FakeSampler(model)


def check_source(source: ModelSource) -> None:
    """ValueError, before anything is loaded, for a folder that cannot be served."""
    folder = Path(source.path)
    if not folder.exists():
        if source.path.startswith((".", "/", "~")) or source.path.count("/") != 1:
            raise ValueError(f"--model {source.name}: there is no folder {source.path}")
        return  # a hub name
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {source.name}: {folder} holds no config.json")
    from tinker_local.backend.families import FAMILIES

    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise ValueError(f"--model {source.name}: {folder / 'config.json'}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model {source.name}: {folder / 'config.json'} holds no JSON object")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"--model {source.name}: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
