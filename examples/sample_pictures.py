"""Draw a folder of pictures to try vlm_classifier.py on: road signs, a folder for each kind.

    python examples/sample_pictures.py pictures             pictures/stop/000.png, ...: 60 of each of four kinds

Each sign has another size, place, angle and background. To use your own pictures, lay them out like these.
"""

import argparse
import math
import random
import sys
from pathlib import Path

import PIL.Image
import PIL.ImageDraw

SIDE = 96
"""Pixels."""


def corners(count: int, turn: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a regular polygon around the centre of a picture."""
    angles = [turn + 2 * math.pi * index / count for index in range(count)]
    return [(SIDE / 2 + radius * math.cos(angle), SIDE / 2 + radius * math.sin(angle)) for angle in angles]


def stop(draw: PIL.ImageDraw.ImageDraw, radius: float) -> None:
    draw.polygon(corners(8, math.pi / 8, radius), fill=(190, 20, 30), outline="white")
    draw.rectangle((SIDE / 2 - radius / 2, SIDE / 2 - 3, SIDE / 2 + radius / 2, SIDE / 2 + 3), fill="white")


def parking(draw: PIL.ImageDraw.ImageDraw, radius: float) -> None:
    draw.polygon(corners(4, math.pi / 4, radius), fill=(20, 70, 190), outline="white")
    draw.text((SIDE / 2, SIDE / 2), "P", fill="white", anchor="mm", font_size=radius)


def priority(draw: PIL.ImageDraw.ImageDraw, radius: float) -> None:
    draw.polygon(corners(4, 0, radius), fill="white", outline="black")
    draw.polygon(corners(4, 0, radius * 0.8), fill=(250, 200, 0))


def yield_(draw: PIL.ImageDraw.ImageDraw, radius: float) -> None:
    draw.polygon(corners(3, math.pi / 2, radius), fill=(200, 20, 30))
    draw.polygon(corners(3, math.pi / 2, radius * 0.65), fill="white")


KINDS = {"stop": stop, "parking": parking, "priority": priority, "yield": yield_}


def picture(kind: str, rng: random.Random) -> PIL.Image.Image:
    """One sign somewhere on a background of one colour."""
    sign = PIL.Image.new("RGBA", (SIDE, SIDE))
    KINDS[kind](PIL.ImageDraw.Draw(sign), SIDE / 2 * rng.uniform(0.55, 0.95))
    image = PIL.Image.new("RGB", (SIDE, SIDE), tuple(rng.randrange(90, 200) for _ in range(3)))
    sign = sign.rotate(rng.uniform(-12, 12))
    image.paste(sign, (rng.randrange(-8, 9), rng.randrange(-8, 9)), sign)
    return image


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--count", type=int, default=60, help="pictures of each kind; default: 60")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    if options.folder.exists():
        parser.exit(2, f"error: {options.folder} exists\n")
    for kind in KINDS:
        folder = options.folder / kind
        folder.mkdir(parents=True)
        for index in range(options.count):
            picture(kind, rng).save(folder / f"{index:03d}.png")
    print(f"{options.folder}: {options.count} pictures each of {', '.join(KINDS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
