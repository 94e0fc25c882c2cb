"""Positions of an image in the client are those that the server counts, or the client says that it cannot count."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tinker_local.backend.families import family_of
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.client import image_chunk, rl
from tinker_local.client.train.picture_places import places_of
from tinker_local.types import InvalidRequestError
from tinker_local.types.processor_templates import processor_positions
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

SIZES = ((224, 224), (260, 60), (50, 200), (30, 40), (333, 217))
"""Width and height in pixels."""

ARCHITECTURES = (
    *("llava", "llava_next", "internvl", "mistral3", "pixtral", "idefics3", "smolvlm", "qwen2_vl", "glm4v", "glm_ocr"),
    "exaone4_5",
)


def server_counts(folder: Path) -> list[int]:
    """What the trainer's processor counts of pictures of `SIZES`."""
    config = AutoConfig.from_pretrained(folder)
    vision = family_of(config.model_type, str(folder)).vision
    assert vision is not None
    processor = vision.processor(str(folder), config)
    return [processor.process(Image.new("RGB", size)).num_tokens for size in SIZES]


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in ("mistral3", "qwen2_vl") else pytest.param(name, marks=pytest.mark.more)
        for name in ARCHITECTURES
    ],
)
def test_expected_tokens_are_the_servers_or_refused(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_seeing_model(tmp_path / "m", architecture)
    expected = server_counts(folder)
    assert len(set(expected)) > 1 or architecture == "llava"
    whole, of_images = AutoProcessor.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    for _ in range(2):  # the second time they are remembered
        found = [image_chunk(Image.new("RGB", size), whole).expected_tokens for size in SIZES]
        assert found == expected
    for size, count in zip(SIZES, expected, strict=True):
        try:
            assert image_chunk(Image.new("RGB", size), of_images).expected_tokens == count
        except InvalidRequestError as error:
            assert "pass the model's whole processor, from AutoProcessor" in str(error)  # noqa: PT017
    assert processor_positions(str(folder)) is None
    token = getattr(whole.image_token, "content", whole.image_token)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert places_of(tokenizer, None, whole).pad == token
    chat = rl.Chat(tokenizer, whole, template=whole.chat_template)
    (message,) = rl.as_messages([Image.new("RGB", SIZES[1]), "What?"])
    content, images = chat.content(message, "")
    chunks: list[Any] = chat.chunks(chat.render([content]), images)
    assert [chunk.expected_tokens for chunk in chunks if hasattr(chunk, "expected_tokens")] == [expected[1]]


def test_only_gemma_3_has_one_number_of_positions_for_every_image(tmp_path: Path) -> None:
    """What InternVL's processor calls so is that of a tile."""
    gemma = make_tiny_vl_model(tmp_path / "gemma", family="gemma3")
    assert {processor_positions(str(gemma))} == {*server_counts(gemma)}
    intern = make_tiny_seeing_model(tmp_path / "intern", "internvl")
    assert AutoProcessor.from_pretrained(intern).image_seq_length == 4
    assert processor_positions(str(intern)) is None


def test_a_processor_that_refuses_a_picture_is_an_error_with_its_size(tmp_path: Path) -> None:
    whole = AutoProcessor.from_pretrained(make_tiny_seeing_model(tmp_path / "m", "qwen2_vl"))
    with pytest.raises(InvalidRequestError, match="the processor refuses an image of 4000 x 2 pixels"):
        image_chunk(Image.new("RGB", (4000, 2)), whole)
