"""Training runs as recorded; checkpoints: listing, publishing, expiry, deleting, copying, and what a path holds."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from tinker_local.backend.control.callers import owner_urn
from tinker_local.backend.http.access import Backend, Offset, PageSize, ServerKeys, ToList, caller_of, owned
from tinker_local.backend.http.bodies import discard_body, parse
from tinker_local.backend.storage.names import KINDS
from tinker_local.backend.storage.records import LOCAL_OWNER, CheckpointKind, CheckpointRecord, TrainingRunRecord
from tinker_local.types import CopyWeightsRequest, Frozen, InvalidRequestError

router = APIRouter(tags=["training runs and checkpoints"], dependencies=[Depends(owned)])

WIRE_TYPE = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class WeightsInfoBody(Frozen):
    tinker_path: str


class TtlBody(Frozen):
    """`ttl_seconds` is required: null removes the expiry."""

    ttl_seconds: int | None


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, backend: Backend) -> dict[str, Any]:
    return {"checkpoints": [checkpoint_json(record) for record in await backend.checkpoints.of(run_id)]}


@router.get("/checkpoints")
async def list_all_checkpoints(
    backend: Backend, owned: ToList, limit: PageSize = 100, offset: Offset = 0
) -> dict[str, Any]:
    """Newest first."""
    records, total = await backend.checkpoints.newest(limit, offset, owned)
    return {
        "checkpoints": [checkpoint_json(record) for record in records],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(run_id: str, kind: str, name: str, backend: Backend) -> Response:
    await backend.checkpoints.delete(f"tinker://{run_id}/{kind}/{name}")
    return Response(status_code=204)


@router.post("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def publish_checkpoint(run_id: str, kind: str, name: str, request: Request, backend: Backend) -> Response:
    """400 and not 409 if it is public already: the SDK repeats what a 409 answers for five minutes."""
    await discard_body(request)
    await backend.checkpoints.set_public(f"tinker://{run_id}/{kind}/{name}", True)
    return Response(status_code=204)


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def unpublish_checkpoint(run_id: str, kind: str, name: str, request: Request, backend: Backend) -> Response:
    """400 and not 409 if it is private already."""
    await discard_body(request)
    await backend.checkpoints.set_public(f"tinker://{run_id}/{kind}/{name}", False)
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_checkpoint_ttl(run_id: str, kind: str, name: str, request: Request, backend: Backend) -> Response:
    body = await parse(request, TtlBody)
    await backend.checkpoints.set_ttl(f"tinker://{run_id}/{kind}/{name}", body.ttl_seconds)
    return Response(status_code=204)


@router.get("/training_runs/{run_id}/checkpoints/{name}")
@router.delete("/training_runs/{run_id}/checkpoints/{name}")
@router.post("/training_runs/{run_id}/checkpoints/{name}/publish")
@router.put("/training_runs/{run_id}/checkpoints/{name}/ttl")
@router.get("/training_runs/{run_id}/checkpoints/{name}/external_weights_urls")
async def refuse_without_kind(run_id: str, name: str, request: Request) -> None:
    """A checkpoint by its name alone may be any of three; SDKs send whatever id they are given."""
    await discard_body(request)
    ids = [f"{kind}/{name}" for kind in KINDS]
    raise InvalidRequestError(
        f"checkpoint_id: {name!r} lacks its kind: give {', '.join(ids[:-1])} or {ids[-1]}, as the run's listing has it"
    )


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def get_checkpoint(run_id: str, kind: str, name: str, backend: Backend) -> dict[str, Any]:
    """One checkpoint, as the listings have it. The SDK asks for lists alone. Not part of the Tinker API."""
    return checkpoint_json(await backend.checkpoints.get(f"tinker://{run_id}/{kind}/{name}"))


@router.post("/copy_weights")
async def copy_weights(
    request: Request, backend: Backend, keys: ServerKeys, x_idempotency_key: Annotated[str | None, Header()] = None
) -> dict[str, Any]:
    asked = keys.opened(await parse(request, CopyWeightsRequest))
    path = await backend.checkpoints.copy(asked, x_idempotency_key, caller=caller_of(request))
    return {"tinker_path": path}


@router.post("/weights_info")
async def weights_info(request: Request, backend: Backend) -> dict[str, Any]:
    record = await backend.checkpoints.get((await parse(request, WeightsInfoBody)).tinker_path)
    config = record.lora_config
    return {
        "base_model": record.base_model,
        "is_lora": True,
        "lora_rank": config.rank,
        "train_unembed": config.train_unembed,
        "train_mlp": config.train_mlp,
        "train_attn": config.train_attn,
        **({"train_vision": True} if config.train_vision else {}),
        "optimizer_config": {"type": await backend.checkpoints.optimizer_of(record)},
        **({"base_precision": record.base_precision} if record.base_precision else {}),
        **({"unusable": record.unusable} if record.unusable else {}),
    }


def checkpoint_json(record: CheckpointRecord) -> dict[str, Any]:
    """A checkpoint on the wire. `base_model` is for SDKs from 0.39 on; older ones ignore it, as all do what follows
    `user_metadata` up to `expires_at`."""
    found: dict[str, Any] = {
        "checkpoint_id": record.checkpoint_id,
        "checkpoint_type": WIRE_TYPE[record.kind],
        "time": record.created_at.isoformat(),
        "tinker_path": record.tinker_path,
        "base_model": record.base_model,
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": dict(record.user_metadata),
    }
    if record.base_precision:
        found["base_precision"] = record.base_precision
    if record.missing:
        found["missing"] = True
    if record.unusable:
        found["unusable"] = record.unusable
    if record.expires_at is not None:
        found["expires_at"] = record.expires_at.isoformat()
    return found


@router.get("/training_runs")
async def list_training_runs(
    backend: Backend, owned: ToList, limit: PageSize = 20, offset: Offset = 0
) -> dict[str, Any]:
    """Newest first."""
    records, total = await backend.runs.newest(limit, offset, owned)
    last = await backend.checkpoints.last([record.training_run_id for record in records])
    owners = await backend.sessions.owners_of({record.session_id for record in records})
    return {
        "training_runs": [
            run_json(record, last.get(record.training_run_id, {}), owners.get(record.session_id, LOCAL_OWNER))
            for record in records
        ],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, backend: Backend) -> dict[str, Any]:
    record = await backend.runs.get(run_id)
    last = (await backend.checkpoints.last([run_id])).get(run_id, {})
    return run_json(record, last, await backend.sessions.owner_of(record.session_id) or LOCAL_OWNER)


def run_json(record: TrainingRunRecord, last: Mapping[CheckpointKind, CheckpointRecord], owner: str) -> dict[str, Any]:
    """A training run on the wire, with its last checkpoint of each kind."""
    found: dict[str, Any] = {
        "training_run_id": record.training_run_id,
        "base_model": record.base_model,
        "model_owner": owner_urn(owner),
        "is_lora": True,
        "lora_rank": record.lora_config.rank,
        "corrupted": False,
        "last_request_time": record.last_request_at.isoformat(),
        "user_metadata": dict(record.user_metadata),
    }
    if record.base_precision:
        found["base_precision"] = record.base_precision
    if "weights" in last:
        found["last_checkpoint"] = checkpoint_json(last["weights"])
    if "sampler_weights" in last:
        found["last_sampler_checkpoint"] = checkpoint_json(last["sampler_weights"])
    return found
