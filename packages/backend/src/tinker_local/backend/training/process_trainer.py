"""`ProcessTrainer`: `training.trainer.Trainer` on a trainer in a separate process, or in several."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterLayout, AdapterState
from tinker_local.backend.process.calls import Calls
from tinker_local.backend.process.child import serve_calls
from tinker_local.backend.process.process_engine import ProcessEngine
from tinker_local.backend.process.process_group import ProcessGroup
from tinker_local.backend.process.ray_hosts import RayHosts, placed
from tinker_local.backend.process.relay import standing_in
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.stages import Stage, taken
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers, Routes
from tinker_local.backend.training.trainer import Replayed, Seat, Trainer, TrainResult, TrainWork
from tinker_local.types import ApiError, LoraConfig
from tinker_local.types.base import Frozen

TrainerFactory = Callable[..., Trainer]
"""Makes the trainer in its process: a function of a module that can be imported (so not `__main__`), or a
`functools.partial` of one or of a class. One for several ranks takes its `Seat`."""

SECONDS_PER_POSITION = 0.01
"""The time limit of a call grows by this much: a hundred times what an 8B model takes on an H200."""

_SIZED_RANKS = tuple(2**power for power in range(10))


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The trainer is loaded. `adapter_bytes`: the size of an adapter at some ranks, by (optimizer, unembed, mlp,
    attn, vision). `stages`: of its start."""

    vocab_size: int
    max_context_length: int
    trains: str
    routed: RoutedLayers | None
    adapter_bytes: Mapping[tuple[str, bool, bool, bool, bool], Mapping[int, int]]
    stages: Sequence[Stage]


def loaded(trainer: Trainer) -> Loaded:
    """What a `ProcessTrainer` has to know of the trainer; called in its process."""
    switch = (False, True)
    keys = itertools.product(OPTIMIZERS, switch, switch, switch, switch)
    sizes = {key: adapter_sizes(trainer, *key) for key in keys}
    return Loaded(trainer.vocab_size, trainer.max_context_length, trainer.trains, trainer.routed, sizes, taken())


def adapter_sizes(
    trainer: Trainer, optimizer: str, unembed: bool, mlp: bool, attn: bool, vision: bool
) -> dict[int, int]:
    """The size of an adapter in bytes at each rank of 2^i that the trainer accepts."""
    sizes = {}
    for rank in _SIZED_RANKS:
        config = LoraConfig(rank=rank, train_unembed=unembed, train_mlp=mlp, train_attn=attn, train_vision=vision)
        try:
            sizes[rank] = trainer.adapter_bytes(config, optimizer)
        except ApiError:
            break
    return sizes


