"""The vision-language classifier: on digits and on folders of images, its curves, and what it says of wrong folders."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220)}


def classify(*arguments: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """The example, run as a user runs it."""
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "vlm_classifier.py"), "--model", "tiny/vision"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
    )


def run(server: Any, out: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Report and metrics of a run that succeeds and draws its curves."""
    done = classify("--base-url", server.url, "--out", str(out), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out accuracy" in done.stdout
    with Image.open(out / "curves.png") as curves:
        assert curves.format == "PNG"
        assert curves.width >= 1000
        assert len(curves.convert("RGB").getcolors(1 << 24)) > 100  # something is drawn
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "report.json").read_text()), metrics


@pytest.fixture
def image_folders(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module that reads folders."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("image_folders")


def write_image(path: Path, colour: tuple[int, int, int], seed: int = 0) -> Path:
    """A rectangle of `colour` on grey noise, of 40 to 160 pixels a side, in the format of the file's suffix."""
    rng = np.random.default_rng(seed)
    width, height = (int(n) for n in rng.integers(40, 161, 2))
    pixels = rng.integers(96, 160, (height, width, 1), dtype=np.uint8).repeat(3, 2)
    pixels[height // 8 : height * 7 // 8, width // 8 : width * 7 // 8] = colour
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_colours(folder: Path, count: int) -> Path:
    """`count` images for each colour, in all the formats, some of them in a folder in the class's folder."""
    formats = ("x/{}.png", "{}.jpg", "{}.JPEG", "{}.webp", "{}.bmp", "{}.png")
    for number, (name, colour) in enumerate(COLOURS.items()):
        for index in range(count):
            file = formats[index % len(formats)].format(index)
            write_image(folder / name / file, colour, seed=number * count + index)
    return folder


def names(examples: list[Any]) -> set[str]:
    return {example.name for example in examples}


def paths(examples: list[Any]) -> list[Path]:
    return [example.source for example in examples]


@pytest.mark.more
def test_classifier_of_digits_runs_and_keeps_its_curves(real_server: Any, tmp_path: Path) -> None:
    """A few steps only: what the demo reaches with all of them is the demo's own mark."""
    settings = ["--epochs", "0.1", "--batch-size", "16", "--eval-every", "4", "--eval-images", "40", "--warmup", "2"]
    report, metrics = run(real_server, tmp_path, *settings, "--learning-rate", "5e-3", "--shift")
    assert [row["step"] for row in metrics] == list(range(11))  # 0.1 of 94 batches, and before the first
    assert [row["step"] for row in metrics if "train_nll" in row] == list(range(1, 11))
    points = [row for row in metrics if "validation_nll" in row]
    assert [row["step"] for row in points] == [0, 4, 8, 10]
    assert points[0]["validation_nll"] == pytest.approx(report["base_nll"], rel=0.2)  # a part of the same images
    assert points[-1]["validation_nll"] == pytest.approx(report["nll"], rel=0.2)
    assert points[-1]["validation_nll"] < points[0]["validation_nll"] / 2
    assert all(0 <= row["validation_accuracy"] <= 1 for row in points)
    assert report["chance"] == pytest.approx(0.1, abs=0.02)
    assert (report["checkpoint"].split("/")[3], report["sampler"].split("/")[3]) == ("weights", "sampler_weights")
    pictures = sorted((tmp_path / "held_out").iterdir())
    assert len(pictures) == 12
    asked = classify("--base-url", real_server.url, "--ask", str(pictures[0]), "--sampler", report["sampler"])
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("\n") == 1


@pytest.mark.more
def test_classifier_learns_a_folder_of_images_per_class(real_server: Any, tmp_path: Path) -> None:
    folder = write_colours(tmp_path / "colours", 20)
    settings = ["--steps", "30", "--batch-size", "16", "--learning-rate", "5e-3", "--clip", "1", "--side", "64"]
    report, metrics = run(
        real_server, tmp_path / "out", "--data", str(folder), *settings, "--question", "Which of {classes}?"
    )
    assert metrics[-1]["step"] == 30
    assert report["accuracy"] >= 0.9
    assert report["blank_accuracy"] <= 0.5  # a black image has none of these colours
    assert report["chance"] == pytest.approx(1 / 3)
    first, last = metrics[0], metrics[-1]
    assert last["validation_accuracy"] == report["accuracy"]  # twelve images: the curve is made of all
    assert last["validation_nll"] < 0.5 < first["validation_nll"]


@pytest.mark.parametrize("train_nll", [0.01, 0.9, math.nan])
@pytest.mark.parametrize(("accuracy", "blank", "warned"), [(0.25, 0.25, True), (0.3, 0.4, True), (0.9, 0.3, False)])
def test_a_model_that_has_not_learned_to_look_is_said(
    accuracy: float, blank: float, warned: bool, train_nll: float, image_folders: Any, tmp_path: Path
) -> None:
    classifier = importlib.import_module("vlm_classifier")
    dataset = image_folders.read_folder(write_colours(tmp_path, 5), share=0.2, seed=0, side=None)
    shown = Console(record=True, width=100)
    options = argparse.Namespace(model="m", out=tmp_path, console=shown)
    numbers = {
        "base_accuracy": 0,
        "base_nll": 1,
        "nll": 1,
        "train_nll": train_nll,
        "train_images_per_second": 1,
        "sampled_images_per_second": 1,
    }
    paths = {"seconds": 1, "checkpoint": "", "sampler": ""}
    report = classifier.Report(accuracy=accuracy, blank_accuracy=blank, chance=dataset.chance, **numbers, **paths)
    classifier.show(report, dataset, options)
    said = " ".join(shown.export_text().split())
    assert ("has not learned to look" in said) == warned
    assert ("has learned its 12 training images by heart (NLL 0.010," in said) == (warned and train_nll == 0.01)
    assert ("train longer" in said) == (warned and train_nll != 0.01)


def test_classifier_says_what_is_wrong_with_a_folder_before_it_asks_a_server(tmp_path: Path) -> None:
    broken = write_colours(tmp_path, 2) / "blue" / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff no picture")
    done = classify("--base-url", "http://127.0.0.1:1", "--data", str(tmp_path))
    assert done.returncode == 2
    assert f"error: {broken}: no image that can be read" in done.stderr
    other = broken.with_name("cut off.png")
    other.write_bytes(write_image(other, (0, 0, 0)).read_bytes()[:200])
    for suffix in ("heic", "heic", "gif"):
        broken.with_name(f"{len([*broken.parent.iterdir()])}.{suffix}").write_bytes(b"skipped")
    done = classify("--base-url", "http://127.0.0.1:1", "--data", str(tmp_path))
    assert done.returncode == 2
    assert all(f"{file}: no image that can be read" in done.stderr for file in (broken, other))
    assert f"{tmp_path}: skipped are 2 .heic, 1 .gif; read are .bmp, .jpeg, .jpg, .png, .webp" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("--data", "missing"), ("--steps", "0"), ("--ask", "a.png", "--sampler", "")])
