"""`VersionFolders`: the adapters of nameless sampler versions, the newest in shared memory, older ones on disk."""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinker_local.backend.storage.adapter_files import adapter_bytes, write_adapter
from tinker_local.backend.storage.lock import FolderInUseError, FolderLock
from tinker_local.backend.training.interface import AdapterState
from tinker_local.types import NotFoundError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 * 2**30


@dataclass(slots=True)
class _Version:
    link: Path
    """What users of the version get: a symbolic link that follows its folder from memory to disk."""
    folder: Path
    size: int


class VersionFolders:
    """Folders in PEFT's layout under names that are never used again; all are gone when the process is.

    The newest lie in `shared_memory` (a RAM file system; None or a missing one: on disk) as long as they fit into
    `memory_bytes` and into half of what is free there; older ones move to `data_dir/ephemeral`. A version's path stays
    the same when it moves, and whoever reads through it sees the same content at any time. The caller holds the lock
    of `data_dir` (`SqlStore`). Methods block; they may be called from several threads.
    """

    def __init__(
        self, data_dir: Path, *, shared_memory: Path | None = SHARED_MEMORY, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._disk = data_dir.absolute() / "ephemeral"
        if self._disk.exists():
            shutil.rmtree(self._disk)  # of a server that was killed
        self._disk.mkdir(parents=True)
        self._memory_bytes = memory_bytes
        self._memory: Path | None = None
        if shared_memory is not None and shared_memory.is_dir():
            self._memory, self._memory_lock = _take_memory_folder(shared_memory)
        self._versions: dict[str, _Version] = {}
        self._changing = threading.Lock()

    def add(self, name: str, state: AdapterState) -> Path:
        """Write `state` as the version `name` and return its path; ValueError if the name is in use."""
        with self._changing:
            if name in self._versions:
                raise ValueError(f"version {name!r} exists")
            size = adapter_bytes(state)
            unique = uuid.uuid4().hex
            folder = (self._place_for(size) or self._disk) / unique
            folder.mkdir()
            try:
                write_adapter(folder, state)
            except BaseException:
                shutil.rmtree(folder)
                raise
            link = self._disk / f"{unique}.link"
            link.symlink_to(folder)
            self._versions[name] = _Version(link, folder, size)
            return link

    def path(self, name: str) -> Path:
        """The path of `name`; it never changes. NotFoundError if there is no such version."""
        version = self._versions.get(name)
        if version is None:
            raise NotFoundError(f"the sampler version {name!r} does not exist any more")
        return version.link

    def remove(self, name: str) -> None:
        """Delete the version; unknown names are ignored."""
        with self._changing:
            version = self._versions.pop(name, None)
            if version is not None:
                version.link.unlink()
                shutil.rmtree(version.folder)

    def bytes_in_memory(self) -> int:
        """Bytes of adapters that lie in shared memory."""
        return sum(version.size for version in list(self._versions.values()) if version.folder.parent == self._memory)

    def close(self) -> None:
        """Delete every version; calling it again does nothing."""
        with self._changing:
            self._versions.clear()
            shutil.rmtree(self._disk, ignore_errors=True)
            if self._memory is not None:
                with _one_at_a_time(self._memory.parent):
                    shutil.rmtree(self._memory)
                    self._memory_lock.release()
                self._memory = None

    def _place_for(self, size: int) -> Path | None:
        """The memory folder with room for `size` bytes, after older versions have left it; None if it has none."""
        if self._memory is None or size > self._capacity():
            return None
        # dict order is the order of `add`: the oldest come first.
        older = [version for version in self._versions.values() if version.folder.parent == self._memory]
        while older and size > self._capacity() - self.bytes_in_memory():
            self._spill(older.pop(0))
        return self._memory

    def _capacity(self) -> int:
        """Bytes that adapters may take in shared memory, which is small in many containers."""
        assert self._memory is not None
        free = shutil.disk_usage(self._memory).free + self.bytes_in_memory()
        return min(self._memory_bytes, free // 2)

    def _spill(self, version: _Version) -> None:
        """Copy to disk, turn the link in one step, then delete the copy in memory."""
        on_disk = self._disk / version.folder.name
        shutil.copytree(version.folder, on_disk)
        new_link = version.link.with_suffix(".new")
        new_link.symlink_to(on_disk)
        new_link.replace(version.link)
        in_memory, version.folder = version.folder, on_disk
        shutil.rmtree(in_memory)


def _take_memory_folder(shared_memory: Path) -> tuple[Path, FolderLock]:
    """A new folder of this process in `shared_memory`; those of this user's processes that died are deleted."""
    with _one_at_a_time(shared_memory):
        for stale in shared_memory.glob(f"{_prefix()}*"):
            # Others may write here too: nothing is followed or deleted that is not our own folder.
            if stale.is_symlink() or not stale.is_dir() or stale.stat().st_uid != os.getuid():
                continue
            try:
                lock = FolderLock(stale)
            except FolderInUseError:
                continue
            log.info("removing %s of a server that was killed", stale)
            shutil.rmtree(stale)
            lock.release()
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=shared_memory))
        return folder, FolderLock(folder)


def _prefix() -> str:
    return f"tinker-local-{os.getuid()}-"


@contextmanager
def _one_at_a_time(shared_memory: Path) -> Iterator[None]:
    """Nobody may look for stale folders while another process makes or deletes its own."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(shared_memory / f"{_prefix()}lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
