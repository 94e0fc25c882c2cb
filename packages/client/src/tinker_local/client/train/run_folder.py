"""The folder of a run: what it trains, its curve, and its checkpoints. A run that is resumed goes on from it.

    run.json            model, kind of rows, settings, and a fingerprint of the data
    metrics.jsonl       one line for each step, and one for each evaluation
    checkpoints.jsonl   one line for each checkpoint: its step, its paths on the server, and when it expires
    reference.jsonl     with preference pairs: a line [row, chosen, rejected] with the reference's logprobs

Neither addresses of servers nor keys are written.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinker_local.client.train.examples import Kind, Rows
from tinker_local.client.train.settings import TrainSettings, made_of
from tinker_local.types import InvalidRequestError

ROWS_IN_FINGERPRINT = 64
"""Rows whose text counts for the fingerprint of rows without a digest, evenly spread; the lengths of all do."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `run.json` has. `name`: of the run, for trackers that join its parts. `pictures`: of the files of the rows'
    pictures, as `fingerprint` is of the rows; None in a run that began before they counted."""

    name: str
    model: str
    kind: Kind
    rows: int
    fingerprint: str
    settings: TrainSettings
    pictures: str | None = None


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A checkpoint after `step` steps. `state` can be trained further, `sampler` sampled from. `expires`: or never."""

    step: int
    state: str
    sampler: str
    expires: datetime | None


def fingerprint(rows: Rows) -> str:
    """Of a data set: 16 hex digits that differ if a row was added, removed, moved or changed. Rows without a `digest`,
    as those of a file have it, are compared by their lengths and the texts of some."""
    digest = hashlib.sha256(f"{rows.kind} {len(rows)}".encode())
    if known := getattr(rows, "digest", ""):
        digest.update(str(known).encode())
        return digest.hexdigest()[:16]
    for row in range(len(rows)):
        digest.update(repr(rows.lengths(row)).encode())
    for row in range(0, len(rows), max(1, len(rows) // ROWS_IN_FINGERPRINT)):
        digest.update(repr(sorted(rows.raw(row).items())).encode())
    return digest.hexdigest()[:16]


def _pictures_of(rows: Rows) -> str:
    """Of the files of the pictures: 16 hex digits; "" if rows have none, or do not know."""
    return str(getattr(rows, "pictures_digest", ""))[:16]


class RunFolder:
    """`path` and its files; `held` makes it when a run begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reference = path / "reference.jsonl"
        self._run = path / "run.json"
        self._metrics = path / "metrics.jsonl"
        self._checkpoints = path / "checkpoints.jsonl"

    def require_new(self) -> None:
        """InvalidRequestError if a run here has a checkpoint. One that ended before its first is begun again."""
        if any(True for _ in _lines(self._checkpoints)):  # not the empty file of a disk that was full
            raise InvalidRequestError(f"out: {self.path} has a run already; resume it, or choose another folder")

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other run writes here meanwhile, where the system has locks; InvalidRequestError if one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InvalidRequestError(
                        f"out: another run is writing to {self.path}; choose another folder"
                    ) from None
            yield

    def begin(self, model: str, rows: Rows, settings: TrainSettings) -> RunRecord:
        """Write what is going to be trained."""
        self.require_new()
        record = RunRecord(
            uuid4().hex[:8], model, rows.kind, len(rows), fingerprint(rows), settings, _pictures_of(rows)
        )
        self._metrics.unlink(missing_ok=True)
        written = {
            "name": record.name,
            "model": record.model,
            "kind": record.kind,
            "rows": record.rows,
            "fingerprint": record.fingerprint,
            "pictures": record.pictures,
            "settings": settings.as_json(),
        }
        with _named(self._run):
            self._run.write_text(json.dumps(written, indent=2) + "\n")
        return record

    def read(self) -> RunRecord:
        """What the run here began with; InvalidRequestError if there is none."""
        try:
            found = json.loads(self._run.read_text())
            settings = made_of(found.pop("settings"))
            return RunRecord(**found, settings=settings)
        except OSError:
            raise InvalidRequestError(f"out: {self.path} has no run to resume") from None
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"out: {self._run} is not what a run wrote; begin in another folder") from None

    def require_same(self, record: RunRecord, model: str, rows: Rows) -> None:
        """InvalidRequestError if the run would go on with another model or other data."""
        if record.model != model:
            raise InvalidRequestError(f"model: the run in {self.path} trains {record.model}, not {model}")
        if (record.kind, record.rows, record.fingerprint) != (rows.kind, len(rows), fingerprint(rows)):
            raise InvalidRequestError(
                f"data: not the {record.rows} rows with which the run in {self.path} began; its order of rows would "
                "differ, so begin in another folder"
            )
        if record.pictures is not None and record.pictures != _pictures_of(rows):
            raise InvalidRequestError(
                f"data: a picture has changed since the run in {self.path} began, while the text of the {record.rows} "
                "rows is the same; put the file back, or begin in another folder"
            )

    def log(self, row: Mapping[str, float]) -> None:
        """Add a line to the curve; what is not finite is null there, as JSON has no word for it."""
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with _named(self._metrics), self._metrics.open("a") as file:
            file.write(json.dumps(finite) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The curve so far."""
        return list(_lines(self._metrics))

    def forget_after(self, step: int) -> None:
        """Cut the curve off behind a checkpoint from which the run goes on, as these steps are done again."""
        for file in (self._metrics, self._checkpoints):
            kept = [row for row in _lines(file) if row["step"] <= step]
            if file.exists():  # and without a last line that was not written to its end
                new = file.with_suffix(".new")  # a full disk, or a kill here, must not lose the paths of checkpoints
                with _named(new):
                    new.write_text("".join(json.dumps(row) + "\n" for row in kept))
                new.replace(file)

    def saved(self, step: int, state: str, sampler: str, ttl_seconds: int | None) -> SavedStep:
        """Remember a checkpoint that was just saved."""
        expires = None if ttl_seconds is None else datetime.now(UTC) + timedelta(seconds=ttl_seconds)
        written = {"step": step, "state": state, "sampler": sampler}
        with _named(self._checkpoints), self._checkpoints.open("a") as file:
            file.write(json.dumps({**written, "expires": expires and expires.isoformat()}) + "\n")
        return SavedStep(step, state, sampler, expires)

    def last_saved(self) -> SavedStep | None:
        """The checkpoint to go on from: the newest. None before the first. InvalidRequestError if it has expired."""
        found = list(_lines(self._checkpoints))
        if not found:
            return None
        last = found[-1]
        expires = last["expires"] and datetime.fromisoformat(last["expires"])
        if expires is not None and expires < datetime.now(UTC):
            raise InvalidRequestError(
                f"out: {last['state']}, the last checkpoint of {self.path}, expired on {expires:%Y-%m-%d}; begin in "
                "another folder, with a longer keep_days"
            )
        return SavedStep(last["step"], last["state"], last["sampler"], expires or None)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """An OSError of writing `file`, as of a full disk, says which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; without the last one if the program was killed while it wrote it."""
    if not file.exists():
        return
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
