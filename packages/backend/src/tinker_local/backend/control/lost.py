"""What a client is told of a model that is no longer here: why, and how to go on."""

import asyncio

from tinker_local.backend.storage.records import SessionRecord
from tinker_local.backend.storage.store import Store
from tinker_local.types import ApiError, InternalError, InvalidRequestError, NotFoundError


def why_lost(session: SessionRecord | None) -> str:
    """Why nothing of `session`, which is not alive, is here any more."""
    if session is not None and session.why_ended is not None:
        return f"its session has ended ({session.why_ended})"
    return "the server was restarted"


async def lost_model(store: Store, model_id: str) -> ApiError:
    """Why nothing can be done with a model that is not alive."""
    record = await asyncio.to_thread(store.get_training_run, model_id)
    if record is None:
        return NotFoundError(f"model_id: there is no model {model_id!r}")
    if record.copied_from is not None:
        return InvalidRequestError(
            f"model_id: {model_id} is a copy of {record.copied_from}, which cannot be trained on; "
            "begin a new model with create_training_client_from_state"
        )
    session = await asyncio.to_thread(store.get_session, record.session_id)
    return InternalError(f"model {model_id} is gone: {why_lost(session)}. {await _how_to_go_on(store, model_id)}")


async def _how_to_go_on(store: Store, model_id: str) -> str:
    checkpoints = await asyncio.to_thread(store.list_checkpoints, model_id)
    saved = [c for c in checkpoints if c.kind == "weights"]
    if not saved:
        return "It has no saved checkpoint."
    last = max(saved, key=lambda c: c.created_at)
    return f"Its last checkpoint is {last.tinker_path}; continue with create_training_client_from_state_with_optimizer"
