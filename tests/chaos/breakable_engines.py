"""Engines that fail while files of certain names lie in the folder `CHAOS_FAULTS`, and say in which processes they are.

Their processes import this file.
"""

import importlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Engine = TypeVar("Engine")


def on(fault: str, number: int = 0) -> bool:
    """Whether the fault happens now in process `number` of an engine, which is then noted in a file beside those of the
    faults. A file says in which, or is empty if it happens in all."""
    try:
        where = (Path(os.environ["CHAOS_FAULTS"]) / fault).read_text()
    except FileNotFoundError:
        return False
    if where not in ("", str(number)):
        return False
    Path(os.environ["CHAOS_FAULTS"]).with_name(f"{fault}.hit").touch()
    return True


def fail(engine: str, number: int = 0) -> None:
    """As the faults of `engine` say: an unexpected error, no memory, or no end."""
    if on(f"{engine}-raises", number):
        raise RuntimeError("injected by the chaos run")
    if on(f"{engine}-lacks-memory", number):
        import torch

        raise torch.OutOfMemoryError("injected by the chaos run")
    while on(f"{engine}-hangs", number):
        time.sleep(0.05)


def noted(engine_name: str, number: int, make: Callable[[], Engine]) -> Engine:
    """What `make` makes; the id of this process is then in the file `engine_name`-`number` beside the faults."""
    engine = make()
    note = Path(os.environ["CHAOS_FAULTS"]).with_name(f"{engine_name}-{number}")
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    return engine


def breakable_trainer(make: Callable[..., Any], *seat: Any) -> Any:
    """A trainer that fails in the middle of a pass, where it computes the loss; with a `Seat`, one of its ranks."""
    from tinker_local.backend.training.losses import LOSSES

    loss, rank = LOSSES["cross_entropy"], seat[0].rank if seat else 0

    def terms(*arguments: Any) -> Any:
        fail("trainer", rank)
        return loss.terms(*arguments)

    LOSSES["cross_entropy"] = replace(loss, terms=terms)
    return noted("trainer", rank, partial(make, *seat))


def breakable_sampler(make: Callable[..., Any], first: int, *seat: Any) -> Any:
    """A sampler whose requests fail, and whose process ends while weights move; a hang is one of its process's event
    loop. Its processes have numbers from `first` on: one, or with a `SamplerSeat` those of its ranks, the first of
    which gets the requests."""
    rank = seat[0].rank if seat else 0
    sampler = noted("sampler", first + rank, partial(make, *seat))
    if rank:
        return sampler
    sample, publish = sampler.sample, sampler.publish

    async def sample_or_fail(work: Any) -> Any:
        fail("sampler", first)
        return await sample(work)

    async def publish_or_die(*arguments: Any) -> None:
        if on("sampler-dies-in-switch", first):  # before it, in the middle, or just after it
            threading.Timer(random.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
        await publish(*arguments)

    sampler.sample, sampler.publish = sample_or_fail, publish_or_die
    return sampler


def breakable_vllm(make: Callable[..., Any], first: int, *seat: Any) -> Any:
    """The same, and vLLM can fail in a step: where it runs the model, with requests of all users in the batch."""
    from tinker_local.backend.vllm_engine.build_engine import prepare_environment
    from tinker_local.backend.vllm_engine.compat_vllm import uses_v2

    prepare_environment()
    name = "gpu.model_runner" if uses_v2() else "gpu_model_runner"
    runner: Any = importlib.import_module(f"vllm.v1.worker.{name}").GPUModelRunner
    execute_model = runner.execute_model
    number = first + (seat[0].rank if seat else 0)

    def execute_or_fail(*arguments: Any, **named: Any) -> Any:
        fail("vllm", number)
        return execute_model(*arguments, **named)

    runner.execute_model = execute_or_fail
    return breakable_sampler(make, first, *seat)
