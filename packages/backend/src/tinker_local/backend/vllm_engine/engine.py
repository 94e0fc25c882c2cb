"""An engine and the requests that it works on: what a thread that steps it keeps of both.

Nothing here knows of threads or commands; whoever steps an engine calls its methods one at a time.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tinker_local.types import InternalError


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """Sequences of one prompt under one adapter: `prompt` as vLLM's renderer gives it, one `params` per sequence."""

    prompt: Any
    params: tuple[Any, ...]
    lora: Any = None


MakeRequest = Callable[[Any], EngineRequest]
"""Makes the request on the engine's thread (and loads its adapter there); called again after a restart."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request in an engine; `ids` of them, in order. `on_begin`: as `SampleWork.begun`."""

    make: MakeRequest
    future: Future[list[Any]]
    on_begin: Callable[[], None]
    begun: bool = False
    lora_name: str | None = None
    ids: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    survived_restart: bool = False

    def begin(self) -> None:
        """One of the sequences has a place on the device."""
        if not self.begun:
            self.begun = True
            self.on_begin()

    def fail(self, error: Exception) -> None:
        """Tell who waits for it, if anybody still does."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Engine:
    """An engine that an `EngineThread` steps; only that thread calls its methods.

    `restarts`: how often it was built again after an exception in a step. `in_flight`: groups by the ids of their
    sequences that have not ended.
    """

    def __init__(self, name: str, build: Callable[[], Any], release: Callable[[Any], None]) -> None:
        self.name = name
        self.restarts = 0
        self._build = build
        self._release = release
        self._engine: Any = None
        self.in_flight: dict[str, SequenceGroup] = {}
        self._closed = False

    def groups(self) -> list[SequenceGroup]:
        """Requests in flight, oldest first."""
        return list(dict.fromkeys(self.in_flight.values()))

    def live(self) -> Any:
        """The vLLM engine; built first if it is not there (a restart failed). InternalError after `close`."""
        if self._closed:
            raise InternalError("the sampling engine was stopped")
        if self._engine is None:
            self._engine = self._build()
        return self._engine

    @property
    def built(self) -> Any:
        """The vLLM engine, or None if it is not there; other threads may look at it."""
        return self._engine

    def abort(self, request_ids: list[str]) -> None:
        """Drop sequences that have not finished."""
        if request_ids and self._engine is not None:
            self._engine.abort_request(request_ids)

    def discard(self) -> None:
        """Let go of the vLLM engine; `live` builds another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._release(engine)

    def close(self) -> None:
        """Fail what is in flight and let go of the engine for good."""
        self._closed = True
        for group in self.groups():
            group.fail(InternalError("the sampling engine was stopped"))
        self.in_flight.clear()
        self.discard()


def at_fault(groups: list[SequenceGroup], error: Exception) -> list[SequenceGroup]:
    """The requests that `error` is about: the only one in flight, or those whose adapter it names; else all."""
    if len(groups) == 1:
        return groups
    words = str(error).split()
    named = [group for group in groups if group.lora_name in words]
    return named or groups
