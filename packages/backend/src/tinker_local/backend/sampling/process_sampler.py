"""`ProcessSampler`: `sampling.sampler.Sampler` on a sampler in a separate process."""

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterState, AdapterVersion, written
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.process.async_calls import AsyncCalls, Value, ignore
from tinker_local.backend.process.async_child import Tell, serve_async_calls
from tinker_local.backend.process.calls import Calls
from tinker_local.backend.process.child import Inbox, serve_follower
from tinker_local.backend.process.linked import linked, own_meeting, own_sockets
from tinker_local.backend.process.messages import Program
from tinker_local.backend.process.process_engine import ProcessEngine
from tinker_local.backend.process.process_group import ProcessEndedError, ProcessGroup
from tinker_local.backend.process.ray_hosts import placed
from tinker_local.backend.process.ray_replicas import RayReplicas
from tinker_local.backend.process.relay import standing_in
from tinker_local.backend.sampling.sampler import DrawnTokens, Sampler, SampleWork, do_nothing, ignore_drawn
from tinker_local.backend.stages import Stage, taken
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.types import SampleOutput

SamplerFactory = Callable[..., Sampler]
"""Makes the sampler in its process: a function of a module that can be imported (so not `__main__`), or a
`functools.partial` of one or of a class. One for several ranks takes its `SamplerSeat`; on all but the first rank it
makes an object whose `follow` does what the first one says, and returns only if that has ended."""

VERSIONS_ELSEWHERE = 8
"""How many versions a replica on another host keeps in host memory. It gets others again when they are sampled from."""

_BEGUN, _ENDED = "begun", "ended"


