"""Engines that fail while files of certain names lie in the folder `CHAOS_FAULTS`, and say in which process they are.

Their processes import this file.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

Engine = TypeVar("Engine")


def on(fault: str) -> bool:
    """Whether the fault happens now, which is then noted in a file beside those of the faults."""
    found = (Path(os.environ["CHAOS_FAULTS"]) / fault).exists()
    if found:
        Path(os.environ["CHAOS_FAULTS"]).with_name(f"{fault}.hit").touch()
    return found


def fail(engine: str) -> None:
    """As the faults of `engine` say: an unexpected error, no memory, or no end."""
    if on(f"{engine}-raises"):
        raise RuntimeError("injected by the chaos run")
    if on(f"{engine}-lacks-memory"):
        import torch

        raise torch.OutOfMemoryError("injected by the chaos run")
    while on(f"{engine}-hangs"):
        time.sleep(0.05)


def noted(name: str, make: Callable[[], Engine]) -> Engine:
    """What `make` makes; the id of this process is then in the file `name` beside the faults."""
    engine = make()
    note = Path(os.environ["CHAOS_FAULTS"]).with_name(name)
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    return engine


def breakable_trainer(make: Callable[[], Any]) -> Any:
    """A trainer that fails in the middle of a pass, where it computes the loss."""
    from tinker_local.backend.training.losses import LOSSES

    loss = LOSSES["cross_entropy"]

    def terms(*arguments: Any) -> Any:
        fail("trainer")
        return loss.terms(*arguments)

    LOSSES["cross_entropy"] = replace(loss, terms=terms)
    return noted("trainer", make)


def breakable_sampler(make: Callable[[], Any]) -> Any:
    """A sampler whose requests fail; a hang is one of its process's event loop."""
    sampler = noted("sampler", make)
    sample = sampler.sample

    async def sample_or_fail(work: Any) -> Any:
        fail("sampler")
        return await sample(work)

    sampler.sample = sample_or_fail
    return sampler


def breakable_vllm(make: Callable[[], Any]) -> Any:
    """The same, and vLLM can fail in a step: where it runs the model, with requests of all users in the batch."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute_model = GPUModelRunner.execute_model

    def execute_or_fail(*arguments: Any, **named: Any) -> Any:
        fail("vllm")
        return execute_model(*arguments, **named)

    GPUModelRunner.execute_model = execute_or_fail
    return breakable_sampler(make)
