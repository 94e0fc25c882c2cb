"""Results of requests in files: those that wait for their clients, and need not be in memory."""

import itertools
import shutil
import threading
from pathlib import Path

SHARE_OF_DISK = 0.1
"""Of the space that would be free without these files, they take at most so much."""


class ResultFiles:
    """Encoded results, one in a file, in a folder that is emptied at the start and deleted at the end.

    They are not durable: requests do not survive the server either. The methods may be called from any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._sizes: dict[Path, int] = {}
        self._held = 0
        self._lock = threading.Lock()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)

    def write(self, content: bytes) -> Path | None:
        """The file that holds `content`; None if the disk has no room for it. OSError if the disk does not work."""
        with self._lock:
            free = shutil.disk_usage(self._folder).free
            if self._held + len(content) > SHARE_OF_DISK * (self._held + free):
                return None
            path = self._folder / str(next(self._numbers))
            self._sizes[path] = len(content)
            self._held += len(content)
        try:
            path.write_bytes(content)
        except OSError:
            self.delete(path)
            raise
        return path

    def delete(self, path: Path) -> None:
        """Delete a file that `write` has returned."""
        path.unlink(missing_ok=True)
        with self._lock:
            self._held -= self._sizes.pop(path, 0)

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
