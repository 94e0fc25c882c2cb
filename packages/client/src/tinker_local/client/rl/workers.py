"""A thread for each environment that is not async, so that a slow one keeps nobody else waiting."""

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

_Outcome: TypeAlias = tuple[Any, BaseException | None]


class CallError(Exception):
    """A call raised `error`. Whatever it is: SystemExit and StopIteration too, which no task can carry as they are."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class Worker:
    """Calls an object's methods one after the other: coroutines on the event loop, others in one daemon thread.

    One thread for all calls, since much that environments wrap (browsers, OpenGL, SQLite) belongs to a thread. It is
    a daemon: a call that never returns does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = 0  # written by the event loop's thread alone
        self._done = 0  # written by the worker's thread alone

    @property
    def busy(self) -> bool:
        """Whether a call runs in the thread, which whoever made it may have given up."""
        return self._given > self._done

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What `function` returns; if this is cancelled, a call in the thread runs on and its result is dropped.

        Raises CallError for all that `function` raises, but for a KeyboardInterrupt on the event loop's thread.
        CancelledError means that the caller's task is cancelled, never that the function raised one.
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
        """End the thread when its calls are done."""
        if self._thread is not None:
            self._calls.put(None)

    async def _in_thread(self, function: Callable[[], Any]) -> _Outcome:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Outcome] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            try:
                outcome: _Outcome = context.run(function), None
            except BaseException as caught:  # whatever it is, it belongs to the one who waits
                outcome = None, caught
            self._done += 1
            try:
                loop.call_soon_threadsafe(_finish, done, outcome)
            except RuntimeError:  # the loop was closed meanwhile: nobody waits
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
    """Whether somebody has asked the current task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _finish(done: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if done.cancelled():
        _drop(outcome)
    else:
        done.set_result(outcome)


def _drop(outcome: _Outcome) -> None:
    """A coroutine that nobody will await says so at its end, which would puzzle whoever reads it."""
    if inspect.iscoroutine(outcome[0]):
        outcome[0].close()
