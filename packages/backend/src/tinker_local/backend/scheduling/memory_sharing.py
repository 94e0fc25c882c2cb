"""How a trainer and a sampler share the memory of one device.

`gpu_plan.py` gives each its part. When a training request does not fit into the trainer's part, the sampler goes to
sleep as soon as it has nothing in flight, and the request runs once more with the sampler's memory. The next sample
wakes the sampler, after the trainer has released its unused memory. If the process of one of them has ended, its calls
wait for the next one. A trainer loads while the sampler is awake, as the first did; a sampler after the trainer has
released its unused memory. When the server stops, a sampler that hangs is given up, so that the trainer can save.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.sampling.sampler import DrawnTokens, Sampler, SampleWork, with_times
from tinker_local.backend.scheduling.operations import as_api_error
from tinker_local.backend.threads import without_pool
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.trainer import Trainer, TrainResult, TrainWork
from tinker_local.types import ApiError, InternalError, NotEnoughMemoryError, SampleOutput

log = logging.getLogger(__name__)
T = TypeVar("T")


class Gate:
    """Whether an engine works. Calls wait while it does not, or fail with `refusal` if there is one."""

    def __init__(self) -> None:
        self.works = True
        self._refusal: str | None = None
        self._shut = False
        self._passable = asyncio.Event()
        self._passable.set()

    @property
    def is_open(self) -> bool:
        """Whether calls neither wait nor fail."""
        return self.works and self._refusal is None

    async def passed(self) -> None:
        """Wait for the engine; ProcessEndedError with the refusal."""
        while not self.is_open:
            await self._passable.wait()
            if self._refusal is not None:
                raise ProcessEndedError(self._refusal)

    def close(self) -> None:
        """The engine has ended."""
        self.works = False
        self._change()

    def open(self) -> None:
        """The next one works."""
        if not self._shut:
            self.works, self._refusal = True, None
            self._change()

    def refuse(self, reason: str | None) -> None:
        """Fail calls with `reason` instead of letting them wait; None: let them wait again."""
        if not self._shut:
            self._refusal = reason
            self._change()

    def shut(self, reason: str) -> None:
        """Fail all calls from here on."""
        self.refuse(reason)
        self._shut = True

    def follow(self, gates: "Sequence[Gate]") -> None:
        """Be open while one of `gates` is. If none is, calls wait as long as one of them lets calls wait."""
        if self._shut:
            return
        self.works = any(gate.works for gate in gates)
        waits = self.works or any(gate._refusal is None for gate in gates)
        self._refusal = None if waits else gates[0]._refusal
        self._change()

    def _change(self) -> None:
        if self.works or self._refusal is not None:
            self._passable.set()
        else:
            self._passable.clear()


class ReplicaGate(Gate):
    """Of one of several replicas. `shared` is open while one of `siblings`, all of them, is."""

    def __init__(self, shared: Gate, siblings: "list[ReplicaGate]") -> None:
        super().__init__()
        self._shared = shared
        self._siblings = siblings

    def _change(self) -> None:
        super()._change()
        self._shared.follow(self._siblings)


class MemorySharing:
    """Runs every call of `trainer`, and puts `sampler` to sleep and wakes it.

    Trainer calls and wake-ups take turns in the order of their requests. A sample therefore waits for at most one
    trainer call. When a trainer call needs the sampler's memory, it waits for the samples in flight; later samples wait
    until the call ends. Without a sampler, or with one that cannot sleep, the trainer only has its own memory.

    A call that runs when an engine's process ends raises ProcessEndedError; later calls wait for the next process, or
    raise it too if that is not to be expected soon (`Gate.refuse`). `trainer_gate`, `sampler_gate`: whether they work.
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
        self._life = 0
        self.trainer_gate = Gate()
        self.sampler_gate = Gate()
        self._loading = 0
        self._sampler_is_loaded = asyncio.Event()
        self._sampler_is_loaded.set()
        self._settled = asyncio.Event()
        self._settled.set()
        self._given_up = asyncio.Event()
        self._end_sampler: Callable[[], Awaitable[None]] | None = None
        self._abandoned: set[asyncio.Task[Any]] = set()
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
        self.trainer_gate.shut("the trainer was closed")
        self.sampler_gate.shut("the sampler was closed")
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.wait((self._waking,))
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    # The trainer's side ---------------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a method of the trainer in the trainer's thread."""
        async with self._trainers_turn():
            return await self.in_turn(function, *args, **kwargs)

    async def discard_gradients(self, adapter_id: str) -> None:
        """Let the trainer forget the gradient of an adapter."""
        await self.call(self._trainer.discard_gradients, adapter_id)

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
        """Whether the sampler went to sleep, or has ended, and so holds no memory: False if it cannot, or already is
        asleep. Called within a turn."""
        sampler = self._sampler
        if sampler is None or not sampler.can_sleep or sampler.asleep:
            return False
        await self._of_sampler(self._sampler_is_loaded.wait())
        self._wanted = True
        try:
            await self._of_sampler(self._unused.wait())
            if self.sampler_gate.works:
                await self._of_sampler(_to_its_end(sampler.sleep()))
        except ProcessEndedError:
            return True
        finally:
            self._wanted = False
        self.sleeps += 1
        return True

    async def in_turn(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a method of the trainer in its thread, for a caller whose turn it is."""
        life = self._life
        result = await self._loop.run_in_executor(self._thread, partial(without_pool, function, *args, **kwargs))
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
            await self.trainer_gate.passed()
            async with self._turn:
                if self.trainer_gate.is_open:
                    yield
                    return

    # When the server stops ------------------------------------------------------------------------------------------

    def give_up_sampler(self, seconds: float, end: Callable[[], Awaitable[None]] | None) -> None:
        """From `seconds` on, let no trainer call wait for the sampler, which may hang. The first that does ends the
        sampler with `end`, if it can be ended; what the call wanted memory for fails."""
        self._end_sampler = end
        self._loop.call_later(seconds, self._given_up.set)

    async def _of_sampler(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait until the sampler has done `work`; InternalError if it is given up before. Called within a turn."""
        task, given_up = asyncio.ensure_future(work), asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait((task, given_up), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task, given_up), return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            given_up.cancel()
        if task.done():
            task.result()
            return
        self._abandoned.add(task)  # it may go on for ever
        task.add_done_callback(self._abandoned.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task.cancel()
        why = "the server stops, and the sampler did not make room for the trainer in time"
        log.warning("%s: it is given up, and its samples fail", why)
        self.sampler_gate.shut(why)
        if self._end_sampler is not None:
            await self._end_sampler()
            self.sampler_gate.close()  # it holds no memory
        raise InternalError(why)

    # When a process has ended ---------------------------------------------------------------------------------------

    def replica_gates(self, replicas: int) -> list[ReplicaGate]:
        """A gate for each of several replicas that are one sampler: `sampler_gate` is open while one of them is."""
        gates: list[ReplicaGate] = []
        gates.extend(ReplicaGate(self.sampler_gate, gates) for _ in range(replicas))
        return gates

    def trainer_lost(self) -> None:
        """Its process has ended, and `trainer_gate` is closed: failures wait until `settle`."""
        self._life += 1
        self._settled.clear()

    def settle(self) -> None:
        """The training runs that lost their adapters are closed."""
        self._settled.set()

    async def settled(self) -> None:
        """Wait for `settle` before telling a client that the trainer has ended: its run may have been closed."""
        await self._settled.wait()

    async def load_trainer(self, load: Callable[[], None], restore: Callable[[], Awaitable[None]]) -> None:
        """Load a new trainer with `load`, and its adapters with `restore`, before any other call. A sampler that was
        asleep wakes first: both then have the memory that they had at the start."""
        async with self._turn:
            if self._sampler is not None and self._sampler.asleep:
                try:
                    await self._of_sampler(self._sampler.wake())
                except Exception:
                    log.exception("the sampler could not be woken; the next sample tries again")
        async with self._turn:  # another turn: samples that wait for the wake-up come first
            await self.in_turn(load)
            await restore()

    async def load_sampler(self, load: Callable[[], None], gate: Gate | None = None) -> None:
        """Load a new sampler with `load`, in a thread, when the trainer does not use its memory, and open its `gate`
        (None: `sampler_gate`). Trainer calls go on meanwhile with their own memory, and the sampler waits for none of
        them, so that one may wait for the sampler. Other replicas that are asleep wake first, so that all are awake."""
        async with self._turn:
            await self._release_trainer()
            if self._sampler is not None and self._sampler.asleep:
                try:
                    await self._sampler.wake()
                except Exception:
                    log.exception("the other replicas could not be woken; the next sample tries again")
            self._loading += 1
            self._sampler_is_loaded.clear()
        try:
            await in_daemon_thread(load)
            (gate or self.sampler_gate).open()
        finally:
            self._loading -= 1
            if not self._loading:
                self._sampler_is_loaded.set()

    # The sampler's side ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Keep the sampler awake within this context. InternalError if there is none to be expected soon."""
        try:
            await self.sampler_gate.passed()
            while self._wanted or self.asleep:
                await self._woken()
                await self.sampler_gate.passed()
        except ProcessEndedError as error:
            raise InternalError(str(error)) from error  # of the sampler: the trainer goes on
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
            await self._release_trainer()
            with suppress(ProcessEndedError):  # the next one starts awake
                await self._of_sampler(self._sampler.wake())

    async def _release_trainer(self) -> None:
        """Have the trainer release its unused memory. Called within a turn."""
        try:
            await self.in_turn(self._trainer.release_memory)
        except ProcessEndedError:
            pass  # and so holds no memory
        except Exception:
            log.exception("the trainer could not release memory")


class WakingSampler:
    """Implements `Sampler` on one that may be asleep, or in a process that may end: wakes it before each use, and runs
    what was in the process once more in the next one. Nothing of it was given out, so clients see no difference."""

    def __init__(self, sampler: Sampler, memory_sharing: MemorySharing) -> None:
        self._sampler = sampler
        self._memory_sharing = memory_sharing
        self.max_context_length = sampler.max_context_length
        self.adapter_dtype = sampler.adapter_dtype
        self.routed = sampler.routed
        self.why_not_in_flight = sampler.why_not_in_flight

    @property
    def can_sleep(self) -> bool:
        return self._sampler.can_sleep

    @property
    def asleep(self) -> bool:
        return self._sampler.asleep

    @property
    def images_encoded(self) -> int:
        return self._sampler.images_encoded

    @property
    def versions_loaded(self) -> int:
        return self._sampler.versions_loaded

    @property
    def sequences_waiting(self) -> int:
        return self._sampler.sequences_waiting

    @property
    def kv_cache_used(self) -> float:
        return self._sampler.kv_cache_used

    async def load_version(self, version: AdapterVersion) -> None:
        await self._use(lambda: self._sampler.load_version(version))

    async def remove_version(self, version: AdapterVersion) -> None:
        await self._sampler.remove_version(version)

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        await self._use(lambda: self._sampler.publish(target, version, number))

    async def end_target(self, target: str) -> None:
        await self._sampler.end_target(target)

    async def sample(self, work: SampleWork) -> SampleOutput:
        told, called, waking = _Told(work), time.monotonic(), 0.0

        def call() -> Awaitable[SampleOutput]:
            nonlocal waking
            waking = time.monotonic() - called
            return self._sampler.sample(told.again())

        output = await self._use(call, told)
        return with_times(output, waking=waking)

    async def _use(self, call: Callable[[], Awaitable[T]], told: "_Told | None" = None) -> T:
        why = ""
        while True:
            async with self._memory_sharing.awake():
                try:
                    return await call()
                except ProcessEndedError as error:
                    why = "after its first tokens were given out" if told is not None and told.drawn else why
                    if why:
                        raise InternalError(f"{error}, {why}") from error
                    why = "the second time that this request was in it"
            await asyncio.sleep(0)  # the supervision was told first, and closes the gate

    async def sleep(self) -> None:
        await self._sampler.sleep()

    async def wake(self) -> None:
        await self._sampler.wake()

    async def pulse(self) -> None:
        await self._sampler.pulse()

    async def rotations(
        self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
    ) -> Rotations:
        return await self._use(lambda: self._sampler.rotations(layers, positions, replica))

    async def module_outputs(self, work: SampleWork) -> ModuleOutputs:
        return await self._use(lambda: self._sampler.module_outputs(work))

    async def close(self) -> None:
        await self._sampler.close()


class _Told:
    """What a sample that may run twice has told: each thing once. `drawn`: tokens, so that it may not."""

    def __init__(self, work: SampleWork) -> None:
        self._work = work
        self._begun = False
        self._ended = self._told = 0
        self.drawn = False

    def again(self) -> SampleWork:
        """The work, from its beginning."""
        self._ended = 0
        return replace(self._work, begun=self._begin, ended=self._end, drawn=self._work.drawn and self._draw)

    def _draw(self, tokens: DrawnTokens) -> None:
        self.drawn = True
        assert self._work.drawn is not None
        self._work.drawn(tokens)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._work.begun()

    def _end(self) -> None:
        self._ended += 1
        if self._ended > self._told:
            self._told = self._ended
            self._work.ended()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even if cancelled, so that no caller sees it half done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
