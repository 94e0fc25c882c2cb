"""A model's chat template, made exact: messages to tokens and images, and what it puts between turns.

Knows templates and tokenizers; a `Conversation` (beside) keeps what was said.

Two rules make it exact. Text of a message is data: a special token that is written in it is encoded as the characters
it consists of, so that neither a web page nor a model can forge a turn or an image. And an image is where the template
puts its image token, nowhere else.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import PIL.Image
import tinker
from tinker_local.client.images import chunk_of
from tinker_local.client.rl.environment import Message
from tinker_local.types import InvalidRequestError
from tinker_local.types.datum import ImageFormat

Chunk: TypeAlias = tinker.ModelInputChunk

# Two characters of Unicode's private use area fence what stands for a special token in a template's input; the same
# characters in a text are fenced too, so nothing that is written can be taken for a fence.
_OPEN, _CLOSE = "\ue000", "\ue001"
MARK = f"{_OPEN}here{_CLOSE}"
"""Stands at the end of a reply whose place in a rendered text is wanted; no message can contain it."""

_ASKED = f"{_OPEN}asked{_CLOSE}"
THINK, END_THINK = _THOUGHT_MARKS = ("<think>", "</think>")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UNREADABLE = (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError)


class ChatTemplateError(InvalidRequestError):
    """A chat template cannot express a conversation, or not so that sampled tokens stay as they are."""


class Chat:
    """The chat format of one model.

    Args:
        tokenizer: HF's, with a chat template.
        image_processor: HF's of the model, which counts the positions of images; needed for images alone.
        template: A chat template (Jinja) instead of the tokenizer's own.
        options: Further variables of the template, e.g. {"enable_thinking": False}.
        image_token: What the template writes for an image.
        image_format: How images that must be encoded travel: "png" (lossless) or "jpeg".

    `end_of_turn`: the token that the template puts behind a reply, None if it puts none. `prefill`: what its
    generation prompt writes on the model's behalf (`<think>\\n` of a thinking model).

    Raises ChatTemplateError if the template cannot render a question and an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any = None,
        *,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        image_token: str = "<|image_pad|>",
        image_format: ImageFormat = "png",
    ) -> None:
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError("tokenizer: it has no chat template; pass template=")
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self._template = template
        self._options = dict(options or {})
        self._image_token = image_token
        self._image_format: ImageFormat = image_format
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        special |= {image_token, _OPEN, _CLOSE}
        names = sorted(special, key=lambda token: (-len(token), token))
        self._fence_of = {token: f"{_OPEN}{index}{_CLOSE}" for index, token in enumerate(names)}
        self._seam = f"{_OPEN}{len(names)}{_CLOSE}"  # encoded as nothing
        self._beginnings = {token[:end] for token in names for end in range(1, len(token)) if token[:end].strip()}
        self._longest = max(map(len, names))
        self._any_special = re.compile("|".join(map(re.escape, names)))
        self._any_fence = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
        self._anchor = self._find_anchor()
        self._spelled = [*(self._spell(token) for token in names), []]
        self._parts_alone = self._takes_parts_alone()
        self.end_of_turn = self._find_end_of_turn()
        self.prefill = self._find_prefill()

    @classmethod
    def of(cls, client: tinker.TrainingClient, **settings: Any) -> "Chat":
        """The format of the model that `client` trains; `settings` as of the constructor.

        Reads tokenizer and image processor from the folder or hub name that the server gives for the tokenizer.
        """
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(client.get_info().model_data.tokenizer_id)
        except (OSError, ValueError):  # a language model has none; an image says so when there is one
            processor = None
        return cls(client.get_tokenizer(), processor, **settings)

    @property
    def stop(self) -> list[int]:
        """The token that ends a reply: the template's end of a turn, or EOS. Empty if there is neither."""
        ends = (self.end_of_turn, self.tokenizer.eos_token_id)
        return [token for token in ends if token is not None][:1]

    def protect(self, text: str) -> str:
        """`text` with a fence for each special token written in it.

        Raises InvalidRequestError for half of a surrogate pair, which no tokenizer can encode.
        """
        if (lone := _LONE_SURROGATE.search(text)) is not None:
            raise InvalidRequestError(
                f"text: character {lone.start()} is U+{ord(lone[0]):04X}, half of a surrogate pair, not text"
            )
        return self._any_special.sub(lambda found: self._fence_of[found[0]], text)

    def protect_reply(self, text: str) -> str:
        """`protect`, but marks of thoughts stay, as a template must see them to drop thoughts."""
        pieces = re.split("(" + "|".join(map(re.escape, _THOUGHT_MARKS)) + ")", text)
        return "".join(piece if piece in _THOUGHT_MARKS else self.protect(piece) for piece in pieces)

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True) -> str:
        """The template's text of `messages`, whose content is protected; with a generation prompt if `generate`."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [_in_parts(message) for message in messages] if self._parts_alone else list(messages),
                    tokenize=False,
                    add_generation_prompt=generate,
                    chat_template=self._template,
                    **self._options,
                )
            )
        except Exception as error:  # templates raise what Jinja or their own expressions raise
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ChatTemplateError(f"chat template: cannot render messages of {roles}: {error}") from error

    def content(self, message: Message, where: str) -> tuple[dict[str, Any], list[tinker.types.ImageChunk]]:
        """`message` as the template's input, and its images in order. Decodes and encodes images: not for event loops.

        Raises InvalidRequestError for an image that cannot be read, and for text that cannot be encoded.
        """
        header = self._protect_all({**message.further, "role": message.role})
        texts = [part for part in message.parts if isinstance(part, str)]
        if len(texts) == len(message.parts):  # templates of language models take text alone
            return {**header, "content": self.protect("".join(texts))}, []
        parts: list[dict[str, str]] = []
        images: list[tinker.types.ImageChunk] = []
        for index, part in enumerate(message.parts):
            if isinstance(part, str):
                parts.append({"type": "text", "text": self._protect_part(part)})
            else:
                parts.append({"type": "image"})
                images.append(self._image(part, f"{where}: part {index} of the {message.role} message"))
        return {**header, "content": parts}, images

    def _protect_part(self, text: str) -> str:
        """`protect`, and no special token can arise where a template joins this part with the next one."""
        fenced = self.protect(text)
        unfinished = any(fenced[start:] in self._beginnings for start in range(-self._longest, 0))
        return fenced + self._seam if unfinished else fenced

    def _protect_all(self, value: Any) -> Any:
        """What a template may read beside the content (tool calls, names, roles), `protect`ed."""
        match value:
            case str():
                return self.protect(value)
            case Mapping():
                return {self._protect_all(key): self._protect_all(entry) for key, entry in value.items()}
            case list() | tuple():
                return [self._protect_all(entry) for entry in value]
        return value

    def _image(self, image: Any, where: str) -> tinker.types.ImageChunk:
        if isinstance(image, tinker.types.ImageChunk):
            if image.expected_tokens is not None:
                return image
            image = image.data
        if self.image_processor is None:
            raise InvalidRequestError(f"{where}: is an image, and the chat has no image_processor to count its tokens")
        try:
            return chunk_of(image, self.image_processor, self._image_format, where)
        except _UNREADABLE as error:  # what PIL raises where it decodes late, and the file system
            raise InvalidRequestError(f"{where}: no image that can be read: {error}") from error

    def chunks(self, text: str, images: Sequence[tinker.types.ImageChunk], *, continued: bool = False) -> list[Chunk]:
        """A rendered text as chunks, each image token replaced by its image. `continued`: as of `encode`.

        Raises ChatTemplateError if the template shows another number of images than there are.
        """
        pieces = text.split(self._image_token)
        if len(pieces) - 1 != len(images):
            raise ChatTemplateError(
                f"chat template: wrote {len(pieces) - 1} image tokens ({self._image_token}) for {len(images)} images"
            )
        chunks: list[Chunk] = []
        for index, piece in enumerate(pieces):
            if tokens := self.encode(piece, continued=continued or index > 0):
                chunks.append(tinker.EncodedTextChunk(tokens=tokens))
            if index < len(images):
                chunks.append(images[index])
        return chunks

    def encode(self, text: str, *, continued: bool = False) -> list[int]:
        """Token ids of a rendered text: the template's special tokens as such, fenced ones as plain characters.

        `continued`: something is before it, so a tokenizer that puts a space in front of a text must not.
        """
        tokens: list[int] = []
        for index, piece in enumerate(self._any_fence.split(text)):
            if index % 2:
                tokens += self._spelled[int(piece)]
            elif piece:
                tokens += self._encode_behind(piece) if continued or tokens else self._encode(piece)
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`, with special tokens written out if `special`."""
        return str(
            self.tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def ends_turn(self, token: int) -> bool:
        """Whether a reply that ends with `token` ended by itself: with any special token, as models have several."""
        name = self.decode([token], special=True)
        return name in self._fence_of and name not in _THOUGHT_MARKS

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_behind(self, text: str) -> list[int]:
        return self._encode(self._anchor + text)[1:] if self._anchor else self._encode(text)

    def _find_anchor(self) -> str:
        """A token to encode text behind, where SentencePiece would put a space in front of it; "" if it would not."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        for name in self._fence_of:
            tokens = self._encode(name)
            if len(tokens) == 1 and tokens[0] in added and not added[tokens[0]].rstrip:
                return name if self._encode(f"{name}x")[1:] != self._encode("x") else ""
        return ""

    def _spell(self, token: str) -> list[int]:
        """Token ids of the characters of a special token.

        Cut in two, not with `split_special_tokens`: that is a state of the tokenizer, which other threads would see.
        """
        return self._encode_behind(token[:1]) + (self._encode_behind(token[1:]) if token[1:] else [])

    def _takes_parts_alone(self) -> bool:
        """Whether a content must be a list of parts: some templates show nothing of a string."""
        for alone in (False, True):
            self._parts_alone = alone
            with suppress(ChatTemplateError):
                text = self.render([{"role": "user", "content": _ASKED}, {"role": "assistant", "content": MARK}])
                if _ASKED in text and MARK in text:
                    return alone
        return False

    def _find_end_of_turn(self) -> int | None:
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        _, found, behind = self.render(asked, generate=False).partition(MARK)
        if not found:
            raise ChatTemplateError("chat template: does not show an assistant's message")
        tokens = self.encode(behind.lstrip(), continued=True)
        return tokens[0] if tokens and self.ends_turn(tokens[0]) else None

    def _find_prefill(self) -> str:
        """The generation prompt holds how a reply begins in history; what it has beyond that is written for it."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        asked, prompted = self.render([question], generate=False), self.render([question])
        history = self.render([question, answer, question]).partition(MARK)[0]
        begin, prompt = history.removeprefix(asked), prompted.removeprefix(asked)
        return prompt.removeprefix(begin) if prompt.startswith(begin) else ""


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}
