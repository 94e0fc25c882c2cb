"""What environments may show, and what is refused with the place of the fault."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tinker
from tinker_local.client import rl
from tinker_local.types import InvalidRequestError

PIXELS = np.full((64, 64, 3), 90, np.uint8)


def png() -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


def test_parts_stand_alone_or_in_messages() -> None:
    (message,) = rl.as_messages("a")
    assert (message.role, message.parts, dict(message.further)) == ("user", ("a",), {})
    assert rl.as_messages(["a", "b"]) == rl.as_messages({"role": "user", "content": ["a", "b"]})
    assert rl.as_messages(("a", "b")) == rl.as_messages([{"type": "text", "text": "a"}, "b"])
    assert rl.as_messages("a", role="tool") == rl.as_messages([{"role": "tool", "content": "a"}])
    two = rl.as_messages([{"role": "system", "content": "a"}, {"role": "tool", "content": ["b"], "name": "c"}])
    assert [(each.role, each.parts, dict(each.further)) for each in two] == [
        ("system", ("a",), {}),
        ("tool", ("b",), {"name": "c"}),
    ]


@pytest.mark.parametrize("nothing", [None, [], (), {"role": "user"}, {"role": "user", "content": None}])
def test_nothing_to_see_is_an_empty_message(nothing: Any) -> None:
    assert [(each.role, each.parts) for each in rl.as_messages(nothing)] == [("user", ())]


def test_every_kind_of_image_becomes_the_same_chunk(
    make_chat: Callable[..., rl.Chat], tmp_path: Path, elements_of: Callable[..., list[Any]]
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png())
    pil = PIL.Image.fromarray(PIXELS)
    same: list[Any] = [pil, path, png(), bytearray(png()), memoryview(png()), PIXELS, {"type": "image", "image": pil}]
    shown = [elements_of(rl.Conversation(make_chat(), rl.as_messages(["a", image])).prompt) for image in same]
    chunks = [chunk for found in shown for chunk in found if isinstance(chunk, tinker.types.ImageChunk)]
    assert len(chunks) == len(same)
    assert {chunk.expected_tokens for chunk in chunks} == {4}
    decoded = [np.asarray(PIL.Image.open(io.BytesIO(chunk.data)).convert("RGB")) for chunk in chunks]
    assert all((pixels == PIXELS).all() for pixels in decoded)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (3, r"observation: must be text, an image .* not int"),
        (["a", 3.5], r"observation\[1\]: .* not float"),
        ([{"role": "user", "content": ["a", None]}], r"observation\[0\].content\[1\]: .* not NoneType"),
        ([{"role": "user", "content": "a"}, "b"], r"observation\[0\]: "),
        ({"type": "text"}, r"observation: .*'type': 'text'"),
        ({"type": "text", "text": 3}, r"observation: .*'text': 3"),
        ({"type": "image", "image": "cat.png"}, r"observation: .*pathlib.Path.*'cat.png'"),
        ({"type": "image", "image": {"type": "text", "text": "a"}}, r"observation: "),
        ({"type": "image_url", "image_url": {"url": "http://a"}}, r"observation: .*image_url"),
        ({"type": "image"}, r"observation: .*'type': 'image'"),
        (iter(["a"]), r"observation: .* not list_iterator"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_place(observation: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        rl.as_messages(observation)


def lazily_broken() -> PIL.Image.Image:
    """PIL opens it, and finds out later that half of it is missing."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(file, "PNG")
    return PIL.Image.open(io.BytesIO(file.getvalue()[:4000]))


@pytest.mark.parametrize(
    "image",
    [
        b"no image",
        b"",
        png()[:40],
        Path("/nowhere/cat.png"),
        lazily_broken(),
        np.zeros((0, 64, 3), np.uint8),
        np.zeros((64, 64, 3), np.float32),
        np.zeros((64, 64, 2), np.uint8),
        np.zeros((2000, 4, 3), np.uint8),
        PIL.Image.new("F", (64, 64)),
    ],
    ids=["text", "nothing", "cut", "no file", "broken late", "empty", "floats", "two channels", "a line", "mode F"],
)
def test_images_that_cannot_be_read_are_refused_with_turn_and_part(
    make_chat: Callable[..., rl.Chat], image: Any
) -> None:
    with pytest.raises(InvalidRequestError, match="observation of turn 1: part 1 of the user message"):
        rl.Conversation(make_chat(), rl.as_messages(["a", image]))


def test_a_group_has_a_member() -> None:
    with pytest.raises(InvalidRequestError, match="size: a group needs at least one environment, not 0"):
        rl.Group(lambda: None, size=0)  # type: ignore[arg-type,return-value]
