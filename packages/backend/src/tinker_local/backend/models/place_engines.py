"""Chooses the layout of a base model by the memory of its GPUs, and sizes both engines for it."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinker_local.backend.heap import free_on_gpu, give_memory_back, memory_available
from tinker_local.backend.models.gpu_plan import (
    COUNTED_RANK,
    SMALLER,
    USUAL,
    GpuPlan,
    ModelSizes,
    Reserves,
    model_sizes,
    plan_gpu,
)
from tinker_local.backend.models.placement import FIRST_GPU, ONE_GPU, Layout, layouts, replica_gpus
from tinker_local.backend.options import CPU_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS, BackendOptions

if TYPE_CHECKING:
    from tinker_local.backend.training.model.decoder import Decoder
    from tinker_local.backend.vllm_engine.build_engine import EngineOptions

log = logging.getLogger(__name__)

CPU_SEQUENCES = 64
"""In a step on a CPU. More make it longer, for which everybody waits, and make only tiny models faster."""

CPU_CONTEXTS = 4
LEAST_CPU_CACHE = 2**28
MOST_CPU_CACHE = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class PlacedEngines:
    """`engines`: of each replica, with steps and a KV cache that fit its GPUs. All take the steps of the smallest.
    `activation_bytes`: the limit for activations of each trainer rank, that of the one with the least memory; None on
    a CPU, or if the KV cache has a given size. `micro_batch_tokens`: of each trainer rank, if the options leave them
    open. `reserves`: that both engines were planned with. `spare_bytes`: left to others on each GPU. `refusal`: why one
    GPU has both although there are more."""

    layout: Layout
    engines: "Sequence[EngineOptions]"
    activation_bytes: int | None = None
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    reserves: Reserves = USUAL
    spare_bytes: int = 2**30
    refusal: str = ""

    def __str__(self) -> str:
        why = f"; on all GPUs it does not fit: {self.refusal}" if self.refusal else ""
        return f"{self.layout}{why}; --train-gpus, --sample-gpus, --shard and --sample-tp choose another layout"


def place_engines(config: Any, engine: "EngineOptions", options: BackendOptions, gpus: int) -> PlacedEngines:
    """Place both engines of a model of `config` where the server sees `gpus` GPUs (0: on a CPU), as `options` choose,
    otherwise in the first of the `layouts` that fits the memory.

    If none fits, raises the ValueError, in one line, of the one that shares most. With a KV cache of given size that
    one is taken instead, with small steps. ValueError also if that cache has no room for the states of a model with
    linear attention.
    """
    text_config = config.get_text_config()
    kv_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    possible = layouts(options, gpus, kv_heads)
    if not gpus:
        cache = engine.kv_cache_bytes or _cpu_cache(text_config.to_dict(), engine, options)
        on_cpu = replace(_placed(engine, possible[0]), max_sequences=CPU_SEQUENCES, kv_cache_bytes=cache)
        engines = [on_cpu] * len(_replicas(possible[0]))
        return PlacedEngines(possible[0], engines, micro_batch_tokens=CPU_MICRO_BATCH_TOKENS)
    decoder, sizes = _sizes(config, engine, options)
    if possible == [ONE_GPU]:
        for usual in (USUAL, *SMALLER[:-1]):
            try:
                found = sized(engine, ONE_GPU, gpu_plans(config, engine, options, decoder, sizes, usual), usual)
            except ValueError:
                continue
            _check_cache(engine.kv_cache_bytes, ONE_GPU, sizes)
            return found
    reserves = SMALLER[-1] if possible == [ONE_GPU] else USUAL
    plan = gpu_plans(config, engine, options, decoder, sizes, reserves)
    refusals: dict[Layout, ValueError] = {}
    for layout in possible:
        try:
            found = sized(engine, layout, plan, reserves)
        except ValueError as error:
            refusals[layout] = error
        else:
            _check_cache(engine.kv_cache_bytes, layout, sizes)
            given_up = [*refusals.values()] if layout == ONE_GPU else []
            return replace(found, refusal=str(given_up[-1])) if given_up else found
    *_, most = [layout for layout in possible if layout != ONE_GPU] or possible
    if engine.kv_cache_bytes is None:
        raise refusals[most]
    _check_cache(engine.kv_cache_bytes, most, sizes)
    sequences = sizes.sequences_with_states(engine.kv_cache_bytes * most.sample_tp, engine.max_sequences)
    one = replace(
        _placed(engine, most),
        max_sequences=sequences,
        adapters_per_step=reserves.adapter_slots,
        image_cache_bytes=reserves.image_cache,
    )
    tokens, reserves = reserves.micro_batch_tokens, replace(reserves, step=None)  # the steps are the engine's
    return PlacedEngines(most, [one] * len(_replicas(most)), micro_batch_tokens=tokens, reserves=reserves)


def _cpu_cache(config: Mapping[str, Any], engine: "EngineOptions", options: BackendOptions) -> int:
    """Bytes of a KV cache for `CPU_CONTEXTS` sequences of the whole context, but at most `MOST_CPU_CACHE` and an eighth
    of the memory that two copies of the weights leave; a tiny model's is `LEAST_CPU_CACHE`."""
    try:
        sizes = model_sizes(config, 0, 2 if (engine.dtype or options.dtype) == "bfloat16" else 4)
        longest = int(config["max_position_embeddings"])
    except KeyError:  # an architecture that names its sizes otherwise
        return LEAST_CPU_CACHE
    context = min(options.max_context_length or longest, longest)
    wanted = CPU_CONTEXTS * sizes.sequence_bytes(context, engine.max_batched_tokens)
    give_memory_back()  # what loading another model has freed
    weights = (sizes.layers * sizes.layer_parameters + 2 * sizes.vocabulary * sizes.hidden) * sizes.itemsize
    return max(LEAST_CPU_CACHE, min(wanted, MOST_CPU_CACHE, (memory_available() - 2 * weights) // 8))


def _check_cache(kv_cache: int | None, layout: Layout, sizes: ModelSizes) -> None:
    """Raise ValueError if a cache of given size, on each GPU of a replica, is too small for one sequence."""
    least = -(-sizes.states_bytes(1) // layout.sample_tp)
    if kv_cache is not None and kv_cache < least:
        raise ValueError(
            f"kv_cache_bytes is {kv_cache} (--kv-cache {kv_cache / 2**30:.3f}); the states of linear attention of this "
            f"model take {least} at least (--kv-cache {math.ceil(least / 2**20) / 2**10:.6f})"
        )


def sized(
    engine: "EngineOptions", layout: Layout, plan: Callable[[int, Layout], GpuPlan], reserves: Reserves = USUAL
) -> PlacedEngines:
    """The engines of `layout` by `plan`, which has `reserves`; ValueError in one line if they do not fit its GPUs."""
    plans = {gpu: plan(gpu, layout) for gpu in sorted({*layout.trains_on, *layout.samples_on})}
    for gpu, each in plans.items():
        log.info(
            "%s, GPU %d: %.1f GiB of KV cache, %.1f of activations, %d sequences and %d positions in a step",
            engine.model,
            gpu,
            each.kv_cache / 2**30,
            each.activations / 2**30,
            each.step.sequences,
            each.step.positions,
        )
    steps = [plans[gpu].step for gpu in layout.samples_on]
    sequences, positions = min(step.sequences for step in steps), min(step.positions for step in steps)
    engines = [
        replace(
            _placed(engine, layout),
            kv_cache_bytes=min(plans[gpu].kv_cache for gpu in of_replica),
            max_sequences=sequences,
            max_batched_tokens=positions,
            adapters_per_step=reserves.adapter_slots,
            image_cache_bytes=reserves.image_cache,
            spare_bytes=min(plans[gpu].spare for gpu in of_replica),
        )
        for of_replica in _replicas(layout)
    ]
    trained = [plans[gpu] for gpu in layout.trains_on]
    activations = min(plan.activations for plan in trained) if engine.kv_cache_bytes is None else None
    tokens, spare = min(plan.micro_batch_tokens for plan in trained), min(plan.spare for plan in plans.values())
    return PlacedEngines(layout, engines, activations, tokens, reserves, spare)


def _replicas(layout: Layout) -> Sequence[Sequence[int]]:
    return replica_gpus(layout.samples_on, layout.sample_tp)


def _placed(engine: "EngineOptions", layout: Layout) -> "EngineOptions":
    """`engine` on the GPUs of a replica. It sleeps only if one of the samplers is beside the trainer."""
    beside = not {*layout.trains_on}.isdisjoint(layout.samples_on)
    return replace(engine, sleeps=engine.sleeps and beside, ranks=layout.sample_tp)


def _sizes(config: Any, engine: "EngineOptions", options: BackendOptions) -> "tuple[Decoder, ModelSizes]":
    """The decoder of a model of `config`, without values, and the model's sizes."""
    from tinker_local.backend.training.model.load_model import decoder_of_sizes, tower_of_sizes

    dtype = engine.dtype or options.dtype or "float32"
    decoder, parameters = decoder_of_sizes(config, dtype, options.decoder)
    itemsize = 2 if dtype == "bfloat16" else 4
    tower = tower_of_sizes(config, dtype) if engine.train_vision else None
    sizes = model_sizes(config.get_text_config().to_dict(), parameters, itemsize)
    return decoder, replace(sizes, tower=None if tower is None else tower.sizes(itemsize))


def gpu_plans(
    config: Any,
    engine: "EngineOptions",
    options: BackendOptions,
    decoder: "Decoder",
    sizes: ModelSizes,
    reserves: Reserves = USUAL,
) -> Callable[[int, Layout], GpuPlan]:
    """A function that plans the memory of a GPU in a layout with `reserves`, by what is free there, for a model of
    `config`. It raises ValueError, with the number of the GPU if there are several."""
    import torch

    longest = config.get_text_config().max_position_embeddings

    memory_of = functools.cache(free_on_gpu)
    memory = functools.partial(decoder.memory, columns=min(options.max_rank, COUNTED_RANK))
    tokens = options.micro_batch_tokens or reserves.micro_batch_tokens

    def plan(gpu: int, layout: Layout) -> GpuPlan:
        free, total = memory_of(gpu)
        try:
            found = plan_gpu(
                sizes,
                memory,
                free=int(options.gpu_memory_utilization * free),
                context=min(options.max_context_length or longest, longest),
                micro_batch_tokens=tokens,
                max_rank=options.max_rank,
                adapter_slots=reserves.adapter_slots,
                steps=reserves.steps(total, torch.cuda.get_device_name(gpu)),
                image_cache=reserves.image_cache if hasattr(config, "vision_config") else 0,
                logits=reserves.logits * sizes.itemsize,
                adapters=reserves.adapters,
                kv_cache=engine.kv_cache_bytes,
                ranks=layout.shards,
                sample_ranks=layout.sample_tp,
                context_parallel=layout.context_parallel,
                trains=gpu in layout.trains_on,
                samples=gpu in layout.samples_on,
                shared=engine.shared_weights is not None and layout == ONE_GPU,
            )
        except ValueError as error:
            if {*layout.trains_on, *layout.samples_on} == {FIRST_GPU}:
                raise
            raise ValueError(f"GPU {gpu}: {error}") from None
        # On two H200s that is 1.89 times one GPU instead of 1.86 (docs/scaling.md).
        alone = gpu in layout.trains_on and gpu not in layout.samples_on
        if options.micro_batch_tokens is None and layout.shards > 1 and alone:
            has_room = memory(2 * tokens).everything <= found.activations
            return replace(found, micro_batch_tokens=2 * tokens) if has_room else found
        return found

    return plan
