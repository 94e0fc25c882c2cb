"""Metrics that are not of one base model: operations, owners, live runs, memory, disk, and what was installed."""

import functools
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.heap import MemoryInUse

Family = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]

Values = Mapping[tuple[str, ...], Any]
"""Numbers, or histograms, by the values of the labels."""


@dataclass(frozen=True, slots=True)
class ServerMetric:
    """One metric. `values`: from the backend, or `of_memory` from the memory in use."""

    family: Family
    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[ControlPlane], Values] = lambda backend: {}
    of_memory: Callable[[MemoryInUse], Values] = lambda memory: {}


PACKAGES = {"version": "tinker-local", "torch": "torch", "transformers": "transformers", "vllm": "vllm"}


@functools.cache
def _versions() -> tuple[str, ...]:
    found = []
    for name in PACKAGES.values():
        for package in (name, f"{name}-cpu"):
            try:
                found.append(importlib.metadata.version(package))
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        else:
            found.append("none")
    return tuple(found)


def _of_runs(name: str) -> Callable[[ControlPlane], Values]:
    """A number of the newest step of each live run that has one."""

    def values(backend: ControlPlane) -> Values:
        last = {(run.model_id, run.owner): run.progress.last for run in backend.runs.all_live()}
        return {key: getattr(point, name) for key, point in last.items() if getattr(point, name, None) is not None}

    return values


def _of_groups(measure: str) -> Callable[[ControlPlane], Values]:
    """One of `mismatch.MEASURES` in each group of tokens, of the newest step of each live run that has it."""

    def values(backend: ControlPlane) -> Values:
        last = {(run.model_id, run.owner): run.progress.last for run in backend.runs.all_live()}
        return {
            (*key, group): found[measure]
            for key, point in last.items()
            if point is not None and point.mismatch is not None
            for group, found in point.mismatch.items()
        }

    return values


RUN = ("run", "owner")
GROUP = (*RUN, "group")

SERVER_METRICS = (
    ServerMetric(
        HistogramMetricFamily,
        "tinker_local_operation_seconds",
        "Time from the request to the result, of operations that succeeded.",
        ("kind",),
        lambda backend: {(kind,): found for kind, found in backend.totals.seconds.items()},
    ),
    ServerMetric(
        HistogramMetricFamily,
        "tinker_local_operation_waiting_seconds",
        "Time of these in which they waited for others, for a thread, or for a place on the device.",
        ("kind",),
        lambda backend: {(kind,): found for kind, found in backend.totals.waited.items()},
    ),
    ServerMetric(
        CounterMetricFamily,
        "tinker_local_operation_stage_seconds",
        "Time of these by stage: waiting, preparing, queued, prefill, decode, ...",
        ("kind", "stage"),
        lambda backend: backend.totals.in_stages,
    ),
    ServerMetric(
        HistogramMetricFamily,
        "tinker_local_time_to_first_token_seconds",
        "Time from the request of a sample to its first token, waiting and rendering included.",
        ("model",),
        lambda backend: {(model.names[0],): model.counts.first_token_seconds for model in backend.models.distinct()},
    ),
    ServerMetric(
        HistogramMetricFamily,
        "tinker_local_time_per_output_token_seconds",
        "Mean time of a token after the first one, of the sequence of a sample that took longest.",
        ("model",),
        lambda backend: {(model.names[0],): model.counts.token_seconds for model in backend.models.distinct()},
    ),
    ServerMetric(
        CounterMetricFamily,
        "tinker_local_owner_operations",
        "Operations of an owner that have ended.",
        ("owner", "kind"),
        lambda backend: backend.totals.ended,
    ),
    ServerMetric(
        CounterMetricFamily,
        "tinker_local_owner_tokens",
        "Tokens of an owner's operations that succeeded: trained, of prompts (image positions included), sampled.",
        ("owner", "kind"),
        lambda backend: backend.totals.tokens,
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_steps",
        "Optimizer steps of a live run since it was created or loaded.",
        RUN,
        lambda backend: {(run.model_id, run.owner): run.steps for run in backend.runs.all_live()},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_tokens",
        "Positions that a live run was trained on, image positions included.",
        RUN,
        lambda backend: {(run.model_id, run.owner): run.progress.tokens for run in backend.runs.all_live()},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_loss",
        "Loss of a live run's last step, divided by the sum of its weights, or without weights by its targets.",
        RUN,
        _of_runs("loss"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_gradient_norm",
        "Norm of the gradient of that step, before clipping.",
        RUN,
        _of_runs("gradient_norm"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_learning_rate",
        "Learning rate of that step.",
        RUN,
        _of_runs("learning_rate"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_kl",
        "KL(sampler, trainer) of that step in nats per token: of all sampled tokens, and by group.",
        GROUP,
        _of_groups("kl"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_largest_ratio",
        "Largest ratio of the trainer's probability of a token to the sampler's.",
        GROUP,
        _of_groups("largest_ratio"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_beyond_share",
        "Share of tokens, 0 to 1, whose ratio is beyond 1 ± 0.2.",
        GROUP,
        _of_groups("beyond_share"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_tokens",
        "Sampled tokens that these are of.",
        GROUP,
        _of_groups("tokens"),
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_memory_bytes",
        "Resident memory of the server and its processes; what they share counts once for each.",
        (),
        of_memory=lambda memory: {(): memory.processes},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_gpu_memory_used_bytes",
        "Memory of a GPU that is in use, by any process.",
        ("gpu",),
        of_memory=lambda memory: {(str(at),): used for at, (used, _) in memory.gpus.items()},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_gpu_memory_bytes",
        "Memory of a GPU.",
        ("gpu",),
        of_memory=lambda memory: {(str(at),): most for at, (_, most) in memory.gpus.items()},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_disk_free_bytes",
        "Free space on the disk of the data folder.",
        (),
        lambda backend: {(): shutil.disk_usage(backend.options.data_dir).free},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_disk_bytes",
        "Size of the disk of the data folder.",
        (),
        lambda backend: {(): shutil.disk_usage(backend.options.data_dir).total},
    ),
    ServerMetric(
        GaugeMetricFamily,
        "tinker_local_build_info",
        "Always 1; the labels are the versions that are installed.",
        tuple(PACKAGES),
        lambda backend: {_versions(): 1},
    ),
)


class ServerCollector(Collector):
    """Reads the backend, which must be ready; `memory` was read before."""

    def __init__(self, backend: ControlPlane, memory: MemoryInUse) -> None:
        self._backend = backend
        self._memory = memory

    def collect(self) -> Iterator[Any]:
        for metric in SERVER_METRICS:
            family = metric.family(metric.name, metric.help, labels=metric.labels)
            for labels, value in {**metric.values(self._backend), **metric.of_memory(self._memory)}.items():
                if isinstance(family, HistogramMetricFamily):
                    family.add_metric(labels, value.cumulated(), value.total)
                else:
                    family.add_metric(labels, value)
            yield family
