"""Turn-taking between a trainer and a sampler whose memory is on one device.

Each has its part of it by a plan (`gpu_plan.py`). When a training request does not fit into the trainer's part, the
sampler lends its own: it sleeps as soon as nothing is in flight, and the request runs once more. It wakes when somebody
samples, after the trainer has given back what it does not need.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tinker_local.backend.sampling.interface import AdapterVersion, Sampler, SampleWork
from tinker_local.backend.scheduling.operations import as_api_error
from tinker_local.backend.training.interface import Trainer, TrainResult, TrainWork
from tinker_local.types import ApiError, InternalError, NotEnoughMemoryError, SampleOutput

log = logging.getLogger(__name__)
T = TypeVar("T")


class Lending:
    """Who has the memory that `trainer` and `sampler` share; all calls of the trainer go through it.

    A call of the trainer is a turn, and so is the sampler's waking; turns are taken in the order in which they were
    asked for. So who samples waits for one call of the trainer at most. Within its turn the trainer may wait for the
    samples in flight to end, if it needs the sampler's memory; those that come then wait for the turn to end. Without
    a sampler, or with one that cannot sleep, nothing is lent.

    `sleeps`: how often the sampler was put to sleep.
    """

    def __init__(self, trainer: Trainer, sampler: Sampler | None = None) -> None:
        self._trainer = trainer
        self._sampler = sampler
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._turn = asyncio.Lock()
        self._wanted = False
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._waking: asyncio.Task[None] | None = None
        self._closed = False
        self.sleeps = 0

    @property
    def asleep(self) -> bool:
        """Whether the sampler sleeps now."""
        return self._sampler is not None and self._sampler.asleep

    @property
    def lent(self) -> bool:
        """Whether samples wait for the trainer to give memory back."""
        return self._wanted or self.asleep

    async def close(self) -> None:
        """Stop what wakes the sampler, and wait for the trainer's last call."""
        self._closed = True
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.wait((self._waking,))
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    # The trainer's side ---------------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a trainer's method in the trainer's thread."""
        async with self._turn:
            return await self._in_thread(function, *args, **kwargs)

    async def forward_backward(self, works: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        """`Trainer.forward_backward`, with those that lacked memory run once more if the sampler can lend its own."""
        async with self._turn:
            results = list(await self._in_thread(self._trainer.forward_backward, works))
            short = {at: result for at, result in enumerate(results) if isinstance(result, NotEnoughMemoryError)}
            if short:
                again = await self._again([works[at] for at in short], list(short.values()))
                for at, result in zip(short, again, strict=True):
                    results[at] = result
            return results

    async def _again(
        self, works: Sequence[TrainWork], errors: Sequence[NotEnoughMemoryError]
    ) -> Sequence[TrainResult | ApiError]:
        """What `works`, which failed with `errors`, give with the sampler's memory. Raises nothing, as others of their
        call have succeeded. The turn is ours."""
        try:
            if not await self._borrow():
                return errors
        except Exception as error:
            log.exception("the sampler could not be put to sleep")
            return [InternalError(f"{e}, and the sampler could not make room: {as_api_error(error)}") for e in errors]
        try:
            results = await self._in_thread(self._trainer.forward_backward, works)
            if len(results) != len(works):
                raise RuntimeError(f"the trainer gave {len(results)} results for {len(works)} requests")
        except Exception as error:
            log.exception("a batch of %d requests failed", len(works))
            return [as_api_error(error)] * len(works)
        return results

    async def _borrow(self) -> bool:
        """Put the sampler to sleep; false if there is nothing to be had. The turn is ours."""
        sampler = self._sampler
        if sampler is None or not sampler.can_sleep or sampler.asleep:
            return False
        self._wanted = True
        try:
            await self._unused.wait()
            await _to_its_end(sampler.sleep())
        finally:
            self._wanted = False
        self.sleeps += 1
        return True

    async def _in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self._loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    # The sampler's side ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """The sampler is awake within, and stays so."""
        while self._wanted or self.asleep:
            await self._woken()
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def _woken(self) -> None:
        """Wait until the sampler is awake or may be used; all who wait wait for one waking."""
        if self._closed:
            raise InternalError("the sampler was stopped")
        waking = self._waking
        if waking is None:
            waking = self._waking = asyncio.create_task(self._wake(), name="wake-sampler")
            waking.add_done_callback(self._waking_ended)
        await asyncio.wait((waking,))  # a cancelled waiter cancels nobody else
        if waking.cancelled():
            raise InternalError("the sampler was stopped")
        if (error := waking.exception()) is not None:
            raise InternalError(f"the sampler could not be woken: {error}") from error

    def _waking_ended(self, waking: asyncio.Task[None]) -> None:
        self._waking = None
        if not waking.cancelled() and (error := waking.exception()) is not None:
            log.error("the sampler could not be woken; the next sample tries again", exc_info=error)

    async def _wake(self) -> None:
        async with self._turn:
            if self._sampler is None or not self._sampler.asleep:
                return
            try:
                await self._in_thread(self._trainer.release_memory)
            except Exception:  # its process has ended, say: it is in nobody's way
                log.exception("the trainer gave nothing back")
            await self._sampler.wake()


class LentSampler:
    """Keeps `Sampler` on one whose memory is lent to a trainer at times: wakes it before it is used."""

    def __init__(self, sampler: Sampler, lending: Lending) -> None:
        self._sampler = sampler
        self._lending = lending
        self.max_context_length = sampler.max_context_length
        self.adapter_dtype = sampler.adapter_dtype

    @property
    def can_sleep(self) -> bool:
        """Whether it can lend its memory."""
        return self._sampler.can_sleep

    @property
    def asleep(self) -> bool:
        """Whether it sleeps now."""
        return self._sampler.asleep

    @property
    def images_encoded(self) -> int:
        """How many images went through the vision tower so far."""
        return self._sampler.images_encoded

    @property
    def versions_loaded(self) -> int:
        """How many versions were loaded and not removed."""
        return self._sampler.versions_loaded

    @property
    def sequences_waiting(self) -> int:
        """How many sequences in flight have no place on the device yet."""
        return self._sampler.sequences_waiting

    async def load_version(self, version: AdapterVersion) -> None:
        async with self._lending.awake():
            await self._sampler.load_version(version)

    async def remove_version(self, version: AdapterVersion) -> None:
        """Nobody is woken for it."""
        await self._sampler.remove_version(version)

    async def sample(self, work: SampleWork) -> SampleOutput:
        async with self._lending.awake():
            return await self._sampler.sample(work)

    async def sleep(self) -> None:
        await self._sampler.sleep()

    async def wake(self) -> None:
        await self._sampler.wake()

    async def close(self) -> None:
        await self._sampler.close()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; if cancelled meanwhile, when it has ended, so that nobody finds it half done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
