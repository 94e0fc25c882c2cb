"""`tinker-local serve` whose sampler and disk fail while files of certain names lie in the folder `CHAOS_FAULTS`."""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

FAULTS = Path(os.environ["CHAOS_FAULTS"])


def on(fault: str) -> bool:
    return (FAULTS / fault).exists()


def break_disk() -> None:
    """Half of a file of weights is written, and then the disk is full."""
    from tinker_local.backend.storage import adapter_files

    save = adapter_files._save

    def save_or_fail(path: Path, *arguments: Any, **named: Any) -> Any:
        if on("disk-full"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return save(path, *arguments, **named)

    adapter_files._save = save_or_fail


def break_sampler() -> None:
    """Samples raise an unexpected error, or hang for some seconds."""
    from tinker_local.backend.fakes import FakeSampler

    sample = FakeSampler._sample

    def sample_or_fail(self: FakeSampler, *arguments: Any) -> Any:
        if on("sampler-raises"):
            raise RuntimeError("injected by the chaos run")
        while on("sampler-hangs"):
            time.sleep(0.05)
        return sample(self, *arguments)

    FakeSampler._sample = sample_or_fail  # type: ignore[assignment]


if __name__ == "__main__":
    break_disk()
    break_sampler()
    from tinker_local.backend.cli.main import main

    main(sys.argv[1:])
