"""A thread for each environment that is not async, so that a slow one keeps nobody else waiting."""

import asyncio
import contextvars
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)


class Worker:
    """Calls an object's methods one after the other: coroutines on the event loop, others in one daemon thread.

    One thread for all calls, since much that environments wrap (browsers, OpenGL, SQLite) belongs to a thread. It is
    a daemon: a call that never returns does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What `function` returns; if this is cancelled, a call in the thread runs on and its result is dropped."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            try:
                result, error = context.run(function, *arguments, **named), None
            except BaseException as caught:  # whatever it is, it belongs to the one who waits
                result, error = None, caught
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(_finish, done, result, error)

        self._start()
        self._calls.put(call)
        result = await done
        return await result if inspect.isawaitable(result) else result

    def post(self, function: Callable[[], Any]) -> None:
        """Call `function` in the thread after all other calls, without waiting for it."""
        self._start()
        self._calls.put(partial(_logged, function))

    def stop(self) -> None:
        """End the thread when its calls are done."""
        if self._thread is not None:
            self._calls.put(None)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _finish(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if isinstance(error, StopIteration):  # a future cannot hold one
        error = RuntimeError(f"StopIteration: {error}")
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _logged(function: Callable[[], Any]) -> None:
    try:
        function()
    except Exception:
        logger.warning("%s failed", getattr(function, "__qualname__", function), exc_info=True)
