"""Files of pictures count for what a data set is, and are decoded once."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import tinker
from tinker_local.client import encode_images
from tinker_local.client.train import media
from tinker_local.client.train.examples import Preference
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows
from tinker_local.client.train.run_folder import RunFolder
from tinker_local.client.train.settings import TrainSettings
from tinker_local.client.train.sources import RowError
from tinker_local.types import InvalidRequestError

ANSWER = {"role": "assistant", "content": "red"}


def picture(colour: str, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (56, 84), colour).save(buffer, form)
    return buffer.getvalue()


def asks(name: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "path": name}]}, ANSWER]}


@pytest.fixture
def read(tmp_path: Path, renderer_of: Callable[..., Renderer]) -> Callable[..., FileRows]:
    def read(*rows: dict[str, Any], **settings: Any) -> FileRows:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_rows(path, renderer=renderer_of(), most_tokens=512, **settings)

    return read


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that are decoded."""
    found: list[bytes] = []
    real = encode_images.chunk_of

    def watched(data: Any, *given: Any) -> Any:
        found.append(data)
        return real(data, *given)

    monkeypatch.setattr(media, "chunk_of", watched)
    return found


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_picture_is_decoded_once_and_sent_as_its_file_is(
    read: Callable[..., FileRows], tmp_path: Path, decoded: list[bytes], form: str
) -> None:
    (tmp_path / "a").write_bytes(picture("red", form))
    pair = {
        "prompt": asks("a")["messages"][:1],
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "blue"}],
    }
    rows = read(pair, pair)
    first, again = rows.examples(0), rows.examples(1)
    assert decoded == [picture("red", form)]
    assert isinstance(first, Preference)
    assert isinstance(again, Preference)
    for side in (first.chosen, first.rejected, again.chosen):
        (chunk,) = (each for each in side.datum.model_input.chunks if isinstance(each, tinker.types.ImageChunk))
        assert bytes(chunk.data) == picture("red", form)
        assert (chunk.format, chunk.length) == (form.lower(), 6)


def test_a_picture_that_must_be_converted_is_the_same_each_time(
    read: Callable[..., FileRows], tmp_path: Path, decoded: list[bytes]
) -> None:
    (tmp_path / "a").write_bytes(picture("red", "WEBP"))
    rows = read(asks("a"))
    checked, prompt = rows.prompt(0)[0], rows.prompt(0)[0]
    assert len(decoded) == 3
    assert checked == prompt
    assert PIL.Image.open(io.BytesIO(checked.chunks[1].data)).format == "PNG"  # type: ignore[union-attr]


def test_a_picture_that_changes_after_the_check_ends_training(read: Callable[..., FileRows], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(picture("red"))
    (tmp_path / "b").write_bytes(picture("blue"))
    rows = read(asks("a"), asks("b"))
    (tmp_path / "b").write_bytes(picture("green"))
    rows.examples(0)
    with pytest.raises(RowError, match=r"line 2: messages\[0\]\.content\[0\]\.path: this picture has changed since"):
        rows.examples(1)


def test_a_run_is_not_resumed_on_other_pictures(read: Callable[..., FileRows], tmp_path: Path) -> None:
    """The rows name the same files, so their text alone would not tell."""
    (tmp_path / "a").write_bytes(picture("red"))
    settings = TrainSettings(learning_rate=1e-4, batch_size=1)
    folder = RunFolder(tmp_path / "run")
    with folder.held():
        began = folder.begin("model", read(asks("a")), settings)
    assert folder.read() == began
    folder.require_same(folder.read(), "model", read(asks("a")))
    (tmp_path / "a").write_bytes(picture("blue"))
    with pytest.raises(InvalidRequestError, match=r"data: a picture has changed since the run in .* began, while the"):
        folder.require_same(folder.read(), "model", read(asks("a")))
    with pytest.raises(InvalidRequestError, match="data: not the 1 rows with which"):
        folder.require_same(folder.read(), "model", read(asks("a"), asks("a")))


def test_a_run_that_began_before_pictures_counted_is_resumed(read: Callable[..., FileRows], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(picture("red"))
    folder = RunFolder(tmp_path / "run")
    with folder.held():
        folder.begin("model", read(asks("a")), TrainSettings(learning_rate=1e-4, batch_size=1))
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    del written["pictures"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(written))
    folder.require_same(folder.read(), "model", read(asks("a")))


def test_pictures_of_rows_that_are_left_out_do_not_count(read: Callable[..., FileRows], tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / name).write_bytes(picture(colour))
    long = asks("b")
    long["messages"] = [*long["messages"][:1], {"role": "assistant", "content": "long " * 600}]
    one = read(asks("a"), long, skip_bad=True)
    (tmp_path / "b").write_bytes(picture("green"))
    other = read(asks("a"), long, skip_bad=True)
    assert one.pictures_digest == other.pictures_digest != ""
    assert read({"messages": [{"role": "user", "content": "a"}, ANSWER]}).pictures_digest == ""
