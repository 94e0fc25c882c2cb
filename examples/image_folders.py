"""Labelled images for vlm_classifier.py: handwritten digits, or a folder that holds a folder of images per class.

    FOLDER/<class name>/*.png          a share of each class is held out, always the same for the same seed
    FOLDER/train/<class name>/*.png    the layout of torchvision's ImageFolder: FOLDER/train is trained on, and
    FOLDER/val/<class name>/*.png      FOLDER/validation, val or test (the first that exists) is held out

Files may be in deeper folders (cat/summer/1.jpg is a cat). Hidden files are skipped, and so are files of other types,
which are counted by their suffix.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from rich.progress import track
from tinker_local.types import as_rgb, open_picture

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
HELD_OUT_FOLDERS = ("validation", "val", "test")
DIGITS_HELD_OUT = 297
MOST_PIXELS = 64 * 2**20  # of a picture that is sent as it is; the server's default
MOST_NAMED = 20  # pictures that cannot be read
WIDEST = 200  # ratio of length to width; image processors of vision-language models refuse more


class Example(NamedTuple):
    """The source of an image (a file, or pixels) and its class."""

    source: Any
    name: str


@dataclass(frozen=True)
class Dataset:
    """Images of known classes; `image(source, rng)` gives what the model sees, augmented if `rng` is given."""

    title: str
    classes: list[str]
    train: list[Example]
    held_out: list[Example]
    image: Callable[[Any, random.Random | None], PIL.Image.Image | Path]

    @property
    def chance(self) -> float:
        """Accuracy on the held-out images of always answering their most frequent class."""
        return max(Counter(example.name for example in self.held_out).values()) / len(self.held_out)


def shifted(image: np.ndarray, rng: random.Random) -> np.ndarray:
    """The 8x8 image, unchanged or shifted by one pixel, which keeps a digit readable."""
    moved = np.zeros_like(image)
    dy, dx = rng.choice([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])
    moved[max(dy, 0) : 8 + min(dy, 0), max(dx, 0) : 8 + min(dx, 0)] = image[
        max(-dy, 0) : 8 + min(-dy, 0), max(-dx, 0) : 8 + min(-dx, 0)
    ]
    return moved


def digits(side: int, fold: int | None = None) -> Dataset:
    """scikit-learn's 1,797 scanned digits of 8x8 pixels, enlarged to `side` pixels; the last 297 are held out.

    `fold` (0 to 4): hold out that fifth of the other 1,500 instead, and leave the last 297 alone.
    """
    from sklearn.datasets import load_digits

    if side < 8 or side % 8:
        raise ValueError(f"--side of the digits must be a multiple of 8, not {side}")

    def image(pixels: np.ndarray, rng: random.Random | None) -> PIL.Image.Image:
        values = np.clip((shifted(pixels, rng) if rng else pixels) * (255 / 16), 0, 255).astype(np.uint8)
        return PIL.Image.fromarray(np.repeat(np.repeat(values, side // 8, 0), side // 8, 1)).convert("RGB")

    data = load_digits()
    examples = [Example(pixels, str(label)) for pixels, label in zip(data.images, data.target, strict=True)]
    train, held_out = examples[:-DIGITS_HELD_OUT], examples[-DIGITS_HELD_OUT:]
    if fold is not None:
        size = len(train) // 5
        held_out = train[fold * size : (fold + 1) * size]
        train = train[: fold * size] + train[(fold + 1) * size :]
    return Dataset("handwritten digits", [str(digit) for digit in range(10)], train, held_out, image)


def open_image(path: Path) -> PIL.Image.Image:
    """The image as RGB, upright, with white behind it. Raises ValueError with the file's name if it cannot be read."""
    try:
        image = as_rgb(open_picture(path.read_bytes()))
    except Exception as error:  # PIL documents no closed set
        raise ValueError(f"{path}: no image that can be read: {error}; remove it, or repair it") from error
    if max(image.size) > WIDEST * min(image.size):
        raise ValueError(f"{path}: {image.width} x {image.height} pixels are too narrow for a vision-language model")
    return image


