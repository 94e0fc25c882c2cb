"""What stands for a picture in the text of a chat template, and how many positions a picture has."""

from dataclasses import dataclass
from typing import Any

from tinker_local.client.encode_images import image_token_of
from tinker_local.client.image_marks import QWEN


@dataclass(frozen=True, slots=True)
class PicturePlaces:
    """`pad`: the token in whose place the picture comes. `in_text`: what stands for a picture where a template takes
    text alone. `written`: what a template writes of `in_text` alone, as Gemma 3's do, whose processors make the whole
    of it; "" if templates write all. `positions`: of each picture; None: the image processor counts them."""

    pad: str
    in_text: str
    written: str = ""
    positions: int | None = None

    def complete(self, text: str) -> str:
        """The text of a template with all that stands for its pictures."""
        return text.replace(self.written, self.in_text) if self.written else text


QWENS = PicturePlaces(QWEN.pad, f"{QWEN.start}{QWEN.pad}{QWEN.end}")


def places_of(tokenizer: Any, positions: int | None, image_processor: Any = None) -> PicturePlaces:
    """Those of a tokenizer. `positions`: the number that the processor has for every picture, if it has one.
    `image_processor`: if it is a whole one, its token is all that stands for a picture."""
    if positions is None and (token := image_token_of(image_processor)) is not None:
        return PicturePlaces(token, token)
    start, pad, end = (getattr(tokenizer, name, None) for name in ("boi_token", "image_token", "eoi_token"))
    if positions is None or not (start and pad and end):
        return QWENS
    return PicturePlaces(pad, f"\n\n{start}{pad}{end}\n\n", start, positions)
