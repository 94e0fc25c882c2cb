"""The ranks of an engine that do what rank 0 says (`rank_leader.py`)."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.sampling.process_sampler import SamplerSeat
from tinker_local.backend.spare_memory import give_back_at_rest
from tinker_local.backend.vllm_engine import sleep_mode
from tinker_local.backend.vllm_engine.build_engine import EngineOptions, build_engine
from tinker_local.backend.vllm_engine.compat_vllm import draw_of, lora_worker, masks_of, runs_on_cpu
from tinker_local.backend.vllm_engine.engine_positions import engine_rotations
from tinker_local.backend.vllm_engine.moved_sequences import compute_again
from tinker_local.backend.vllm_engine.patches import EngineEvents
from tinker_local.backend.vllm_engine.rank_leader import Call, Prepare, Told, fingerprint, join, link
from tinker_local.backend.vllm_engine.vllm_adapters import VLLMAdapters
from tinker_local.types import InternalError


class Follower:
    """A rank above 0. Builds the engine when all ranks do; `follow` runs on the same thread, as CUDA's current device
    belongs to it."""

    def __init__(self, options: EngineOptions, seat: SamplerSeat) -> None:
        self._seat = seat
        self._spare_bytes = options.spare_bytes
        (descriptor,) = seat.links
        self._link = link(descriptor)
        self._adapters = VLLMAdapters(options.max_rank)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="adapters", initializer=self._use_device)
        self._prepared: dict[int, tuple[str, Future[Any]]] = {}
        self._waiting: deque[Told] = deque()
        self._targets: dict[int, str] = {}  # of weights that move: the name of the version in their slot
        self._ended = 0
        join(seat)
        self._engine = build_engine(options, EngineEvents(load_adapter=self._load))
        self._adapters.attach(self._engine)

    def _use_device(self) -> None:
        """Page-locked memory belongs to a device."""
        if not runs_on_cpu():
            import torch

            torch.cuda.set_device(self._seat.rank)

    def follow(self) -> None:
        """Do what rank 0 does. Raises what an engine raises, EOFError if rank 0 has ended, and InternalError if this
        rank has other results."""
        while True:
            told = self._waiting.popleft() if self._waiting else self._next()
            if told is None:
                continue
            *before, last = told.calls
            for call in before:
                self._do(call)
            for number in told.unneeded:  # the calls before needed them, perhaps; the last one does not
                self._prepared.pop(number, None)
            self._do(last)

    def _do(self, call: Call) -> None:
        name, args, kwargs = call
        own = getattr(self, f"_{name}", None)
        (own or getattr(self._engine, name))(*args, **kwargs)

    def _next(self) -> Told | None:
        """The next calls; None after a message about something else."""
        message = self._link.receive()
        if isinstance(message, Told):
            return message
        assert isinstance(message, Prepare)
        content = message.content
        version = replace(message.version, unwritten=lambda: content)
        making = self._threads.submit(self._adapters.make, version, lora_worker(self._engine))
        self._prepared[message.number] = (version.name, making)
        return None

    def _load(self, request: Any) -> Any:
        """What rank 0 has prepared, or prepares now, for a `LoRARequest`.

        It stays prepared: vLLM's caches drop adapters in the order of sets of names, which differs between processes,
        so this rank may need again what rank 0 still has.
        """
        if request.load_inplace:
            self._targets[request.lora_int_id] = request.lora_name
        wanted = self._targets.get(request.lora_int_id, request.lora_name)
        while True:
            made = [making for name, making in reversed(self._prepared.values()) if name == wanted]
            worked = [making for making in made if making.exception() is None]
            if made:
                lora = (worked or made)[0].result()
                lora.id = request.lora_int_id
                return lora
            told = self._next()
            if told is not None:
                self._waiting.append(told)

    def _seed(self, seed: int) -> None:
        draw_of(self._engine).seed(seed)

    def _step(self, ended: int, masks: Any) -> None:
        """`ended`: the fingerprint of rank 0's last step. `masks`: what sequences under a grammar may say next."""
        if ended != self._ended:
            raise InternalError(f"rank {self._seat.rank} of the sampler drew other tokens than rank 0")
        masks_of(self._engine).hear(masks)
        self._ended = fingerprint(self._engine.step())

    def _compute_again(self, request_ids: Sequence[str], number: int) -> None:
        compute_again(self._engine, request_ids, number)

    def _rest(self) -> None:
        give_back_at_rest(self._spare_bytes)

    def _rotate(self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> None:
        engine_rotations(self._engine, layers, positions)
        self._link.send(None)

    def _put_to_sleep(self) -> None:
        sleep_mode.put_to_sleep(self._engine)
        self._link.send(None)

    def _wake(self) -> None:
        sleep_mode.wake(self._engine)
        self._link.send(None)