@dataclass(frozen=True, slots=True)
class SamplerSeat:
    """Rank `rank` of `size` processes that are one sampler. `meeting`: the path of a file, empty at first, over which
    they find each other. `links`: sockets of the first one to each other one in turn, of another to the first. `name`:
    theirs alone on this machine."""

    rank: int
    size: int
    meeting: str
    links: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Elsewhere:
    """A place on another host: that of the `replica` of this number in `places`. `read`: the content of a version, also
    from its folder; its errors are those of the request."""

    places: RayReplicas
    replica: int
    read: Callable[[AdapterVersion], AdapterState]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The sampler is loaded. `stages`: of its start."""

    max_context_length: int
    adapter_dtype: AdapterDType
    can_sleep: bool
    routed: RoutedLayers | None
    why_not_in_flight: str
    stages: Sequence[Stage]


class ServedSampler:
    """A sampler for the calls of a `ProcessSampler`; in the sampler's process. Versions without a folder are among the
    values that `inbox` keeps."""

    def __init__(self, make: SamplerFactory, inbox: Inbox) -> None:
        self.sampler = make()
        self._unwritten = inbox.values

    async def load_version(self, _: Tell, version: AdapterVersion) -> None:
        await self.sampler.load_version(self._whole(version))

    async def remove_version(self, _: Tell, version: AdapterVersion) -> None:
        await self.sampler.remove_version(version)

    async def publish(self, _: Tell, target: str, version: AdapterVersion, number: int) -> None:
        await self.sampler.publish(target, self._whole(version), number)

    async def end_target(self, _: Tell, target: str) -> None:
        await self.sampler.end_target(target)

    async def sample(self, tell: Tell, work: SampleWork) -> SampleOutput:
        version = None if work.version is None else self._whole(work.version)
        begun, ended = partial(tell, _BEGUN), partial(tell, _ENDED)
        drawn = None if work.drawn is None else tell
        return await self.sampler.sample(replace(work, version=version, begun=begun, ended=ended, drawn=drawn))

    async def sleep(self, _: Tell) -> None:
        await self.sampler.sleep()

    async def wake(self, _: Tell) -> None:
        await self.sampler.wake()

    async def pulse(self, _: Tell) -> None:
        await self.sampler.pulse()

    async def rotations(self, _: Tell, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        return await self.sampler.rotations(layers, positions)

    async def module_outputs(self, _: Tell, work: SampleWork) -> ModuleOutputs:
        return await self.sampler.module_outputs(work)

    def _whole(self, version: AdapterVersion) -> AdapterVersion:
        return replace(version, unwritten=partial(self._unwritten.get, version.name))


def loaded(served: ServedSampler) -> Loaded:
    """What a `ProcessSampler` has to know of the sampler; called in its process."""
    sampler = served.sampler
    in_flight = sampler.why_not_in_flight
    return Loaded(
        sampler.max_context_length, sampler.adapter_dtype, sampler.can_sleep, sampler.routed, in_flight, taken()
    )


def state(served: ServedSampler) -> Mapping[str, Any]:
    """What changes of the sampler; called in its process."""
    sampler = served.sampler
    return {
        "asleep": sampler.asleep,
        "images_encoded": sampler.images_encoded,
        "versions_loaded": sampler.versions_loaded,
        "sequences_waiting": sampler.sequences_waiting,
        "kv_cache_used": sampler.kv_cache_used,
    }


class ProcessSampler(ProcessEngine):
    """Implements `Sampler` with the sampler that `make` makes in a separate process, which starts at once.

    Call `load` before anything else. Errors of the sampler are raised here: an ApiError unchanged, others as
    InternalError with the traceback in the log. If the process ends, all calls and later ones raise ProcessEndedError
    with its exit code or signal, until `restart` and `load`; the next process has no versions, and `sample` loads them.
    A step may take `timeout` seconds, and as long as the first start took, in case the engine is built again in it;
    then the process is killed. `image_bytes`: how many bytes of pixel values it keeps. `name`: what it is in messages.
    `environment`: what its environment has besides, or instead.

    With `ranks` above 1, there are so many processes, and each calls `make` with its `SamplerSeat`. The first one is
    called, and leads the others. They end together.

    `elsewhere`: the processes are on another host, and each has one here that stands in for it. Versions are sent,
    since that host has none of this one's folders; it keeps `VERSIONS_ELSEWHERE`.
    """

    max_context_length: int
    adapter_dtype: AdapterDType
    routed: RoutedLayers | None
    can_sleep: bool
    why_not_in_flight: str

    def __init__(
        self,
        make: SamplerFactory,
        *,
        timeout: float = 120.0,
        image_bytes: int = 2**30,
        name: str = "sampler",
        environment: Mapping[str, str] = MappingProxyType({}),
        ranks: int = 1,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._make = make
        self._ranks = ranks
        self._elsewhere = elsewhere
        self._image_bytes = image_bytes
        self._images_encoded = 0
        self._changing = threading.Lock()
        self._environment = environment
        super().__init__(name, [], timeout)

    def _begin(self) -> None:
        ranks, name = self._ranks, secrets.token_hex(8)
        seated = partial(_seated, self._make, ranks, name)
        makes = [self._make] if ranks == 1 else [partial(seated, rank) for rank in range(ranks)]
        programs: list[Program] = [_leading(makes[0]), *(partial(serve_follower, make=make) for make in makes[1:])]
        if self._elsewhere is None:
            links = linked(ranks)
            self._meeting = links.meeting
            self._programs, self._files = programs, links.files
            self._environments = [{**self._environment, **each} for each in links.environments]
        else:
            found = self._elsewhere.places.find(self._elsewhere.replica)
            finds = [partial(placed, file) for file in found]
            self._programs = [standing_in(self._name, *each) for each in zip(programs, finds, strict=True)]
            self._files = [[file] for file in found]
        try:
            super()._begin()
        finally:
            for file in (file for each in self._files for file in each):
                os.close(file)

    def _connect(self, group: ProcessGroup) -> None:
        self._loading = Calls(group)
        self._calls: AsyncCalls | None = None

    def _disconnect(self) -> None:
        with self._changing:
            calls = self._calls or self._loading
        calls.close()

    def _ended(self) -> None:
        super()._ended()
        with self._changing:
            calls = self._calls
        if calls is not None:
            calls.lost()

    def load(self) -> None:
        """Wait until the sampler can sample. If its factory raises, end the process and raise the same error. The first
        time it may take as long as it takes, and later ten times that."""
        told = self._load(self._loading)
        assert isinstance(told, Loaded)
        self.max_context_length = told.max_context_length
        self.adapter_dtype = told.adapter_dtype
        self.can_sleep = told.can_sleep
        self.routed = told.routed
        self.why_not_in_flight = told.why_not_in_flight
        self.stages = told.stages
        with self._changing:
            if self.ended or self._closed:
                raise ProcessEndedError(self.why)
            limit = self._timeout + self.load_seconds
            kept = None if self._elsewhere is None else VERSIONS_ELSEWHERE
            self._calls = AsyncCalls(self._group, limit, image_bytes=self._image_bytes, values_kept=kept)

    @property
    def ready(self) -> bool:
        """Whether it may be called: its process is loaded and has not ended."""
        calls = self._calls  # still of the last process while `restart` starts the next
        return calls is not None and not self.ended and not calls.group.ended

    def restart(self) -> None:
        """Start a new process after the last one has ended; `load` is next."""
        self._images_encoded = self.images_encoded
        super().restart()

    def _told(self, name: str) -> Any:
        calls = self._calls
        return 0 if calls is None or self.ended else calls.state.get(name, 0)

    @property
    def asleep(self) -> bool:
        """Whether it is asleep; a process that has ended holds no memory, and the next one is awake."""
        return bool(self._told("asleep"))

    @property
    def images_encoded(self) -> int:
        """Images that had passed the vision tower when the last call ended, of all processes so far."""
        calls = self._calls
        return self._images_encoded + cast(int, 0 if calls is None else calls.state.get("images_encoded", 0))

    @property
    def versions_loaded(self) -> int:
        """How many versions were loaded when the last call ended."""
        return cast(int, self._told("versions_loaded"))

    @property
    def sequences_waiting(self) -> int:
        """How many sequences waited when the last call ended, or a second ago."""
        return cast(int, self._told("sequences_waiting"))

    @property
    def kv_cache_used(self) -> float:
        """Share of the KV cache in use when the last call ended, or a second ago; 0 after the process has ended."""
        return float(self._told("kv_cache_used"))

    async def load_version(self, version: AdapterVersion) -> None:
        await self._call("load_version", _named(version), version=version)

    async def remove_version(self, version: AdapterVersion) -> None:
        """A process that has ended has no versions."""
        try:
            await self._call("remove_version", _named(version))
        except ProcessEndedError:
            return

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        await self._call("publish", target, _named(version), number, version=version)

    async def end_target(self, target: str) -> None:
        """A process that has ended has none."""
        try:
            await self._call("end_target", target)
        except ProcessEndedError:
            return

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Cancelling this cancels the sample in the process."""

        def heard(what: str | DrawnTokens) -> None:
            if not isinstance(what, DrawnTokens):
                work.begun() if what == _BEGUN else work.ended()
            elif work.drawn is not None:
                work.drawn(what)

        version = None if work.version is None else _named(work.version)
        drawn = None if work.drawn is None else ignore_drawn
        sent = replace(work, version=version, begun=do_nothing, ended=do_nothing, drawn=drawn)
        return cast(SampleOutput, await self._call("sample", sent, version=work.version, heard=heard))

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def pulse(self) -> None:
        await self._call("pulse")

    async def rotations(
        self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
    ) -> Rotations:
        return cast(Rotations, await self._call("rotations", layers, positions))

    async def module_outputs(self, work: SampleWork) -> ModuleOutputs:
        return cast(ModuleOutputs, await self._call("module_outputs", work))

    async def close(self) -> None:
        """End the process within seconds; what is in flight fails. It does not start again."""
        await in_daemon_thread(self.end)

    def end(self) -> None:
        """As `close`, for any thread."""
        closed, self._closed = self._closed, True
        super().end()
        if self._elsewhere is not None and not closed:
            self._elsewhere.places.ended()

    async def _call(
        self,
        method: str,
        *args: Any,
        version: AdapterVersion | None = None,
        heard: Callable[[Any], None] = ignore,
    ) -> Any:
        """`version`: which the process needs for it."""
        calls = self._calls
        if calls is None:
            raise ProcessEndedError(self.why if self.ended else "the sampler is not loaded")
        values = {} if version is None else {version.name: self._content(version)}
        return await calls.call(method, *args, values=values, heard=heard)

    def _content(self, version: AdapterVersion) -> Value:
        return version.unwritten if self._elsewhere is None else partial(self._elsewhere.read, version)


def _leading(make: SamplerFactory) -> Program:
    return partial(serve_async_calls, make=partial(ServedSampler, make), describe=loaded, state=state)


def _seated(make: SamplerFactory, size: int, name: str, rank: int) -> Any:
    """What `make` makes at the seat of this process."""
    return make(SamplerSeat(rank, size, own_meeting(), own_sockets(), name))


def _named(version: AdapterVersion) -> AdapterVersion:
    """`version` without its content, to be sent."""
    return replace(version, unwritten=written)
