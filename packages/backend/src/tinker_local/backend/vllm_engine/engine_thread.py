"""One thread that steps all vLLM engines of the process.

vLLM's forward context is a module global, so two engines must never run at the same time: one thread steps them in
turn. Callers put commands into a queue and get futures. An idle thread sleeps on that queue.
"""

import itertools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinker_local.backend.heap import freeze_heap
from tinker_local.backend.sampling.sampler import EngineClock, do_nothing
from tinker_local.backend.threads import leave_pool
from tinker_local.backend.vllm_engine.moved_sequences import Move, TornSlotError
from tinker_local.types import InternalError

log = logging.getLogger(__name__)
T = TypeVar("T")

_one_engine_at_a_time = threading.Lock()
"""Held while an engine works, in case the process has two engine threads."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """Sequences of one prompt under one adapter: `prompt` as vLLM's renderer gives it, one `params` per sequence.
    `moves`: of each sequence, if its weights move while it runs, a list for its `Move`s, with the first in it."""

    prompt: Any
    params: tuple[Any, ...]
    lora: Any = None
    moves: Sequence[list[Move]] = ()


MakeRequest = Callable[[Any], EngineRequest]
"""Makes the request on the engine's thread, and loads its adapter; called again after a restart."""


Settle = Callable[[Any], Mapping[str, Exception]]
"""Prepares an engine for its next step; the ids of sequences that cannot go on, and why."""

Change = Callable[[Any], Callable[[Sequence[str]], Sequence[Move]] | None]

