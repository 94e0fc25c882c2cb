"""The threads of the server, by what they do: work of one kind never waits for work of another.

The event loop computes and waits for nothing itself. What holds the GIL gets few threads, since more would only keep
others from it. All base models share these. The trainer, the sampler and what writes ephemeral versions have threads
elsewhere, because each does one thing after the other.

Each thread that calls torch on a CPU gets a pool of threads from libgomp. It leaves the pool when it is done.
"""

import asyncio
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


# The pools of libgomp -------------------------------------------------------------------------------------------------

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
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):  # else nothing has multiplied yet
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


# Threads of the server ------------------------------------------------------------------------------------------------


class Threads:
    """`count` threads with a queue. `nice` is added to their nice value, which Linux has for each thread: where cores
    lack, other work goes first."""

    def __init__(self, name: str, count: int, *, nice: int = 0) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=partial(_yield_cores, nice))

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call `function` in one of the threads. Cancelling takes the call out of the queue, unless it has begun."""
        call = partial(without_pool, function, *args, **kwargs)
        return asyncio.get_running_loop().run_in_executor(self._executor, call)


def _yield_cores(nice: int) -> None:
    """Add to the nice value of this thread and of those that it starts."""
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))


DATABASE = Threads("database", 4)
"""Statements, of milliseconds each. SQLite writes one transaction after the other."""

CURVES = Threads("curves", 1)
"""What training runs have done, in order."""

DISK = Threads("disk", 4)
"""Files of any size: checkpoints, exports, traces, downloads."""

PARSING = Threads("parse", 2)
"""Large bodies of requests."""

ENCODING = Threads("encode", 2)
"""Results into public types and protobuf."""

MEASURING = Threads("measure", 1)
"""How far results of the trainer are from the sampler: a few milliseconds, for which an optimizer step may wait."""

RENDERING = Threads("render", 2)
"""Prompts of samples that are text alone."""

IMAGE_THREADS = 4
"""One of them is left to other sessions of an owner, and another one to other owners."""

RENDERING_IMAGES = Threads("render-images", IMAGE_THREADS, nice=10)
"""Prompts of samples with images, which may take seconds each, most of them without the GIL."""

PREPARING = Threads("prepare", 2)
"""Data of training requests, in short slices: decoding, rendering, checking."""

PREPARING_IMAGES = Threads("prepare-images", IMAGE_THREADS, nice=10)
"""Slices of these that render images."""
