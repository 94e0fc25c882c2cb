"""A conversation kept as tokenized chunks, so that sampled tokens stay exactly as they were sampled.

A new observation is rendered as the difference that it makes to the template's text. If the template continues its
earlier text, the difference is appended to the tokens so far. If it rewrites earlier text (thinking models drop earlier
thoughts), the prompt starts again from the template's whole text. For every observation, a comparison of the texts
decides between the two.
"""

from collections.abc import Sequence
from typing import Any

import tinker
from tinker_local.client.rl.chat import END_THINK, MARK, THINK, Chat, ChatTemplateError
from tinker_local.client.rl.environment import Message
from tinker_local.types import InvalidRequestError


class Conversation:
    """The prompt of the next reply, turn by turn: `prompt`, sample, `reply(tokens)`, `observe(messages)`, `prompt`.

    Rendering decodes images and tokenizes, so do not call it on an event loop. Raises ChatTemplateError if the template
    cannot express a turn, and InvalidRequestError for an image that cannot be read.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message]) -> None:
        self._chat = chat
        self._messages, self._images = self._contents(messages, turn=1)
        self._text = chat.render(self._messages)
        self._check_heard([], self._messages)
        self._chunks = chat.chunks(self._text, self._images)
        self._reply: list[int] | None = None
        self.turns = 0
        self.continues = True
        """Whether the last `observe` appended to the tokens before it."""

    @property
    def prompt(self) -> tinker.ModelInput:
        """What the model continues. Chunks are shared with earlier prompts, not copied."""
        return tinker.ModelInput(chunks=list(self._chunks))

    @property
    def length(self) -> int:
        """Positions of `prompt`."""
        return sum(chunk.length for chunk in self._chunks)

    @property
    def num_images(self) -> int:
        return len(self._images)

    def reply(self, tokens: Sequence[int]) -> str:
        """Add the sampled `tokens`, including an end token; returns their text without special tokens."""
        if self._reply is not None:
            raise ValueError("reply: an observation must come first")
        self._reply = list(tokens)
        self.turns += 1
        return self._chat.decode(self._reply)

    def observe(self, messages: Sequence[Message]) -> None:
        """Render an observation, preceded by the template's end of turn if that was not sampled."""
        if self._reply is None:
            raise ValueError("observe: a reply must come first")
        chat, sampled = self._chat, self._reply
        ended = bool(sampled) and chat.ends_turn(sampled[-1])
        body = sampled[:-1] if ended else sampled
        written = chat.protect_reply(chat.decode(body, special=True))
        new, images = self._contents(messages, turn=self.turns + 1)
        said = {"role": "assistant", "content": chat.prefill + written}
        text = chat.render([*self._messages, said, *new])
        self._check_heard([*self._messages, said], new)
        before, found, behind = self._render_around(written, new).partition(MARK)
        self.continues = bool(found) and _continues(before, self._text, written)
        if self.continues:
            if ended:  # it was sampled already
                behind = _without_first(behind, chat.decode(sampled[-1:], special=True))
            said_chunks = [tinker.EncodedTextChunk(tokens=sampled)] if sampled else []
            self._chunks = [*self._chunks, *said_chunks, *chat.chunks(behind, images, continued=True)]
        else:
            _check_shown(before if found else "", chat.prefill + written)
            self._chunks = chat.chunks(text, [*self._images, *images])
        self._messages = [*self._messages, said, *new]
        self._images = [*self._images, *images]
        self._text = text
        self._reply = None

    def write(self, text: str) -> list[int]:
        """The tokens that the template would write for `text` as the next reply, with the end of turn. Changes nothing.

        The template decides about white space around a reply. What its prompt has already written (`prefill`) is not
        repeated. Raises InvalidRequestError if the thoughts of `text` do not match those of the prompt.
        """
        chat = self._chat
        written = chat.protect_reply(behind_prefill(text, chat.prefill))
        words, spaces = written.rstrip(), written[len(written.rstrip()) :]
        before, found, behind = self._render_around(words, [], spaces, generate=False).partition(MARK)
        if found and _continues(before, self._text, words):
            end = chat.decode([] if chat.end_of_turn is None else [chat.end_of_turn], special=True)
            if end and behind.lstrip().startswith(end):
                spaces = behind[: len(behind) - len(behind.lstrip())]
            written = before[len(self._text) :] + spaces
        return [*chat.encode(written, continued=True), *chat.stop]

    def _render_around(
        self, written: str, new: Sequence[dict[str, Any]], spaces: str = "", *, generate: bool = True
    ) -> str:
        """The template's text with MARK where the reply `written` ends, before its trailing `spaces`."""
        said = {"role": "assistant", "content": self._chat.prefill + written + MARK + spaces}
        return self._chat.render([*self._messages, said, *new], generate=generate)

    def _check_heard(self, before: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> None:
        """ChatTemplateError if the template drops a message, as templates do with unknown roles."""
        shown = [marked(message) for message in new]
        changed = sum(after != message for after, message in zip(shown, new, strict=True))
        if self._chat.render([*before, *shown]).count(MARK) < changed:
            roles = ", ".join(message["role"] for message in new)
            raise ChatTemplateError(f"chat template: does not show the text of every message; their roles: {roles}")

    def _contents(
        self, messages: Sequence[Message], turn: int
    ) -> tuple[list[dict[str, Any]], list[tinker.types.ImageChunk]]:
        contents, images = [], []
        for message in messages:
            content, found = self._chat.content(message, f"observation of turn {turn}")
            contents.append(content)
            images += found
        return contents, images


def marked(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with MARK after its last text, if it has any: a template that shows it shows the mark."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + MARK if content.strip() else content}
    texts = [index for index, part in enumerate(content) if part.get("text", "").strip()]
    if not texts:
        return message
    last = texts[-1]
    return {
        **message,
        "content": [*content[:last], {**content[last], "text": content[last]["text"] + MARK}, *content[last + 1 :]],
    }


def _continues(before: str, prompt: str, written: str) -> bool:
    """Whether `before` is the prompt's text followed by the reply. Templates may trim a reply; its tokens stay."""
    return before.startswith(prompt) and squeezed(before[len(prompt) :]) == squeezed(written)


def _check_shown(before: str, reply: str) -> None:
    """ChatTemplateError if a rewritten context no longer shows the reply (apart from thoughts), which would be lost.

    `before`: the context up to the end of the reply, or "" if the reply is missing.
    """
    answers = [reply, reply.rpartition(END_THINK)[2]]
    spoken, _, thought = reply.rpartition(THINK)
    if THINK in reply and END_THINK not in thought:  # cut while it thought
        answers.append(spoken.rpartition(END_THINK)[2])
    if not squeezed(before).endswith(tuple(map(squeezed, answers))):
        raise ChatTemplateError(
            "chat template: neither continues the conversation with the sampled reply nor shows the reply in a new "
            f"one; the reply ends in {reply[-60:]!r}"
        )


def behind_prefill(text: str, prefill: str) -> str:
    """The rest of a reply whose beginning the prompt has already written. Raises InvalidRequestError if its thoughts do
    not match those of the prompt."""
    begin = prefill.strip()
    if begin and text.lstrip().startswith(begin):
        text = text.lstrip().removeprefix(begin).lstrip()
    if THINK in prefill and text.lstrip().startswith(THINK):
        raise InvalidRequestError(f"reply: begins with {THINK}, but the template's prompt ends in {prefill!r} already")
    if prefill.rfind(THINK) > prefill.rfind(END_THINK) and END_THINK not in text:
        raise InvalidRequestError(
            f"reply: never closes with {END_THINK} the thought that the template's prompt opens ({prefill!r})"
        )
    return text


def _without_first(behind: str, token: str) -> str:
    """`behind` without its first `token`, ignoring white space."""
    rest = behind.lstrip()
    return rest.removeprefix(token) if rest.startswith(token) else behind


def squeezed(text: str) -> str:
    """Without white space, which templates change."""
    return "".join(text.split())
