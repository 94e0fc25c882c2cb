"""One process per folder, by `flock`: the kernel releases the lock however the process ends."""

import fcntl
import os
from pathlib import Path


class FolderInUseError(RuntimeError):
    """Another process serves this folder."""


class FolderLock:
    """Holds `folder/lock` from construction until `release`; FolderInUseError if somebody else holds it.

    Programs that this process starts do not inherit the lock (PEP 446); a fork without exec would. The file stays when
    the lock is released: removing it would let two processes lock two files of one name.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise FolderInUseError(
                f"{folder} is in use by another tinker-local server (process {holder}); "
                "stop it, or give this one another data folder"
            ) from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let others in; calling it again does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
