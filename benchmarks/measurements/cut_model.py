"""Writes a random model in a real shape with fewer layers: `python -m measurements.cut_model SCALE SHAPE COUNT OUT`."""

import dataclasses
import sys
from pathlib import Path

from harness.model_shapes import SHAPES, Shape
from harness.scale import SCALES

from measurements.one_family import write_model


def cut(shape: Shape, count: int) -> Shape:
    """`shape` with its first `count` layers."""
    settings = shape.settings | {"num_hidden_layers": count}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][:count]
    return dataclasses.replace(shape, settings=settings)


def main(scale: str, name: str, layers: str, out: str) -> None:
    write_model(SCALES[scale], cut(SHAPES[name], int(layers)), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
