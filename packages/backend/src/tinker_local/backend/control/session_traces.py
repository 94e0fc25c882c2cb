"""Session traces: where the time of a session's requests went, as a file for https://ui.perfetto.dev."""

import asyncio
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from tinker_local.backend.control.sessions import Sessions
from tinker_local.backend.control.signatures import LIFETIME, Signatures
from tinker_local.backend.perfetto import OwnerTrack, SessionTrace, packets
from tinker_local.backend.scheduling.operations import (
    SessionTimelines,
    Timeline,
    TraceRecorder,
    as_api_error,
    clock,
    owner_of,
)
from tinker_local.backend.storage.records import SessionRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import ACTING, DISK, Places
from tinker_local.types import NotFoundError
from tinker_local.types.wire.perfetto_trace_pb2 import Trace

PATIENCE = 3.0
"""Seconds to wait for a build; a client that gets `pending` asks again after five."""

AT_ONCE = 512
"""Packets per write."""


KIND = "session_trace"
"""What a token is for."""


@dataclass(frozen=True, slots=True)
class TraceExport:
    """The state of an export: `ready` has the `token` that `open` takes, `failed` has an `error`."""

    status: Literal["pending", "ready", "failed"]
    token: str | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Build:
    """A trace that is being built or is ready. `given`: it has a URL. `until`: when its file may be deleted."""

    task: asyncio.Task[None]
    given: bool = False
    until: float = field(default_factory=lambda: time.monotonic() + LIFETIME.total_seconds())


class SessionTraces:
    """`trace_export`: builds traces in the background from what `recorder` keeps, and gives out their files."""

    def __init__(
        self, recorder: TraceRecorder, store: Store, sessions: Sessions, signatures: Signatures, folder: Path
    ) -> None:
        """`folder` holds the files; those of an earlier process are deleted."""
        self._recorder = recorder
        self._store = store
        self._sessions = sessions
        self._signatures = signatures
        self._folder = folder
        self._builds: dict[str, _Build] = {}
        self._one_at_a_time = Places(1)
        self._unix_ns = time.time_ns() - clock()
        self._started = datetime.now(UTC)
        shutil.rmtree(folder, ignore_errors=True)

    async def export(self, session_id: str) -> TraceExport:
        """Build the trace, and wait up to `PATIENCE` seconds for it; NotFoundError if there never was such a session.

        A trace that took longer is given to the next caller as it is. Otherwise each call builds a new one.
        """
        record = await self._sessions.record(session_id)
        kept = self._recorder.of(session_id)
        if kept is None:
            return TraceExport("failed", error=self._why_nothing(session_id))
        build = self._builds.get(session_id)
        if build is None or (build.task.done() and build.given):
            build = self._builds[session_id] = self._begin(record, kept)
        await asyncio.wait((build.task,), timeout=PATIENCE)
        if not build.task.done():
            return TraceExport("pending")
        if build.task.cancelled() or (error := build.task.exception()) is not None:
            self._builds.pop(session_id, None)
            return TraceExport("failed", error="the server was stopped" if error is None else str(as_api_error(error)))
        build.given, build.until = True, time.monotonic() + LIFETIME.total_seconds()
        return TraceExport("ready", self._signatures.sign(KIND, session_id))

    async def open(self, session_id: str, token: str) -> BinaryIO:
        """The file; PermissionDeniedError if `token` is wrong or expired, NotFoundError if the trace was dropped."""
        self._signatures.check(token, KIND, session_id)
        try:
            return await DISK.run(self._path(session_id).open, "rb")
        except FileNotFoundError:
            raise NotFoundError(f"session_id: {self._why_nothing(session_id)}") from None

    async def forget_old(self) -> None:
        """Delete the files whose last URL has expired."""
        now = time.monotonic()
        for session_id, build in list(self._builds.items()):
            if build.task.done() and build.until < now:
                del self._builds[session_id]
                await DISK.run(self._path(session_id).unlink, missing_ok=True)

    async def close(self) -> None:
        """Stop building, and delete the files."""
        tasks = [build.task for build in self._builds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await DISK.run(shutil.rmtree, self._folder, ignore_errors=True)

    def _begin(self, record: SessionRecord, kept: SessionTimelines) -> _Build:
        timelines, note, who = list(kept.timelines), self._note(kept), ACTING.get()

        async def build() -> None:
            async with self._one_at_a_time.turn(who):  # each takes a thread's whole time
                await DISK.run(self._write, record, timelines, note)

        return _Build(asyncio.create_task(build(), name="session-trace"))

    def _write(self, record: SessionRecord, timelines: Iterable[Timeline], note: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(record.session_id)
        unfinished = path.with_suffix(".unfinished")
        trace = self._trace(record, timelines, note)
        with unfinished.open("wb") as file:
            part = Trace()
            for packet in packets(trace):
                part.packet.append(packet)
                if len(part.packet) == AT_ONCE:
                    file.write(part.SerializeToString())
                    part = Trace()
            file.write(part.SerializeToString())
        unfinished.replace(path)  # a download that has begun goes on with the old one

    def _trace(self, record: SessionRecord, timelines: Iterable[Timeline], note: str) -> SessionTrace:
        owners: dict[str, list[Timeline]] = {}
        for timeline in timelines:
            owners.setdefault(owner_of(timeline.request_id), []).append(timeline)
        training = [self._run_track(owner, of) for owner, of in owners.items() if of[0].kind != "sample"]
        sampling = [self._sampler_track(owner, of) for owner, of in owners.items() if of[0].kind == "sample"]
        name = record.session_id
        if record.display_name != name:
            name = f"{record.display_name} ({name})"
        return SessionTrace(f"session {name}", note, note, training, sampling, self._unix_ns)

    def _run_track(self, owner: str, timelines: list[Timeline]) -> OwnerTrack:
        run = self._store.get_training_run(owner)
        of = "not created" if run is None else f"{run.base_model}, rank {run.lora_config.rank}"
        return OwnerTrack(f"training run {_short(owner)}: {of}", owner, timelines)

    def _sampler_track(self, owner: str, timelines: list[Timeline]) -> OwnerTrack:
        sampler = self._store.get_sampling_session(owner)
        of = "not created" if sampler is None else sampler.model_path or sampler.base_model
        if sampler is not None and sampler.nameless:
            of = f"{of}, weights without a name"
        return OwnerTrack(f"sampler {_short(owner)}: {of}", owner, timelines)

    def _note(self, kept: SessionTimelines) -> str:
        complete = (
            f"all {kept.recorded} requests since {kept.since:%Y-%m-%d %H:%M:%S} UTC "
            f"(the server started at {self._started:%Y-%m-%d %H:%M:%S} UTC)"
        )
        if not kept.dropped:
            return complete
        return f"the newest {len(kept.timelines)} of {complete}; {kept.dropped} older ones were dropped"

    def _why_nothing(self, session_id: str) -> str:
        return (
            f"nothing is recorded of the session {session_id}: it has made no request since the server started at "
            f"{self._started:%Y-%m-%d %H:%M:%S} UTC, or its requests were dropped for newer ones of any session. "
            "Requests are recorded in memory only; export before the server stops"
        )

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.pftrace"


def _short(owner: str) -> str:
    """The number within the session."""
    return owner.rpartition(":")[2]
