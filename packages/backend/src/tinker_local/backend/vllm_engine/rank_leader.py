"""One engine in several processes on tensor parallel ranks, each with a share of every layer.

Each rank runs a whole vLLM engine with a scheduler (`external_launcher`). They compute the same steps if all get the
same requests between the same steps. Rank 0 is the sampler: it tells every call of its engine to the others
(`rank_follower.py`), in order and before the step that depends on it. All ranks draw the same tokens, because their
logits are equal to the bit and so are the states of their random generators.

A rank that fails in a step leaves the others waiting for its part, so its process ends, and with it the whole group.
"""

import functools
import itertools
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion, written
from tinker_local.backend.process.channel import Channel
from tinker_local.backend.sampling.process_sampler import SamplerSeat
from tinker_local.backend.vllm_engine.compat_vllm import draw_of, masks_of, runs_on_cpu
from tinker_local.backend.vllm_engine.patches import RANKS_NAME

log = logging.getLogger(__name__)

_FOREVER = timedelta(days=1)
"""The server ends processes that take too long."""

_FAILED = 1
"""Exit code of a rank that failed."""

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Prepare:
    """An adapter that will be needed: make it ready under `number`. `content` None: its folder can be read."""

    number: int
    version: AdapterVersion
    content: AdapterState | None


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Calls in order, at least one. `unneeded`: numbers of what was prepared that the last call cannot need: rank 0
    has dropped it."""

    calls: Sequence[Call]
    unneeded: Sequence[int]


def join(seat: SamplerSeat) -> None:
    """Wait for all other ranks, and let vLLM use the connections to them. Ranks count the GPUs that they see."""
    import torch
    import torch.distributed as dist

    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"})
    os.environ.update({"RANK": str(seat.rank), "LOCAL_RANK": str(seat.rank), RANKS_NAME: seat.name})
    device = None
    if not runs_on_cpu():
        device = torch.device("cuda", seat.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        init_method=f"file://{seat.meeting}",
        rank=seat.rank,
        world_size=seat.size,
        timeout=_FOREVER,
        device_id=device,
    )


def link(descriptor: int) -> Channel:
    """The channel over a socket of a seat. It ends with this process's parent, too, as all ranks do."""
    return Channel(socket.socket(fileno=descriptor), os.getppid())


def fingerprint(outputs: Sequence[Any]) -> int:
    """A number that differs if the tokens of sequences that ended in a step do."""
    ended = [output for output in outputs if output.finished]
    return hash(tuple(tuple(part.token_ids) for output in ended for part in output.outputs))


class Leader:
    """Rank 0's side. Call `join`, build the engine, and `lead` it; all on the engine's thread."""

    def __init__(self, seat: SamplerSeat) -> None:
        self._seat = seat
        self._links = [link(descriptor) for descriptor in seat.links]
        self._numbers = itertools.count()
        self._untold: list[Call] = []
        self._unneeded: deque[int] = deque()  # any thread adds to it
        self._ended = 0
        self._masks: Any = None

    def join(self) -> None:
        """See `join`. A second engine cannot join: the group ends instead."""
        join(self._seat)

    def lead(self, engine: Any) -> None:
        """From now on, others do what `engine` does."""
        seed = int.from_bytes(os.urandom(7), "little")
        draw_of(engine).seed(seed)
        self._masks = masks_of(engine)
        self._tell("seed", seed)
        for name in ("add_request", "abort_request", "add_lora", "remove_lora", "compute_again"):
            setattr(engine, name, functools.partial(self._tell_after, name, getattr(engine, name)))
        engine.step = functools.partial(self._step, engine.step)

    def together(self, name: str, call: Callable[[], None], *args: Any) -> None:
        """Do `call`, which is `name` with `args` to the others, on all ranks; return when all have done it."""
        self._tell(name, *args)
        try:
            call()
        except Exception:
            log.exception("%s failed on rank 0 of the sampler, which ends", name)
            os._exit(_FAILED)
        for other in self._links:
            other.receive()

    def rest(self) -> None:
        """Nothing is sampled."""
        self._tell("rest")

    @contextmanager
    def preparing(self, version: AdapterVersion) -> Iterator["Preparing"]:
        """Have the others make an adapter ready while this rank does; any thread may call it."""
        number = next(self._numbers)
        prepare = Prepare(number, replace(version, unwritten=written), version.unwritten())
        try:
            for other in self._links:
                other.send(prepare)
            yield Preparing(number, self._unneeded)
        except BaseException:
            self._unneeded.append(number)
            raise

    def _tell_after(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What is refused here is not told; the others hear of the rest with the next step."""
        result = call(*args, **kwargs)
        self._untold.append((name, args, kwargs))
        return result

    def _step(self, step: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        self._tell("step", self._ended, self._masks.tell())
        try:
            outputs = step()
        except Exception:
            log.exception("a step failed on rank 0 of the sampler, which ends")
            os._exit(_FAILED)
        self._ended = fingerprint(outputs)
        return outputs

    def _tell(self, name: str, *args: Any) -> None:
        calls, self._untold = [*self._untold, (name, args, {})], []
        unneeded = [self._unneeded.popleft() for _ in range(len(self._unneeded))]
        told = Told(calls, unneeded)
        try:
            for other in self._links:
                other.send(told)
        except Exception:  # as when memory is short: some know more than others now, and no second engine can join
            log.exception("%s could not be told to the other ranks of the sampler, which ends", name)
            os._exit(_FAILED)


class Preparing:
    """An adapter that all ranks make ready."""

    def __init__(self, number: int, unneeded: deque[int]) -> None:
        self._number = number
        self._unneeded = unneeded

    def kept_for(self, lora: Any) -> Any:
        """Return `lora`. The others keep theirs until this one is gone."""
        weakref.finalize(lora, self._unneeded.append, self._number)
        return lora
