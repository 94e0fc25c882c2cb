"""How a program puts pictures into its prompts, as it may say in the `user_metadata` of its run or checkpoints.

A model learns prompts of one form. `tinker-local chat` and the console's playground ask a checkpoint in the form that
it was trained with, if the program said so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from tinker_local.types.errors import InvalidRequestError

PromptOrder = Literal["picture-first", "text-first"]
"""Where the pictures of a message stand, before or after its text."""

PROMPT_ORDER = "tinker_local.prompt_order"
"""The entry of `user_metadata` that holds a `PromptOrder`."""

PICTURE_SIDE = "tinker_local.picture_side"
"""The entry of `user_metadata` that holds the longest side of the pictures trained on, in pixels."""


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """`side`: the longest side of pictures, in pixels. None: the program did not say."""

    order: PromptOrder | None = None
    side: int | None = None

    @classmethod
    def of(cls, user_metadata: Mapping[str, Any]) -> Self:
        """The layout that `user_metadata` states; InvalidRequestError for a value that is none."""
        order, side = user_metadata.get(PROMPT_ORDER), user_metadata.get(PICTURE_SIDE)
        if order is not None and order not in get_args(PromptOrder):
            choices = " or ".join(map(repr, get_args(PromptOrder)))
            raise InvalidRequestError(f"user_metadata[{PROMPT_ORDER!r}]: must be {choices}, not {order!r}")
        if side is not None and not (str(side).isascii() and str(side).isdigit() and int(side) > 0):
            raise InvalidRequestError(f"user_metadata[{PICTURE_SIDE!r}]: must be a number of pixels, not {side!r}")
        return cls(order, None if side is None else int(side))

    def as_metadata(self) -> dict[str, str]:
        """The entries of `user_metadata` that state it."""
        order = {} if self.order is None else {PROMPT_ORDER: str(self.order)}
        return order if self.side is None else {**order, PICTURE_SIDE: str(self.side)}

    def words(self) -> str:
        """For people; empty if nothing is known."""
        order = {"picture-first": "pictures before the text", "text-first": "pictures after the text"}
        side = [] if self.side is None else [f"pictures of at most {self.side} pixels a side"]
        return " and ".join([*([] if self.order is None else [order[self.order]]), *side])

    def as_json(self) -> dict[str, Any]:
        """What is known of it."""
        return {name: value for name in ("order", "side") if (value := getattr(self, name)) is not None}
