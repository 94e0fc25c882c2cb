"""Sessions that fit a search, newest first, page by page."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_local.backend.control.ownership import OWNER, check_project
from tinker_local.backend.control.sessions import Sessions, SessionStatus
from tinker_local.backend.storage.records import SessionRecord
from tinker_local.backend.storage.store import Store
from tinker_local.types import ClientFinishedQuery, SessionCursor, SessionSearchRequest, StatusQuery, UserQuery

BATCH = 500
"""Sessions that are read at a time; what fits is told apart in Python, as texts compare alike on every database."""


@dataclass(frozen=True, slots=True)
class FoundSession:
    """`status` None: lost when the server stopped. Sizes in bytes."""

    record: SessionRecord
    status: SessionStatus | None
    checkpoints_count: int
    checkpoint_storage_bytes: int


async def search_sessions(
    store: Store, sessions: Sessions, request: SessionSearchRequest
) -> tuple[list[FoundSession], SessionCursor | None]:
    """A page of what fits, and where the next one begins; None after the last."""
    for project_id in request.project_ids or ():
        check_project(project_id, "project_ids")
    if isinstance(request.owner, UserQuery) and OWNER not in request.owner.owner_urns:
        return [], None
    cursor = request.cursor
    before = None if cursor is None else (cursor.last_created_at, cursor.last_session_id)
    found: list[tuple[SessionRecord, SessionStatus | None]] = []
    while len(found) <= request.limit:
        live = sessions.live_statuses()
        batch = await asyncio.to_thread(store.sessions_before, before, BATCH)
        told = [(record, live.get(record.session_id) or sessions.status(record)) for record in batch]
        found += [(record, status) for record, status in told if fits(record, status, request)]
        if len(batch) < BATCH:
            break
        before = (batch[-1].created_at, batch[-1].session_id)
    page = found[: request.limit]
    storage = await asyncio.to_thread(store.session_storage, [record.session_id for record, _ in page])
    summaries = [FoundSession(record, status, *storage.get(record.session_id, (0, 0))) for record, status in page]
    if len(found) == len(page):
        return summaries, None
    last = page[-1][0]
    return summaries, SessionCursor(last_created_at=last.created_at, last_session_id=last.session_id)


def fits(record: SessionRecord, status: SessionStatus | None, request: SessionSearchRequest) -> bool:
    """Whether a session is among what `request` asks for, its owner and project aside."""
    named = [] if request.session_id is None else [record.session_id == request.session_id]
    if request.display_name is not None:
        name = (record.display_name or "").casefold()
        named.append(all(word in name for word in request.display_name.casefold().split()))
    if named and not any(named):
        return False
    if any(record.user_metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    return request.statuses is None or _is_one_of(status, request.statuses)


def _is_one_of(status: SessionStatus | None, queries: Sequence[StatusQuery | ClientFinishedQuery]) -> bool:
    if status is None:
        return False
    return any(
        status.type == query.type
        and (isinstance(query, StatusQuery) or query.reasons is None or status.reason in query.reasons)
        for query in queries
    )
