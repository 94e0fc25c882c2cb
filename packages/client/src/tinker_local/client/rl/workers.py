"""One thread for each environment that is not async, so that a slow one does not delay others."""

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

_Outcome: TypeAlias = tuple[Any, BaseException | None]


class CallError(Exception):
    """A call raised `error`, which may be SystemExit or StopIteration, which a task cannot raise directly."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class Worker:
    """Calls an object's methods one at a time: coroutines on the event loop, others in one daemon thread.

    All calls use the same thread, because much of what environments wrap (browsers, OpenGL, SQLite) is bound to one. It
    is a daemon thread, so a call that never returns does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = 0  # only written by the event loop's thread
        self._done = 0  # only written by the worker's thread

    @property
    def busy(self) -> bool:
        """Whether a call runs in the thread, even if its caller has given up."""
        return self._given > self._done

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of `function`. If this is cancelled, a call in the thread continues and its result is dropped.

        Raises CallError for everything that `function` raises, except a KeyboardInterrupt on the event loop's thread.
        CancelledError always means that the caller's task was cancelled, never that the function raised it.
        """
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments, **named)
            result, error = await self._in_thread(lambda: function(*arguments, **named))
            if error is None:
                return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError as caught:
            if is_cancelled():
                raise
            error = caught
        except (Exception, SystemExit) as caught:
            error = caught
        raise CallError(error) from error

    def stop(self) -> None:
        """End the thread after its calls."""
        if self._thread is not None:
            self._calls.put(None)

    async def _in_thread(self, function: Callable[[], Any]) -> _Outcome:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Outcome] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            try:
                outcome: _Outcome = context.run(function), None
            except BaseException as caught:  # everything is passed to the caller
                outcome = None, caught
            self._done += 1
            try:
                loop.call_soon_threadsafe(_finish, done, outcome)
            except RuntimeError:  # the loop was closed meanwhile
                _drop(outcome)

        self._start()
        self._given += 1
        self._calls.put(call)
        return await done

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def is_cancelled() -> bool:
    """Whether the current task has been asked to cancel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _finish(done: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if done.cancelled():
        _drop(outcome)
    else:
        done.set_result(outcome)


def _drop(outcome: _Outcome) -> None:
    """Close a coroutine that will not be awaited, which avoids Python's warning about it."""
    if inspect.iscoroutine(outcome[0]):
        outcome[0].close()