OnOutput = Callable[[int, Any], None]
"""Takes the index of a sequence and vLLM's output of it so far, on the engine's thread."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request in an engine; `ids` are theirs, in order. `on_begin`, `on_end`: as
    `SampleWork.begun` and `SampleWork.ended`. `on_output`: of a request that is streamed; `streamed`: it was called, so
    that the request may not start over. `clock` follows it."""

    make: MakeRequest
    future: Future[list[Any]]
    on_begin: Callable[[], None]
    on_end: Callable[[], None]
    clock: EngineClock
    begun: bool = False
    lora_name: str | None = None
    ids: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    survived_restart: bool = False
    on_output: "OnOutput | None" = None
    streamed: bool = False
    moves: Sequence[list[Move]] = ()

    def begin(self) -> None:
        """One of the sequences runs."""
        self.clock.begin()
        if not self.begun:
            self.begun = True
            self.on_begin()

    def fail(self, error: Exception) -> None:
        """Set `error` on the future, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Engine:
    """An engine and the requests in it. Only its `EngineThread` calls the methods.

    `restarts`: how often it was rebuilt after an exception in a step. `in_flight`: the group of each unfinished
    sequence, by the sequence's id. `rest` is called when the thread has nothing to step.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Any],
        release: Callable[[Any], None],
        settle: "Settle | None" = None,
        rest: Callable[[], None] = do_nothing,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.rest = rest
        self._build = build
        self._release = release
        self._settle = settle
        self._engine: Any = None
        self.in_flight: dict[str, SequenceGroup] = {}
        self._closed = False

    def groups(self) -> list[SequenceGroup]:
        """Requests in flight, oldest first."""
        return list(dict.fromkeys(self.in_flight.values()))

    def live(self) -> Any:
        """The vLLM engine, built first if a restart failed. InternalError after `close`."""
        if self._closed:
            raise InternalError("the sampling engine was stopped")
        if self._engine is None:
            self._engine = self._build()
            if self.restarts:  # the first time, the heap is frozen when all is loaded
                freeze_heap()
        return self._engine

    def settled(self) -> Mapping[str, Exception]:
        """Sequences that cannot go on, and why, after waiting a moment for what the next step needs."""
        return {} if self._settle is None else self._settle(self.live())

    @property
    def built(self) -> Any:
        """The vLLM engine, or None before it is built; readable from any thread."""
        return self._engine

    def abort(self, request_ids: list[str]) -> None:
        """Abort unfinished sequences."""
        if request_ids and self._engine is not None:
            self._engine.abort_request(request_ids)

    def discard(self) -> None:
        """Release the vLLM engine; `live` builds another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._release(engine)

    def close(self) -> None:
        """Fail what is in flight and release the engine for good."""
        self._closed = True
        for group in self.groups():
            group.fail(InternalError("the sampling engine was stopped"))
        self.in_flight.clear()
        self.discard()


def at_fault(groups: list[SequenceGroup], error: Exception) -> list[SequenceGroup]:
    """The requests that caused `error`: the only one in flight, or those whose adapter it names; otherwise all."""
    if len(groups) == 1:
        return groups
    words = str(error).split()
    named = [group for group in groups if group.lora_name in words]
    return named or groups


@dataclass(frozen=True, slots=True, eq=False)
class _Command:
    run: Callable[[], None]
    future: Future[Any] | None = None


class EngineThread:
    """Owns the engines. Every method may be called from any thread; await its futures with `asyncio.wrap_future`.
    Cancelling a future of `submit` aborts its sequences."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._engines: list[Engine] = []
        self._ids = itertools.count()
        self._stopped = False
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="vllm-engines", daemon=True)
        self._thread.start()

    def add_engine(
        self,
        name: str,
        build: Callable[[], Any],
        release: Callable[[Any], None],
        settle: Settle | None = None,
        rest: Callable[[], None] = do_nothing,
    ) -> Future[Engine]:
        """Build an engine on the thread, which steps no other in the meantime. `release` frees one; `settle` is called
        before each step, and `rest` when there is nothing to step."""
        engine = Engine(name, build, release, settle, rest)

        def add() -> Engine:
            engine.live()
            self._engines.append(engine)
            return engine

        return self._call(add)

    def remove_engine(self, engine: Engine) -> Future[None]:
        """Fail what is in flight on `engine` and release it."""

        def remove() -> None:
            if engine in self._engines:
                self._engines.remove(engine)
                engine.close()

        return self._call(remove)

    def call(self, engine: Engine, fn: Callable[[Any], T]) -> Future[T]:
        """Run `fn(vLLM engine)` between two steps."""
        return self._call(lambda: fn(engine.live()))

    def move(self, engine: Engine, lora_name: str, change: Change) -> Future[None]:
        """Run `change(vLLM engine)` between two steps: from the next one on, sequences under `lora_name` run on other
        weights. It returns what tells their `Move`s by their ids; None: nothing has changed. They fail if it raises
        TornSlotError, whose error the future gets."""

        def run() -> None:
            try:
                told = change(engine.live())
            except TornSlotError as torn:
                for group in engine.groups():
                    if group.lora_name == lora_name:
                        self._abort(engine, group)
                        group.fail(torn.error)
                raise torn.error from torn
            if told is not None:
                running = [
                    (moves, request_id)
                    for group in engine.groups()
                    if group.lora_name == lora_name
                    for moves, request_id in zip(group.moves, group.ids, strict=True)
                    if request_id in engine.in_flight
                ]
                for (moves, _), move in zip(running, told([request_id for _, request_id in running]), strict=True):
                    moves.append(move)

        return self._call(run)

    def between_steps(self) -> Future[None]:
        """Done when no engine is in a step or being built."""
        return self._call(lambda: None)

    def submit(
        self,
        engine: Engine,
        make: MakeRequest,
        on_begin: Callable[[], None] = do_nothing,
        on_end: Callable[[], None] = do_nothing,
        on_output: OnOutput | None = None,
        clock: EngineClock | None = None,
    ) -> Future[list[Any]]:
        """Run a request. The future gives vLLM's final `RequestOutput` of each sequence, in order.

        It fails with what `make` or vLLM's checks raise, and with InternalError if the engine fails. `on_begin` is
        called on the thread when the first sequence runs, and `on_end` when one has ended before the last. With
        `on_output`, `make` must ask for cumulative outputs.
        """
        group = SequenceGroup(make, Future(), on_begin, on_end, clock or EngineClock(), on_output=on_output)
        self._put(_Command(lambda: self._admit(engine, group), group.future))
        group.future.add_done_callback(lambda future: self._put_abort(engine, group) if future.cancelled() else None)
        return group.future

    def when_idle(self, engine: Engine, lora_name: str) -> Future[None]:
        """Done when every request under `lora_name` that was submitted before this call has ended."""
        done: Future[None] = Future()

        def watch() -> None:
            waiting = [group for group in engine.groups() if group.lora_name == lora_name]
            left = len(waiting)
            if not left and done.set_running_or_notify_cancel():
                done.set_result(None)

            def finished(_: Future[Any]) -> None:
                nonlocal left
                left -= 1
                if not left and done.set_running_or_notify_cancel():
                    done.set_result(None)

            for group in waiting:
                group.future.add_done_callback(finished)

        self._put(_Command(watch, done))
        return done

    def stop(self) -> None:
        """Fail what is in flight, release all engines and end the thread."""
        with self._gate:
            self._stopped = True
            self._commands.put(None)
        self._thread.join()

    def _call(self, fn: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn())
            except Exception as error:  # the caller gets it from the future
                future.set_exception(error)

        self._put(_Command(run, future))
        return future

    def _put(self, command: _Command) -> None:
        with self._gate:
            if not self._stopped:
                self._commands.put(command)
                return
        if command.future is not None and command.future.set_running_or_notify_cancel():
            command.future.set_exception(InternalError("the engine thread has stopped"))

    def _put_abort(self, engine: Engine, group: SequenceGroup) -> None:
        self._put(_Command(lambda: self._abort(engine, group)))

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                for engine in list(self._engines):
                    if engine.in_flight:
                        with _one_engine_at_a_time:
                            self._step(engine)
        finally:
            self._shut_down()

    def _take_commands(self) -> bool:
        """Run queued commands; sleep while there is nothing to step. False to end the thread."""
        while True:
            idle = not any(engine.in_flight for engine in self._engines)
            if idle and self._commands.empty():
                leave_pool()
                with _one_engine_at_a_time:
                    for engine in self._engines:
                        engine.rest()
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            with _one_engine_at_a_time:
                command.run()

    def _admit(self, engine: Engine, group: SequenceGroup) -> None:
        if group.future.cancelled():
            return
        try:
            started = time.monotonic()
            request = group.make(engine.live())
            group.clock.load_since(started)
            group.lora_name = None if request.lora is None else request.lora.lora_name
            group.moves = request.moves
            number = next(self._ids)
            for index, params in enumerate(request.params):
                request_id = f"{number}-{index}"
                engine.live().add_request(request_id, request.prompt, params, lora_request=request.lora)
                group.ids.append(request_id)
                engine.in_flight[request_id] = group
        except Exception as error:  # a fault of the request; the engine is unchanged
            self._abort(engine, group)
            group.fail(error)

    def _abort(self, engine: Engine, group: SequenceGroup) -> None:
        """End the sequences of a group, which is not in flight any more. The engine starts again if it fails."""
        try:
            engine.abort([request_id for request_id in group.ids if engine.in_flight.pop(request_id, None)])
        except Exception as error:  # leaves vLLM in an unknown state
            log.exception("engine %s failed to end a request", engine.name)
            self._restart(engine, error, guilty=[])

    def _step(self, engine: Engine) -> None:
        try:
            for request_id, error in engine.settled().items():
                group = engine.in_flight.get(request_id)
                if group is not None:
                    self._abort(engine, group)
                    group.fail(error)
            outputs = engine.live().step()
        except Exception as error:  # leaves vLLM in an unknown state
            log.exception("engine %s failed in a step", engine.name)
            self._restart(engine, error)
            return
        for output in outputs:
            group = engine.in_flight.get(output.request_id)
            if group is not None and group.on_output is not None:
                group.streamed = True
                group.on_output(group.ids.index(output.request_id), output)
            if group is None or not output.finished:
                continue
            del engine.in_flight[output.request_id]
            group.outputs[output.request_id] = output
            if len(group.outputs) < len(group.ids):
                group.on_end()
                continue
            group.clock.ended = time.monotonic()
            if group.future.set_running_or_notify_cancel():
                group.future.set_result([group.outputs[request_id] for request_id in group.ids])

    def _restart(self, engine: Engine, error: Exception, guilty: Sequence[SequenceGroup] | None = None) -> None:
        """Rebuild the engine. If the request at fault is known, the others start over, once, unless they are streamed
        and have begun; otherwise all fail. `guilty`: those at fault; None: what `error` says of it."""
        groups = engine.groups()
        guilty = at_fault(groups, error) if guilty is None else guilty
        engine.in_flight.clear()
        traceback.clear_frames(error.__traceback__)  # they hold the weights, and two copies do not fit
        engine.discard()
        engine.restarts += 1
        try:
            engine.live()
        except Exception as failure:
            log.exception("engine %s could not be started again; the next request tries", engine.name)
            guilty, error = groups, failure
        for group in groups:
            if group in guilty or group.survived_restart or group.streamed:
                failed = InternalError(f"the sampling engine failed ({type(error).__name__}: {error}); try again")
                failed.__cause__ = error
                group.fail(failed)
            else:
                group.survived_restart = True
                group.ids, group.outputs, group.clock.begun = [], {}, 0.0
                self._admit(engine, group)

    def _shut_down(self) -> None:
        """Fail everything that waits, however the thread ended."""
        with self._gate:
            self._stopped = True
        for engine in self._engines:
            engine.close()
        self._engines.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            future = None if command is None else command.future
            if future is not None and not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(InternalError("the engine thread has stopped"))
