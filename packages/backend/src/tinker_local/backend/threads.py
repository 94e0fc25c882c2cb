"""The threads of the server, by what they do: work of one kind never waits for work of another. And whose turn it is in
them, and wherever else the cost of work is not known before it is done: that of the owner with the fewest, and there of
the session with the fewest.

The event loop computes and waits for nothing itself. What holds the GIL gets few threads, since more would only keep
others from it. All base models share these. The trainer, the sampler and what writes ephemeral versions have threads
elsewhere, because each does one thing after the other.

`ACTING` says for whom the code that runs now works. A task has it from the one that made it, so threads and queues know
whose their work is, however deep below a request it is made.

Each thread that calls torch on a CPU gets a pool of threads from libgomp. It leaves the pool when it is done.
"""

import asyncio
import ctypes
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")


# Turns ----------------------------------------------------------------------------------------------------------------


class Who(NamedTuple):
    """An owner, and one of its sessions; without names, the server itself, or none in particular."""

    owner: str = ""
    session_id: str = ""


THE_SERVER = Who()

ACTING: ContextVar[Who] = ContextVar("acting", default=THE_SERVER)


class _Acting:
    __slots__ = ("_before", "_who")

    def __init__(self, who: Who) -> None:
        self._who = who

    def __enter__(self) -> None:
        self._before = ACTING.set(self._who)

    def __exit__(self, *error: object) -> None:
        ACTING.reset(self._before)


def acting_for(owner: str, session_id: str = "") -> AbstractContextManager[None]:
    """What is begun inside is work of this owner and session."""
    return _Acting(Who(owner, session_id))  # every request does this: half the time of a generator


class Ledger(Counter[K]):
    """Amounts by key. A key whose amount is zero is forgotten, so that those that come and go take no memory."""

    def __setitem__(self, key: K, amount: int) -> None:
        if amount:
            super().__setitem__(key, amount)
        else:
            self.pop(key, None)


class Turns(Generic[T]):
    """What waits, and how many of each owner and session are running.

    The next is of the owner that has the fewest running, and there of the session that has the fewest; among equals of
    the one that was served the longest ago; and there what has waited the longest. An owner has `of_owner` running at
    most, and a session `of_session`; None: any number. Not safe for threads.
    """

    def __init__(self, of_owner: int | None = None, of_session: int | None = None) -> None:
        self._of_owner = of_owner
        self._of_session = of_session
        self._waiting: dict[str, dict[str, dict[T, None]]] = {}  # the last served come last
        self._running: Ledger[str] = Ledger()
        self._running_of: Ledger[Who] = Ledger()
        self._all = 0

    def __len__(self) -> int:
        """How many are running."""
        return self._all

    def wait(self, who: Who, item: T) -> None:
        """Add what is to have a turn, once."""
        self._waiting.setdefault(who.owner, {}).setdefault(who.session_id, {})[item] = None

    def forget(self, who: Who, item: T) -> None:
        """Let it wait no more; ignored if it does not."""
        sessions = self._waiting.get(who.owner, {})
        items = sessions.get(who.session_id, {})
        items.pop(item, None)
        if not items:
            sessions.pop(who.session_id, None)
        if not sessions:
            self._waiting.pop(who.owner, None)

    def take(self, may: Callable[[str], bool] = lambda owner: True) -> tuple[Who, T] | None:
        """What is next, which runs until `ended`; None if nothing waits that may run. `may`: whether an owner may have
        one more."""
        who = self._next(may)
        if who is None:
            return None
        sessions = self._waiting.pop(who.owner)
        items = sessions.pop(who.session_id)
        self._waiting[who.owner], sessions[who.session_id] = sessions, items
        item = next(iter(items))
        self.forget(who, item)
        self._running[who.owner] += 1
        self._running_of[who] += 1
        self._all += 1
        return who, item

    def ended(self, who: Who) -> None:
        """One of its items runs no more."""
        self._all -= 1
        self._running[who.owner] -= 1
        self._running_of[who] -= 1

    def _next(self, may: Callable[[str], bool]) -> Who | None:
        best, fewest = None, 0
        for owner, sessions in self._waiting.items():
            count = self._running[owner]
            if best is not None and count >= fewest:
                continue
            if (self._of_owner is not None and count >= self._of_owner) or not may(owner):
                continue
            if (found := self._session(owner, sessions)) is not None:
                best, fewest = found, count
                if not count:
                    break
        return best

    def _session(self, owner: str, sessions: dict[str, dict[T, None]]) -> Who | None:
        """The session of an owner whose turn it is."""
        best: Who | None = None
        fewest = self._of_session
        for session_id in sessions:
            who = Who(owner, session_id)
            count = self._running_of[who]
            if fewest is None or count < fewest:
                best, fewest = who, count
                if not count:
                    break
        return best


