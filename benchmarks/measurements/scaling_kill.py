"""Kill a trainer rank in a step: python -m measurements.scaling_kill SCALE MODEL RANKS TOKENS"""

import functools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness import workloads
from harness.lines import Line
from harness.scale import SCALES, Scale

from measurements.training import text_datum, work

KILLS = 3
SLOWEST = 10.0
"""Seconds until the error."""


def kill(trainer: Any, works: Any, rank: int, wait: float) -> float:
    """Kill `rank`, `wait` seconds after a call has begun; the seconds until that call fails."""
    ended: list[tuple[float, BaseException | None]] = []

    def call() -> None:
        try:
            trainer.forward_backward(works)
            ended.append((time.monotonic(), None))
        except Exception as error:
            ended.append((time.monotonic(), error))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(wait)
    pids = trainer.pids
    began = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    thread.join()
    (at, error), *_ = ended
    if error is None or "SIGKILL" not in str(error):
        raise RuntimeError(f"the call should have failed with its process, but ended with {error!r}")
    if left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        raise RuntimeError(f"processes {left} are still there after the error")
    return at - began


def main(scale: Scale, model: str, ranks: int, tokens: int) -> None:
    """Print the line `kill`."""
    from tinker_local.backend.models.placement import environment_of
    from tinker_local.backend.training.process_trainer import ProcessTrainer
    from tinker_local.backend.training.run.worker import trainer_of_rank
    from tinker_local.backend.training.trainer_config import TrainerConfig
    from tinker_local.types import LoraConfig

    make = functools.partial(
        trainer_of_rank, TrainerConfig(model, name="bench", micro_batch_tokens=scale.micro_batch_tokens)
    )
    trainer = ProcessTrainer(make, ranks=ranks, environments=[environment_of([rank]) for rank in range(ranks)])
    length = min(scale.longest, tokens)
    works = [work("one", [text_datum(each) for each in workloads.sequences(scale, [length] * (tokens // length))])]

    def ready() -> float:
        """Load, and run a step; the seconds of another one."""
        trainer.load()
        trainer.create_adapter("one", LoraConfig(rank=scale.rank, seed=1, train_unembed=False))
        for _ in range(2):
            start = time.monotonic()
            trainer.forward_backward(works)
        return time.monotonic() - start

    step, generator = ready(), random.Random(15)
    seconds, again = [], []
    for number in range(KILLS):
        seconds.append(kill(trainer, works, (ranks - 1 - number) % ranks, generator.uniform(0.1, 0.4) * step))
        began = time.monotonic()
        trainer.restart()
        ready()
        again.append(time.monotonic() - began)
    trainer.close()
    note = f"the slowest of {KILLS} kills of a rank in a step; new ranks have trained after "
    note += ", ".join(f"{each:.0f} s" for each in again)
    Line("kill.error", max(seconds), "s", note=note).emit()
    if max(seconds) > SLOWEST:
        raise RuntimeError(f"the error took {max(seconds):.1f} s")


if __name__ == "__main__":
    main(SCALES[sys.argv[1]], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
