"""`tinker-local serve` whose engines and disk fail while files of certain names lie in the folder `CHAOS_FAULTS`."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.breakable_engines import breakable_sampler, breakable_trainer, breakable_vllm, on


def break_disk() -> None:
    """Half of a file of weights is written, and then the disk is full."""
    from tinker_local.backend.adapters import adapter_files

    save = adapter_files._save

    def save_or_fail(path: Path, *arguments: Any, **named: Any) -> Any:
        if on("disk-full"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return save(path, *arguments, **named)

    adapter_files._save = save_or_fail


def break_engines(*, real: bool) -> None:
    """Engines write down in which process they are, and can be broken."""
    from tinker_local.backend.models import load_engines

    breakable = breakable_vllm if real else breakable_sampler
    starting = load_engines.starting

    @contextmanager
    def start(
        options: Any, sampler_place: Any, make_sampler: Any, trainer_place: Any, make_trainer: Any
    ) -> Iterator[Any]:
        trainer = partial(breakable_trainer, make_trainer)
        sampler: Any = partial(breakable, make_sampler, 0)
        if isinstance(make_sampler, load_engines.Replicas):
            makes = enumerate(make_sampler.factories)
            factories = [partial(breakable, make, at * (options.sample_tp or 1)) for at, make in makes]
            sampler = load_engines.Replicas(factories, make_sampler.sequences)
        with starting(options, sampler_place, sampler, trainer_place, trainer) as loaders:
            yield loaders

    load_engines.starting = start


if __name__ == "__main__":
    break_disk()
    break_engines(real="--fake" not in sys.argv)
    from tinker_local.backend.cli.main import main

    main(sys.argv[1:])
