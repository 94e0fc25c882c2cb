"""In-flight weights: of each training run one target, whose weights move under running samples with every save.

A save with kind='inflight' ends when its version is captured. Behind it, the version is loaded, verified as every one
is, and published to all replicas between two of their steps. A version that waits for that while a newer one is saved
is left out: the contract promises a client the weights of its save or newer ones.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.control.ephemeral_versions import EphemeralVersion, EphemeralVersions
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.sampling.sampler import MovingWeights, SampleWork
from tinker_local.types import GoneError, InternalError, NotFoundError, SampleOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class InFlightSave:
    """`number`: of the in-flight saves of its run, from 1. `verify` loads the version and raises if the sampler does
    not serve it as the trainer computes it."""

    number: int
    version: AdapterVersion
    kept: EphemeralVersion
    verify: Callable[[], Awaitable[None]]


async def _verified() -> None:
    """Of a save that was."""


class InFlightTarget:
    """The weights of one training run that its in-flight clients sample from. Used on the event loop.

    `saves`: how many the run has made. `steps`: the optimizer steps of the run at each, by its number. `current`: the
    one whose version the sampler has; None before the first. `ended`: its session has ended.
    """

    def __init__(self, run: str, session_id: str, base: ServedModel, ephemeral: EphemeralVersions) -> None:
        self.run = run
        self.name = f"{run}/in-flight"
        self.session_id = session_id
        self.saves = 0
        self.steps: dict[int, int] = {}
        self.current: InFlightSave | None = None
        self.ended = False
        self._base = base
        self._ephemeral = ephemeral
        self._next: InFlightSave | None = None
        self._publishing: InFlightSave | None = None
        self._held: list[InFlightSave] = []  # versions that a replica may have, after a failure of another one
        self._failed = 0
        self._why: Exception | None = None
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def begin_save(self, steps: int) -> int:
        """The number of a new save, in the run's order."""
        self.saves += 1
        self.steps[self.saves] = steps
        return self.saves

    def version(self, number: int) -> str:
        """The name of the weights of save `number`, by which the run knows how old they are."""
        return f"{self.name}#{number}"

    async def put(self, save: InFlightSave) -> None:
        """Let the sampler go on to `save`; return before it has."""
        newest = max((each.number for each in (self._next, self._publishing, self.current) if each), default=0)
        if save.number < newest or self.ended:
            await self._ephemeral.remove(save.kept)
            return
        superseded, self._next = self._next, save
        if self._work is None:
            self._work = asyncio.create_task(self._publish())
        if superseded is not None:
            await self._ephemeral.remove(superseded.kept)

    async def _publish(self) -> None:
        """Publish what is put, one after the other."""
        try:
            while self._next is not None:
                self._publishing, self._next = self._next, None
                await self._publish_one(self._publishing)
                self._publishing = None
                self._change()
        finally:
            self._publishing = self._work = None
            self._change()

    async def _publish_one(self, save: InFlightSave) -> None:
        sampler, verified = self._base.engines.sampler, False
        try:
            await save.verify()
            verified, save = True, replace(save, verify=_verified)  # it had the trainer's tensors
            await sampler.publish(self.name, save.version, save.number)
            await sampler.remove_version(save.version)  # the slot in which it was verified; its folder stays
        except Exception as error:
            log.warning("run %s: its in-flight save %d is not served: %s", self.run, save.number, error)
            self._failed, self._why = save.number, error
            if verified:
                self._held.append(save)
            else:
                await self._ephemeral.remove(save.kept)
            return
        before = [*self._held, *([] if self.current is None else [self.current])]
        self.current, self._held = save, before
        self._base.counts.in_flight_published += 1
        self._change()
        for each in before:
            await self._ephemeral.remove(each.kept)
        self._held = []

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def at_least(self, number: int) -> InFlightSave:
        """The current version, once it is that of save `number` or a later one. InternalError if that failed and none
        was saved since; GoneError once the session has ended."""
        while True:
            if self.ended:
                raise GoneError(f"sampling_session_id: the session {self.session_id} of {self.run} has ended")
            if self.current is not None and self.current.number >= number:
                return self.current
            if self._failed >= number and self._next is None and self._publishing is None:
                raise InternalError(
                    f"sampling_session_id: the sampler does not serve in-flight save {self._failed} of {self.run}, "
                    f"and this client needs save {number} or a later one: {self._why}; save with kind='inflight' again"
                ) from self._why
            await self._changed.wait()

    async def stop(self) -> None:
        """Publish nothing any more; samples that wait for it fail."""
        self.ended = True
        self._change()
        if (work := self._work) is not None:
            work.cancel()
            await asyncio.wait((work,))

    async def end(self) -> None:
        """Free its versions. Its samples were cancelled."""
        kept = [save for save in (self.current, self._next, self._publishing, *self._held) if save is not None]
        self._next = None
        await self.stop()
        self.current = None
        await self._base.engines.sampler.end_target(self.name)
        for save in kept:
            await self._ephemeral.remove(save.kept)


@dataclass(frozen=True, slots=True, eq=False)
class InFlightClient:
    """A sampling session of `target`, made by its save number `since`. `namespace`: of its keys and values."""

    target: InFlightTarget
    since: int
    namespace: str

    async def sample(self, base: ServedModel, work: SampleWork) -> SampleOutput:
        """Sample `work` from the target."""
        while True:
            save = await self.target.at_least(self.since)
            moving = MovingWeights(self.target.name, save.number, self.since, self.namespace)
            try:
                return await base.engines.sampler.sample(replace(work, version=save.version, moving=moving))
            except NotFoundError:  # a new process needed what was superseded on the way to it
                if self.target.current is save:
                    raise


class InFlightTargets:
    """Those of all live sessions."""

    def __init__(self, ephemeral: EphemeralVersions) -> None:
        self._ephemeral = ephemeral
        self._targets: dict[str, InFlightTarget] = {}

    def of(self, run: str, session_id: str, base: ServedModel) -> InFlightTarget:
        """The target of a training run."""
        if run not in self._targets:
            self._targets[run] = InFlightTarget(run, session_id, base, self._ephemeral)
        return self._targets[run]

    async def end_session(self, session_id: str) -> None:
        """Free those of a session."""
        ending = [target for target in self._targets.values() if target.session_id == session_id]
        for target in ending:
            del self._targets[target.run]
        await asyncio.gather(*(target.end() for target in ending))

    async def close(self) -> None:
        """Stop publishing."""
        await asyncio.gather(*(target.stop() for target in self._targets.values()))