def test_the_classifier_refuses_before_it_imports_what_takes_long(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    program = [sys.executable, "-X", "importtime", str(EXAMPLES / "vlm_classifier.py"), "--model", "m"]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "\nerror: " in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "numpy" in imported
    assert not imported & {"tinker", "torch", "transformers"}


def test_a_folder_is_split_by_class_and_seed(image_folders: Any, tmp_path: Path) -> None:
    write_colours(tmp_path, 10)
    dataset = image_folders.read_folder(tmp_path, share=0.3, seed=1, side=None)
    assert dataset.classes == ["blue", "green", "red"]
    assert (len(dataset.train), len(dataset.held_out)) == (21, 9)
    assert names(dataset.train) == names(dataset.held_out) == set(COLOURS)
    assert not set(paths(dataset.train)) & set(paths(dataset.held_out))
    assert all(path.relative_to(tmp_path).parts[0] == name for path, name in dataset.train + dataset.held_out)
    again = image_folders.read_folder(tmp_path, share=0.3, seed=1, side=None)
    assert (again.train, again.held_out) == (dataset.train, dataset.held_out)
    other = image_folders.read_folder(tmp_path, share=0.3, seed=2, side=None)
    assert paths(other.held_out) != paths(dataset.held_out)
    write_image(tmp_path / "black" / "1.png", (0, 0, 0))
    write_image(tmp_path / "black" / "2.png", (0, 0, 0))
    more = image_folders.read_folder(tmp_path, share=0.3, seed=1, side=None)
    assert [path for path in paths(more.held_out) if path.parent.name != "black"] == paths(dataset.held_out)


def test_a_class_of_which_all_pictures_are_skipped_is_said(image_folders: Any, tmp_path: Path) -> None:
    write_colours(tmp_path, 3)
    (tmp_path / "phone").mkdir()
    for number in range(4):
        (tmp_path / "phone" / f"IMG_{number}.HEIC").write_bytes(b"....ftypheic")
    with pytest.raises(ValueError, match=r"class 'phone' has too few images .*; skipped in .*: 4 \.heic"):
        image_folders.read_folder(tmp_path, share=0.2, seed=0, side=None)


def test_a_picture_is_checked_by_the_servers_rules_before_training_starts(image_folders: Any, tmp_path: Path) -> None:
    from tinker_local.backend.rendering.decoding import ImageError, decode_image
    from tinker_local.types.pictures import MAX_PIXELS

    write_colours(tmp_path, 3)
    assert image_folders.MOST_PIXELS == MAX_PIXELS
    large, slow = tmp_path / "red" / "large.png", tmp_path / "red" / "slow.jpg"
    Image.new("L", (8193, 8192)).save(large)
    Image.new("RGB", (64, 48), "red").save(slow, progressive=True)
    data = slow.read_bytes()
    slow.write_bytes(data[:-2] + data[data.rfind(b"\xff\xda") : -2] * 64 + data[-2:])
    for file in (large, slow):
        with pytest.raises(ImageError):
            decode_image(file.read_bytes())
    with pytest.raises(ValueError, match=r"slow.jpg: no image that can be read: a JPEG of \d+ scans") as refused:
        image_folders.read_folder(tmp_path, share=0.2, seed=0, side=None)
    assert "large.png: 8193 x 8192 pixels are more than a server takes" in str(refused.value)
    slow.unlink()
    image_folders.read_folder(tmp_path, share=0.2, seed=0, side=64)


@pytest.mark.parametrize("held_out", ["validation", "val", "test"])
def test_the_split_of_a_folder_that_has_one_is_kept(image_folders: Any, tmp_path: Path, held_out: str) -> None:
    write_colours(tmp_path / "train", 3)
    write_colours(tmp_path / held_out, 2)
    dataset = image_folders.read_folder(tmp_path, share=0.5, seed=0, side=None)
    assert dataset.classes == ["blue", "green", "red"]
    assert {path.relative_to(tmp_path).parts[0] for path in paths(dataset.train)} == {"train"}
    assert {path.relative_to(tmp_path).parts[0] for path in paths(dataset.held_out)} == {held_out}
    assert (len(dataset.train), len(dataset.held_out)) == (9, 6)


def test_a_fold_holds_out_training_digits_and_leaves_the_test_digits_alone(image_folders: Any) -> None:
    whole = image_folders.digits(32)
    assert (len(whole.train), len(whole.held_out)) == (1500, 297)
    test = {id(example.source) for example in whole.held_out}
    assert len(test) == 297
    folds = [image_folders.digits(32, fold) for fold in range(5)]
    held_out = [example.source.tobytes() for fold in folds for example in fold.held_out]
    assert held_out == [example.source.tobytes() for example in whole.train]
    for fold in folds:
        assert (len(fold.train), len(fold.held_out)) == (1200, 300)
        assert not {e.source.tobytes() for e in fold.train} & {e.source.tobytes() for e in fold.held_out}


def test_hidden_files_and_files_that_are_no_images_are_passed_over(image_folders: Any, tmp_path: Path) -> None:
    write_colours(tmp_path, 2)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "licence.txt").write_text("free")
    (tmp_path / "red" / "notes.txt").write_text("red ones")
    write_image(tmp_path / "red" / ".checkpoints" / "0.png", COLOURS["red"])
    (tmp_path / "red" / "._0.png").write_bytes(b"resource fork")
    dataset = image_folders.read_folder(tmp_path, share=0.5, seed=0, side=None)
    assert (dataset.classes, len(dataset.train), len(dataset.held_out)) == (["blue", "green", "red"], 3, 3)


