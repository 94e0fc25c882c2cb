"""`StorageQuota`: the bytes that each owner has on disk, and the most that they may be."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from cachetools import LRUCache
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.metadata import Owned
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.steady_clock import SteadyClock
from tinker_local.backend.threads import Ledger
from tinker_local.types import InvalidRequestError

RECORD_BYTES = 512
"""Counted for each session and training run, besides its metadata."""

FREE_BYTES = 2**20
"""Of the records and curves of an owner, which do not count."""

LARGEST = 3
"""Checkpoints that a refusal names."""


class StorageQuota:
    """Counts checkpoints of every kind, also deleted ones whose folders still exist, as those of exports that are being
    downloaded; the records of sessions with their metadata; and curves. `most_bytes` gives the limit of an owner,
    infinity for none; `curve_sizes` the bytes of the curve of each run.

    Records and curves are refused when they alone take all that an owner may have: who has too many checkpoints needs a
    session to delete some.

    Autosaves count and are never refused: each run has one, and without it training would be lost. Instead, an owner
    who is over the limit begins no new run. Methods block on the database and may be called from any thread.
    """

    def __init__(self, engine: sa.Engine, clock: SteadyClock, most_bytes: Callable[[str], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._most_bytes = most_bytes
        self._writing: Ledger[str] = Ledger()  # bytes that `room` has granted and that are not recorded yet
        self._deleted: dict[tuple[str, datetime], tuple[str, int]] = {}  # path and time: owner and bytes
        self._granting = threading.Lock()
        self.curve_sizes: Callable[[], Mapping[str, int]] = dict
        self._kept: Counter[str] | None = None  # bytes of records and curves, once they were counted
        self._counting = threading.RLock()
        self._owners: LRUCache[str, str] = LRUCache(4096)  # of sessions

    def used(self) -> dict[str, int]:
        """The bytes of each owner that has any."""
        sessions, runs, checkpoints = tables.sessions.c, tables.training_runs.c, tables.checkpoints.c
        query = (
            sa.select(sessions.owner, sa.func.sum(checkpoints.size_bytes))
            .select_from(tables.checkpoints)
            .join(tables.training_runs, checkpoints.training_run_id == runs.training_run_id)
            .join(tables.sessions, runs.session_id == sessions.session_id)
            .where(self._in_time())
            .group_by(sessions.owner)
        )
        with self._engine.connect() as connection:
            used = Counter({owner: int(size) for owner, size in connection.execute(query)})
        with self._counting:
            used.update({owner: size for owner in self._records_and_curves() if (size := self._kept_by(owner))})
        for owner, size in list(self._deleted.values()):
            used[owner] += size
        return dict(used)

    def deleted(self, record: CheckpointRecord) -> None:
        """The record is gone, and its folder still exists."""
        sessions, runs = tables.sessions.c, tables.training_runs.c
        query = sa.select(sessions.owner).join(tables.training_runs, runs.session_id == sessions.session_id)
        with self._engine.connect() as connection:
            owner = connection.execute(query.where(runs.training_run_id == record.training_run_id)).scalar()
        if owner is not None:
            self._deleted[record.tinker_path, record.created_at] = owner, record.size_bytes

    def removed(self, record: CheckpointRecord) -> None:
        """The folder is gone, too."""
        self._deleted.pop((record.tinker_path, record.created_at), None)

    @contextmanager
    def room(self, record: CheckpointRecord, size: int, owner: str, *, refuse: bool = True) -> Iterator[None]:
        """Write and record `record` of `owner`, of `size` bytes, inside. A checkpoint of the same name, which is
        replaced, counts no more. With `refuse`, InvalidRequestError if the owner may not have so many bytes.
        """
        most = self._most_bytes(owner)
        if math.isinf(most):
            yield
            return
        with self._granting:
            used = self._used_by(owner, record) + self._writing[owner]
            if refuse and used + size > most:
                raise InvalidRequestError(self._refusal(owner, used, size, most))
            self._writing[owner] += size
        try:
            yield
        finally:
            with self._granting:
                self._writing[owner] -= size

    def take(self, owner: str, size: int, what: str) -> None:
        """Count `size` bytes more of records or curves; InvalidRequestError if these would be too many. `what`: the
        field or request that the error names."""
        most = self._most_bytes(owner)
        with self._counting:
            kept = self._records_and_curves()
            if size > 0 and kept[owner] + size > most + FREE_BYTES:
                raise InvalidRequestError(
                    f"{what}: records of sessions, their metadata and curves of the owner {owner!r} take "
                    f"{_mib(kept[owner])}; with {size} bytes more they would exceed {_mib(most + FREE_BYTES)}. "
                    "They are deleted when the sessions are old (--keep-sessions)"
                )
            kept[owner] += size

    def recount(self) -> None:
        """Some records or curves are gone."""
        with self._counting:
            self._kept = None

    def _records_and_curves(self) -> Counter[str]:
        """Bytes by owner, counted once; with the lock."""
        if self._kept is None:
            self._kept = Counter()
            sessions, runs = tables.sessions.c, tables.training_runs.c
            count = sa.func.count()
            of_sessions = sa.select(
                sessions.owner, count, sa.func.sum(_length(sessions.user_metadata) + _length(sessions.tags))
            ).group_by(sessions.owner)
            of_runs = (
                sa.select(sessions.owner, count, sa.func.sum(_length(runs.user_metadata)))
                .join(tables.training_runs, runs.session_id == sessions.session_id)
                .group_by(sessions.owner)
            )
            samplers = tables.sampling_sessions.c
            of_samplers = (
                sa.select(sessions.owner, count, sa.literal(0))
                .join(tables.sampling_sessions, samplers.session_id == sessions.session_id)
                .where(~samplers.nameless)
                .group_by(sessions.owner)
            )
            with self._engine.connect() as connection:
                for query in (of_sessions, of_runs, of_samplers):
                    for owner, records, size in connection.execute(query):
                        self._kept[owner] += RECORD_BYTES * records + int(size or 0)
            for run_id, size in self.curve_sizes().items():
                if (owner := self.owner_of(run_id)) is not None:
                    self._kept[owner] += size
        return self._kept

    def _kept_by(self, owner: str) -> int:
        """What counts of the records and curves of an owner; with the lock."""
        return max(0, self._records_and_curves()[owner] - FREE_BYTES)

    def owner_of(self, run_id: str) -> str | None:
        """Who owns the session of a training run, which never changes."""
        session_id = run_id.partition(":")[0]
        with self._counting:
            if (known := self._owners.get(session_id)) is not None:
                return known
        query = sa.select(tables.sessions.c.owner).where(tables.sessions.c.session_id == session_id)
        with self._engine.connect() as connection:
            owner: str | None = connection.execute(query).scalar()
        if owner is not None:
            with self._counting:
                self._owners[session_id] = owner
        return owner

    def check_new_run(self, owner: str) -> None:
        """InvalidRequestError if `owner` is over the limit: every run may leave one more autosave."""
        most = self._most_bytes(owner)
        if not math.isinf(most) and (used := self._used_by(owner)) > most:
            raise InvalidRequestError(
                f"create_model: the checkpoints of the owner {owner!r} take {_mib(used)}, the most is {_mib(most)}: "
                f"delete some (`tinker checkpoint delete PATH`) before a new run{self._largest(owner)}"
                f"{self._still_read(owner)}"
            )

    def _refusal(self, owner: str, used: int, size: int, most: float) -> str:
        return (
            f"storage: the checkpoints of the owner {owner!r} take {_mib(used)}; with this one of {_mib(size)} they "
            f"would exceed the most, {_mib(most)}: delete some (`tinker checkpoint delete PATH`) and save again"
            f"{self._largest(owner)}{self._still_read(owner)}"
        )

    def _still_read(self, owner: str) -> str:
        size = self._deleted_of(owner)
        return f"; {_mib(size)} are of deleted ones that are still being downloaded or read" if size else ""

    def _largest(self, owner: str) -> str:
        """What a refusal adds."""
        table = tables.checkpoints.c
        query = sa.select(table.training_run_id, table.kind, table.name, table.size_bytes).where(
            Owned(owner).checkpoints() & self._in_time()
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(table.size_bytes.desc(), table.number).limit(LARGEST)).all()
        largest = ", ".join(f"tinker://{run}/{kind}/{name} ({_mib(bytes_)})" for run, kind, name, bytes_ in rows)
        return f"; the largest: {largest}" if largest else ""

    def _used_by(self, owner: str, without: CheckpointRecord | None = None) -> int:
        table = tables.checkpoints.c
        query = sa.select(sa.func.sum(table.size_bytes)).where(Owned(owner).checkpoints() & self._in_time())
        if without is not None:
            same = (
                (table.training_run_id == without.training_run_id)
                & (table.kind == without.kind)
                & (table.name == without.name)
            )
            query = query.where(~same)
        with self._engine.connect() as connection:
            recorded = int(connection.execute(query).scalar() or 0)
        with self._counting:
            recorded += self._kept_by(owner)
        return recorded + self._deleted_of(owner)

    def _deleted_of(self, owner: str) -> int:
        return sum(size for other, size in list(self._deleted.values()) if other == owner)

    def _in_time(self) -> sa.ColumnElement[bool]:
        expires_at = tables.checkpoints.c.expires_at
        return expires_at.is_(None) | (expires_at > self._clock.now())


def _length(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """Of JSON as it is written."""
    return sa.func.length(sa.cast(column, sa.Text))


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
