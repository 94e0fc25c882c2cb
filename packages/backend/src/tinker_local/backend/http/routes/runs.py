"""Training runs as they are recorded."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from tinker_local.backend.backend import InProcessBackend
from tinker_local.backend.control.ownership import OWNER
from tinker_local.backend.http.access import Backend, Offset, one_owner
from tinker_local.backend.http.routes.checkpoints import checkpoint_json
from tinker_local.backend.storage.records import TrainingRunRecord

router = APIRouter(tags=["training runs"], dependencies=[Depends(one_owner)])


@router.get("/training_runs")
async def list_training_runs(
    backend: Backend, limit: Annotated[int, Query(ge=1, le=1000)] = 20, offset: Offset = 0
) -> dict[str, Any]:
    """Newest first."""
    records, total = await backend.list_training_runs(limit, offset)
    return {
        "training_runs": [await run_json(backend, record) for record in records],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, backend: Backend) -> dict[str, Any]:
    return await run_json(backend, await backend.get_training_run(run_id))


async def run_json(backend: InProcessBackend, record: TrainingRunRecord) -> dict[str, Any]:
    """A training run on the wire, with its last checkpoints."""
    found: dict[str, Any] = {
        "training_run_id": record.training_run_id,
        "base_model": record.base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": record.lora_config.rank,
        "corrupted": False,
        "last_request_time": record.last_request_at.isoformat(),
        "user_metadata": dict(record.user_metadata),
    }
    checkpoints = sorted(await backend.list_checkpoints(record.training_run_id), key=lambda c: c.created_at)
    for kind, field in (("weights", "last_checkpoint"), ("sampler_weights", "last_sampler_checkpoint")):
        last = [c for c in checkpoints if c.kind == kind][-1:]
        if last:
            found[field] = checkpoint_json(last[0])
    return found
