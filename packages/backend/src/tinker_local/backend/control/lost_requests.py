"""Why this process knows nothing of a request."""

from tinker_local.backend.control.sampling_sessions import Sampling
from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.control.training_runs import TrainingRuns, why_lost
from tinker_local.backend.scheduling.operations import owner_of, session_of
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE
from tinker_local.types import ApiError, GoneError, InternalError, NotFoundError

GONE = (
    "its result was kept too long ago, or newer results of the session took its memory (read results as they come, or "
    "start the server with a larger --max-results-per-session)"
)


class LostRequests:
    """Explains requests that `Operations` does not have, from what is recorded of their owners."""

    def __init__(self, store: Store, sessions: Sessions, training: TrainingRuns, sampling: Sampling) -> None:
        self._store = store
        self._sessions = sessions
        self._training = training
        self._sampling = sampling

    async def why(self, request_id: str) -> ApiError:
        """The error that a poll of an unknown request gets."""
        owner = owner_of(request_id)
        if await DATABASE.run(self._store.get_training_run, owner) is not None:
            if self._training.live(owner) is not None:
                return InternalError(f"request_id: {request_id} is unknown here, or {GONE}")
            return await self._training.lost_model(owner)
        if await DATABASE.run(self._store.get_sampling_session, owner) is not None:
            try:
                await self._sampling.get(owner)
            except ApiError as error:
                return error
            return GoneError(f"request_id: the result of {request_id} is gone: {GONE}; sample again")
        session_id = session_of(owner)
        session = await DATABASE.run(self._store.get_session, session_id)
        if session is not None and not self._sessions.is_live(session_id):
            return InternalError(f"request_id: {request_id} is lost or never was: {why_lost(session)}")
        return NotFoundError(f"request_id: there is no request {request_id!r}")
