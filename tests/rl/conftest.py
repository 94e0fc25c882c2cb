"""Chats of the tiny vision model with templates of other families, and what prompts and data hold, spelled out."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tinker
from tinker_local.client import rl

from tests.rl.scripted_sampler import ScriptedSampler


@pytest.fixture
def sampler() -> Iterator[ScriptedSampler]:
    """A sampling client that answers from a script; files with another script have their own."""
    sampler = ScriptedSampler()
    yield sampler
    sampler.close()


@pytest.fixture(scope="session")
def vision_processors(tiny_models: dict[str, Path]) -> tuple[Any, Any]:
    """Tokenizer and image processor of the tiny vision model."""
    from transformers import AutoImageProcessor, AutoTokenizer

    path = tiny_models["tiny/vision"]
    return AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path)


@pytest.fixture(scope="session")
def make_chat(vision_processors: tuple[Any, Any]) -> Callable[..., rl.Chat]:
    """A chat of the tiny vision model; Qwen3-VL's format if no `template` is given."""

    def make(template: str | None = None, **options: Any) -> rl.Chat:
        return rl.Chat(*vision_processors, template=template, options=options)

    return make


@pytest.fixture(scope="session")
def spell(vision_processors: tuple[Any, Any]) -> Callable[..., list[Any]]:
    """Pieces to elements: the name of a special token to its id, other text to ids of its characters; the rest stays.

    No code of the client has a part in it.
    """
    tokenizer = vision_processors[0]

    def spell(*pieces: Any) -> list[Any]:
        elements: list[Any] = []
        for piece in pieces:
            if not isinstance(piece, str):
                elements.append(piece)
            elif piece in tokenizer.all_special_tokens:
                elements.append(tokenizer.convert_tokens_to_ids(piece))
            else:
                elements += tokenizer.encode(piece, add_special_tokens=False)
        return elements

    return spell


@pytest.fixture(scope="session")
def images(vision_processors: tuple[Any, Any]) -> list[tinker.types.ImageChunk]:
    """Four images of different sizes."""
    from tinker_local.client import image_chunk

    sizes = [(64, 64), (96, 64), (64, 96), (128, 64)]
    pixels = [np.full((height, width, 3), 40 * index, np.uint8) for index, (width, height) in enumerate(sizes)]
    return [image_chunk(PIL.Image.fromarray(array), vision_processors[1]) for array in pixels]


def elements(model_input: tinker.ModelInput) -> list[Any]:
    """Token ids and image chunks in order, whatever the chunks' borders."""
    found: list[Any] = []
    for chunk in model_input.chunks:
        found += chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [chunk]
    return found


@pytest.fixture(scope="session")
def elements_of() -> Callable[[tinker.ModelInput], list[Any]]:
    return elements


@pytest.fixture(scope="session")
def talk() -> Callable[..., rl.Conversation]:
    """A conversation of observations and the token ids that were sampled between them."""

    def talk(chat: rl.Chat, *said: Any) -> rl.Conversation:
        conversation = rl.Conversation(chat, rl.as_messages(said[0]))
        for reply, observation in zip(said[1::2], said[2::2], strict=True):
            conversation.reply(reply)
            conversation.observe(rl.as_messages(observation))
        return conversation

    return talk


@pytest.fixture(scope="session")
def turn() -> Callable[..., rl.Turn]:
    """A turn of `prompt` and sampled `tokens`; logprobs that tell positions and turns apart."""

    def make(
        prompt: Sequence[int | tinker.types.ImageChunk] | tinker.ModelInput,
        tokens: Sequence[int],
        sequence_id: str = "",
        reward: float = 0.0,
    ) -> rl.Turn:
        if not isinstance(prompt, tinker.ModelInput):
            chunks = [tinker.EncodedTextChunk(tokens=[part]) if isinstance(part, int) else part for part in prompt]
            prompt = tinker.ModelInput(chunks=chunks)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8 - len(sequence_id)
        return rl.Turn(prompt, tuple(tokens), logprobs, sequence_id, "stop", "", reward=reward)

    return make
