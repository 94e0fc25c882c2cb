"""Checkpoints after they were saved: look-up, publication, expiry and deletion."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from tinker_local.backend.control.checkpoint_uses import CheckpointUses
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.sampling_sessions import SamplingSessions
from tinker_local.backend.control.ttl import check_ttl, expiry
from tinker_local.backend.storage.names import parse_tinker_path
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store

log = logging.getLogger(__name__)

DELETION_SECONDS = 2.0
"""How long an answer, or the end of the server, waits for a folder that nobody uses to be gone from the disk."""


class Checkpoints:
    """What becomes of checkpoints. One that is deleted or over is found by nobody from then on; samples and loads that
    have begun with it go on to their end, and its folder is deleted after the last of them."""

    def __init__(
        self,
        store: Store,
        versions: SamplerVersions,
        sampling: SamplingSessions,
        uses: CheckpointUses,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._versions = versions
        self._sampling = sampling
        self._uses = uses
        self._clock = clock
        self._removals: set[asyncio.Task[None]] = set()

    async def get(self, tinker_path: str, field: str = "tinker_path") -> CheckpointRecord:
        """The checkpoint behind a tinker path."""
        run, kind, name = parse_tinker_path(tinker_path, field)
        return await asyncio.to_thread(self._store.existing_checkpoint, run, kind, name, field)

    async def optimizer_of(self, record: CheckpointRecord) -> str:
        """The type of the optimizer that a checkpoint was trained by."""
        return await asyncio.to_thread(self._store.checkpoint_optimizer, record)

    async def set_public(self, tinker_path: str, public: bool) -> None:
        """Publish or unpublish; InvalidRequestError if it is so already."""
        record = await self.get(tinker_path)
        await asyncio.to_thread(self._store.set_public, record, public)

    async def set_ttl(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint end `ttl_seconds` from now, or never."""
        check_ttl(ttl_seconds)
        record = await self.get(tinker_path)
        expires_at = expiry(self._clock(), ttl_seconds)
        self._sampling.checkpoint_changed(await asyncio.to_thread(self._store.set_expiry, record, expires_at))

    async def delete(self, tinker_path: str) -> None:
        """Delete a checkpoint, on disk too; its sampling sessions end."""
        record = await asyncio.to_thread(self._store.forget_checkpoint, await self.get(tinker_path))
        removal = self._remove(record)
        if not self._uses.in_use(record):
            await asyncio.wait([removal], timeout=DELETION_SECONDS)

    async def sweep(self) -> None:
        """Delete what is over."""
        for record in await asyncio.to_thread(self._store.forget_expired):
            log.info("checkpoint %s expired at %s", record.tinker_path, record.expires_at)
            self._remove(record)

    def _remove(self, record: CheckpointRecord) -> asyncio.Task[None]:
        """Close the sampling sessions of a forgotten checkpoint; a task deletes its folder as soon as it may."""
        self._sampling.checkpoint_deleted(record)

        async def remove() -> None:
            await self._uses.unused(record)
            try:
                await self._versions.unload(record)
            except Exception:
                log.exception("the sampler did not let %s go", record.tinker_path)
            await asyncio.to_thread(self._store.remove_folder, record)

        task = asyncio.create_task(remove(), name=f"remove {record.tinker_path}")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    async def close(self) -> None:
        """Finish deletions that wait for nobody; folders that are left are deleted when the next server starts."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=DELETION_SECONDS)
        for task in self._removals:
            task.cancel()
        await asyncio.gather(*self._removals, return_exceptions=True)
