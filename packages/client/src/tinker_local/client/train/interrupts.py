"""Ctrl-C, once: the program ends in order, after a checkpoint. Twice: at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

STOPPING = b"\nstopping after the steps that are under way, with a checkpoint; Ctrl-C again ends at once\n"


class Interrupts:
    """A context in which the first Ctrl-C (or SIGTERM) makes `asked` true and says so on standard error; the second
    raises KeyboardInterrupt. Outside the main thread, where Python has no signals, nothing is changed."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        os.write(2, STOPPING)  # the signal may have come within a `print`, which must not be called in another
