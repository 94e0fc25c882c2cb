"""The tokens that mark an image in a prompt.

A table, because a tokenizer does not say which of its tokens they are, and not every model has a chat template that
shows them.
"""

from dataclasses import dataclass
from typing import Any, Protocol


class Vocabulary(Protocol):
    """The part of a tokenizer that looks up tokens; HF's implement it."""

    def convert_tokens_to_ids(self, token: str, /) -> Any: ...
    def convert_ids_to_tokens(self, token_id: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class ImageMarks:
    """`start` and `end` stand around an image; `pad` stands for it in the text of a chat template."""

    start: str
    pad: str
    end: str


QWEN = ImageMarks("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
FAMILIES = (QWEN,)


def start_and_end(vocabulary: Vocabulary) -> tuple[int, int] | None:
    """Ids of the tokens around an image, of the first family whose tokens are in `vocabulary`."""
    for marks in FAMILIES:
        start, end = _token_id(vocabulary, marks.start), _token_id(vocabulary, marks.end)
        if start is not None and end is not None:
            return start, end
    return None


def _token_id(vocabulary: Vocabulary, token: str) -> int | None:
    """The id of `token`; None if it is not in the vocabulary, for which some tokenizers return their unknown token."""
    token_id = vocabulary.convert_tokens_to_ids(token)
    known = token_id is not None and vocabulary.convert_ids_to_tokens(token_id) == token
    return int(token_id) if known else None
