"""Exports: adapters as PEFT folders to be downloaded, by URLs that are signed and need no key."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tinker_local.backend.adapters.adapter_files import AGE, CONFIG, WEIGHTS
from tinker_local.backend.control.age_encryption import encryption_to
from tinker_local.backend.control.checkpoint_lifetime import CheckpointUses, check_ttl
from tinker_local.backend.control.signatures import LIFETIME, Signatures
from tinker_local.backend.control.training_runs import Command, TrainingRun
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.backend.storage.names import check_checkpoint_name, parse_tinker_path
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import DATABASE, DISK
from tinker_local.types import (
    InvalidRequestError,
    NotFoundError,
    SaveWeightsExternalRequest,
)

FILES = (CONFIG, WEIGHTS)
"""The files of a checkpoint's folder that can be downloaded; encrypted ones end in `AGE`."""

KIND = "external_weights"
"""What a signature is for."""


@dataclass(frozen=True, slots=True)
class SignedFile:
    """Permission to fetch one file of one checkpoint.

    `version`: when the checkpoint was saved (microseconds since 1970), so that the URL of a deleted checkpoint does not
    fetch the next one of that name.
    """

    training_run_id: str
    name: str
    file: str
    version: int
    token: str


class Exports:
    """Exports of `save_weights_external`, and signed access to their files."""

    def __init__(
        self,
        store: Store,
        uses: CheckpointUses,
        signatures: Signatures,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._uses = uses
        self._clock = clock
        self._signatures = signatures

    def save(self, request: SaveWeightsExternalRequest) -> Command:
        """Capture and write the copy. The operation ends with `path` and `size_bytes` once the files are on disk."""

        async def run(model: TrainingRun, operation: Operation[dict[str, Any]]) -> None:
            name = check_checkpoint_name(request.path, "path")
            check_ttl(request.ttl_seconds)
            recipients = request.age_encryption_recipients
            encrypt = encryption_to(recipients) if recipients else None
            state = await model.base.scheduler.call(model.base.engines.trainer.export, model.model_id)
            record = model.checkpoint("external_weights", name, request.ttl_seconds, None)

            async def write() -> None:
                written = await DISK.run(self._store.write_checkpoint, record, state, overwrite=False, encrypt=encrypt)
                operation.succeed({"path": written.tinker_path, "size_bytes": written.size_bytes})

            model.beside(operation, write())

        return run

    async def sign(self, tinker_path: str) -> tuple[list[SignedFile], datetime]:
        """Every file of an export with a signature, and when these expire: with the export itself, if that is first."""
        run, kind, name = parse_tinker_path(tinker_path, "tinker_path")
        if kind != "external_weights":
            raise InvalidRequestError(
                f"tinker_path: {tinker_path} is not an export; only what save_weights_external saved "
                f"(tinker://{run}/external_weights/...) has URLs"
            )
        record = await self._record(run, name)
        await DISK.run(self._store.check_checkpoint, record, "tinker_path")
        until = self._clock() + LIFETIME
        if record.expires_at is not None:
            until = min(until, record.expires_at)
        folder = self._store.checkpoint_folder(record)
        files = [f"{file}{AGE}" if (folder / f"{file}{AGE}").exists() else file for file in FILES]
        until, version = until.replace(microsecond=0), _microseconds(record.created_at)
        signed = [
            SignedFile(run, name, file, version, self._signatures.sign(KIND, run, name, file, version, until=until))
            for file in files
        ]
        return signed, until.astimezone(UTC)

    @asynccontextmanager
    async def opened(self, wanted: SignedFile) -> AsyncIterator[Path]:
        """The file; PermissionDeniedError if the token is wrong or expired, NotFoundError if the export is gone.

        An export that is deleted meanwhile keeps its files until the last download ends.
        """
        self._signatures.check(wanted.token, KIND, wanted.training_run_id, wanted.name, wanted.file, wanted.version)
        record = await self._signed(wanted)
        with self._uses.using(record):
            # Look again: a deletion that forgot the record before `using` did not wait for us; a later one does.
            record = await self._signed(wanted)
            yield self._store.checkpoint_folder(record) / wanted.file

    async def _signed(self, wanted: SignedFile) -> CheckpointRecord:
        record = await self._record(wanted.training_run_id, wanted.name)
        if _microseconds(record.created_at) != wanted.version:
            raise NotFoundError(f"{record.tinker_path} was deleted and saved again; ask for the URLs again")
        return record

    async def _record(self, run: str, name: str) -> CheckpointRecord:
        return await DATABASE.run(self._store.existing_checkpoint, run, "external_weights", name, "tinker_path")


def _microseconds(when: datetime) -> int:
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