def test_images_are_shrunk_to_the_longest_side_and_never_enlarged(image_folders: Any, tmp_path: Path) -> None:
    for name, size in {"wide": (300, 100), "small": (20, 10)}.items():
        for index in range(2):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("L", size).save(tmp_path / name / f"{index}.png")
    dataset = image_folders.read_folder(tmp_path, share=0.5, seed=0, side=60)
    shown = {example.name: dataset.image(example.source, None) for example in dataset.train}
    assert {name: (image.size, image.mode) for name, image in shown.items()} == {
        "wide": ((60, 20), "RGB"),
        "small": ((20, 10), "RGB"),
    }
    as_it_is = image_folders.read_folder(tmp_path, share=0.5, seed=0, side=None)
    assert as_it_is.image(as_it_is.train[0].source, None) == as_it_is.train[0].source  # the file itself travels


def test_a_wrong_folder_is_refused_with_what_is_wrong(image_folders: Any, tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(ValueError) as error:
            image_folders.read_folder(folder, share=0.2, seed=0, side=None)
        return str(error.value)

    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such folder"
    assert refusal(tmp_path).endswith("at least two classes are needed, each a folder of images; found none")
    write_image(tmp_path / "loose.png", COLOURS["red"])
    assert refusal(tmp_path).endswith("found none; image files beside the folders: 1")
    (tmp_path / "loose.png").unlink()
    write_image(tmp_path / "red" / "0.png", COLOURS["red"])
    assert "found only 'red'" in refusal(tmp_path)
    for index in range(4):
        write_image(tmp_path / "blue" / f"{index}.png", COLOURS["blue"])
    assert "class 'red' has too few images" in refusal(tmp_path)
    assert "0 to train on and 1 held out" in refusal(tmp_path)
    write_image(tmp_path / "red" / "1.png", COLOURS["red"])
    assert len(image_folders.read_folder(tmp_path, share=0.2, seed=0, side=None).train) == 4
    whole = (tmp_path / "red" / "0.png").read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        (tmp_path / "red" / "1.png").write_bytes(content)
        assert f"{tmp_path / 'red' / '1.png'}: no image that can be read" in refusal(tmp_path)
    Image.new("RGB", (402, 2)).save(tmp_path / "red" / "1.png")
    assert f"{tmp_path / 'red' / '1.png'}: 402 x 2 pixels" in refusal(tmp_path)


def test_a_class_that_one_part_lacks_is_refused(image_folders: Any, tmp_path: Path) -> None:
    write_colours(tmp_path / "train", 2)
    write_colours(tmp_path / "val", 2)
    write_image(tmp_path / "val" / "pink" / "0.png", (250, 150, 180))
    with pytest.raises(ValueError, match=r"class 'pink' has too few images .*: 0 to train on and 1 held out"):
        image_folders.read_folder(tmp_path, share=0.2, seed=0, side=None)