class Places:
    """`count` places that owners, and sessions, have in turns; the rest as for `Turns`. Belongs to one event loop."""

    def __init__(
        self,
        count: int,
        of_owner: int | None = None,
        of_session: int | None = None,
        may: Callable[[str], bool] = lambda owner: True,
    ) -> None:
        self._count = count
        self._may = may
        self._turns: Turns[asyncio.Future[None]] = Turns(of_owner, of_session)

    @asynccontextmanager
    async def turn(self, who: Who) -> AsyncIterator[None]:
        """A place inside."""
        await self.take(who)
        try:
            yield
        finally:
            self.leave(who)

    async def take(self, who: Who) -> None:
        """Wait for a place, which is to be left with `leave`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.wait(who, turn)
        self.give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._turns.forget(who, turn)
            else:
                self._turns.ended(who)
            self.give()
            raise

    def leave(self, who: Who) -> None:
        """Give a place back."""
        self._turns.ended(who)
        self.give()

    def give(self) -> None:
        """Give the places that are free; call it when an owner may have one that it might not."""
        while len(self._turns) < self._count and (found := self._turns.take(self._may)) is not None:
            who, turn = found
            if turn.cancelled():
                self._turns.ended(who)
            else:
                turn.set_result(None)


# The pools of libgomp -------------------------------------------------------------------------------------------------

_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0, section 3.2.44."""

_SPINS = "10000"
"""About 0.1 ms."""


def spin_briefly() -> None:
    """Let threads that wait for the next product look out for it a short time, in this process and those that it
    starts; before torch is imported. By default it is 3 ms, for which a thread keeps a core from the one it waits for
    where other programs run: a step then takes several times as long. `GOMP_SPINCOUNT` in the environment stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def leave_pool() -> None:
    """End the pool of the calling thread, if it has one. Its next product makes another, in about 0.1 ms.

    libgomp counts the threads of all pools of a process. If they are more than the cores, threads that wait for the
    next product sleep at once instead of looking out for it, and waking them takes up to two fifths of a small model's
    step. So a thread leaves its pool before it waits. Does nothing where GPUs compute or torch has another OpenMP.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):  # else nothing has multiplied yet
        library = _libgomp()
        if library is not None:
            library.omp_pause_resource_all(_SOFT)


