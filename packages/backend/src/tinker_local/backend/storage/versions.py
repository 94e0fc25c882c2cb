"""`VersionFolders`: the adapters of ephemeral sampler versions, the newest in shared memory, older ones on disk."""

import asyncio
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.adapter_files import adapter_bytes, write_adapter
from tinker_local.backend.storage.data_folder import FolderInUseError, FolderLock
from tinker_local.types import NotFoundError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 * 2**30
WRITE_DELAY = 1.0
"""Seconds from `write` until the folder is written, so that the version's first samples come first. `flush`, or a
`publish` that waits for room, cuts the delay short."""
UNWRITTEN = 4
"""How many versions may be without a folder; until they have one, their tensors stay in memory."""


@dataclass(slots=True)
class _Version:
    link: Path
    """The path that users of the version get: a symbolic link that follows its folder from memory to disk."""
    size: int
    loop: asyncio.AbstractEventLoop
    """Of its `publish`."""
    unwritten: AdapterState | None
    """What the folder will contain; None once the folder exists."""
    folder: Path | None = None
    writing: Future[None] | None = None
    removed: bool = False
    takes_room: bool = True


class VersionFolders:
    """Folders in PEFT's layout, each under a new name; all of them disappear with the process.

    A version exists as soon as it is published, with its tensors in memory. `write` has a background thread write its
    folder `WRITE_DELAY` later, because writing takes memory bandwidth and the GIL from the version's first samples. If
    writing fails, the tensors stay in memory.

    The newest versions are in `shared_memory` (a RAM file system; None, missing or not writable: on disk), as long as
    they fit into `memory_bytes` and into half of the free space there. Older ones move to `data_dir/ephemeral`. A
    version's path stays valid when it moves, and readers see the same content at any time. The caller holds the lock of
    `data_dir` (`Store`). Versions are published on one event loop; the other methods may be called from several
    threads, and `flush`, `remove` and `close` block.
    """

    def __init__(
        self, data_dir: Path, *, shared_memory: Path | None = SHARED_MEMORY, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._disk = data_dir.absolute() / "ephemeral"
        if self._disk.exists():
            shutil.rmtree(self._disk)  # left by a server that was killed
        self._disk.mkdir(parents=True)
        self._memory_bytes = memory_bytes
        self._memory: Path | None = None
        if shared_memory is not None and shared_memory.is_dir() and os.access(shared_memory, os.W_OK):
            self._memory, self._memory_lock = _take_memory_folder(shared_memory)
        self._versions: dict[str, _Version] = {}
        self._changing = threading.Lock()  # held while folders are written, moved and deleted
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="versions")
        self._room = asyncio.BoundedSemaphore(UNWRITTEN)  # changed on the event loop alone
        self._hurry = threading.Event()
        self._waiting = 0
        self._counting = threading.Lock()

    async def publish(self, name: str, state: AdapterState) -> Path:
        """Make `state` the version `name`; its path, where `write` will make a folder. ValueError if the name is in
        use. Waits, in the order of the calls, while `UNWRITTEN` versions have no folder."""
        with self._hurrying() if self._room.locked() else nullcontext():
            await self._room.acquire()
        link, loop = self._disk / f"{uuid.uuid4().hex}.link", asyncio.get_running_loop()
        version = _Version(link, adapter_bytes(state), loop, state)
        if self._versions.setdefault(name, version) is not version:
            self._room.release()
            raise ValueError(f"version {name!r} exists")
        return version.link

    def write(self, name: str) -> None:
        """Write the folder of a published version in the background; unknown names are ignored."""
        version = self._versions.get(name)
        if version is not None:
            version.writing = self._writer.submit(self._write_later, name, version, time.monotonic() + WRITE_DELAY)
            version.writing.add_done_callback(lambda _: self._leave_room(version))

    def path(self, name: str) -> Path:
        """The path of `name`; it never changes. NotFoundError if there is no such version."""
        return self._version(name).link

    def unwritten(self, name: str) -> AdapterState | None:
        """What the folder of `name` will contain; None once it can be read. NotFoundError if the version is unknown."""
        return self._version(name).unwritten

    def size(self, name: str) -> int:
        """Bytes of the adapter of `name`. NotFoundError if there is no such version."""
        return self._version(name).size

    def flush(self) -> None:
        """Wait until every folder that `write` was called for exists."""
        with self._hurrying():
            self._writer.submit(lambda: None).result()

    def remove(self, name: str) -> None:
        """Delete the version; unknown names are ignored."""
        version = self._versions.pop(name, None)
        if version is not None:
            version.removed = True
            if version.writing is None:
                self._leave_room(version)
            with self._changing:
                if version.folder is not None:
                    version.link.unlink()
                    shutil.rmtree(version.folder)

    def bytes_in_memory(self) -> int:
        """Bytes of adapters in shared memory."""
        return sum(version.size for version in self._in_memory())

    def close(self) -> None:
        """Delete every version; a second call does nothing."""
        for version in self._versions.values():
            version.removed = True
        with self._hurrying():
            self._writer.shutdown(wait=True, cancel_futures=True)
        with self._changing:
            self._versions.clear()
            shutil.rmtree(self._disk, ignore_errors=True)
            if self._memory is not None:
                shutil.rmtree(self._memory, ignore_errors=True)  # another server may finish it
                self._memory_lock.release()
                self._memory = None

    def _version(self, name: str) -> _Version:
        version = self._versions.get(name)
        if version is None:
            raise NotFoundError(f"the sampler version {name!r} does not exist any more")
        return version

    def _leave_room(self, version: _Version) -> None:
        with self._counting:
            if version.takes_room:
                version.takes_room = False
                version.loop.call_soon_threadsafe(self._room.release)

    @contextmanager
    def _hurrying(self) -> Iterator[None]:
        """While a caller waits for the writer, folders are written without delay."""
        with self._counting:
            self._waiting += 1
            self._hurry.set()
        try:
            yield
        finally:
            with self._counting:
                self._waiting -= 1
                if not self._waiting:
                    self._hurry.clear()

    def _write_later(self, name: str, version: _Version, when: float) -> None:
        self._hurry.wait(max(0.0, when - time.monotonic()))
        self._write(name, version)

    def _write(self, name: str, version: _Version) -> None:
        """Write the folder of a version; on the writer's thread."""
        state = version.unwritten
        assert state is not None
        with self._changing:
            if version.removed:
                return
            try:
                folder = (self._place_for(version.size) or self._disk) / version.link.stem
                folder.mkdir()
                try:
                    write_adapter(folder, state)
                    version.link.symlink_to(folder)
                except BaseException:
                    shutil.rmtree(folder)
                    raise
            except Exception:
                log.exception("the sampler version %s could not be written; it stays in memory", name)
                return
            version.folder = folder
            version.unwritten = None  # last: once it is None, the folder may be read

    def _in_memory(self) -> list[_Version]:
        """Versions whose folder is in shared memory, oldest first: dict order is the order of `publish`."""
        return [v for v in list(self._versions.values()) if v.folder is not None and v.folder.parent == self._memory]

    def _place_for(self, size: int) -> Path | None:
        """The memory folder, after older versions have made room for `size` bytes; None if it cannot have that much."""
        if self._memory is None or size > self._capacity():
            return None
        older = self._in_memory()
        while older and size > self._capacity() - self.bytes_in_memory():
            self._spill(older.pop(0))
        return self._memory

    def _capacity(self) -> int:
        """Bytes that adapters may take in shared memory, which is small in many containers."""
        assert self._memory is not None
        free = shutil.disk_usage(self._memory).free + self.bytes_in_memory()
        return min(self._memory_bytes, free // 2)

    def _spill(self, version: _Version) -> None:
        """Copy to disk, redirect the link atomically, then delete the copy in memory."""
        assert version.folder is not None
        on_disk = self._disk / version.folder.name
        shutil.copytree(version.folder, on_disk)
        new_link = version.link.with_suffix(".new")
        new_link.symlink_to(on_disk)
        new_link.replace(version.link)
        in_memory, version.folder = version.folder, on_disk
        shutil.rmtree(in_memory)


def _take_memory_folder(shared_memory: Path) -> tuple[Path, FolderLock]:
    """A new folder of this process in `shared_memory`; deletes those of this user's dead processes.

    Other users may write into `shared_memory`, and may have made any name there that can be guessed. So what this
    process opens is in folders that only its user can have made, under random names.
    """
    _remove_stale(shared_memory)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=shared_memory))
        with suppress(FileNotFoundError, FolderInUseError):  # another server took it for a dead one's
            lock = FolderLock(folder)
            if lock.is_in_place:
                return folder, lock
            lock.release()


def _remove_stale(shared_memory: Path) -> None:
    for folder in shared_memory.glob(f"{_prefix()}*"):
        with suppress(FileNotFoundError, FolderInUseError):  # another server removes it; its server lives
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = FolderLock(folder)
            if lock.is_in_place:
                log.info("removing %s of a server that was killed", folder)
                shutil.rmtree(folder, ignore_errors=True)  # maybe another server does so, too
            lock.release()


def _prefix() -> str:
    return f"tinker-local-{os.getuid()}-"
