"""Durable folders (fsync: what was written survives a power cut) and locked ones (one process owns a folder)."""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_folder(folder: Path, mode: int = 0o777) -> None:
    """`mkdir -p`, with every new entry on disk; `mode` applies to the last one."""
    if not folder.exists():
        make_durable_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        fsync_path(folder.parent)


class FolderInUseError(RuntimeError):
    """Another process serves this folder."""


class FolderLock:
    """Holds `folder/lock` from construction until `release`; FolderInUseError if another process holds it, RuntimeError
    if something else has the name, as a link that another user made beforehand.

    The kernel releases the lock however the process ends (`flock`). Programs that this process starts do not inherit
    it (PEP 446); a fork without exec would. The file stays after a release: if it were removed, two processes could
    lock two files of the same name.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file: int | None = _open_plain(self._path)
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
        with suppress(OSError):  # only tells people who holds it; the disk may be full
            os.write(self._file, f"{os.getpid()}\n".encode())

    @property
    def is_in_place(self) -> bool:
        """Whether the folder still has the locked file: another process may have deleted both before the lock."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open_plain(path: Path) -> int:
    """Open a file that may have to be made, and follow no link: its target would be overwritten."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM):
            raise
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        why = "it is not a plain file"
    raise RuntimeError(
        f"{path} cannot be locked ({why}); another user may have made it: remove it, or give another folder"
    )
