"""One run of `compare.py`: `python -m measurements.rate SCALE MODELS NAME` prints a line with tokens/s."""

import os
import sys
from pathlib import Path

from harness import timing, workloads
from harness.lines import Line
from harness.scale import SCALES

from measurements.training import make_trainer, text_datum, train_step, work

STEPS = 5


def main(scale_name: str, models: str, name: str) -> None:
    from tinker_local.types import LoraConfig

    scale = SCALES[scale_name]
    trainer = make_trainer(scale, Path(models) / "text")
    trainer.create_adapter("run", LoraConfig(rank=scale.rank, train_unembed=False))
    data = workloads.ragged_sequences(scale)
    works = [work("run", [text_datum(sequence) for sequence in data])]
    seconds = timing.median_seconds(lambda: train_step(trainer, works), scale, repeats=STEPS)
    import torch.distributed

    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    note = "a process group of torch.distributed" if joined else "no process group"
    Line(name, sum(map(len, data)) / seconds, "tokens/s", seconds, timing.peak_gib(), note).emit()
    sys.stdout.flush()
    os._exit(0)  # as in __main__.py


if __name__ == "__main__":
    main(*sys.argv[1:])
