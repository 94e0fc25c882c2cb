"""How a trainer and a sampler share the memory of one device.

`gpu_plan.py` gives each its part. When a training request does not fit into the trainer's part, the sampler goes to
sleep as soon as it has nothing in flight, and the request runs once more with the sampler's memory. The next sample
wakes the sampler, after the trainer has released its unused memory. If the trainer's process has ended, its calls wait
for the next one, which loads while the sampler is awake, as the first did.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.sampling.sampler import AdapterVersion, Sampler, SampleWork
from tinker_local.backend.scheduling.operations import as_api_error
from tinker_local.backend.training.trainer import Trainer, TrainResult, TrainWork
from tinker_local.types import ApiError, InternalError, NotEnoughMemoryError, SampleOutput

log = logging.getLogger(__name__)
T = TypeVar("T")


class MemorySharing:
    """Runs every call of `trainer`, and puts `sampler` to sleep and wakes it.

    Trainer calls and wake-ups take turns in the order of their requests. A sample therefore waits for at most one
    trainer call. When a trainer call needs the sampler's memory, it waits for the samples in flight; later samples wait
    until the call ends. Without a sampler, or with one that cannot sleep, the trainer only has its own memory.

    A call that runs when the trainer's process ends raises ProcessEndedError; later calls wait for the next process,
    or raise it too if that is not to be expected soon (`refuse`). `sleeps`: how often the sampler was put to sleep.
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
        self._life = 0
        self._refusal: str | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._settled = asyncio.Event()
        self._settled.set()
        self.sleeps = 0

    @property
    def asleep(self) -> bool:
        """Whether the sampler is asleep."""
        return self._sampler is not None and self._sampler.asleep

    @property
    def trainer_has_memory(self) -> bool:
        """Whether new samples wait until the trainer is done with the sampler's memory."""
        return self._wanted or self.asleep

    async def close(self) -> None:
        """Cancel a wake-up and wait for the last trainer call."""
        self._closed = True
        self.settle()
        self.refuse("the trainer was closed")
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.wait((self._waking,))
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    # The trainer's side ---------------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a method of the trainer in the trainer's thread."""
        async with self._trainers_turn():
            return await self.in_turn(function, *args, **kwargs)

    async def forward_backward(self, works: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        """`Trainer.forward_backward`; what ran out of memory runs once more if the sampler can sleep."""
        async with self._trainers_turn():
            life = self._life
            results = list(await self.in_turn(self._trainer.forward_backward, works))
            short = {at: result for at, result in enumerate(results) if isinstance(result, NotEnoughMemoryError)}
            if short:
                again = await self._again([works[at] for at in short], list(short.values()))
                for at, result in zip(short, again, strict=True):
                    results[at] = result
            self._check_life(life)  # or gradients that were lost would count
            return results

    async def _again(
        self, works: Sequence[TrainWork], errors: Sequence[NotEnoughMemoryError]
    ) -> Sequence[TrainResult | ApiError]:
        """Run `works`, which failed with `errors`, again with the sampler's memory.

        Returns errors instead of raising them: other requests of the same call have succeeded. Called within a turn."""
        try:
            if not await self._put_sampler_to_sleep():
                return errors
        except Exception as error:
            log.exception("the sampler could not be put to sleep")
            return [InternalError(f"{e}, and the sampler could not make room: {as_api_error(error)}") for e in errors]
        try:
            results = await self.in_turn(self._trainer.forward_backward, works)
            if len(results) != len(works):
                raise RuntimeError(f"the trainer gave {len(results)} results for {len(works)} requests")
        except ProcessEndedError:
            raise
        except Exception as error:
            log.exception("a batch of %d requests failed", len(works))
            return [as_api_error(error)] * len(works)
        return results

    async def _put_sampler_to_sleep(self) -> bool:
        """Whether the sampler went to sleep: False if it cannot, or already is asleep. Called within a turn."""
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

    async def in_turn(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a method of the trainer in its thread, for a caller whose turn it is."""
        life = self._life
        result = await self._loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        self._check_life(life)
        return result

    def _check_life(self, life: int) -> None:
        """ProcessEndedError if the trainer has ended since then: what it did is lost, even if its answer came."""
        if life != self._life:
            raise ProcessEndedError("the trainer's process ended")

    @asynccontextmanager
    async def _trainers_turn(self) -> AsyncIterator[None]:
        """A turn while there is a trainer."""
        while True:
            await self._open.wait()
            if self._refusal is not None:
                raise ProcessEndedError(self._refusal)
            async with self._turn:
                if self._open.is_set() and self._refusal is None:
                    yield
                    return

    # When the trainer's process has ended ---------------------------------------------------------------------------

    def trainer_lost(self) -> None:
        """Its process has ended: calls wait until `trainer_back`, and failures until `settle`."""
        self._life += 1
        self._open.clear()
        self._settled.clear()

    def settle(self) -> None:
        """The training runs that lost their adapters are closed."""
        self._settled.set()

    async def settled(self) -> None:
        """Wait for `settle` before telling a client that the trainer has ended: its run may have been closed."""
        await self._settled.wait()

    def refuse(self, reason: str | None) -> None:
        """Fail calls with `reason` instead of letting them wait; None: let them wait again."""
        if self._refusal == reason or (self._closed and reason is None):
            return
        self._refusal = reason
        if reason is None:
            self._open.clear()
        else:
            self._open.set()

    async def load_trainer(self, load: Callable[[], None], restore: Callable[[], Awaitable[None]]) -> None:
        """Load a new trainer with `load`, and its adapters with `restore`, before any other call. A sampler that was
        asleep wakes first: both then have the memory that they had at the start."""
        async with self._turn:
            if self._sampler is not None and self._sampler.asleep:
                try:
                    await self._sampler.wake()
                except Exception:
                    log.exception("the sampler could not be woken; the next sample tries again")
        async with self._turn:  # another turn: samples that wait for the wake-up come first
            await self.in_turn(load)
            await restore()

    def trainer_back(self) -> None:
        """The new trainer works."""
        if not self._closed:
            self._refusal = None
            self._open.set()

    @property
    def trainer_works(self) -> bool:
        """Whether calls do not wait for a new trainer, and do not fail for the lack of one."""
        return self._open.is_set() and self._refusal is None

    # The sampler's side ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Keep the sampler awake within this context."""
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
        """Wake the sampler; concurrent callers share one wake-up."""
        if self._closed:
            raise InternalError("the sampler was stopped")
        waking = self._waking
        if waking is None:
            waking = self._waking = asyncio.create_task(self._wake(), name="wake-sampler")
            waking.add_done_callback(self._waking_ended)
        await asyncio.wait((waking,))  # cancelling one waiter must not cancel the wake-up
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
                await self.in_turn(self._trainer.release_memory)
            except ProcessEndedError:
                pass  # and so holds no memory
            except Exception:
                log.exception("the trainer could not release memory")
            await self._sampler.wake()


class WakingSampler:
    """Implements `Sampler` on one that may be asleep: wakes it before each use."""

    def __init__(self, sampler: Sampler, memory_sharing: MemorySharing) -> None:
        self._sampler = sampler
        self._memory_sharing = memory_sharing
        self.max_context_length = sampler.max_context_length
        self.adapter_dtype = sampler.adapter_dtype

    @property
    def can_sleep(self) -> bool:
        """Whether it can sleep."""
        return self._sampler.can_sleep

    @property
    def asleep(self) -> bool:
        """Whether it is asleep."""
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
        async with self._memory_sharing.awake():
            await self._sampler.load_version(version)

    async def remove_version(self, version: AdapterVersion) -> None:
        """Needs no wake-up."""
        await self._sampler.remove_version(version)

    async def sample(self, work: SampleWork) -> SampleOutput:
        async with self._memory_sharing.awake():
            return await self._sampler.sample(work)

    async def sleep(self) -> None:
        await self._sampler.sleep()

    async def wake(self) -> None:
        await self._sampler.wake()

    async def close(self) -> None:
        await self._sampler.close()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even if cancelled, so that no caller sees it half done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
