"""`GET /metrics`: what `InProcessBackend.metrics()` and `.usage()` tell, in Prometheus' text format, per base model or
owner; and `server_metrics.py`.

It needs a key where every request does: Prometheus sends one with `http_headers: {X-API-Key: {files: [...]}}` in its
scrape configuration. A base model that is served under several names is reported once, under the first. Not
part of the Tinker API.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import get_args

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.heap import memory_in_use
from tinker_local.backend.http.access import Backend, sees_all
from tinker_local.backend.http.server_metrics import ServerCollector
from tinker_local.backend.models.metrics import ModelMetrics
from tinker_local.backend.scheduling.quotas import Amounts
from tinker_local.types import PermissionDeniedError
from tinker_local.types.errors import Category

router = APIRouter(tags=["metrics"])

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True, slots=True)
class Exported:
    """One metric. `values`: its numbers by the value of `label`, or by "" where there is no label but the model."""

    family: Family
    name: str
    help: str
    values: Callable[[ModelMetrics], Mapping[str, float]]
    label: str | None = None


EXPORTED = (
    Exported(
        CounterMetricFamily,
        "tinker_local_images_rendered",
        "Images decoded and processed; one that is still kept is not processed again.",
        lambda m: {"": m.images_rendered},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_images_encoded",
        "Images that went through the vision tower of the sampler or of the trainer.",
        lambda m: {"sampler": m.images_encoded_by_sampler, "trainer": m.images_encoded_by_trainer},
        "side",
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_samples",
        "Sequences sampled and given out.",
        lambda m: {"": m.samples},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_prompt_tokens",
        "Positions of the prompts that were sampled from, image positions included, once per request.",
        lambda m: {"": m.prompt_tokens},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_sampled_tokens",
        "Tokens of the sequences given out.",
        lambda m: {"": m.sampled_tokens},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_trained_tokens",
        "Positions of the data of forward_backward requests that succeeded, image positions included.",
        lambda m: {"": m.trained_tokens},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_optimizer_steps",
        "Optimizer steps taken.",
        lambda m: {"": m.optimizer_steps},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_submits_refused",
        "Training requests answered with 429 because as much is queued as may be; each is sent again.",
        lambda m: {"": m.submits_refused},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_operations_failed",
        "Operations that ended with an error, by the category that the client saw; cancelled ones are the user's.",
        lambda m: {category: m.failures.get(category, 0) for category in get_args(Category)},
        "category",
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_requests_running",
        "Sample requests in the sampler (its own queue included), training commands in the trainer.",
        lambda m: {"sampler": m.samples_running, "trainer": m.commands_running},
        "side",
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_requests_waiting",
        "Sample requests on their way to the sampler, training commands queued for the trainer.",
        lambda m: {"sampler": m.samples_waiting, "trainer": m.commands_waiting},
        "side",
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_adapters",
        "Adapters that are being trained.",
        lambda m: {"": m.adapters},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_sampler_versions",
        "Adapter versions that the sampler has verified and may be sampled from.",
        lambda m: {"": m.sampler_versions},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_sequences",
        "Sequences in the sampler, its own queue included.",
        lambda m: {"": m.sequences},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_kv_cache_used_ratio",
        "Share of the sampler's KV cache, 0 to 1, that sequences hold; the mean of several replicas.",
        lambda m: {"": m.kv_cache_used},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_ephemeral_version_bytes",
        "Size of the ephemeral sampler versions that are kept, in shared memory or on disk.",
        lambda m: {"": m.ephemeral_bytes},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_ephemeral_versions_dropped",
        "Ephemeral sampler versions dropped because those of their session, of their owner or of all were too large.",
        lambda m: {"": m.versions_dropped},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_in_flight_versions",
        "Versions that the sampler went on to while samples of in-flight clients ran.",
        lambda m: {"": m.in_flight_published},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_in_flight_tokens",
        "Tokens of in-flight clients.",
        lambda m: {"": m.in_flight_tokens},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_tokens_on_older_keys",
        "Those of them that were drawn on keys and values that may be of an earlier version.",
        lambda m: {"": m.tokens_on_older_keys},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_sampler_sleeps",
        "How often the sampler gave its memory to the trainer, for requests that did not fit otherwise.",
        lambda m: {"": m.sampler_sleeps},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_sampler_asleep",
        "1 while the sampler is asleep so that the trainer can use its memory.",
        lambda m: {"": int(m.sampler_asleep)},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_trainer_restarts",
        "How often the trainer's process was started again because it had ended or did not answer.",
        lambda m: {"": m.trainer_restarts},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_trainer_up",
        "0 while the trainer's process has ended and the next one is not ready.",
        lambda m: {"": int(m.trainer_works)},
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_sampler_restarts",
        "How often the sampler's process was started again because it had ended or did not answer.",
        lambda m: {"": m.sampler_restarts},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_sampler_up",
        "0 while the sampler's process has ended and the next one is not ready; of several replicas: while none works.",
        lambda m: {"": int(m.sampler_works)},
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_replica_sequences",
        "Sequences in each of several replicas of the sampler.",
        lambda m: {str(at): replica.sequences for at, replica in m.replicas.items()},
        "replica",
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_replica_kv_cache_used_ratio",
        "Share of the KV cache of each of several replicas, 0 to 1, that sequences hold.",
        lambda m: {str(at): replica.kv_cache_used for at, replica in m.replicas.items()},
        "replica",
    ),
    Exported(
        CounterMetricFamily,
        "tinker_local_replica_restarts",
        "How often the process of each of several replicas was started again.",
        lambda m: {str(at): replica.restarts for at, replica in m.replicas.items()},
        "replica",
    ),
    Exported(
        GaugeMetricFamily,
        "tinker_local_replica_up",
        "0 while the process of one of several replicas has ended and the next one is not ready; others answer.",
        lambda m: {str(at): int(replica.works) for at, replica in m.replicas.items()},
        "replica",
    ),
)


@dataclass(frozen=True, slots=True)
class OwnerGauge:
    """A gauge of each owner and resource. `value`: which of what it uses and the most that it may; infinity is left
    out."""

    name: str
    help: str
    value: Callable[[Amounts, Amounts], Amounts]


OF_OWNERS = (
    OwnerGauge(
        "tinker_local_owner_used",
        "What an owner uses of what quotas limit; the resources that end with bytes are in bytes.",
        lambda used, most: used,
    ),
    OwnerGauge("tinker_local_owner_limit", "The quota of an owner, where it has one.", lambda used, most: most),
)

OWNER_LABELS = ("owner", "resource")


class BackendCollector(Collector):
    """Reads the backend; `usage` is that of `ControlPlane.usage`."""

    def __init__(self, backend: ControlPlane, usage: Mapping[str, tuple[Amounts, Amounts]]) -> None:
        self._backend = backend
        self._usage = usage

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        models = self._backend.metrics()
        for metric in EXPORTED:
            labels = ["model"] if metric.label is None else ["model", metric.label]
            family = metric.family(metric.name, metric.help, labels=labels)
            for model, metrics in models.items():
                for value, number in metric.values(metrics).items():
                    family.add_metric([model] if metric.label is None else [model, value], number)
            yield family
        for gauge in OF_OWNERS:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=OWNER_LABELS)
            for owner, amounts in self._usage.items():
                for resource, amount in asdict(gauge.value(*amounts)).items():
                    if not math.isinf(amount):
                        family.add_metric([owner, resource], amount)
            yield family


@router.get("/metrics")
async def metrics(request: Request, backend: Backend) -> Response:
    """The metrics of this app's backend. They are of all owners together, so that only an admin sees those of many."""
    if not sees_all(request):
        raise PermissionDeniedError(
            "X-API-Key: the metrics are of all owners together; use a key of the owner 'admin' of --api-key-file, or "
            "GET /api/v1/usage for what is yours"
        )
    registry = CollectorRegistry()  # not the global one, so that two backends of a process share nothing
    registry.register(BackendCollector(backend, await backend.usage()))
    if backend.ready:
        registry.register(ServerCollector(backend, await memory_in_use()))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
