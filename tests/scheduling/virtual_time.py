"""An event loop whose clock jumps from one event to the next: the real scheduler's hours pass in milliseconds.

What should run "in a thread" runs at once and takes as much virtual time as its test says, one call at a time for each
executor. A run therefore has no races: it is the same every time.
"""

import asyncio
import selectors
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from unittest import mock

from tinker_local.backend.threads import Threads


class _Jump(selectors.DefaultSelector):
    """Never waits: where a selector would, it tells the loop for how long."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout != 0:
            self._jump(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`took`: seconds that the function which runs "in a thread" now takes, set by that function. `before_jump`: called
    before time passes, when everything that could happen at this moment has. `busy`: executors that are working."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.took = 0.0
        self.before_jump: Callable[[], None] = lambda: None
        self.busy: set[Any] = set()
        self._queues: defaultdict[Any, deque[Callable[[], None]]] = defaultdict(deque)
        super().__init__(_Jump(self._pass_time))

    def time(self) -> float:
        return self.clock

    def _pass_time(self, seconds: float | None) -> None:
        self.before_jump()
        if self._ready:  # type: ignore[attr-defined]
            return
        if seconds is None:
            raise RuntimeError(f"at {self.clock}: everybody waits, and nothing is left to happen")
        self.clock += seconds + 1e-9  # and not a rounding error before what is due

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def begin() -> None:
            self.took = 0.0
            try:
                result, error = func(*args), None
            except Exception as raised:
                result, error = None, raised
            self.call_later(self.took, end, result, error)

        def end(result: Any, error: Exception | None) -> None:
            if not future.cancelled():
                future.set_result(result) if error is None else future.set_exception(error)
            if executor is not None:
                self.busy.discard(executor)
                self._begin_next(executor)

        if executor is None:
            self.call_soon(begin)
        else:
            self._queues[executor].append(begin)
            self._begin_next(executor)
        return future

    def _begin_next(self, executor: Any) -> None:
        if executor not in self.busy and self._queues[executor]:
            self.busy.add(executor)
            self._queues[executor].popleft()()


def run(main: Callable[[VirtualLoop], Any]) -> Any:
    """`main(loop)` in a new virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        with mock.patch.object(Threads, "_begin", lambda threads: loop.call_soon(threads._work)):
            return runner.run(main(loop))
