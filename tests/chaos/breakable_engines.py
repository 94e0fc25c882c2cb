"""Engines that fail while files of certain names lie in the folder `CHAOS_FAULTS`, and say in which process they are.

Their processes import this file.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Engine = TypeVar("Engine")


def on(fault: str) -> bool:
    """Whether the fault happens now."""
    return (Path(os.environ["CHAOS_FAULTS"]) / fault).exists()


def noted(name: str, make: Callable[[], Engine]) -> Engine:
    """What `make` makes; the id of this process is then in the file `name` beside the faults."""
    engine = make()
    note = Path(os.environ["CHAOS_FAULTS"]).with_name(name)
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    return engine


def breakable_sampler(make: Callable[[], Any]) -> Any:
    """A sampler whose requests raise an unexpected error, or stop its process's event loop for a while."""
    sampler = noted("sampler", make)
    sample = sampler.sample

    async def sample_or_fail(work: Any) -> Any:
        if on("sampler-raises"):
            raise RuntimeError("injected by the chaos run")
        while on("sampler-hangs"):
            time.sleep(0.05)  # noqa: ASYNC251 the loop hangs
        return await sample(work)

    sampler.sample = sample_or_fail
    return sampler
