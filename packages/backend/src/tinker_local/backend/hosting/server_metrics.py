"""The table of all metrics: of base models, owners, operations, live runs, memory, disk, and what is installed."""

import functools
import importlib.metadata
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.heap import MemoryInUse
from tinker_local.backend.models.metrics import ModelMetrics
from tinker_local.backend.scheduling.quotas import Amounts
from tinker_local.types.errors import Category

Family = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]

Values = Mapping[tuple[str, ...], Any]
"""Numbers, or histograms, by the values of the labels."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What metrics are made of. `models`: by the first name of each base model. `usage`: see `ControlPlane.usage`."""

    backend: ControlPlane
    models: Mapping[str, ModelMetrics]
    usage: Mapping[str, tuple[Amounts, Amounts]]
    memory: MemoryInUse


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and its values by those of `labels`."""

    family: Family
    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[Reading], Values]


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


def _of_models(numbers: Callable[[ModelMetrics], Mapping[str, float]]) -> Callable[[Reading], Values]:
    """Numbers of each base model, by the value of a second label, or "" without one."""

    def values(now: Reading) -> Values:
        found = {name: numbers(model) for name, model in now.models.items()}
        return {(name, *filter(None, (key,))): number for name, of in found.items() for key, number in of.items()}

    return values


def _of_owners(which: Callable[[Amounts, Amounts], Amounts]) -> Callable[[Reading], Values]:
    """What each owner uses, or the most that it may, of each resource; infinity is left out."""

    def values(now: Reading) -> Values:
        found = {owner: asdict(which(*amounts)) for owner, amounts in now.usage.items()}
        return {
            (owner, resource): amount
            for owner, amounts in found.items()
            for resource, amount in amounts.items()
            if not math.isinf(amount)
        }

    return values


def _of_runs(name: str) -> Callable[[Reading], Values]:
    """A number of the newest step of each live run that has one."""

    def values(now: Reading) -> Values:
        last = {(run.model_id, run.owner): run.progress.last for run in now.backend.runs.all_live()}
        return {key: getattr(point, name) for key, point in last.items() if getattr(point, name, None) is not None}

    return values


def _of_groups(measure: str) -> Callable[[Reading], Values]:
    """One of `mismatch.MEASURES` in each group of tokens, of the newest step of each live run that has it."""

    def values(now: Reading) -> Values:
        last = {(run.model_id, run.owner): run.progress.last for run in now.backend.runs.all_live()}
        return {
            (*key, group): found[measure]
            for key, point in last.items()
            if point is not None and point.mismatch is not None
            for group, found in point.mismatch.items()
        }

    return values


MODEL = ("model",)
RUN = ("run", "owner")
GROUP = (*RUN, "group")

METRICS = (
    Metric(
        CounterMetricFamily,
        "tinker_local_images_rendered",
        "Images decoded and processed; one that is still kept is not processed again.",
        MODEL,
        _of_models(lambda m: {"": m.images_rendered}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_images_encoded",
        "Images that went through the vision tower of the sampler or of the trainer.",
        ("model", "side"),
        _of_models(lambda m: {"sampler": m.images_encoded_by_sampler, "trainer": m.images_encoded_by_trainer}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_samples",
        "Sequences sampled and given out.",
        MODEL,
        _of_models(lambda m: {"": m.samples}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_prompt_tokens",
        "Positions of the prompts that were sampled from, image positions included, once per request.",
        MODEL,
        _of_models(lambda m: {"": m.prompt_tokens}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_sampled_tokens",
        "Tokens of the sequences given out.",
        MODEL,
        _of_models(lambda m: {"": m.sampled_tokens}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_trained_tokens",
        "Positions of the data of forward_backward requests that succeeded, image positions included.",
        MODEL,
        _of_models(lambda m: {"": m.trained_tokens}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_optimizer_steps",
        "Optimizer steps taken.",
        MODEL,
        _of_models(lambda m: {"": m.optimizer_steps}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_submits_refused",
        "Training requests answered with 429 because as much is queued as may be; each is sent again.",
        MODEL,
        _of_models(lambda m: {"": m.submits_refused}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_operations_failed",
        "Operations that ended with an error, by the category that the client saw; cancelled ones are the user's.",
        ("model", "category"),
        _of_models(lambda m: {category: m.failures.get(category, 0) for category in get_args(Category)}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_requests_running",
        "Sample requests in the sampler (its own queue included), training commands in the trainer.",
        ("model", "side"),
        _of_models(lambda m: {"sampler": m.samples_running, "trainer": m.commands_running}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_requests_waiting",
        "Sample requests on their way to the sampler, training commands queued for the trainer.",
        ("model", "side"),
        _of_models(lambda m: {"sampler": m.samples_waiting, "trainer": m.commands_waiting}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_adapters",
        "Adapters that are being trained.",
        MODEL,
        _of_models(lambda m: {"": m.adapters}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_sampler_versions",
        "Adapter versions that the sampler has verified and may be sampled from.",
        MODEL,
        _of_models(lambda m: {"": m.sampler_versions}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_sequences",
        "Sequences in the sampler, its own queue included.",
        MODEL,
        _of_models(lambda m: {"": m.sequences}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_kv_cache_used_ratio",
        "Share of the sampler's KV cache, 0 to 1, that sequences hold; the mean of several replicas.",
        MODEL,
        _of_models(lambda m: {"": m.kv_cache_used}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_ephemeral_version_bytes",
        "Size of the ephemeral sampler versions that are kept, in shared memory or on disk.",
        MODEL,
        _of_models(lambda m: {"": m.ephemeral_bytes}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_ephemeral_versions_dropped",
        "Ephemeral sampler versions dropped because those of their session, of their owner or of all were too large.",
        MODEL,
        _of_models(lambda m: {"": m.versions_dropped}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_in_flight_versions",
        "Versions that the sampler went on to while samples of in-flight clients ran.",
        MODEL,
        _of_models(lambda m: {"": m.in_flight_published}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_in_flight_tokens",
        "Tokens of in-flight clients.",
        MODEL,
        _of_models(lambda m: {"": m.in_flight_tokens}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_tokens_on_older_keys",
        "Those of them that were drawn on keys and values that may be of an earlier version.",
        MODEL,
        _of_models(lambda m: {"": m.tokens_on_older_keys}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_sampler_sleeps",
        "How often the sampler gave its memory to the trainer, for requests that did not fit otherwise.",
        MODEL,
        _of_models(lambda m: {"": m.sampler_sleeps}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_sampler_asleep",
        "1 while the sampler is asleep so that the trainer can use its memory.",
        MODEL,
        _of_models(lambda m: {"": int(m.sampler_asleep)}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_trainer_restarts",
        "How often the trainer's process was started again because it had ended or did not answer.",
        MODEL,
        _of_models(lambda m: {"": m.trainer_restarts}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_trainer_up",
        "0 while the trainer's process has ended and the next one is not ready.",
        MODEL,
        _of_models(lambda m: {"": int(m.trainer_works)}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_sampler_restarts",
        "How often the sampler's process was started again because it had ended or did not answer.",
        MODEL,
        _of_models(lambda m: {"": m.sampler_restarts}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_sampler_up",
        "0 while the sampler's process has ended and the next one is not ready; of several replicas: while none works.",
        MODEL,
        _of_models(lambda m: {"": int(m.sampler_works)}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_replica_sequences",
        "Sequences in each of several replicas of the sampler.",
        ("model", "replica"),
        _of_models(lambda m: {str(at): replica.sequences for at, replica in m.replicas.items()}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_replica_kv_cache_used_ratio",
        "Share of the KV cache of each of several replicas, 0 to 1, that sequences hold.",
        ("model", "replica"),
        _of_models(lambda m: {str(at): replica.kv_cache_used for at, replica in m.replicas.items()}),
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_replica_restarts",
        "How often the process of each of several replicas was started again.",
        ("model", "replica"),
        _of_models(lambda m: {str(at): replica.restarts for at, replica in m.replicas.items()}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_replica_up",
        "0 while the process of one of several replicas has ended and the next one is not ready; others answer.",
        ("model", "replica"),
        _of_models(lambda m: {str(at): int(replica.works) for at, replica in m.replicas.items()}),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_owner_used",
        "What an owner uses of what quotas limit; the resources that end with bytes are in bytes.",
        ("owner", "resource"),
        _of_owners(lambda used, most: used),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_owner_limit",
        "The quota of an owner, where it has one.",
        ("owner", "resource"),
        _of_owners(lambda used, most: most),
    ),
    Metric(
        HistogramMetricFamily,
        "tinker_local_operation_seconds",
        "Time from the request to the result, of operations that succeeded.",
        ("kind",),
        lambda now: {(kind,): found for kind, found in now.backend.totals.seconds.items()},
    ),
    Metric(
        HistogramMetricFamily,
        "tinker_local_operation_waiting_seconds",
        "Time of these in which they waited for others, for a thread, or for a place on the device.",
        ("kind",),
        lambda now: {(kind,): found for kind, found in now.backend.totals.waited.items()},
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_operation_stage_seconds",
        "Time of these by stage: waiting, preparing, queued, prefill, decode, ...",
        ("kind", "stage"),
        lambda now: now.backend.totals.in_stages,
    ),
    Metric(
        HistogramMetricFamily,
        "tinker_local_time_to_first_token_seconds",
        "Time from the request of a sample to its first token, waiting and rendering included.",
        ("model",),
        lambda now: {(model.names[0],): model.counts.first_token_seconds for model in now.backend.models.distinct()},
    ),
    Metric(
        HistogramMetricFamily,
        "tinker_local_time_per_output_token_seconds",
        "Mean time of a token after the first one, of the sequence of a sample that took longest.",
        ("model",),
        lambda now: {(model.names[0],): model.counts.token_seconds for model in now.backend.models.distinct()},
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_owner_operations",
        "Operations of an owner that have ended.",
        ("owner", "kind"),
        lambda now: now.backend.totals.ended,
    ),
    Metric(
        CounterMetricFamily,
        "tinker_local_owner_tokens",
        "Tokens of an owner's operations that succeeded: trained, of prompts (image positions included), sampled.",
        ("owner", "kind"),
        lambda now: now.backend.totals.tokens,
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_steps",
        "Optimizer steps of a live run since it was created or loaded.",
        RUN,
        lambda now: {(run.model_id, run.owner): run.steps for run in now.backend.runs.all_live()},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_tokens",
        "Positions that a live run was trained on, image positions included.",
        RUN,
        lambda now: {(run.model_id, run.owner): run.progress.tokens for run in now.backend.runs.all_live()},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_loss",
        "Loss of a live run's last step, divided by the sum of its weights, or without weights by its targets.",
        RUN,
        _of_runs("loss"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_gradient_norm",
        "Norm of the gradient of that step, before clipping.",
        RUN,
        _of_runs("gradient_norm"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_learning_rate",
        "Learning rate of that step.",
        RUN,
        _of_runs("learning_rate"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_kl",
        "KL(sampler, trainer) of that step in nats per token: of all sampled tokens, and by group.",
        GROUP,
        _of_groups("kl"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_largest_ratio",
        "Largest ratio of the trainer's probability of a token to the sampler's.",
        GROUP,
        _of_groups("largest_ratio"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_beyond_share",
        "Share of tokens, 0 to 1, whose ratio is beyond 1 ± 0.2.",
        GROUP,
        _of_groups("beyond_share"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_run_mismatch_tokens",
        "Sampled tokens that these are of.",
        GROUP,
        _of_groups("tokens"),
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_memory_bytes",
        "Resident memory of the server and its processes; what they share counts once for each.",
        (),
        lambda now: {(): now.memory.processes},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_gpu_memory_used_bytes",
        "Memory of a GPU that is in use, by any process.",
        ("gpu",),
        lambda now: {(str(at),): used for at, (used, _) in now.memory.gpus.items()},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_gpu_memory_bytes",
        "Memory of a GPU.",
        ("gpu",),
        lambda now: {(str(at),): most for at, (_, most) in now.memory.gpus.items()},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_disk_free_bytes",
        "Free space on the disk of the data folder.",
        (),
        lambda now: {(): shutil.disk_usage(now.backend.options.data_dir).free},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_disk_bytes",
        "Size of the disk of the data folder.",
        (),
        lambda now: {(): shutil.disk_usage(now.backend.options.data_dir).total},
    ),
    Metric(
        GaugeMetricFamily,
        "tinker_local_build_info",
        "Always 1; the labels are the versions that are installed.",
        tuple(PACKAGES),
        lambda now: {_versions(): 1},
    ),
)


class Collected(Collector):
    """The metrics of one moment. Before the backend is ready, none has a value."""

    def __init__(self, now: Reading | None) -> None:
        self._now = now

    def collect(self) -> Iterator[Any]:
        for metric in METRICS:
            family = metric.family(metric.name, metric.help, labels=metric.labels)
            values = {} if self._now is None else metric.values(self._now)
            for labels, value in values.items():
                if isinstance(family, HistogramMetricFamily):
                    family.add_metric(labels, value.cumulated(), value.total)
                else:
                    family.add_metric(labels, value)
            yield family
