"""The threads with which torch computes on a CPU. Each thread of Python that calls it gets another pool of them."""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0, section 3.2.44."""


_SPINS = "10000"
"""About 0.1 ms."""


def spin_briefly() -> None:
    """Let threads that wait for the next product look out for it a short time, in this process and those that it
    starts; before torch is imported. By default it is 3 ms, for which a thread keeps a core from the one it waits for
    where other programs run: a step then takes several times as long. `GOMP_SPINCOUNT` in the environment stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def leave_pool() -> None:
    """End the pool of the calling thread, if it has one. Its next product makes another, in about 0.1 ms.

    libgomp counts the threads of all pools of a process. If they are more than the cores, threads that wait for the
    next product sleep at once instead of looking out for it, and waking them takes up to two fifths of a small model's
    step. So a thread leaves its pool before it waits. Does nothing where GPUs compute or torch has another OpenMP.
    """
    if "torch" in sys.modules:
        library = _libgomp()
        if library is not None:
            library.omp_pause_resource_all(_SOFT)


def without_pool(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` and leave the pool that it may have made."""
    try:
        return function(*args, **kwargs)
    finally:
        leave_pool()


@functools.cache
def _libgomp() -> Any:
    import torch

    if torch.cuda.is_available():
        return None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None
