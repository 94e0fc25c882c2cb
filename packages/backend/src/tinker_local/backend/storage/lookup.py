"""Looking up what a request names."""

import asyncio

from tinker_local.backend.storage.interface import CheckpointKind, CheckpointRecord, Store
from tinker_local.types import NotFoundError


async def existing_checkpoint(store: Store, run: str, kind: CheckpointKind, name: str, field: str) -> CheckpointRecord:
    """The checkpoint, looked up in a thread; NotFoundError that names `field`."""
    record = await asyncio.to_thread(store.get_checkpoint, run, kind, name)
    if record is None:
        raise NotFoundError(f"{field}: there is no checkpoint tinker://{run}/{kind}/{name}")
    return record
