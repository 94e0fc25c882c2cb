"""`ReplicaPool`: `sampling.sampler.Sampler` on several samplers of one base model, each on its own device."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.sampling.prefix_routes import Prefix, PrefixRoutes, prefixes
from tinker_local.backend.sampling.sampler import Sampler, SampleWork, with_times
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.rotations import Rotations
from tinker_local.types import SampleOutput

AHEAD = 64
"""Sequences that a replica which has read a prompt may have more than the one with the fewest."""


def replica_name(replica: int) -> str:
    """What it is in messages."""
    return f"sampler replica {replica}"


class Replica(Sampler, Protocol):
    """A sampler in a process."""

    @property
    def ready(self) -> bool:
        """Whether it may be called: its process is loaded and has not ended. Readable from any thread."""


class ReplicaPool:
    """Implements `Sampler` on `replicas`, which serve the same model. Each is to run `places` sequences at once.

    A sample goes to one replica: to the one that has read most of its prompt, if that is at least half of it and that
    replica has a place and at most `AHEAD` sequences more than the one with the fewest; otherwise to that with the
    fewest. All samples of a prompt so share one prefill, and a group that is too large for one replica is spread.

    Versions are loaded by all, sleep and wake reach all. A replica that is not `ready` is passed over, and reads
    versions when it samples from them again. A sample that was in a replica whose process ended raises
    ProcessEndedError, and may be repeated: another replica answers. `sequences`: how many each has.
    """

    def __init__(self, replicas: Sequence[Replica], places: int) -> None:
        self.replicas = tuple(replicas)
        self.sequences = [0] * len(replicas)
        self._places = places
        self._handed = [0] * len(replicas)
        self._routes = PrefixRoutes(len(replicas))
        self.max_context_length = min(replica.max_context_length for replica in replicas)
        self.adapter_dtype = replicas[0].adapter_dtype
        self.routed = replicas[0].routed
        self.why_not_in_flight = replicas[0].why_not_in_flight

    @property
    def can_sleep(self) -> bool:
        """Whether all can."""
        return all(replica.can_sleep for replica in self.replicas)

    @property
    def asleep(self) -> bool:
        """Whether one of them is asleep."""
        return any(replica.asleep for replica in self.replicas)

    @property
    def images_encoded(self) -> int:
        """Of all; an image that two replicas see counts twice."""
        return sum(replica.images_encoded for replica in self.replicas)

    @property
    def versions_loaded(self) -> int:
        """How many versions the replica with the most has."""
        return max(replica.versions_loaded for replica in self.replicas)

    @property
    def sequences_waiting(self) -> int:
        """Of all."""
        return sum(replica.sequences_waiting for replica in self.replicas)

    @property
    def kv_cache_used(self) -> float:
        """Mean of all; each has its own cache of the same size."""
        return sum(replica.kv_cache_used for replica in self.replicas) / len(self.replicas)

    async def load_version(self, version: AdapterVersion) -> None:
        """Return when every replica that works has loaded and verified it."""
        await self._by_all(lambda replica: replica.load_version(version))

    async def remove_version(self, version: AdapterVersion) -> None:
        """Of all. Those that have ended have none."""
        await self._by_all(lambda replica: replica.remove_version(version))

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        """In every replica that works. Another one gets the weights with its next sample of `target`."""
        await self._by_all(lambda replica: replica.publish(target, version, number))

    async def end_target(self, target: str) -> None:
        """Of all."""
        await self._by_all(lambda replica: replica.end_target(target))

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Sample in one replica."""
        beginnings = prefixes(work)
        chosen = self._chosen(work, beginnings)
        self._routes.note(chosen, beginnings)
        self._handed[chosen] += 1
        self.sequences[chosen] += work.num_samples
        try:
            return with_times(await self.replicas[chosen].sample(work), replica=chosen)
        finally:
            self.sequences[chosen] -= work.num_samples

    def _chosen(self, work: SampleWork, beginnings: Sequence[Prefix]) -> int:
        """The replica for `work`."""
        ready = [at for at, replica in enumerate(self.replicas) if replica.ready]
        if work.replica is not None and work.replica in ready:
            return work.replica
        for at, _ in enumerate(self.replicas):
            if at not in ready:
                self._routes.forget(at)  # the next process begins with an empty cache
        ready = ready or list(range(len(self.replicas)))  # any of them says how it ended
        fewest = min(ready, key=lambda at: (self.sequences[at], self._handed[at]))
        most = min(self.sequences[fewest] + AHEAD, self._places - work.num_samples)
        near = [at for at in ready if self.sequences[at] <= most]
        read = {at: self._routes.positions_read(at, beginnings) for at in near}
        best = max(near, key=lambda at: (read[at], -self.sequences[at], -self._handed[at]), default=fewest)
        return best if 2 * read.get(best, 0) >= work.prompt.length else fewest

    async def sleep(self) -> None:
        """Put all to sleep. If one cannot, all are awake as before."""
        try:
            await self._by_all(lambda replica: replica.sleep())
        except Exception:
            await self.wake()
            raise
        finally:
            for at, _ in enumerate(self.replicas):
                self._routes.forget(at)

    async def wake(self) -> None:
        """Wake those that are asleep. If one cannot, it stays asleep."""
        await self._by_all(lambda replica: replica.wake(), [each for each in self.replicas if each.asleep])

    async def pulse(self) -> None:
        """Return when one has made progress: sampling works while one replica does."""
        pulses = [asyncio.ensure_future(replica.pulse()) for replica in self.replicas]
        try:
            for pulse in asyncio.as_completed(pulses):
                with contextlib.suppress(Exception):  # of one that has ended
                    await pulse
                    return
        finally:
            for each in pulses:
                each.cancel()

    async def rotations(
        self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
    ) -> Rotations:
        """Of that replica."""
        return await self.replicas[replica].rotations(layers, positions)

    async def module_outputs(self, work: SampleWork) -> ModuleOutputs:
        """Of the replica that `work` names."""
        return await self.replicas[work.replica or 0].module_outputs(work)

    async def close(self) -> None:
        """Stop all at once."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _by_all(
        self, call: Callable[[Replica], Awaitable[None]], replicas: Sequence[Replica] | None = None
    ) -> None:
        """Wait until all `replicas` (None: those that are ready) have done it. Raises the first error that is not the
        end of a process, or ProcessEndedError if all have ended."""
        if replicas is None:
            replicas = [replica for replica in self.replicas if replica.ready] or self.replicas
        results = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        ends = [error for error in errors if isinstance(error, ProcessEndedError)]
        for error in errors:
            if error not in ends or len(ends) == len(results):
                raise error
