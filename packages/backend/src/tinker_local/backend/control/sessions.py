"""Sessions: who is connected. They end by `finish` or when heartbeats stop, and take their training runs with them."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from tinker_local.backend.control.callers import LOCAL, Caller, owner_urn
from tinker_local.backend.storage.metadata import EVERYTHING, Owned
from tinker_local.backend.storage.records import LOCAL_OWNER, LOCAL_PROJECT, EndReason, SessionRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE
from tinker_local.types import (
    ClientFinishedQuery,
    CreateSessionRequest,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    PromptLayout,
    SessionCursor,
    SessionSearchRequest,
    StatusQuery,
    StorageFullError,
    UnsupportedError,
    UserQuery,
)

LONGEST_NAME = 256
"""Characters of a session's name, of a tag and of a key of metadata."""
LONGEST_VALUE = 4096
"""Characters of a value of metadata."""
LONGEST_METADATA = 16_384
"""Characters of all metadata of a session, run or checkpoint, which listings read."""
MOST_ENTRIES = 64
"""Tags of a session, and entries of metadata."""


def check_user_metadata(metadata: Mapping[str, Any] | None) -> None:
    """InvalidRequestError for metadata that is too large, for a value that is not a string, because the SDK could not
    read listings with it, and for a layout of prompts that is none."""
    check_at_most(len(metadata or {}), MOST_ENTRIES, "user_metadata", "entries")
    for name, value in (metadata or {}).items():
        check_at_most(len(name), LONGEST_NAME, f"user_metadata: the key {name[:40]!r}", "characters")
        if not isinstance(value, str):
            raise InvalidRequestError(f"user_metadata[{name!r}]: must be a text, not {type(value).__name__}")
        check_at_most(len(value), LONGEST_VALUE, f"user_metadata[{name!r}]", "characters")
    characters = sum(len(name) + len(value) for name, value in (metadata or {}).items())
    check_at_most(characters, LONGEST_METADATA, "user_metadata", "characters in all")
    PromptLayout.of(metadata or {})


def check_at_most(count: int, most: int, what: str, unit: str) -> None:
    """InvalidRequestError if `what` has too many."""
    if count > most:
        raise InvalidRequestError(f"{what}: {count} {unit} are more than {most}")


def project_label(project_id: str | None, field: str) -> str | None:
    """`project_id` as it is recorded; InvalidRequestError if it is too long. Any text is a project."""
    check_at_most(len(project_id or ""), LONGEST_NAME, field, "characters")
    return None if project_id == LOCAL_PROJECT else project_id


def check_no_token(token: str | None) -> None:
    """UnsupportedError for a token: in this process none is needed. (The HTTP app accepts its API keys as tokens.)"""
    if token is not None:
        raise UnsupportedError("weights_access_token: this process reads every checkpoint without one; leave it out")


log = logging.getLogger(__name__)

StatusType = Literal["active", "cancelled", "client_finished"]

LONGEST_DETAIL = 500
"""Characters of a `finish`'s detail that are kept with the session."""


MOST_ENDING = 2
"""Silent sessions that end at one time: thousands would take every thread and the event loop from the others."""

PRUNE_SECONDS = 3600.0
"""How often the records of old sessions are looked for."""


def now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Why a session ended."""

    reason: EndReason
    detail: str | None = None

    @property
    def clean(self) -> bool:
        """Whether the client had done what it wanted to."""
        return self.reason == "success"

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Whether a session is active, was cancelled because its heartbeats stopped, or was finished by its client.

    A session does not fail with a request, run or sampler: each failure is reported by its own future.
    """

    type: StatusType
    reason: EndReason | None = None
    detail: str | None = None


BATCH = 100
"""Sessions read at a time; they are filtered in Python, so that text compares the same on every database."""


@dataclass(frozen=True, slots=True)
class FoundSession:
    """`status` None: lost when the server stopped. `checkpoint_storage_bytes`: of all its checkpoints."""

    record: SessionRecord
    status: SessionStatus | None
    checkpoints_count: int
    checkpoint_storage_bytes: int


@dataclass(slots=True, eq=False)
class Session:
    """`heartbeats`: whether it ends when they stop. `ended`: why it is being ended."""

    session_id: str
    heartbeats: bool
    owner: str = LOCAL_OWNER
    last_heartbeat: float = field(default_factory=time.monotonic)
    ended: SessionEnd | None = None


