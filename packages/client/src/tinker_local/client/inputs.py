"""Text, tokens and pictures → the SDK's `ModelInput`."""

import os
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import PIL.Image
import tinker
from pydantic import ValidationError
from tinker_local import types as local
from tinker_local.client.encode_images import Image, ImageFormat, chunk_of
from tinker_local.client.image_marks import Vocabulary, start_and_end

ImageChunk: TypeAlias = tinker.types.ImageChunk | tinker.types.ImageAssetPointerChunk
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Part: TypeAlias = (
    str
    | Tokens
    | Image
    | tinker.EncodedTextChunk
    | ImageChunk
    | tinker.ModelInput
    | local.EncodedTextChunk
    | local.ImageChunk
    | local.ImageAssetPointerChunk
    | local.ModelInput
)


class Tokenizer(Vocabulary, Protocol):
    """The part of a tokenizer that is used here; HF's implement it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def text_chunk(text: str, tokenizer: Tokenizer) -> tinker.EncodedTextChunk:
    """`text` as a chunk of the SDK. Special tokens written in it are recognised; none are added.

    Raises InvalidRequestError for empty text: servers refuse an empty chunk.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not tokens:
        raise local.InvalidRequestError("text: has no tokens, and a text chunk needs at least one")
    return tinker.EncodedTextChunk(tokens=tokens)


def model_input(
    *parts: Part,
    tokenizer: Tokenizer | None = None,
    image_processor: Any = None,
    image_format: ImageFormat = "png",
    vision_markers: bool = True,
) -> tinker.ModelInput:
    """A prompt of `parts` in order, as an object of the SDK:

        model_input("What is this? ", PIL.Image.open("cat.png"), "It is", tokenizer=..., image_processor=...)

    A part is one of

    - str: text, tokenized by `tokenizer`. Special tokens written in it (`<|im_start|>`) are recognised; none are
      added (no BOS). Adjacent strings are joined first, so `"a", "b"` equals `"ab"`.
    - a list or 1-D integer array: token ids, as they are.
    - an image: a PIL image, a `pathlib.Path`, the bytes of an image file, or a uint8 array [H, W], [H, W, 3] or
      [H, W, 4]. A str is never a path; one that is the name of an image file is refused, because its name as text is
      hardly meant. See `image_chunk` for conversion, `image_format`, and `image_processor`, which counts
      `expected_tokens`.
    - a text or image chunk or a `ModelInput`, of the SDK or of `tinker_local.types`: unchanged.

    Qwen's vision-language models read an image between `<|vision_start|>` and `<|vision_end|>`, which are text.
    `vision_markers` adds whichever of the two is missing beside an image, if the tokenizer has both; False adds none.

    All text between two images becomes one chunk. Raises InvalidRequestError with the index of the invalid part.
    """
    texts: list[list[int]] = [[]]  # before, between and after the images, so always one longer than `images`
    images: list[ImageChunk] = []
    for where, part in _joined(parts):
        for piece in _pieces(part, where, tokenizer, image_processor, image_format):
            if isinstance(piece, list):
                texts[-1].extend(piece)
            else:
                images.append(piece)
                texts.append([])
    if images and vision_markers:
        _mark(texts, tokenizer)
    return _assemble(texts, images)


def _joined(parts: Iterable[Part]) -> Iterable[tuple[str, Part]]:
    """The parts with their names in error messages; adjacent strings are joined."""
    parts = list(parts)
    for index, part in enumerate(parts):
        if isinstance(part, str) and _names_an_image(part):
            raise local.InvalidRequestError(
                f"parts[{index}]: {part!r} is an image file, but a str is text; pass pathlib.Path({part!r}) for the "
                f"picture, or text_chunk({part!r}, tokenizer) for its name as text"
            )
    for is_text, group in groupby(enumerate(parts), key=lambda item: isinstance(item[1], str)):
        if is_text:
            items = list(group)
            yield f"parts[{items[0][0]}]", "".join(str(part) for _, part in items)
        else:
            for index, part in group:
                yield f"parts[{index}]", part


