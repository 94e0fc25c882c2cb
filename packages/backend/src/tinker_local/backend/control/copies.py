"""`copy_weights`: a checkpoint as the only one of a new run, which was never a model."""

import asyncio
import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tinker_local.backend.control import paths
from tinker_local.backend.control.checkpoints import Checkpoints
from tinker_local.backend.control.ownership import check_no_token, check_project
from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.control.training_runs import TrainingRuns
from tinker_local.backend.control.ttl import check_ttl, expiry
from tinker_local.backend.storage.records import CopyRecord, SessionRecord, TrainingRunRecord
from tinker_local.backend.storage.store import Store
from tinker_local.types import CopyWeightsRequest, GoneError, InvalidRequestError, NotFoundError

LONGEST_KEY = 255
"""Characters of an idempotency key."""


class Copies:
    """Makes copies, each once: by the idempotency key, and by the run that it is to become."""

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        sessions: Sessions,
        runs: TrainingRuns,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._sessions = sessions
        self._runs = runs
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    async def copy(self, request: CopyWeightsRequest, idempotency_key: str | None = None) -> str:
        """The copy's tinker path. The same request under the same key, or for the same run, is the same copy; GoneError
        if that was deleted."""
        check_no_token(request.weights_access_token)
        check_project(request.destination_project_id, "destination_project_id")
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
            keys.append(f"key {idempotency_key}")
        if request.session_id is not None and request.model_seq_id is not None:
            keys.append(f"run {paths.model_id(request.session_id, request.model_seq_id)}")
        asked = request.model_dump(exclude_none=True)
        async with self._one_at_a_time:  # two of one key at the same time are one copy, too
            for key in keys:
                known = await asyncio.to_thread(self._store.find_copy, key)
                if known is not None:
                    return await self._made(known, asked)
            return await self._make(request, keys, asked)

    async def _made(self, known: CopyRecord, asked: dict[str, Any]) -> str:
        """The path of a copy that was asked for before. GoneError if it is there no more: a new copy is not what a
        request that is merely sent again means, and a path that leads nowhere would fail later, somewhere else."""
        kind, _, name = known.key.partition(" ")
        field = "X-Idempotency-Key" if kind == "key" else "model_seq_id"
        if known.request != asked:
            raise InvalidRequestError(
                f"{field}: {name!r} stands for another copy already ({known.tinker_path}); give this one another"
            )
        try:
            await self._checkpoints.get(known.tinker_path)
        except NotFoundError:
            raise GoneError(
                f"{field}: the copy of {name!r} was made and is gone ({known.tinker_path} was deleted or has expired); "
                "give another for a new copy"
            ) from None
        return known.tinker_path

    async def _make(self, request: CopyWeightsRequest, keys: list[str], asked: dict[str, Any]) -> str:
        source = await self._checkpoints.get(request.source_path, "source_path")
        when = self._clock()
        if request.session_id is None or request.model_seq_id is None:
            session_id, number = f"s-{secrets.token_hex(8)}", 0
            session = SessionRecord(session_id, when, display_name=f"copy of {source.tinker_path}")
        else:
            session_id, number, session = request.session_id, request.model_seq_id, None
            await self._sessions.require(session_id)
        run_id = paths.model_id(session_id, number)
        if session is None:
            self._runs.reserve(run_id)
        run = TrainingRunRecord(
            run_id, session_id, source.base_model, source.lora_config, when, when, copied_from=source.tinker_path
        )
        path = f"tinker://{run_id}/{source.kind}/{source.name}"
        try:
            await asyncio.to_thread(
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
