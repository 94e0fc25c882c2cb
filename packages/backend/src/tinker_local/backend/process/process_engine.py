"""An engine in a group of processes, which can be started again after they have ended."""

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinker_local.backend.process.calls import Calls
from tinker_local.backend.process.child import LOAD
from tinker_local.backend.process.messages import Program
from tinker_local.backend.process.process_group import ProcessGroup
from tinker_local.backend.stages import Stage

log = logging.getLogger(__name__)

_REAP_SECONDS = 20.0
"""More than a group takes to end after one of its processes has."""


class ProcessEngine(ABC):
    """Runs each of `programs` in a process, one group of processes after the other. `name`: what they are ("trainer").
    `environments`: what the environment of each has besides, or instead (none given: nothing).

    As `models.supervision.Supervised`: `on_end` is called in a thread, after `ended` was set, when a group has ended by
    itself or was killed, and before a call fails for it. Loading may take as long as it takes the first time, and later
    ten times that, or `timeout` seconds if that is more. `stages`: of the last load, in the first process.
    """

    def __init__(
        self, name: str, programs: Sequence[Program], timeout: float, environments: Sequence[Mapping[str, str]] = ()
    ) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self.load_seconds = 0.0
        self.stages: Sequence[Stage] = ()
        self._name = name
        self._programs = programs
        self._environments = environments
        self._files: Sequence[Sequence[int]] = ()
        self._timeout = timeout
        self._closed = False
        self._load_limit: float | None = None
        self._begin()

    @abstractmethod
    def _connect(self, group: ProcessGroup) -> None:
        """Call the processes of `group` from now on."""

    @abstractmethod
    def _disconnect(self) -> None:
        """End the group and all calls to it. Blocks, for seconds."""

    def _begin(self) -> None:
        ended = weakref.WeakMethod(self._ended)

        def on_end() -> None:
            if (method := ended()) is not None:
                method()

        self.ended = False
        self._began = time.monotonic()
        self._group = ProcessGroup(self._name, self._programs, on_end, self._environments, self._files)
        self._connect(self._group)

    def _ended(self) -> None:
        """In a thread."""
        if not self._closed:
            self.ended = True
            self.on_end()

    def _load(self, calls: Calls) -> Any:
        """Wait until the engine is loaded; what the processes tell of it. If its factory raises, end them and raise the
        same error."""
        try:
            told = calls.call(self._load_limit, LOAD)
        except BaseException:
            self._disconnect()
            raise
        if self._load_limit is None:
            self.load_seconds = time.monotonic() - self._began
            self._load_limit = max(self._timeout, 10 * self.load_seconds)
        return told

    @property
    def why(self) -> str:
        """How the processes ended; only if `ended`."""
        return self._group.why

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [member.pid for member in self._group.members]

    def restart(self) -> None:
        """Start new processes after the last ones have ended; loading is next."""
        self._group.wait(_REAP_SECONDS)  # all who wait for its end have been told
        self._disconnect()
        self._begin()
        if self._closed:
            self._disconnect()

    def end(self) -> None:
        """End the processes within seconds, with running calls. They do not start again."""
        self._closed = True
        began = time.monotonic()
        self._disconnect()
        log.info("the %s ended in %.1f s", self._name, time.monotonic() - began)
