"""Writes the random models of a run: `python -m measurements.models SCALE FOLDER KIND…` (text, vl, 32b)."""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from harness.scale import SCALES, TEXT_32B, Scale
from random_model import write_random_model


def write_missing(scale: Scale, folder: Path, kinds: Iterable[str]) -> None:
    """Write the `kinds` that `folder` lacks, each into a folder of its name."""
    for kind in sorted(kinds):
        out = folder / kind
        if (out / COMPLETE).exists():
            continue
        shutil.rmtree(out, ignore_errors=True)
        text = TEXT_32B if kind == "32b" and scale.name == "full" else scale.text
        write_random_model(out, text, scale.vision if kind == "vl" else None)
        (out / COMPLETE).touch()


COMPLETE = "complete"
"""A file that marks a model as complete."""


if __name__ == "__main__":
    write_missing(SCALES[sys.argv[1]], Path(sys.argv[2]), sys.argv[3:])
