"""`StorageQuota`: the bytes of each owner's checkpoints, and the most that they may be."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import sqlalchemy as sa
from tinker_local.backend.storage import tables
from tinker_local.backend.storage.metadata import Owned
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.steady_clock import SteadyClock
from tinker_local.types import InvalidRequestError

LARGEST = 3
"""Checkpoints that a refusal names."""


class StorageQuota:
    """Counts checkpoints of every kind, also deleted ones whose folders still exist, as those of exports that are being
    downloaded. `most_bytes` gives the limit of an owner, infinity for none.

    Autosaves count and are never refused: each run has one, and without it training would be lost. Instead, an owner
    who is over the limit begins no new run. Methods block on the database and may be called from any thread.
    """

    def __init__(self, engine: sa.Engine, clock: SteadyClock, most_bytes: Callable[[str], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._most_bytes = most_bytes
        self._writing: Counter[str] = Counter()  # bytes that `room` has granted and that are not recorded yet
        self._deleted: dict[tuple[str, datetime], tuple[str, int]] = {}  # path and time: owner and bytes
        self._granting = threading.Lock()

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
        return recorded + self._deleted_of(owner)

    def _deleted_of(self, owner: str) -> int:
        return sum(size for other, size in list(self._deleted.values()) if other == owner)

    def _in_time(self) -> sa.ColumnElement[bool]:
        expires_at = tables.checkpoints.c.expires_at
        return expires_at.is_(None) | (expires_at > self._clock.now())


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
