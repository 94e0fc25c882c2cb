"""A conversation kept as chunks already tokenized: what was sampled stays as it was sampled.

A new observation is rendered as the difference that it makes to the template's text. Where the template continues its
own text, the difference is appended to the tokens so far; where it rewrites what was there (thinking models: earlier
thoughts are dropped), the prompt starts anew from the template's whole text. Which of the two holds is tested for
every observation, on the texts themselves.
"""

from collections.abc import Sequence
from typing import Any

import tinker
from tinker_local.client.rl.chat import MARK, Chat, ChatTemplateError, Chunk
from tinker_local.client.rl.environment import Message


class Conversation:
    """The prompt of the next reply, turn by turn: `prompt`, sample, `reply(tokens)`, `observe(messages)`, `prompt`.

    Rendering decodes images and tokenizes: not for event loops. Raises ChatTemplateError if the template cannot
    express a turn, InvalidRequestError for an image that cannot be read.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message]) -> None:
        self._chat = chat
        self._messages, self._images = self._contents(messages, turn=1)
        self._text = chat.render(self._messages)
        self._chunks = chat.chunks(self._text, self._images)
        self._reply: list[int] | None = None
        self.turns = 0
        self.continues = True
        """Whether the last `observe` appended to the tokens before it."""

    @property
    def prompt(self) -> tinker.ModelInput:
        """What the model is to continue. Chunks are shared with the prompts before, not copied."""
        return tinker.ModelInput(chunks=list(self._chunks))

    @property
    def length(self) -> int:
        """Positions of `prompt`."""
        return sum(chunk.length for chunk in self._chunks)

    @property
    def num_images(self) -> int:
        return len(self._images)

    def reply(self, tokens: Sequence[int]) -> str:
        """Take the sampled `tokens`, with the one that ended them if there is one; their text without special ones."""
        if self._reply is not None:
            raise ValueError("reply: an observation must come first")
        self._reply = list(tokens)
        self.turns += 1
        return self._chat.decode(self._reply)

    def observe(self, messages: Sequence[Message]) -> None:
        """Render what came back, and the template's end of the turn before it if that was not sampled."""
        if self._reply is None:
            raise ValueError("observe: a reply must come first")
        chat, sampled = self._chat, self._reply
        ended = bool(sampled) and chat.ends_turn(sampled[-1])
        body = sampled[:-1] if ended else sampled
        written = chat.protect_reply(chat.decode(body, special=True))
        new, images = self._contents(messages, turn=self.turns + 1)
        said = {"role": "assistant", "content": chat.prefill + written}
        marked = chat.render([*self._messages, {**said, "content": chat.prefill + written + MARK}, *new])
        text = chat.render([*self._messages, said, *new])
        before, found, behind = marked.partition(MARK)
        self.continues = bool(found) and _continues(before, self._text, written)
        if self.continues:
            self._append(sampled, chat.chunks(behind, images), ended)
        else:
            _check_shown(text, written)
            self._chunks = chat.chunks(text, [*self._images, *images])
        self._messages = [*self._messages, said, *new]
        self._images = [*self._images, *images]
        self._text = text
        self._reply = None

    def _append(self, sampled: list[int], difference: list[Chunk], ended: bool) -> None:
        """The reply's tokens as they are, then the template's; an end of turn that was sampled is not repeated."""
        if sampled:
            self._chunks = [*self._chunks, tinker.EncodedTextChunk(tokens=sampled)]
        first = difference[0] if difference else None
        if ended and isinstance(first, tinker.EncodedTextChunk) and first.tokens[0] == sampled[-1]:
            rest = list(first.tokens[1:])
            difference = [*([tinker.EncodedTextChunk(tokens=rest)] if rest else []), *difference[1:]]
        self._chunks = [*self._chunks, *difference]

    def _contents(
        self, messages: Sequence[Message], turn: int
    ) -> tuple[list[dict[str, Any]], list[tinker.types.ImageChunk]]:
        contents, images = [], []
        for message in messages:
            content, found = self._chat.content(message, f"observation of turn {turn}")
            contents.append(content)
            images += found
        return contents, images


def _continues(before: str, prompt: str, written: str) -> bool:
    """Whether `before` is the prompt's text and then the reply; templates may trim a reply, its tokens stay."""
    return before.startswith(prompt) and "".join(before[len(prompt) :].split()) == "".join(written.split())


def _check_shown(text: str, written: str) -> None:
    """A reply that a rewritten context no longer shows, thoughts aside, would silently be lost."""
    answer = "".join(written.rpartition("</think>")[2].split())
    if answer not in "".join(text.split()):
        raise ChatTemplateError(
            "chat template: neither continues the conversation with the sampled reply nor shows the reply in a new "
            f"one; the reply ends in {written[-60:]!r}"
        )