class Sessions:
    """Live sessions; `on_end` frees what belongs to one that has ended."""

    def __init__(self, store: Store, timeout: float, on_end: Callable[[str, SessionEnd], Awaitable[None]]) -> None:
        self._store = store
        self._timeout = timeout
        self._on_end = on_end
        self._live: dict[str, Session] = {}
        self._prune_at = 0.0
        self._looked_at = asyncio.get_running_loop().time()

    async def create(
        self,
        request: CreateSessionRequest | None = None,
        *,
        heartbeats: bool = False,
        caller: Caller = LOCAL,
        must_record: bool = True,
    ) -> str:
        """A new session's id. `heartbeats`: it ends when they stop, for clients that may vanish. `must_record`: raise
        StorageFullError if the disk is full; otherwise the session lives without a record then."""
        request = request or CreateSessionRequest()
        project = project_label(request.project_id, "project_id")
        check_user_metadata(request.user_metadata)
        check_at_most(len(request.display_name or ""), LONGEST_NAME, "display_name", "characters")
        check_at_most(len(request.tags), MOST_ENTRIES, "tags", "entries")
        for index, tag in enumerate(request.tags):
            check_at_most(len(tag), LONGEST_NAME, f"tags[{index}]", "characters")
        session = Session(f"s-{secrets.token_hex(8)}", heartbeats, caller.owner)
        record = SessionRecord(
            session.session_id,
            now(),
            request.user_metadata,
            request.tags,
            request.display_name or session.session_id,
            owner=caller.owner,
            project_id=project,
        )
        with nullcontext() if must_record else suppress(StorageFullError):
            await DATABASE.run(self._store.add_session, record)
        session.last_heartbeat = time.monotonic()
        self._live[session.session_id] = session
        return session.session_id

    async def require(self, session_id: str) -> Session:
        """The live session; NotFoundError if there never was one, GoneError if it has ended.

        It does not suspend if the session lives, so what follows it runs before the session can end.
        """
        session = self._live.get(session_id)
        if session is not None and session.ended is None:
            return session
        if session is not None:
            why = str(session.ended)
        else:
            why = (await self.record(session_id)).why_ended or "the server was restarted"
        raise GoneError(f"session_id: the session {session_id!r} has ended ({why}); make a new ServiceClient")

    async def record(self, session_id: str) -> SessionRecord:
        """What is recorded of a session, live or not; NotFoundError if there never was one."""
        record = await DATABASE.run(self._store.get_session, session_id)
        if record is None:
            raise NotFoundError(f"session_id: there is no session {session_id!r}")
        return record

    def live_owner(self, session_id: str) -> str:
        """Who owns a session that is live."""
        return self._live[session_id].owner

    async def owner_of(self, id_: str) -> str | None:
        """Who owns the session that `id_` names or begins with: that of a training run, a sampler or a request. None
        if there never was such a session."""
        session_id = id_.partition(":")[0]
        session = self._live.get(session_id)
        if session is not None:
            return session.owner
        return (await self.owners_of([session_id])).get(session_id)

    async def owners_of(self, session_ids: Collection[str]) -> dict[str, str]:
        """Who owns each of these sessions that exists."""
        return await DATABASE.run(self._store.owners_of, session_ids)

    def status(self, record: SessionRecord) -> SessionStatus | None:
        """The status of a recorded session; None if it was lost when the server stopped."""
        session = self._live.get(record.session_id)
        if session is not None:
            return _status(session.ended)
        return None if record.end_reason is None else _status(SessionEnd(record.end_reason, record.end_detail))

    def live_statuses(self) -> dict[str, SessionStatus]:
        """The status of the sessions of this process. Read it before reading records, to miss none that ends
        meanwhile."""
        return {session_id: _status(session.ended) for session_id, session in self._live.items()}

    def is_live(self, session_id: str) -> bool:
        """Whether the session was made by this process and has not ended."""
        session = self._live.get(session_id)
        return session is not None and session.ended is None

    async def heartbeat(self, session_id: str) -> None:
        """Keep a session alive; GoneError tells the client to stop."""
        (await self.require(session_id)).last_heartbeat = time.monotonic()

    async def finish(self, session_id: str, reason: EndReason = "success", detail: str | None = None) -> None:
        """End a session and free its training runs and ephemeral samplers; the first reason wins."""
        session = self._live.get(session_id)
        if session is None:
            await self.record(session_id)
        elif session.ended is not None:
            return
        end = SessionEnd(reason, detail[:LONGEST_DETAIL] if detail else None)
        if session is not None:
            session.ended = end
        try:
            # Record it first, so that requests during the clean-up get the reason.
            await DATABASE.run(self._store.end_session, session_id, end.reason, end.detail, now())
        finally:  # if that fails, say because the disk is full, its runs end all the same
            if session is not None:
                try:
                    await self._on_end(session_id, end)
                finally:
                    del self._live[session_id]

    async def end_silent(self, every: float = 0.0) -> None:
        """End the sessions whose heartbeats have stopped. It is called `every` so many seconds. If it was not, the
        server was stopped or too busy to read heartbeats, which may wait to be read now: that time is not silence."""
        looked, self._looked_at = self._looked_at, asyncio.get_running_loop().time()
        if (missed := self._looked_at - looked - every) > every > 0:
            for session in self._live.values():
                session.last_heartbeat = min(time.monotonic(), session.last_heartbeat + missed)
        limit = time.monotonic() - self._timeout
        silent = [s for s in self._live.values() if s.heartbeats and s.ended is None and s.last_heartbeat < limit]
        for session in silent:
            log.warning("session %s: no heartbeat for %.0f s, ended", session.session_id, self._timeout)
        detail = f"none for {self._timeout:g} s"
        left = iter(silent)

        async def end() -> None:
            for session in left:
                await self.finish(session.session_id, "heartbeats_lost", detail)

        await asyncio.gather(*(end() for _ in range(MOST_ENDING)))

    async def prune(self, age: timedelta) -> bool:
        """Once an hour, delete the records of sessions that ended so long ago; whether there were any."""
        if time.monotonic() < self._prune_at:
            return False
        pruned = await DATABASE.run(self._store.prune_sessions, age, self._live.keys())
        self._prune_at = time.monotonic() + (0 if pruned else PRUNE_SECONDS)
        if pruned:
            log.info("the records of %d sessions were deleted: they ended more than %s ago", pruned, age)
        return bool(pruned)

    # Listings -------------------------------------------------------------------------------------------------------

    async def newest(self, limit: int, offset: int, owned: Owned = EVERYTHING) -> list[str]:
        """Ids, newest first."""
        records, _ = await DATABASE.run(self._store.list_sessions, limit, offset, owned)
        return [record.session_id for record in records]

    async def get(self, session_id: str) -> tuple[SessionRecord, list[str], list[str]]:
        """A session, and the ids of its training runs and samplers."""
        record = await self.record(session_id)
        return record, *(await DATABASE.run(self._store.session_members, session_id))

    async def search(
        self, request: SessionSearchRequest, owned: Owned = EVERYTHING
    ) -> tuple[list[FoundSession], SessionCursor | None]:
        """A page of the matching sessions, newest first, and where the next page begins; None after the last."""
        cursor = request.cursor
        before = None if cursor is None else (cursor.last_created_at, cursor.last_session_id)
        found: list[tuple[SessionRecord, SessionStatus | None]] = []
        while len(found) <= request.limit:
            live = self.live_statuses()
            batch = await DATABASE.run(self._store.sessions_before, before, BATCH, owned)
            told = [(record, live.get(record.session_id) or self.status(record)) for record in batch]
            found += [(record, status) for record, status in told if fits(record, status, request)]
            if len(batch) < BATCH:
                break
            before = (batch[-1].created_at, batch[-1].session_id)
        page = found[: request.limit]
        storage = await DATABASE.run(self._store.session_storage, [record.session_id for record, _ in page])
        summaries = [FoundSession(record, status, *storage.get(record.session_id, (0, 0))) for record, status in page]
        if len(found) == len(page):
            return summaries, None
        last = page[-1][0]
        return summaries, SessionCursor(last_created_at=last.created_at, last_session_id=last.session_id)

    def __len__(self) -> int:
        return len(self._live)


def _status(end: SessionEnd | None) -> SessionStatus:
    if end is None:
        return SessionStatus("active")
    if end.reason == "heartbeats_lost":
        return SessionStatus("cancelled", end.reason, str(end))
    return SessionStatus("client_finished", end.reason, end.detail)


def fits(record: SessionRecord, status: SessionStatus | None, request: SessionSearchRequest) -> bool:
    """Whether a session matches `request`."""
    if isinstance(request.owner, UserQuery) and owner_urn(record.owner) not in request.owner.owner_urns:
        return False
    if request.project_ids is not None and (record.project_id or LOCAL_PROJECT) not in request.project_ids:
        return False
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
