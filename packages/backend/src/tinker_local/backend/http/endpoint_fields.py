"""Fields that requests of OpenAI's and Anthropic's APIs have in common."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError
from tinker_local.types import ImageAssetPointerChunk, ImageChunk, user_message
from tinker_local.types.base import TupleOf

LONGEST_MODEL = 1024
"""Characters of a model's name."""

ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_MODEL)]

_FORMATS: dict[str, Literal["png", "jpeg"]] = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/jpg": "jpeg",
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
}

MOST_CONTROL_TOKENS = 64

ControlTokens = Annotated[TupleOf[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_CONTROL_TOKENS)]
"""Control tokens that count as such where a user's, system's or tool's text has them."""

Image = ImageChunk | ImageAssetPointerChunk


def image_of(media_type: str, data: str) -> ImageChunk:
    """An image that was sent as base64; ValueError for another format than PNG and JPEG."""
    if media_type.lower() not in _FORMATS:
        raise ValueError(f"{media_type!r} is not image/png or image/jpeg")
    try:
        return ImageChunk.model_validate({"data": data, "format": _FORMATS[media_type.lower()]})
    except ValidationError as error:
        told = user_message(error).removeprefix("data: ")
        raise ValueError(told.replace("format: says", "the media type says", 1)) from None


def image_at(url: Any) -> Any:
    """The image of a data URL, or one to be fetched where the operator allows it; ValueError."""
    if not isinstance(url, str):
        raise ValueError("must be a URL")
    if url[:5].lower() == "data:":
        head, _, data = url[5:].partition(",")
        media_type, *parameters = head.split(";")
        if "base64" not in parameters:
            raise ValueError("a data URL must be data:image/png;base64,... or data:image/jpeg;base64,...")
        return image_of(media_type, data)
    suffix = urlsplit(url).path.lower().rpartition(".")
    if (found := _FORMATS.get(f".{suffix[2]}")) is None:
        raise ValueError("the path of a URL must end with .png, .jpg or .jpeg; or send a data URL")
    return ImageAssetPointerChunk(location=url, format=found)


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
