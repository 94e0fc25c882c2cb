"""`model_input` and `text_chunk`: parts in, the SDK's `ModelInput` out."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tinker
from tinker_local import types as local
from tinker_local.client import image_chunk, model_input, text_chunk
from tinker_local.types import InvalidRequestError
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
IMAGE = PIL.Image.fromarray(PIXELS)
START, END = "<|vision_start|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(size={"shortest_edge": 1024, "longest_edge": 65536}, patch_size=16, merge_size=2)


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def outline(built: tinker.ModelInput) -> list[object]:
    """Token ids of text chunks, 'image' for images."""
    return [list(c.tokens) if isinstance(c, tinker.EncodedTextChunk) else c.type for c in built.chunks]


def test_a_prompt_with_an_image_is_the_sdks_own_object(tokenizer: Any, processor: Any) -> None:
    built = model_input("What is this? ", IMAGE, "It is", tokenizer=tokenizer, image_processor=processor)
    assert type(built) is tinker.ModelInput
    before, image, after = built.chunks
    assert isinstance(image, tinker.types.ImageChunk)
    assert image == image_chunk(IMAGE, processor)
    assert image.expected_tokens == 2
    assert built.length == before.length + 2 + after.length
    targets: Any = {"target_tokens": np.zeros(built.length, np.int64)}
    tinker.Datum(model_input=built, loss_fn_inputs=targets)


def test_it_is_what_hf_makes_of_the_same_text(tokenizer: Any, processor: Any) -> None:
    """HF tokenizes one string with a pad between the markers, then repeats the pad once per patch."""
    built = model_input("What is this? ", IMAGE, "It is a", IMAGE, tokenizer=tokenizer, image_processor=processor)
    whole = f"What is this? {START}<|image_pad|>{END}It is a{START}<|image_pad|>{END}"
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    expected = [i for token in ids(tokenizer, whole) for i in ([pad] * 2 if token == pad else [token])]
    ours = [
        i
        for chunk in built.chunks
        for i in (chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [pad] * chunk.length)
    ]
    assert ours == expected


def test_special_tokens_in_text_are_recognised_and_none_are_added(tokenizer: Any) -> None:
    built = model_input("<|im_start|>What<|im_end|>", tokenizer=tokenizer)
    names = tokenizer.convert_ids_to_tokens(built.to_ints())
    assert (names[0], names[-1]) == ("<|im_start|>", "<|im_end|>")
    assert "<|endoftext|>" not in names


def test_neighbouring_strings_mean_the_same_as_one(tokenizer: Any) -> None:
    whole = model_input("What is this?", tokenizer=tokenizer)
    for cut in range(14):
        assert model_input("What is this?"[:cut], "What is this?"[cut:], tokenizer=tokenizer) == whole
    assert outline(whole) == [ids(tokenizer, "What is this?")]


@pytest.mark.parametrize("tokens", [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.int32), [np.int64(5), 6]])
def test_token_ids_are_taken_as_they_are(tokens: Any, tokenizer: Any) -> None:
    built = model_input("a", tokens, "b", tokenizer=tokenizer)
    assert outline(built) == [[*ids(tokenizer, "a"), 5, 6, *ids(tokenizer, "b")]]
    assert all(type(token) is int for token in built.to_ints())


def test_empty_parts_leave_nothing(tokenizer: Any) -> None:
    assert model_input("", [], np.array([], np.int64), tokenizer=tokenizer).chunks == []
    assert outline(model_input("", IMAGE, "", vision_markers=False, tokenizer=tokenizer)) == ["image"]


def test_every_kind_of_image_gives_the_same_chunk(tokenizer: Any, tmp_path: Path) -> None:
    file = BytesIO()
    IMAGE.save(file, "png", compress_level=1)
    path = tmp_path / "image.png"
    path.write_bytes(file.getvalue())
    given = [IMAGE, PIXELS, path, file.getvalue(), image_chunk(IMAGE), local.ImageChunk(**dict(image_chunk(IMAGE)))]
    built = [model_input(image, vision_markers=False) for image in given]
    assert all(item == built[0] for item in built)


def test_markers_are_put_around_images(tokenizer: Any) -> None:
    start, end = ids(tokenizer, START), ids(tokenizer, END)
    what, it = ids(tokenizer, "What"), ids(tokenizer, "It")
    assert outline(model_input("What", IMAGE, "It", tokenizer=tokenizer)) == [what + start, "image", end + it]
    assert outline(model_input(IMAGE, tokenizer=tokenizer)) == [start, "image", end]
    assert outline(model_input(IMAGE, IMAGE, tokenizer=tokenizer)) == [start, "image", end + start, "image", end]


@pytest.mark.parametrize(
    ("before", "after"), [("What" + START, END + "It"), ("What", END + "It"), ("What" + START, "It"), ("What", "It")]
)
def test_markers_that_are_written_already_are_not_doubled(before: str, after: str, tokenizer: Any) -> None:
    complete = model_input("What" + START, IMAGE, END + "It", tokenizer=tokenizer, vision_markers=False)
    assert model_input(before, IMAGE, after, tokenizer=tokenizer) == complete
    as_ids = model_input(ids(tokenizer, before), IMAGE, ids(tokenizer, after), tokenizer=tokenizer)
    assert as_ids == complete


def test_written_markers_between_two_images_are_not_doubled(tokenizer: Any) -> None:
    plain = model_input(IMAGE, IMAGE, tokenizer=tokenizer)
    assert model_input(START, IMAGE, END + START, IMAGE, END, tokenizer=tokenizer) == plain
    assert model_input(IMAGE, START, IMAGE, tokenizer=tokenizer) == plain
    assert model_input(IMAGE, END, IMAGE, tokenizer=tokenizer) == plain


def test_without_vision_markers_nothing_is_added(tokenizer: Any) -> None:
    built = model_input("What", IMAGE, "It", tokenizer=tokenizer, vision_markers=False)
    assert outline(built) == [ids(tokenizer, "What"), "image", ids(tokenizer, "It")]
    assert outline(model_input([1], IMAGE, [2], vision_markers=False)) == [[1], "image", [2]]


def test_a_tokenizer_without_the_markers_adds_none(tokenizer: Any) -> None:
    class Plain:
        """Answers with its unknown token, as tokenizers that have one do."""

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [ord(letter) for letter in text]

        def convert_tokens_to_ids(self, token: str) -> int:
            return 0

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return "<unk>"

    assert outline(model_input("a", IMAGE, "b", tokenizer=Plain())) == [[97], "image", [98]]

    class Missing(Plain):
        def convert_tokens_to_ids(self, token: str) -> Any:
            return None

    assert outline(model_input("a", IMAGE, "b", tokenizer=Missing())) == [[97], "image", [98]]


def test_chunks_and_model_inputs_are_taken_over(tokenizer: Any) -> None:
    chunk = image_chunk(IMAGE)
    theirs = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1, 2]), chunk])
    ours = local.ModelInput(chunks=(local.EncodedTextChunk(tokens=[1, 2]), local.ImageChunk(**dict(chunk))))
    pointer = tinker.types.ImageAssetPointerChunk(location="a.png", format="png", expected_tokens=3)
    our_pointer = local.ImageAssetPointerChunk(location="a.png", format="png", expected_tokens=3)
    expected = [[1, 2], "image", [9], "image_asset_pointer"]
    for first, last in ((theirs, pointer), (ours, our_pointer)):
        built = model_input(first, [9], last, vision_markers=False)
        assert outline(built) == expected
        assert built.chunks[1] == chunk
        assert built.chunks[3] == pointer
    assert outline(model_input(tinker.EncodedTextChunk(tokens=[1]), local.EncodedTextChunk(tokens=[2]))) == [[1, 2]]


def test_image_format_reaches_the_images(tokenizer: Any) -> None:
    built = model_input(IMAGE, tokenizer=tokenizer, image_format="jpeg")
    assert isinstance(built.chunks[1], tinker.types.ImageChunk)
    assert built.chunks[1].format == "jpeg"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("a",), r"parts\[0\]: text needs tokenizer="),
        (([1], [2, -3]), r"parts\[1\].*-3"),
        (([1], [2, 2**31]), r"parts\[1\].*2147483648"),
        (([1], [1.5]), r"parts\[1\].*integers"),
        (([1], [True]), r"parts\[1\].*bool"),
        (([1], ["a"]), r"parts\[1\]"),
        (([1], [[2]]), r"parts\[1\]"),
        (([1], [IMAGE]), r"parts\[1\]"),
        (([1], np.array([0.5])), r"parts\[1\].*integers"),
        (([1], np.array([1], np.uint8)), r"parts\[1\]: a 1-D uint8 array"),
        (([1], PIXELS / 255), r"parts\[1\]: .*uint8.*float64"),
        (([1], np.zeros((1, 3), np.int64)), r"parts\[1\]: .*uint8.*int64"),
        (([1], b"text"), r"parts\[1\]: no image"),
        (([1], 7), r"parts\[1\]: .*not int"),
        (([1], None), r"parts\[1\]: .*not NoneType"),
        (([1], {"image": 1}), r"parts\[1\]: .*not dict"),
        (([1], tinker.DmelChunk.model_construct(dmel=b"")), r"parts\[1\]: .*not DmelChunk"),
        (([1], IMAGE), "tokenizer: needed to put .*vision_markers=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_that_cannot_be_used_is_named(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        model_input(*parts)


def test_the_name_of_an_image_file_is_not_silently_text(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "cat.PNG"
    PIL.Image.new("RGB", (28, 28)).save(file)
    with pytest.raises(InvalidRequestError) as refused:
        model_input("What is this? ", str(file), "It is", tokenizer=tokenizer)
    assert f"parts[1]: '{file}' is an image file" in str(refused.value)
    assert f"pathlib.Path('{file}')" in str(refused.value)
    for text in (f"look at {file} now", "dog.png", "a" * 9000 + ".png", "\0.png", str(tmp_path)):
        assert model_input(text, tokenizer=tokenizer).chunks == [text_chunk(text, tokenizer)]
    assert model_input(text_chunk(str(file), tokenizer)).length


def test_text_chunk_is_the_sdks_and_never_empty(tokenizer: Any) -> None:
    chunk = text_chunk("What<|im_end|>", tokenizer)
    assert type(chunk) is tinker.EncodedTextChunk
    assert chunk.tokens == ids(tokenizer, "What<|im_end|>")
    with pytest.raises(InvalidRequestError, match="text: has no tokens"):
        text_chunk("", tokenizer)
