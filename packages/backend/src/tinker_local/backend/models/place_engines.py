"""Chooses the layout of a base model by the memory of its GPUs, and sizes both engines for it."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinker_local.backend.heap import free_on_gpu, give_memory_back, memory_available
from tinker_local.backend.models.gpu_plan import SMALLER, USUAL, ModelSizes, Reserves, model_sizes
from tinker_local.backend.models.placement import Layout, layouts, replica_gpus
from tinker_local.backend.models.plan_layout import (
    DoesNotFitError,
    GpuMemory,
    PlannedLayout,
    PlannedModel,
    plan_layout,
)
from tinker_local.backend.options import CPU_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS, BackendOptions
from tinker_local.backend.weights.published import published_of

if TYPE_CHECKING:
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
    if not gpus:
        layout = layouts(options, gpus, _kv_heads(text_config))[0]
        cache = engine.kv_cache_bytes or _cpu_cache(text_config.to_dict(), engine, options)
        on_cpu = replace(_placed(engine, layout), max_sequences=CPU_SEQUENCES, kv_cache_bytes=cache)
        engines = [on_cpu] * len(_replicas(layout))
        return PlacedEngines(layout, engines, micro_batch_tokens=CPU_MICRO_BATCH_TOKENS)
    dtype, one_copy = engine.dtype or options.dtype or "float32", engine.shared_weights is not None
    model = planned_model(config, options, dtype, train_vision=engine.train_vision, one_copy=one_copy)
    options = replace(options, kv_cache_bytes=engine.kv_cache_bytes)
    try:
        planned = plan_layout(model, options, gpus, _memory_of)
    except DoesNotFitError as error:
        if engine.kv_cache_bytes is None:
            raise
        return _with_given_cache(engine, engine.kv_cache_bytes, error.layout, model.sizes)
    _check_cache(engine.kv_cache_bytes, planned.layout, model.sizes)
    return _sized(engine, planned)


def _with_given_cache(engine: "EngineOptions", kv_cache: int, layout: Layout, sizes: ModelSizes) -> PlacedEngines:
    """The engines of a `layout` that does not fit by the plan: with the least reserves, and the steps of `engine`."""
    _check_cache(kv_cache, layout, sizes)
    reserves = replace(SMALLER[-1], step=None)
    one = replace(
        _placed(engine, layout),
        max_sequences=sizes.sequences_with_states(kv_cache * layout.sample_tp, engine.max_sequences),
        adapters_per_step=reserves.adapter_slots,
        image_cache_bytes=reserves.image_cache,
    )
    engines = [one] * len(_replicas(layout))
    return PlacedEngines(layout, engines, micro_batch_tokens=reserves.micro_batch_tokens, reserves=reserves)


def _memory_of(gpu: int) -> GpuMemory:
    import torch

    return GpuMemory(*free_on_gpu(gpu), torch.cuda.get_device_name(gpu))


def _cpu_cache(config: Mapping[str, Any], engine: "EngineOptions", options: BackendOptions) -> int:
    """Bytes of a KV cache for `CPU_CONTEXTS` sequences of the whole context, but at most `MOST_CPU_CACHE` and an eighth
    of the memory that two copies of the weights leave, or the one that is read before it is packed; a tiny model's is
    `LEAST_CPU_CACHE`."""
    try:
        sizes = model_sizes(config, 0, 2 if (engine.dtype or options.dtype) == "bfloat16" else 4)
        longest = int(config["max_position_embeddings"])
    except KeyError:  # an architecture that names its sizes otherwise
        return LEAST_CPU_CACHE
    context = min(options.max_context_length or longest, longest)
    wanted = CPU_CONTEXTS * sizes.sequence_bytes(context, engine.max_batched_tokens)
    give_memory_back()  # what loading another model has freed
    weights = (sizes.layers * sizes.layer_parameters + 2 * sizes.vocabulary * sizes.hidden) * sizes.itemsize
    left = memory_available() - (2 if engine.weights == "dense" else 1) * weights
    return max(LEAST_CPU_CACHE, min(wanted, MOST_CPU_CACHE, left // 8))


def _check_cache(kv_cache: int | None, layout: Layout, sizes: ModelSizes) -> None:
    """Raise ValueError if a cache of given size, on each GPU of a replica, is too small for one sequence."""
    least = -(-sizes.states_bytes(1) // layout.sample_tp)
    if kv_cache is not None and kv_cache < least:
        raise ValueError(
            f"kv_cache_bytes is {kv_cache} (--kv-cache {kv_cache / 2**30:.3f}); the states of linear attention of this "
            f"model take {least} at least (--kv-cache {math.ceil(least / 2**20) / 2**10:.6f})"
        )


def _sized(engine: "EngineOptions", planned: PlannedLayout) -> PlacedEngines:
    """The engines of a layout by the plans of its GPUs."""
    layout, plans, reserves = planned.layout, planned.plans, planned.reserves
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
    return PlacedEngines(layout, engines, activations, tokens, reserves, spare, planned.refusal)


def _replicas(layout: Layout) -> Sequence[Sequence[int]]:
    return replica_gpus(layout.samples_on, layout.sample_tp)


def _placed(engine: "EngineOptions", layout: Layout) -> "EngineOptions":
    """`engine` on the GPUs of a replica. It sleeps only if one of the samplers is beside the trainer."""
    beside = not {*layout.trains_on}.isdisjoint(layout.samples_on)
    return replace(engine, sleeps=engine.sleeps and beside, ranks=layout.sample_tp)


def planned_model(
    config: Any, options: BackendOptions, dtype: str, *, train_vision: bool, one_copy: bool
) -> PlannedModel:
    """A model of `config`, a config of transformers, in `dtype`. torch makes its modules without values.
    `train_vision`: whether adapters may train its tower; `one_copy`: whether both engines can read one copy."""
    from tinker_local.backend.training.model.load_model import decoder_of_sizes, packable, packable_head, tower_of_sizes

    decoder, parameters = decoder_of_sizes(config, dtype, options.decoder)
    itemsize = 2 if dtype == "bfloat16" else 4
    tower = tower_of_sizes(config, dtype) if train_vision else None
    text = config.get_text_config()
    of_layers, of_head = (packable(config), options.base_precision), (packable_head(config), options.head_precision)
    sizes = model_sizes(text.to_dict(), parameters, itemsize, *of_layers, *of_head)
    if (published := published_of(config.name_or_path)) is not None:
        sizes = replace(sizes, packed_bits=published.layout.bits)
    return PlannedModel(
        replace(sizes, tower=None if tower is None else tower.sizes(itemsize)),
        decoder.memory,
        text.max_position_embeddings,
        _kv_heads(text),
        vision=hasattr(config, "vision_config"),
        one_copy=one_copy,
    )


def _kv_heads(config: Any) -> int:
    """The fewest of any layer."""
    layers = [*config.per_layer_config] if getattr(config, "per_layer_attributes", None) else [config]
    return min(int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads) for layer in layers)
