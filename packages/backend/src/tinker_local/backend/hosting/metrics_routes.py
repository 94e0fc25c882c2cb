"""`GET /metrics`: the table of `server_metrics.py` in Prometheus' text format.

It needs a key where every request does: Prometheus sends one with `http_headers: {X-API-Key: {files: [...]}}` in its
scrape configuration. A base model that is served under several names is reported once, under the first. Not
part of the Tinker API.
"""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from tinker_local.backend.heap import memory_in_use
from tinker_local.backend.hosting.server_metrics import Collected, Reading
from tinker_local.backend.http.access import Backend, sees_all
from tinker_local.types import PermissionDeniedError

router = APIRouter(tags=["metrics"])


@router.get("/metrics")
async def metrics(request: Request, backend: Backend) -> Response:
    """The metrics of this app's backend. They are of all owners together, so that only an admin sees those of many."""
    if not sees_all(request):
        raise PermissionDeniedError(
            "X-API-Key: the metrics are of all owners together; use a key of the owner 'admin' of --api-key-file, or "
            "GET /api/v1/usage for what is yours"
        )
    now = None
    if backend.ready:
        now = Reading(backend, backend.metrics(), await backend.usage(), await memory_in_use())
    registry = CollectorRegistry()  # not the global one, so that two backends of a process share nothing
    registry.register(Collected(now))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
