"""How far runs are; the curve of a run, numbers that a program adds to it, and logs of programs. Not part of the Tinker
API."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field
from tinker_local.backend.control.ephemeral_versions import EphemeralVersion
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.control.training_runs import TrainingRun
from tinker_local.backend.heap import memory_in_use
from tinker_local.backend.http.access import Backend, caller_of, sees_all
from tinker_local.backend.http.bodies import parse
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.storage.watched_logs import Log
from tinker_local.backend.threads import WATCHED
from tinker_local.types import Frozen, InternalError, InvalidRequestError, NotFoundError, PermissionDeniedError

router = APIRouter(tags=["progress"])

P = ParamSpec("P")
T = TypeVar("T")

MOST_METRICS = 64
"""Numbers in one call."""

LONGEST_METRIC = 128
"""Characters of a metric's name."""

MOST_EPHEMERAL = 20
"""Ephemeral sampler versions that are listed of each run."""

WATCH_SECONDS = 10.0
"""Within which a folder of logs must answer."""

STARTED = time.monotonic()

OF_MODELS = (
    *("commands_running", "commands_waiting", "samples_running", "samples_waiting", "sequences", "kv_cache_used"),
    *("adapters", "sampler_versions", "trained_tokens", "sampled_tokens", "optimizer_steps", "samples"),
    *("trainer_works", "sampler_works", "sampler_asleep", "kv_cache_bytes", "trainer_cached_bytes"),
)
"""Fields of `ModelMetrics` in the answer for each base model."""


class MetricsBody(Frozen):
    """`step`: the program's own number of a step; null: none."""

    metrics: dict[str, float]
    step: int | None = Field(default=None, ge=-(2**53), le=2**53)


@router.get("/status")
async def status(request: Request, backend: Backend) -> dict[str, Any]:
    """The live runs of the caller, and to those who see all: how busy each base model is, and memory."""
    caller = caller_of(request)
    runs = [run for run in backend.runs.all_live() if caller.admin or run.owner == caller.owner]
    ephemeral = backend.sampling.ephemeral.of_runs()
    found: dict[str, Any] = {
        "version": _version(),
        "time": time.time(),
        "problems": backend.problems(),
        "runs": [run_json(run, ephemeral.get(run.model_id, ())) for run in runs],
        "models": [{"names": list(model.names)} for model in backend.models.distinct()],
    }
    if sees_all(request):
        found["models"] = [model_json(model) for model in backend.models.distinct()]
        found["seconds_up"] = time.monotonic() - STARTED
        memory = await memory_in_use()
        found["memory_bytes"] = memory.processes
        found["gpus"] = [{"gpu": at, "used_bytes": used, "bytes": most} for at, (used, most) in memory.gpus.items()]
    return found


@router.post("/check_weights")
async def check_weights(request: Request, backend: Backend) -> dict[str, Any]:
    """Whether the frozen weights that both engines of each base model read are what was written. Waits for a running
    step, and training waits for it."""
    if not sees_all(request):
        raise PermissionDeniedError("only an admin may have the weights checked, or the only owner of the server")
    return {"weights": [asdict(await model.check_weights()) for model in backend.models.distinct()]}


def _version() -> str:
    """Of this server; empty if it runs from a checkout that is not installed."""
    try:
        return version("tinker-local")
    except PackageNotFoundError:
        return ""


def run_json(run: TrainingRun, ephemeral: Sequence[EphemeralVersion]) -> dict[str, Any]:
    """A live run. `last`: its newest optimizer step, if it has taken one since it began here. `ephemeral_versions`: the
    sampler versions without a name, the most recently used first; no checkpoint lists them, as they have no path."""
    last = run.progress.last
    return {
        "training_run_id": run.model_id,
        "base_model": run.record.base_model,
        "owner": run.owner,
        "lora_rank": run.record.lora_config.rank,
        "created_at": run.record.created_at.isoformat(),
        "steps": run.steps,
        "unsaved_steps": run.unsaved_steps,
        "tokens": run.progress.tokens,
        "last": None if last is None else last.line(),
        "queued": run.queue.load.commands,
        "ephemeral_versions": [
            {"sampler_id": each.sampler_id, "size_bytes": each.size, "samples": each.samples}
            for each in ephemeral[:MOST_EPHEMERAL]
        ],
        "ephemeral_version_count": len(ephemeral),
    }