def without_pool(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` and leave the pool that it may have made."""
    try:
        return function(*args, **kwargs)
    finally:
        leave_pool()


@functools.cache
def _libgomp() -> Any:
    import torch

    if torch.cuda.is_available():
        return None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None


# Threads of the server ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Call:
    """One call, and the future of an event loop where its result goes."""

    function: Callable[[], Any]
    result: "asyncio.Future[Any]"

    def make(self) -> None:
        """In a thread. One that was cancelled does not begin."""
        if self.result.cancelled():
            return
        outcome, error = None, None
        try:
            outcome = self.function()
        except BaseException as raised:
            error = raised
        try:
            self.result.get_loop().call_soon_threadsafe(_tell, self.result, outcome, error)
        except RuntimeError:
            if not self.result.get_loop().is_closed():  # else what waited has ended with it
                raise
        finally:
            del error  # its traceback has this frame


def _tell(result: "asyncio.Future[Any]", outcome: object, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(outcome)
    else:
        result.set_exception(error)


class Threads:
    """`count` threads. Owners take turns in them, and sessions those of their owner (`Turns`): what is called is the
    work of `ACTING`. `of_owner`: the most of them that one owner may have at a time, so that a short call of another
    finds one, whatever that does there.

    `nice` is added to the nice value of each, which Linux has for each thread: where cores lack, other work goes first.
    `may_hang`: its calls may never end. Neither the end of the program nor other threads wait for them.
    """

    def __init__(
        self, name: str, count: int, *, of_owner: int | None = None, nice: int = 0, may_hang: bool = False
    ) -> None:
        start = partial(_yield_cores, nice)
        self._executor = None if may_hang else ThreadPoolExecutor(count, thread_name_prefix=name, initializer=start)
        self._name = name
        self._count = count
        self._working = 0
        self._turns: Turns[_Call] = Turns(of_owner)
        self._lock = threading.Lock()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call `function` in one of the threads. Cancelling takes the call out of the queue, unless it has begun."""
        who = ACTING.get()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _Call(partial(without_pool, function, *args, **kwargs), result)
        with self._lock:
            self._turns.wait(who, call)
            if begins := self._working < self._count:
                self._working += 1
        if begins:
            self._begin()
        result.add_done_callback(partial(self._forget_cancelled, who, call))
        return result

    def _begin(self) -> None:
        """Let one more thread work."""
        if self._executor is None:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        else:
            self._executor.submit(self._work)

    def _forget_cancelled(self, who: Who, call: _Call, result: "asyncio.Future[Any]") -> None:
        if result.cancelled():
            with self._lock:
                self._turns.forget(who, call)

    def _work(self) -> None:
        """Make the calls whose turn it is, until there are none."""
        while (found := self._next()) is not None:
            who, call = found
            call.make()
            del found, call
            with self._lock:
                self._turns.ended(who)

    def _next(self) -> tuple[Who, _Call] | None:
        with self._lock:
            found = self._turns.take()
            self._working -= found is None
            return found


def _yield_cores(nice: int) -> None:
    """Add to the nice value of this thread and of those that it starts."""
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))


DATABASE = Threads("database", 5, of_owner=4)
"""Statements, of milliseconds each. SQLite writes one transaction after the other."""

CURVES = Threads("curves", 1)
"""What training runs have done, in order."""

DISK = Threads("disk", 5, of_owner=4)
"""Files of any size: checkpoints, exports, traces, downloads."""

WATCHED = Threads("watched", 4, of_owner=2, may_hang=True)
"""Folders that other programs and machines write: watched logs."""

IMAGE_FOLDER = Threads("image-folder", 10, of_owner=8, may_hang=True)
"""The folder of images that requests name."""

PARSING = Threads("parse", 3, of_owner=2)
"""Large bodies of requests."""

ENCODING = Threads("encode", 3, of_owner=2)
"""Results into public types and protobuf; before that, how far those of the trainer are from the sampler: a few
milliseconds, for which an optimizer step may wait."""

RENDERING = Threads("render", 3, of_owner=2)
"""Prompts of samples that are text alone."""

IMAGE_THREADS = 4
"""One of them is left to other sessions of an owner, and another one to other owners."""

RENDERING_IMAGES = Threads("render-images", IMAGE_THREADS, nice=10)
"""Prompts of samples with images, which may take seconds each, most of them without the GIL."""

PREPARING = Threads("prepare", 2)
"""Data of training requests, in short slices: decoding, rendering, checking."""

PREPARING_IMAGES = Threads("prepare-images", IMAGE_THREADS, nice=10)
"""Slices of these that render images."""
