"""What has to be awaited so that files and folders survive a power cut: their content, and the entries above them."""

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_folder(folder: Path, mode: int = 0o777) -> None:
    """`mkdir -p`, with every new entry on the disk; `mode` is for the last one."""
    if not folder.exists():
        make_durable_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        fsync_path(folder.parent)
