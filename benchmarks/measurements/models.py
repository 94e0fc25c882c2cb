"""Writes the random models of a run: `python -m measurements.models SCALE FOLDER KIND…` (text, vl)."""

import sys
from pathlib import Path

from harness.scale import SCALES
from random_model import write_random_model


def main() -> None:
    scale, folder, kinds = SCALES[sys.argv[1]], Path(sys.argv[2]), sys.argv[3:]
    for kind in kinds:
        write_random_model(folder / kind, scale.text, scale.vision if kind == "vl" else None)
        (folder / kind / "complete").touch()


if __name__ == "__main__":
    main()