def check_image(path: Path, side: int | None) -> str | None:
    """Why the image cannot be trained on, as the server would say when it gets it, shrunk to `side`; None if it can."""
    try:
        image = open_image(path)
    except ValueError as error:
        return str(error)
    if side is None and image.width * image.height > MOST_PIXELS:
        size = f"{image.width} x {image.height} pixels"
        return f"{path}: {size} are more than a server takes ({MOST_PIXELS}); shrink it, or all of them (--side)"
    return None


def skipped(folder: Path) -> str:
    """How many files of other types there are by their suffix, as `3 .heic, 1 .gif`; empty if there are none."""
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    shown = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    others = Counter(file.suffix.lower() or "without a suffix" for file in shown)
    return ", ".join(f"{count} {suffix}" for suffix, count in others.most_common() if suffix not in SUFFIXES)


def image_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of each folder in `folder`, sorted; the folder's name is the class."""
    files: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            found = sorted(file for file in entry.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            hidden = {file for file in found if any(part.startswith(".") for part in file.relative_to(entry).parts)}
            files[entry.name] = [file for file in found if file not in hidden]
    return files


def split(files: dict[str, list[Path]], share: float, seed: int) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Split each class into training images and held-out images: `share` of it, at least one.

    The split of a class depends only on the seed and its name, so adding or removing other classes does not change it.
    """
    train, held_out = {}, {}
    for name, paths in files.items():
        shuffled = random.Random(f"{seed}/{name}").sample(paths, len(paths))
        count = max(1, round(share * len(paths)))
        train[name], held_out[name] = shuffled[count:], shuffled[:count]
    return train, held_out


def read_folder(folder: Path, *, share: float, seed: int, side: int | None) -> Dataset:
    """The images of `folder`. Each is read once, so that all broken ones are named before training starts.

    share: the held-out part of each class, unless the folder has its own split. side: images are shrunk to this longest
    side, in pixels; None leaves them unchanged. Raises ValueError with what is wrong with the folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    parts = [folder / name for name in ("train", *HELD_OUT_FOLDERS) if (folder / name).is_dir()]
    if len(parts) > 1 and parts[0].name == "train":
        train, held_out = image_files(parts[0]), image_files(parts[1])
        layout = f"{parts[0]} and {parts[1]}"
    else:
        train, held_out = split(image_files(folder), share, seed)
        layout = f"{folder}"
    classes = sorted(train.keys() | held_out.keys())
    if len(classes) < 2:
        found = f"only {classes[0]!r}" if classes else "none"
        loose = sum(file.suffix.lower() in SUFFIXES for file in folder.iterdir())
        beside = f"; image files beside the folders: {loose}" if loose else ""
        raise ValueError(f"{layout}: at least two classes are needed, each a folder of images; found {found}{beside}")
    others = skipped(folder)
    for name in classes:
        counts = len(train.get(name, [])), len(held_out.get(name, []))
        if 0 in counts:
            raise ValueError(
                f"{layout}: class {name!r} has too few images ({' or '.join(sorted(SUFFIXES))}): "
                f"{counts[0]} to train on and {counts[1]} held out, and each must be at least 1"
                f"{f'; skipped in {folder}: {others}' if others else ''}"
            )
    if others:
        print(f"{folder}: skipped are {others}; read are {', '.join(sorted(SUFFIXES))}", file=sys.stderr)
    examples = [[Example(path, name) for name in classes for path in part[name]] for part in (train, held_out)]
    every = track([*examples[0], *examples[1]], description="reading images", transient=True)
    faults = [fault for example in every if (fault := check_image(example.source, side)) is not None]
    if faults:
        more = len(faults) - MOST_NAMED
        raise ValueError("\n".join([*faults[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]))

    def image(path: Path, _: random.Random | None) -> PIL.Image.Image | Path:
        if side is None:
            return path
        smaller = open_image(path)
        smaller.thumbnail((side, side))
        return smaller

    return Dataset(f"images in {folder.resolve().name}", classes, examples[0], examples[1], image)
