"""Checkpoints after they were saved: look-up, publication, expiry, deletion and copies."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from tinker_local.backend.control.callers import LOCAL, Caller
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses, check_ttl, expiry
from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.control.sampling_sessions import Sampling
from tinker_local.backend.control.sessions import Sessions, check_no_token, project_label
from tinker_local.backend.control.training_runs import TrainingRuns
from tinker_local.backend.scheduling.operations import model_id_in
from tinker_local.backend.storage.metadata import EVERYTHING, Owned
from tinker_local.backend.storage.names import parse_tinker_path
from tinker_local.backend.storage.records import (
    LOCAL_OWNER,
    CheckpointKind,
    CheckpointRecord,
    CopyRecord,
    SessionRecord,
    TrainingRunRecord,
)
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE, DISK, Places, Who
from tinker_local.types import CopyWeightsRequest, GoneError, InvalidRequestError, NotFoundError, OptimizerConfig

log = logging.getLogger(__name__)

DELETION_SECONDS = 2.0
"""How long a response, or the shutdown, waits until an unused folder is deleted from disk."""


LONGEST_KEY = 255
"""Characters of an idempotency key."""


class Checkpoints:
    """Finds, lists and deletes checkpoints. A deleted or expired checkpoint cannot be found any more; samples and loads
    that already use it finish first, then its folder is deleted."""

    def __init__(
        self,
        store: Store,
        versions: SamplerVersions,
        sampling: Sampling,
        sessions: Sessions,
        runs: TrainingRuns,
        uses: CheckpointUses,
        clock: Callable[[], datetime],
        on_expiry: Callable[[str], None],
    ) -> None:
        self._on_expiry = on_expiry
        self._store = store
        self._versions = versions
        self._sampling = sampling
        self._sessions = sessions
        self._runs = runs
        self._uses = uses
        self._clock = clock
        self._removals: set[asyncio.Task[None]] = set()
        self._one_copy_at_a_time = Places(1)

    async def get(self, tinker_path: str, field: str = "tinker_path") -> CheckpointRecord:
        """The checkpoint behind a tinker path."""
        run, kind, name = parse_tinker_path(tinker_path, field)
        return await DATABASE.run(self._store.existing_checkpoint, run, kind, name, field)

    async def of(self, training_run_id: str) -> list[CheckpointRecord]:
        """All checkpoints of a training run."""
        await self._runs.get(training_run_id)
        return await DATABASE.run(self._store.list_checkpoints, training_run_id)

    async def last(self, training_run_ids: Collection[str]) -> dict[str, dict[CheckpointKind, CheckpointRecord]]:
        """The last checkpoint of each kind, of each of these runs that has any."""
        return await DATABASE.run(self._store.last_checkpoints, training_run_ids)

    async def newest(self, limit: int, offset: int, owned: Owned = EVERYTHING) -> tuple[list[CheckpointRecord], int]:
        """Newest first, and the count of all."""
        return await DATABASE.run(self._store.list_all_checkpoints, limit, offset, owned)

    async def optimizer_of(self, record: CheckpointRecord) -> str:
        """The type of the optimizer that a checkpoint was trained by; the default one if its state cannot be read."""
        try:
            return await DISK.run(self._store.checkpoint_optimizer, record)
        except InvalidRequestError:
            return OptimizerConfig().type

    async def set_public(self, tinker_path: str, public: bool) -> None:
        """Publish or unpublish; InvalidRequestError if nothing would change."""
        record = await self.get(tinker_path)
        self._sampling.checkpoint_changed(await DATABASE.run(self._store.set_public, record, public))

    async def set_ttl(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire `ttl_seconds` from now, or never."""
        check_ttl(ttl_seconds)
        record = await self.get(tinker_path)
        expires_at = expiry(self._clock(), ttl_seconds)
        self._sampling.checkpoint_changed(await DATABASE.run(self._store.set_expiry, record, expires_at))

    async def delete(self, tinker_path: str) -> None:
        """Delete a checkpoint, on disk too; its sampling sessions end."""
        record = await DATABASE.run(self._store.forget_checkpoint, await self.get(tinker_path))
        removal = self._remove(record)
        if not self._uses.in_use(record):
            await asyncio.wait([removal], timeout=DELETION_SECONDS)

    async def examine(self) -> None:
        """Find the checkpoints of an older server that cannot be loaded, among those that the start left."""
        while await DISK.run(self._store.examine_next):
            pass

    async def sweep(self) -> None:
        """Delete expired checkpoints."""
        for record in await DATABASE.run(self._store.forget_expired):
            log.info("checkpoint %s expired at %s", record.tinker_path, record.expires_at)
            self._on_expiry(record.tinker_path)
            self._remove(record)

    def _remove(self, record: CheckpointRecord) -> asyncio.Task[None]:
        """Close the sampling sessions of a forgotten checkpoint; a task deletes its folder once it is unused."""
        self._sampling.checkpoint_deleted(record)

        async def remove() -> None:
            await self._uses.unused(record)
            try:
                await self._versions.unload(record)
            except Exception:
                log.exception("the sampler did not let %s go", record.tinker_path)
            await DISK.run(self._store.remove_folder, record)

        task = asyncio.create_task(remove(), name=f"remove {record.tinker_path}")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    # Copies ---------------------------------------------------------------------------------------------------------

    async def copy(
        self, request: CopyWeightsRequest, idempotency_key: str | None = None, *, caller: Caller = LOCAL
    ) -> str:
        """The copy's tinker path. The same request under the same key, or for the same run, is the same copy; GoneError
        if that was deleted."""
        check_no_token(request.weights_access_token)
        project_label(request.destination_project_id, "destination_project_id")
        check_ttl(request.ttl_seconds)
        into_session = request.session_id is not None and request.model_seq_id is not None
        if (request.session_id is None) != (request.model_seq_id is None) or into_session == (
            request.destination_project_id is not None
        ):
            raise InvalidRequestError("copy_weights: give destination_project_id, or session_id and model_seq_id")
        keys = []
        if idempotency_key is not None:
            if not 1 <= len(idempotency_key) <= LONGEST_KEY:
                raise InvalidRequestError(
                    f"X-Idempotency-Key: {len(idempotency_key)} characters are not 1 to {LONGEST_KEY}"
                )
            mine = "key" if caller.owner == LOCAL_OWNER else f"key@{caller.owner}"
            keys.append(f"{mine} {idempotency_key}")
        if request.session_id is not None and request.model_seq_id is not None:
            keys.append(f"run {model_id_in(request.session_id, request.model_seq_id)}")
        asked = request.model_dump(exclude_none=True)
        async with self._one_copy_at_a_time.turn(Who(caller.owner)):  # concurrent requests with one key make one copy
            for key in keys:
                known = await DATABASE.run(self._store.find_copy, key)
                if known is not None:
                    return await self._made(known, asked)
            return await self._make(request, keys, asked, caller)

    async def _made(self, known: CopyRecord, asked: dict[str, Any]) -> str:
        """The path of a copy that was asked for before. GoneError if it is there no more: a new copy is not what a
        request that is merely sent again means, and a path that leads nowhere would fail later, somewhere else."""
        kind, _, name = known.key.partition(" ")
        field = "model_seq_id" if kind == "run" else "X-Idempotency-Key"
        if known.request != asked:
            raise InvalidRequestError(
                f"{field}: {name!r} stands for another copy already ({known.tinker_path}); give this one another"
            )
        try:
            await self.get(known.tinker_path)
        except NotFoundError:
            raise GoneError(
                f"{field}: the copy of {name!r} was made and is gone ({known.tinker_path} was deleted or has expired); "
                "give another for a new copy"
            ) from None
        return known.tinker_path

    async def _make(self, request: CopyWeightsRequest, keys: list[str], asked: dict[str, Any], caller: Caller) -> str:
        source = await self.get(request.source_path, "source_path")
        when = self._clock()
        if request.session_id is None or request.model_seq_id is None:
            session_id, number = f"s-{secrets.token_hex(8)}", 0
            session = SessionRecord(
                session_id,
                when,
                display_name=f"copy of {source.tinker_path}",
                owner=caller.owner,
                project_id=project_label(request.destination_project_id, "destination_project_id"),
            )
        else:
            session_id, number, session = request.session_id, request.model_seq_id, None
            await self._sessions.require(session_id)
        run_id = model_id_in(session_id, number)
        if session is None:
            self._runs.reserve(run_id)
        layout = await self._runs.layout(source.training_run_id, source)
        run = TrainingRunRecord(
            run_id,
            session_id,
            source.base_model,
            source.lora_config,
            when,
            when,
            user_metadata=layout.as_metadata(),
            copied_from=source.tinker_path,
            base_precision=source.base_precision,
        )
        path = f"tinker://{run_id}/{source.kind}/{source.name}"
        try:
            await DISK.run(
                self._store.copy_checkpoint,
                source,
                run,
                session=session,
                expires_at=expiry(when, request.ttl_seconds),
                copies=[CopyRecord(key, asked, path) for key in keys],
            )
        except BaseException:
            self._runs.release(run_id)
            raise
        return path

    # End ------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish deletions of unused folders; the next server that starts deletes the others."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=DELETION_SECONDS)
        for task in self._removals:
            task.cancel()
        await asyncio.gather(*self._removals, return_exceptions=True)
