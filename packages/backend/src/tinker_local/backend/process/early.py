"""Starts processes before it is known what they will run, so that they import libraries while this one does."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from tinker_local.backend.process.channel import Channel
from tinker_local.backend.process.messages import Prepare
from tinker_local.backend.process.start_process import end_process, start_process

Started = tuple["subprocess.Popen[bytes]", Channel]

_waiting: ContextVar[dict[str, Started] | None] = ContextVar("_waiting", default=None)


@contextmanager
def started_early(imports: Mapping[str, str]) -> Iterator[None]:
    """Within this context, in its thread, a `ChildProcess` of each of these names has begun already, and does what
    `imports` has for it (`messages.Prepare`). What is not taken until the end is ended."""
    waiting: dict[str, Started] = {}
    token = _waiting.set(waiting)
    try:
        for name, function in imports.items():
            waiting[name] = start_process({}, ())
            waiting[name][1].send(Prepare(function))
        yield
    finally:
        _waiting.reset(token)
        for popen, channel in waiting.values():
            channel.close()
            with suppress(subprocess.TimeoutExpired):  # it was killed, and hangs in the kernel
                end_process(popen)


def take(name: str) -> Started | None:
    """The process that was started early under this name, once."""
    return (_waiting.get() or {}).pop(name, None)