def _names_an_image(text: str) -> bool:
    """Whether all of `text` is the path of a file that PIL reads, by its suffix. Text without such a suffix is not
    looked up, and text that cannot be a path (os.path, unlike pathlib) raises nothing."""
    if os.path.splitext(text)[1].lower() not in PIL.Image.registered_extensions():  # noqa: PTH122
        return False
    return os.path.isfile(text)  # noqa: PTH113


def _pieces(
    part: Part, where: str, tokenizer: Tokenizer | None, image_processor: Any, image_format: ImageFormat
) -> Iterable[list[int] | ImageChunk]:
    match part:
        case str():
            if tokenizer is None:
                raise local.InvalidRequestError(f"{where}: text needs tokenizer=")
            yield tokenizer.encode(part, add_special_tokens=False)
        case PIL.Image.Image() | Path() | bytes() | bytearray() | memoryview():
            yield chunk_of(part, image_processor, image_format, where)
        case np.ndarray() if part.ndim != 1:
            yield chunk_of(part, image_processor, image_format, where)
        case np.ndarray() | list() | tuple():
            yield _token_ids(part, where)
        case tinker.ModelInput() | local.ModelInput():
            for index, chunk in enumerate(part.chunks):
                yield _chunk(chunk, f"{where}.chunks[{index}]")
        case _:
            yield _chunk(part, where)


def _token_ids(part: Tokens, where: str) -> list[int]:
    if not len(part):
        return []
    if isinstance(part, np.ndarray) and part.dtype == np.uint8:  # probably a file read by numpy.frombuffer
        raise local.InvalidRequestError(
            f"{where}: a 1-D uint8 array may be token ids or a file; pass a wider integer type, or bytes"
        )
    values: Any = part if isinstance(part, np.ndarray) else list(part)
    try:
        ids: list[int] = local.EncodedTextChunk(tokens=values).tokens.tolist()
    except ValidationError as error:
        raise local.InvalidRequestError(f"{where}: {local.user_message(error)}") from error
    return ids


def _chunk(part: object, where: str) -> list[int] | ImageChunk:
    match part:
        case tinker.EncodedTextChunk():
            return _token_ids(list(part.tokens), where)
        case local.EncodedTextChunk():
            return _token_ids(part.tokens, where)
        case tinker.types.ImageChunk() | tinker.types.ImageAssetPointerChunk():
            return part
        case local.ImageChunk(format="png" | "jpeg" as format):
            return tinker.types.ImageChunk(data=part.data, format=format, expected_tokens=part.expected_tokens)
        case local.ImageChunk():
            data = chunk_of(part.data, None, "png", where).data
            return tinker.types.ImageChunk(data=data, format="png", expected_tokens=part.expected_tokens)
        case local.ImageAssetPointerChunk():
            return tinker.types.ImageAssetPointerChunk(
                location=part.location,
                format="jpeg" if part.format == "jpeg" else "png",  # servers look at the file
                expected_tokens=part.expected_tokens,
            )
    raise local.InvalidRequestError(
        f"{where}: must be text, a list of token ids, an image or a chunk, not {type(part).__name__}"
    )


def _mark(texts: list[list[int]], tokenizer: Tokenizer | None) -> None:
    """Put the marks of the model's family beside each image where they are missing; changes `texts`."""
    if tokenizer is None:
        raise local.InvalidRequestError(
            "tokenizer: needed to put marks around images; with vision_markers=False the parts are taken as they are"
        )
    marks = start_and_end(tokenizer)
    if marks is None:
        return
    start, end = marks
    for before, after in pairwise(texts):
        if before[-1:] != [start]:
            before.append(start)
        if after[:1] != [end]:
            after.insert(0, end)


def _assemble(texts: Sequence[list[int]], images: Sequence[ImageChunk]) -> tinker.ModelInput:
    chunks: list[tinker.ModelInputChunk] = []
    for index, tokens in enumerate(texts):
        if tokens:
            chunks.append(tinker.EncodedTextChunk(tokens=tokens))
        if index < len(images):
            chunks.append(images[index])
    return tinker.ModelInput(chunks=chunks)
