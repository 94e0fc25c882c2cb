"""`DiskSpace`: what to do when the disk of the data folder is full, and a reserve, so that deleting still works."""

import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa
from safetensors import SafetensorError
from tinker_local.backend.storage.data_folder import fsync_path
from tinker_local.types import StorageFullError

log = logging.getLogger(__name__)

RESERVE = "reserve"
RESERVE_BYTES = 8 * 2**20
RESERVE_STEP = 2**18
"""How much of the reserve is used at a time: other programs may fill the disk again at once."""
NEARLY_FULL = 2**20
"""With less free space, SQLite's other failures to write are taken for the same one."""


class DiskSpace:
    """The disk of `folder`. A file of `reserve_bytes` there keeps space that `give_reserve` gives back in steps. Its
    methods may be called from any thread."""

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        self._folder = folder
        self._path = folder / RESERVE
        self._bytes = reserve_bytes
        self.full = False
        """Whether there was no space when something was written, or when `look` was called, and not since."""

    def look(self) -> None:
        """See whether it is full."""
        self.full = self.free() < NEARLY_FULL

    def free(self) -> int:
        """Free bytes."""
        return shutil.disk_usage(self._folder).free

    def fill_reserve(self) -> None:
        """Take what is missing of the reserve, or all that is free."""
        size = self._size()
        wanted = min(self._bytes, size + self.free())
        if wanted <= size:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, wanted)
        except OSError as error:
            os.ftruncate(descriptor, size)
            log.warning("no space can be reserved in %s (%s)", self._folder, error)
        finally:
            os.close(descriptor)

    def give_reserve(self) -> bool:
        """Give `RESERVE_STEP` bytes of the reserve back to the disk; false if nothing is left of it."""
        size = self._size()
        if not size:
            return False
        os.truncate(self._path, max(0, size - RESERVE_STEP))
        fsync_path(self._path)  # some file systems free the blocks only then
        log.warning("%s is full: using space that was reserved for deleting", self._folder)
        return True

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def close(self) -> None:
        """Delete the reserve."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of a full disk into StorageFullError, which says what to do."""
        try:
            yield
        except (OSError, SafetensorError, sa.exc.DBAPIError) as error:
            if not self._is_full(error):
                raise
            self.full = True
            raise StorageFullError(
                f"the disk of {self._folder} is full ({self.free() / 2**20:.1f} MiB are free): delete checkpoints "
                "(`tinker checkpoint delete PATH`), which works on a full disk too, or free space there in another "
                "way, and send the request again"
            ) from error

    def _is_full(self, error: OSError | SafetensorError | sa.exc.DBAPIError) -> bool:
        full = (errno.ENOSPC, errno.EDQUOT)
        if isinstance(error, OSError):
            return error.errno in full
        if isinstance(error, SafetensorError):
            return any(f"(os error {code})" in str(error) for code in full)
        known = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        return known or (isinstance(error, sa.exc.OperationalError) and self.free() < NEARLY_FULL)
