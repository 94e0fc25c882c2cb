"""Trainers for the tests of processes. The processes import this file, so it contains no tests."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterDType, AdapterState
from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeTrainer
from tinker_local.backend.process.child import NO_MEMORY
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.trainer import Seat, TrainResult, TrainWork
from tinker_local.types import ApiError, LoraConfig, UnsupportedError


def fake(name: str = "fake/bigram") -> FakeTrainer:
    return FakeTrainer(FakeModel(name))


def rank_that_cannot_load(seat: Seat) -> FakeTrainer:
    """Rank 1 fails, and the others wait for it as in a rendezvous."""
    if seat.rank == 1:
        raise UnsupportedError("model_type 'gpt': not supported")
    time.sleep(600)
    return fake()


class NumberedTrainer(FakeTrainer):
    """Number 0 of a group fails where others wait for it. In another call, number 0 answers and then number 1 fails."""

    def __init__(self, number: int) -> None:
        super().__init__(FakeModel("fake/bigram"))
        self._number = number

    def release_memory(self) -> None:
        if self._number == 0:
            raise ValueError("alone")
        time.sleep(600)

    def remove_adapter(self, adapter_id: str) -> None:
        time.sleep(self._number)
        if self._number == 1:
            raise ValueError("alone")
        if self._number == 2:
            time.sleep(600)


def numbered(number: int) -> FakeTrainer:
    return NumberedTrainer(number)


def described(_: FakeTrainer) -> str:
    return "loaded"


class HangingTrainer(FakeTrainer):
    """Hangs on importance sampling."""

    def forward_backward(self, work: Sequence[TrainWork]) -> list[TrainResult | ApiError]:
        if any(item.loss_fn == "importance_sampling" for item in work):
            time.sleep(600)
        return super().forward_backward(work)


def hanging() -> FakeTrainer:
    return HangingTrainer(FakeModel("fake/bigram"))


def hanging_rank(seat: Seat) -> FakeTrainer:
    return HangingTrainer(FakeModel("fake/bigram"))


def short_of_memory() -> FakeTrainer:
    """A trainer whose memory holds 40 positions."""
    return FakeTrainer(FakeModel("fake/bigram"), FakeMemory(100, 60))


class StubbornError(Exception):
    """Can be neither pickled nor created from its message."""

    def __init__(self, what: str, lock: Any) -> None:
        super().__init__(what)
        self.lock = lock


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class OddTrainer(FakeTrainer):
    """`discard_gradients` does what its argument says instead of discarding anything."""

    def discard_gradients(self, adapter_id: str) -> None:
        deed, _, argument = adapter_id.partition(" ")
        getattr(self, f"do_{deed}")(argument)

    def do_sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def do_fill(self, mib: str) -> None:
        bytearray(b"x") * (int(mib) << 20)

    def do_exit(self, code: str) -> None:
        os._exit(int(code))

    def do_stubborn(self, what: str) -> None:
        raise StubbornError(what, threading.Lock())

    def do_mute(self, _: str) -> None:
        raise MuteError

    def do_lose_device(self, _: str) -> None:
        import torch

        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def do_lack_locked_memory(self, _: str) -> None:
        import torch

        error: Any = torch.AcceleratorError("CUDA error: out of memory")
        error.error_code = NO_MEMORY
        raise error

    def do_break_cuda(self, _: str) -> None:
        import torch

        torch.zeros(1, device="cuda")[torch.tensor([10**6], device="cuda")].cpu()

    def do_log(self, text: str) -> None:
        logging.getLogger("tinker_local.backend.training.run.worker").warning(text)

    def do_print(self, text: str) -> None:
        print(text, flush=True)

    def capture(self, adapter_id: str, *, optimizer: bool, dtype: AdapterDType = "float32") -> AdapterState:
        """`adapter_id` is the number of float32 values, in a large and in small tensors, one of them empty."""
        values = np.arange(int(adapter_id), dtype=np.float32)
        tensors = {"all": values, "odd": values[1::2], "three": values[:3], "none": values[:0], "square": np.eye(3).T}
        return AdapterState("fake", LoraConfig(), ["x"], tensors)

    def logprobs(self, adapter_id: str | None, *inputs: RenderedInput, nudge: int = 0) -> npt.NDArray[np.float32]:
        """The count and the sum of each image's pixel values as received."""
        pixels = [placement.image.pixel_values for each in inputs for placement in each.images]
        return np.array([[p.size, p.sum()] for p in pixels], np.float32)


class SeeingTrainer(FakeTrainer):
    """Its adapters of the vision tower take 1000 bytes for each rank."""

    def adapter_bytes(self, config: LoraConfig, optimizer: str = "adamw") -> int:
        plain = config.model_copy(update={"train_vision": False})
        return super().adapter_bytes(plain, optimizer) + 1000 * config.rank * config.train_vision


def seeing() -> FakeTrainer:
    return SeeingTrainer(FakeModel("fake/bigram"))


def odd() -> OddTrainer:
    return OddTrainer(FakeModel("fake/bigram"))


def no_such_model() -> FakeTrainer:
    raise UnsupportedError("model_type 'gpt': not supported")


def no_file() -> FakeTrainer:
    raise FileNotFoundError(2, "No such file or directory", "/nowhere/config.json")


def stubborn() -> FakeTrainer:
    raise StubbornError("weights are torn", threading.Lock())


def exits() -> FakeTrainer:
    os._exit(3)


def main() -> None:
    """Start an `OddTrainer` in a process, print its id, and wait inside or outside a call until a test kills this."""
    import process_trainers  # type: ignore[import-not-found]  # by the name under which the process finds it
    from tinker_local.backend.training.process_trainer import ProcessTrainer

    trainer = ProcessTrainer(process_trainers.odd)
    trainer.load()
    print(*trainer.pids, flush=True)
    if sys.argv[1] == "busy":
        trainer.discard_gradients("sleep 600")
    else:
        socket.socket().bind(("127.0.0.1", 0))
        time.sleep(600)


if __name__ == "__main__":
    main()
