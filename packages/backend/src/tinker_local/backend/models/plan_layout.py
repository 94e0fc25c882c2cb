"""Chooses the layout of a base model, and divides the memory of its GPUs. Imports neither torch nor vLLM."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from tinker_local.backend.models.gpu_plan import COUNTED_RANK, SMALLER, USUAL, GpuPlan, ModelSizes, Reserves, plan_gpu
from tinker_local.backend.models.placement import FIRST_GPU, ONE_GPU, Layout, layouts, shares_weights
from tinker_local.backend.options import BackendOptions, HeadPrecision, Precision
from tinker_local.backend.weights.precision import BITS

if TYPE_CHECKING:
    from tinker_local.backend.training.run.recompute_policy import ActivationMemory


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU. `name`: as CUDA says it, or empty."""

    free: int
    total: int
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedModel:
    """What of a base model decides how much memory its engines take.

    `memory`: of the decoder's activations, by positions and columns of adapters. `longest`: its longest sequence, in
    positions. `vision`: whether it reads images. `one_copy`: whether both engines can read one copy of its weights.
    """

    sizes: ModelSizes
    memory: "Callable[[int, int], ActivationMemory]"
    longest: int
    kv_heads: int
    vision: bool
    one_copy: bool


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """`plans`: of each GPU of `layout`, by its number. `refusal`: why one GPU has both engines although there are
    more."""

    layout: Layout
    plans: Mapping[int, GpuPlan]
    reserves: Reserves
    refusal: str = ""


class DoesNotFitError(ValueError):
    """No layout fits; the message, in one line, is of `layout`, which shares most."""

    def __init__(self, message: str, layout: Layout) -> None:
        super().__init__(message)
        self.layout = layout


def plan_layout(
    model: PlannedModel, options: BackendOptions, gpus: int, memory_of: Callable[[int], GpuMemory]
) -> PlannedLayout:
    """The first of the `layouts` that `options` allow on `gpus` GPUs and that fits their memory, with the largest
    reserves with which one fits. `memory_of`: a GPU, by its number. DoesNotFitError if none fits; ValueError in one
    line if `options` contradict one another."""
    memory_of, columns = functools.cache(memory_of), min(options.max_rank, COUNTED_RANK)
    memory = functools.cache(lambda positions: model.memory(positions, columns))
    possible = layouts(options, gpus, model.kv_heads)
    refusals: dict[Layout, str] = {}
    for reserves in (USUAL, *SMALLER):
        for layout in possible:
            try:
                plans = {
                    gpu: _plan(gpu, layout, model, memory, options, memory_of(gpu), reserves)
                    for gpu in sorted({*layout.trains_on, *layout.samples_on})
                }
            except ValueError as error:
                refusals[layout] = str(error)
                continue
            given_up = [text for other, text in refusals.items() if other != ONE_GPU] if layout == ONE_GPU else []
            return PlannedLayout(layout, plans, reserves, given_up[-1] if given_up else "")
    together = [layout for layout in possible if layout.train_gpus == layout.sample_gpus != ()]
    *_, most = together or [layout for layout in possible if layout != ONE_GPU] or possible
    raise DoesNotFitError(f"{refusals[most]}{_in_fewer_bits(model, options, gpus, memory_of)}", most)


def _in_fewer_bits(
    model: PlannedModel, options: BackendOptions, gpus: int, memory_of: Callable[[int], GpuMemory]
) -> str:
    """The precision of the base that would fit, in words; empty if none would."""
    sizes = model.sizes
    if gpus > 1:
        return ""
    of_layers = (None, *get_args(Precision)) if sizes.packable and not sizes.packed_bits else (None,)
    of_head = (None, *get_args(HeadPrecision)) if sizes.packable_head and not sizes.head_bits else (None,)
    for head, layers in itertools.product(of_head, of_layers):
        given = {"--base-precision": layers, "--head-precision": head}
        if not (told := " ".join(f"{option} {value}" for option, value in given.items() if value)):
            continue
        chosen = replace(options, base_precision=layers or options.base_precision)
        # Experts that vLLM turns round in 16 bits are one copy where they are packed.
        stacks = sizes.packable is not None and bool(sizes.packable.stack) and layers is not None
        turned = stacks and options.shared_weights != "off" and shares_weights(chosen, gpus)
        fewer = replace(
            sizes,
            packed_bits=BITS[layers] if layers else sizes.packed_bits,
            head_bits=BITS[head] if head else sizes.head_bits,
        )
        packed = replace(model, sizes=fewer, one_copy=model.one_copy or turned)
        if not packed.one_copy:
            continue
        with contextlib.suppress(ValueError):
            plan_layout(packed, options, gpus, memory_of)
            return f"; {told} fits"
    return ""


def _plan(
    gpu: int,
    layout: Layout,
    model: PlannedModel,
    memory: "Callable[[int], ActivationMemory]",
    options: BackendOptions,
    there: GpuMemory,
    reserves: Reserves,
) -> GpuPlan:
    """Of one GPU; ValueError, with its number if there are several."""
    tokens = options.micro_batch_tokens or reserves.micro_batch_tokens
    try:
        found = plan_gpu(
            model.sizes,
            memory,
            free=int(options.gpu_memory_utilization * there.free),
            context=min(options.max_context_length or model.longest, model.longest),
            micro_batch_tokens=tokens,
            max_rank=options.max_rank,
            adapter_slots=reserves.adapter_slots,
            steps=reserves.steps(there.total, there.name),
            image_cache=reserves.image_cache if model.vision else 0,
            logits=reserves.logits * model.sizes.itemsize,
            adapters=reserves.adapters,
            kv_cache=options.kv_cache_bytes,
            ranks=layout.shards,
            sample_ranks=layout.sample_tp,
            context_parallel=layout.context_parallel,
            trains=gpu in layout.trains_on,
            samples=gpu in layout.samples_on,
            shared=model.one_copy and layout == ONE_GPU,
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
