"""The threads of the server, by what they do: work of one kind never waits for work of another.

The event loop computes and waits for nothing itself. What holds the GIL gets few threads, since more would only keep
others from it. All base models share these. The trainer, the sampler and what writes ephemeral versions have threads
elsewhere, because each does one thing after the other.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tinker_local.backend.cpu_threads import without_pool

P = ParamSpec("P")
T = TypeVar("T")


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
