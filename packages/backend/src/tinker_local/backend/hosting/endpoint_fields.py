"""Fields that requests of OpenAI's and Anthropic's APIs have in common."""

import base64
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError
from tinker_local.types import ImageAssetPointerChunk, ImageChunk, user_message
from tinker_local.types.base import TupleOf

LONGEST_MODEL = 1024
"""Characters of a model's name."""

ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_MODEL)]

MOST_CONTROL_TOKENS = 64

ControlTokens = Annotated[TupleOf[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_CONTROL_TOKENS)]
"""Control tokens that count as such where a user's, system's or tool's text has them."""

Image = ImageChunk | ImageAssetPointerChunk


def image_of(data: str) -> ImageChunk:
    """An image that was sent as base64. Its bytes say what it is, as for hosted APIs and vLLM, whatever media type a
    client has written beside them; ValueError for other bytes than PNG, JPEG, WebP or GIF."""
    try:
        return ImageChunk.of(base64.b64decode(data, validate=True))
    except ValidationError as error:
        raise ValueError(user_message(error).removeprefix("data: ")) from None
    except ValueError as error:
        raise ValueError(f"not base64: {error}") from None


def image_at(url: Any) -> Any:
    """The image of a data URL, or one to be fetched where the operator allows it; ValueError."""
    if not isinstance(url, str):
        raise ValueError("must be a URL")
    if url[:5].lower() == "data:":
        head, _, data = url[5:].partition(",")
        if "base64" not in head.split(";")[1:]:
            raise ValueError("a data URL must be data:image/png;base64,... (or image/jpeg, image/webp, image/gif)")
        return image_of(data)
    return ImageAssetPointerChunk(location=url, format="png")  # read as what it is


def only(*without_effect: Any) -> AfterValidator:
    """Of a field that is not served: it may have a value that changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in without_effect:
            raise ValueError("this field is not supported by this server; leave it out")
        return value

    return AfterValidator(check)


Unsupported = Annotated[Any, only()]

Label = Any
"""Says something about the request to its sender's own service."""