class ProcessTrainer(ProcessEngine):
    """Implements `Trainer` with the trainer that `make` makes in a separate process, which starts at once.

    With `ranks` above 1, there are so many processes, and each calls `make` with its `Seat`. They get the same calls;
    those that only read an adapter go to the first alone, as its copy equals all others. They end together. `others`:
    where the last of them are, if not on this host; each has a process here that stands in for it.

    Call `load` before anything else. Errors of the trainer are raised here: an ApiError unchanged, others as
    InternalError with the traceback in the log. If the process ends, the running call and every later one raise
    ProcessEndedError with its exit code or signal, until `restart`. A call may take `timeout` seconds, and
    `SECONDS_PER_POSITION` for each position in it; then the process is killed. `image_bytes`: how many bytes of pixel
    values it keeps. `environments`: what the environment of each process has besides, or instead.
    """

    vocab_size: int
    max_context_length: int
    trains: str
    routed: RoutedLayers | None

    def __init__(
        self,
        make: TrainerFactory,
        *,
        ranks: int = 1,
        timeout: float = 120.0,
        image_bytes: int = 2**30,
        environments: Sequence[Mapping[str, str]] = (),
        others: RayHosts | None = None,
    ) -> None:
        self._make = make
        self._ranks = ranks
        self._others = others
        self._image_bytes = image_bytes
        self._images_encoded = 0
        self._elsewhere = 0 if others is None else others.hosts * others.ranks
        nothing: list[Mapping[str, str]] = [{}]
        of_each = [*(environments or nothing * (ranks - self._elsewhere)), *nothing * self._elsewhere]
        super().__init__("trainer", [], timeout, of_each)

    def _begin(self) -> None:
        makes = [self._make] if self._ranks == 1 else self._makes()
        self._programs = [
            partial(serve_calls, make=make, describe=loaded, told=("images_encoded", "cached_bytes")) for make in makes
        ]
        if self._others is None:
            super()._begin()
        else:
            self._begin_elsewhere(self._others, self._ranks - self._elsewhere)

    def _begin_elsewhere(self, others: RayHosts, here: int) -> None:
        """Start the first `here` ranks, and stand-ins of all others. The first stand-in places the actors, and tells
        each other one through a pipe where its own is."""
        elsewhere = self._programs[here:]
        pipes = [os.pipe() for _ in elsewhere[1:]]
        writes = [write for _, write in pipes]
        finds = [partial(others.place, writes), *(partial(placed, read) for read, _ in pipes)]
        programs = [standing_in(self._name, *each) for each in zip(elsewhere, finds, strict=True)]
        self._programs = [*self._programs[:here], *programs]
        self._files = [*([()] * here), writes, *([read] for read, _ in pipes)]
        try:
            super()._begin()
        finally:
            for file in itertools.chain.from_iterable(pipes):
                os.close(file)

    def _makes(self) -> list[TrainerFactory]:
        """The factory of each rank. On one host they meet in a new file, which has no name, so that it leaves nothing
        behind."""
        others, here = self._others, self._ranks - self._elsewhere
        if others is not None:
            meeting = others.meeting()
        else:
            self._meeting = os.fdopen(os.memfd_create("tinker-local-ranks", os.MFD_CLOEXEC), "rb")
            meeting = f"/proc/{os.getpid()}/fd/{self._meeting.fileno()}"
        hosts = [
            0 if others is None or rank < here else 1 + (rank - here) // others.ranks for rank in range(self._ranks)
        ]
        return [partial(self._make, Seat(rank, self._ranks, meeting, host)) for rank, host in enumerate(hosts)]

    def _connect(self, group: ProcessGroup) -> None:
        self._calls = Calls(group, image_bytes=self._image_bytes)

    def _disconnect(self) -> None:
        self._calls.close()

    def load(self) -> None:
        """Wait until the trainer is loaded. If its factory raises, end the process and raise the same error. The first
        time it may take as long as it takes, and later ten times that."""
        told = self._load(self._calls)
        assert isinstance(told, Loaded)
        self.vocab_size = told.vocab_size
        self.max_context_length = told.max_context_length
        self.trains = told.trains
        self.routed = told.routed
        self._adapter_bytes = told.adapter_bytes
        self.stages = told.stages

    def restart(self) -> None:
        """Start a new process after the last one has ended; `load` is next. It has no adapters."""
        self._images_encoded = self.images_encoded
        super().restart()

    @property
    def images_encoded(self) -> int:
        """Images that had passed the vision tower when the last call ended, of all processes so far."""
        return self._images_encoded + sum(cast(int, state.get("images_encoded", 0)) for state in self._calls.states)

    @property
    def cached_bytes(self) -> int:
        """When the last call ended, of all ranks."""
        return sum(cast(int, state.get("cached_bytes", 0)) for state in self._calls.states)

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        """The size that the trainer reported when it was loaded, so that this does not wait for a running call.

        Sizes between two ranks are interpolated: an adapter's matrices are [rank, in] and [out, rank].
        """
        key = optimizer, config.train_unembed, config.train_mlp, config.train_attn
        # A text model has no sizes with vision; its trainer refuses such an adapter when it is to make it.
        sizes = self._adapter_bytes[*key, config.train_vision] or self._adapter_bytes[*key, False]
        if not sizes:  # nothing would be trained; the trainer raises the error
            return cast(int, self._call("adapter_bytes", config, optimizer))
        largest = max(sizes)
        if config.rank > largest:
            return sizes[largest] * config.rank // largest
        return round(float(np.interp(config.rank, list(sizes), list(sizes.values()))))

    def check_weights(self) -> tuple[int, str]:
        # It reads what loading read, and nothing may end because it is slow.
        matrices, changed = cast(tuple[int, str], self._calls.call(self._load_limit, "check_weights"))
        return matrices, changed

    def create_adapter(self, adapter_id: str, config: LoraConfig, optimizer: str = "adamw") -> None:
        self._call("create_adapter", adapter_id, config, optimizer)

    def load_adapter(self, adapter_id: str, state: AdapterState) -> None:
        self._call("load_adapter", adapter_id, state)

    def remove_adapter(self, adapter_id: str) -> None:
        self._call("remove_adapter", adapter_id)

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        return cast(
            list[TrainResult | ApiError],
            self._call("forward_backward", work, positions=sum(d.input.length for w in work for d in w.data)),
        )

    def discard_gradients(self, adapter_id: str) -> None:
        self._call("discard_gradients", adapter_id)

    def optim_step(self, adapter_id: str, params: Frozen) -> dict[str, float]:
        return cast(dict[str, float], self._call("optim_step", adapter_id, params))

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """The arrays are in memory that the process has handed over; it is freed with the last of them."""
        return cast(AdapterState, self._read("capture", adapter_id, optimizer=optimizer, dtype=dtype))

    def copy_adapter(self, adapter_id: str, copy_id: str) -> AdapterLayout:
        return cast(AdapterLayout, self._read("copy_adapter", adapter_id, copy_id))

    def read_adapter(self, adapter_id: str, vector: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """As for `capture`, the array is in memory that the process has handed over."""
        return cast(npt.NDArray[np.float32], self._read("read_adapter", adapter_id, vector, start, stop))

    def export(self, adapter_id: str) -> AdapterState:
        """As for `capture`, the arrays are in memory that the process has handed over."""
        return cast(AdapterState, self._read("export", adapter_id))

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> npt.NDArray[np.float32]:
        positions = sum(each.length for each in inputs)
        return cast(
            npt.NDArray[np.float32], self._call("logprobs", adapter_id, *inputs, nudge=nudge, positions=positions)
        )

    def replayed(self, inputs: Sequence[RenderedInput], routes: Sequence[Routes], nudge: int = 0) -> Replayed:
        positions = sum(each.length for each in inputs)
        return cast(Replayed, self._call("replayed", inputs, routes, nudge=nudge, positions=positions))

    def rotations(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        return cast(Rotations, self._read("rotations", layers, positions))

    def module_outputs(self, input: RenderedInput) -> ModuleOutputs:
        return cast(ModuleOutputs, self._call("module_outputs", input))

    def release_memory(self) -> None:
        self._call("release_memory")

    def close(self) -> None:
        """End the process within seconds, a running call with it. It does not start again."""
        self.end()

    def _read(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calls.call_first(self._timeout, method, *args, **kwargs)

    def _call(self, method: str, *args: Any, positions: int = 0, **kwargs: Any) -> Any:
        seconds = self._timeout + positions * SECONDS_PER_POSITION
        return self._calls.call(seconds, method, *args, **kwargs)
