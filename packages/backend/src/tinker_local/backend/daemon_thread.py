"""Run blocking work that may be abandoned."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, in a new daemon thread for which neither the loop nor the interpreter waits."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(error: BaseException | None, result: T | None) -> None:
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # T may be None itself

    def run() -> None:
        error, result = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, error, result)

    threading.Thread(target=run, daemon=True, name=getattr(function, "__name__", "daemon")).start()
    return await outcome
