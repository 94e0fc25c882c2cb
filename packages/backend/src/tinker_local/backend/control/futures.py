"""Futures: the operation of a request id, what it waits for, or why it is lost."""

import asyncio
from typing import Any

from tinker_local.backend import ids
from tinker_local.backend.control.sampling_sessions import Sampling
from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.control.training_runs import TrainingRuns, lost_model, why_lost
from tinker_local.backend.scheduling.operations import Operation, Operations
from tinker_local.backend.scheduling.queue_states import QueueState
from tinker_local.backend.storage.store import Store
from tinker_local.types import GoneError, InternalError, NotFoundError


class Futures:
    """Looks up the operations of training runs and of sampling sessions."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        training: TrainingRuns,
        sampling: Sampling,
        operations: Operations,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._training = training
        self._sampling = sampling
        self._operations = operations

    async def get(self, request_id: str) -> Operation[Any]:
        """The operation of a request id; raises why it is lost if this process does not know it."""
        operation = self._operations.get(request_id)
        if operation is not None:
            return operation
        owner = ids.owner_of(request_id)
        if await asyncio.to_thread(self._store.get_training_run, owner) is not None:
            if self._training.live(owner) is not None:
                raise InternalError(f"request_id: {request_id} is unknown here, or its result was kept too long ago")
            raise await lost_model(self._store, owner)
        if await asyncio.to_thread(self._store.get_sampling_session, owner) is not None:
            await self._sampling.get(owner)
            raise GoneError(f"request_id: the result of {request_id} is gone; sample again")
        session_id = ids.session_of(owner)
        session = await asyncio.to_thread(self._store.get_session, session_id)
        if session is not None and not self._sessions.is_live(session_id):
            raise InternalError(f"request_id: {request_id} is lost or never was: {why_lost(session)}")
        raise NotFoundError(f"request_id: there is no request {request_id!r}")

    def queue_state(self, operation: Operation[Any]) -> QueueState:
        """Whether an unfinished operation waits for others on the same device."""
        return (self._sampling if operation.kind == "sample" else self._training).state_of(operation)

    def cancel(self, request_id: str) -> None:
        """Stop a sample and free what it holds; ignores unknown ids and finished operations."""
        operation = self._operations.get(request_id)
        if operation is not None and operation.kind == "sample":
            operation.cancel(GoneError("the request was cancelled"))