def model_json(model: ServedModel) -> dict[str, Any]:
    """How busy a base model is, and the seconds of each stage of its start, by the part of the server."""
    metrics = model.metrics()
    start = {part: {each.name: round(each.seconds, 3) for each in stages} for part, stages in model.start.items()}
    return {"names": list(model.names), **{name: getattr(metrics, name) for name in OF_MODELS}, "start": start}


@router.get("/training_runs/{run_id}/curve")
async def curve(run_id: str, backend: Backend, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> dict[str, Any]:
    """The steps and logged metrics of a run, alive or not, after the first `after` bytes: ask again with `next`."""
    await backend.runs.get(run_id)
    piece = await backend.curves.read(run_id, after)
    return {"lines": piece.lines, "next": piece.next, "full": piece.full}


@router.post("/training_runs/{run_id}/metrics")
async def log_metrics(run_id: str, request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, MetricsBody)
    if not 1 <= len(body.metrics) <= MOST_METRICS:
        raise InvalidRequestError(f"metrics: {len(body.metrics)} numbers; give 1 to {MOST_METRICS} in one call")
    for name, value in body.metrics.items():
        if not 1 <= len(name) <= LONGEST_METRIC:
            raise InvalidRequestError(f"metrics: a name has {len(name)} characters; 1 to {LONGEST_METRIC} may be")
        if not math.isfinite(value):
            raise InvalidRequestError(f"metrics.{name}: {value} is not a finite number")
    await backend.runs.get(run_id)
    if not await backend.curves.add_metrics(run_id, body.step, body.metrics):
        raise InvalidRequestError(
            f"run_id: no more metrics of {run_id} are recorded: its curve is full, the disk, or the "
            "storage of its owner"
        )
    return {}


@router.get("/logs")
async def logs(request: Request, backend: Backend) -> dict[str, Any]:
    """The logs below `--watch-logs`, the newest first: those of the caller's runs, and to those who see all the others
    too."""
    found = [] if backend.logs is None else await _watched(backend.logs.logs)
    shown = [each for log in found if (each := await _shown(request, backend, log)) is not None]
    return {"logs": shown, "watches": backend.logs is not None}


async def _watched(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Read the folder, which may be of another machine that is gone."""
    try:
        async with asyncio.timeout(WATCH_SECONDS):
            return await WATCHED.run(function, *args, **kwargs)
    except TimeoutError:
        raise InternalError(f"the folder of --watch-logs did not answer within {WATCH_SECONDS:g} seconds") from None


async def _shown(request: Request, backend: ControlPlane, log: Log) -> dict[str, Any] | None:
    """A log as JSON; None if the caller may not see it. `training_run_id`: null if it names no run of this server."""
    owner = None if log.run_id is None else await backend.sessions.owner_of(log.run_id)
    if not sees_all(request) and (owner is None or owner != caller_of(request).owner):
        return None
    run = None if owner is None else log.run_id
    return {
        "log_id": log.id,
        "name": log.name,
        "training_run_id": run,
        "time": log.changed,
        "size_bytes": log.size_bytes,
    }


@router.get("/logs/{log_id}/curve")
async def log_curve(
    log_id: str, request: Request, backend: Backend, after: Annotated[int, Query(ge=0, le=2**53)] = 0, file: str = ""
) -> dict[str, Any]:
    """The metrics of a log after the first `after` bytes of `file`: ask again with `next` and the `file` of the answer.
    If that is another one than was asked for, these are the first metrics of a new file."""
    log = None if backend.logs is None else await _watched(backend.logs.log, log_id)
    if backend.logs is None or log is None or await _shown(request, backend, log) is None:
        raise NotFoundError(f"log_id: there is no log {log_id!r}")
    piece = await _watched(backend.logs.read, log_id, after, file)
    if piece is None:
        raise NotFoundError(f"log_id: the log {log_id!r} is gone")
    return {"lines": piece.lines, "next": piece.next, "file": piece.file, "full": piece.full}
