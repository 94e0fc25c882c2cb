"""Sessions: who is connected. They end by `finish` or when heartbeats stop, and take their models with them."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from tinker_local.backend.storage.interface import SessionRecord, Store
from tinker_local.types import CreateSessionRequest, GoneError, NotFoundError

log = logging.getLogger(__name__)

EndReason = Literal["success", "errored", "interrupted", "heartbeats_lost"]


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    last_heartbeat: float = field(default_factory=time.monotonic)


class Sessions:
    """Live sessions; `on_end` frees what belongs to one."""

    def __init__(self, store: Store, timeout: float, on_end: Callable[[str], Awaitable[None]]) -> None:
        self._store = store
        self._timeout = timeout
        self._on_end = on_end
        self._live: dict[str, Session] = {}

    async def create(self, request: CreateSessionRequest) -> str:
        """A new session's id."""
        session = Session(f"s-{secrets.token_hex(8)}")
        record = SessionRecord(
            session.session_id, now(), request.user_metadata, request.tags, request.display_name or session.session_id
        )
        await asyncio.to_thread(self._store.add_session, record)
        self._live[session.session_id] = session
        return session.session_id

    async def require(self, session_id: str) -> Session:
        """The live session; NotFoundError if there never was one, GoneError if it has ended."""
        session = self._live.get(session_id)
        if session is not None:
            return session
        record = await asyncio.to_thread(self._store.get_session, session_id)
        if record is None:
            raise NotFoundError(f"session_id: there is no session {session_id!r}")
        why = record.end_reason or "the server was restarted"
        raise GoneError(f"session_id: the session {session_id!r} has ended ({why}); make a new ServiceClient")

    async def heartbeat(self, session_id: str) -> None:
        """Keep a session alive; GoneError tells the client to stop."""
        (await self.require(session_id)).last_heartbeat = time.monotonic()

    async def end(self, session_id: str, reason: EndReason) -> None:
        """End a session and free what it holds; the first reason wins."""
        if self._live.pop(session_id, None) is None:
            if await asyncio.to_thread(self._store.get_session, session_id) is None:
                raise NotFoundError(f"session_id: there is no session {session_id!r}")
            return
        await self._on_end(session_id)
        await asyncio.to_thread(self._store.end_session, session_id, reason, now())

    async def end_silent(self) -> None:
        """End the sessions whose heartbeats have stopped."""
        limit = time.monotonic() - self._timeout
        for session in [s for s in self._live.values() if s.last_heartbeat < limit]:
            log.warning("session %s: no heartbeat for %.0f s, ended", session.session_id, self._timeout)
            await self.end(session.session_id, "heartbeats_lost")

    def __len__(self) -> int:
        return len(self._live)
