"""A model's chat template, made exact: messages to tokens and images, and what it puts between turns.

Knows templates and tokenizers; a `Conversation` (beside) keeps what was said.

Two rules make it exact. Text of a message is data: a special token that is written in it is encoded as the characters
it consists of, so that neither a web page nor a model can forge a turn or an image. And an image is where the template
puts its image token, nowhere else.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tinker
from tinker_local.client.images import chunk_of
from tinker_local.client.rl.environment import Message
from tinker_local.types import InvalidRequestError
from tinker_local.types.chunks import ImageFormat

Chunk: TypeAlias = tinker.ModelInputChunk

# Two characters of Unicode's private use area fence what stands for a special token in a template's input; the same
# characters in a text are fenced too, so nothing that is written can be taken for a fence.
_OPEN, _CLOSE = "\ue000", "\ue001"
MARK = f"{_OPEN}here{_CLOSE}"
"""Stands at the end of a reply whose place in a rendered text is wanted; no message can contain it."""

_THOUGHT_MARKS = ("<think>", "</think>")


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
        self._special = sorted(special, key=lambda token: (-len(token), token))
        self._fence_of = {token: f"{_OPEN}{index}{_CLOSE}" for index, token in enumerate(self._special)}
        self._any_special = re.compile("|".join(map(re.escape, self._special)))
        self._any_fence = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
        self.end_of_turn = self._find_end_of_turn()
        self.prefill = self._find_prefill()

    @classmethod
    def of(cls, client: tinker.TrainingClient, **settings: Any) -> "Chat":
        """The format of the model that `client` trains; `settings` as of the constructor.

        Reads tokenizer and image processor from the folder or hub name that the server gives for the tokenizer.
        """
        from transformers import AutoImageProcessor

        processor = None
        try:
            processor = AutoImageProcessor.from_pretrained(client.get_info().model_data.tokenizer_id)
        except (OSError, ValueError):  # a language model has none; an image says so when there is one
            processor = None
        return cls(client.get_tokenizer(), processor, **settings)

    @property
    def stop(self) -> list[int]:
        """Tokens that end a reply: the template's end of a turn, or EOS."""
        return [self.tokenizer.eos_token_id if self.end_of_turn is None else self.end_of_turn]

    def protect(self, text: str) -> str:
        """`text` with a fence for each special token written in it."""
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
                    list(messages),
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

        Raises InvalidRequestError for an image that cannot be read.
        """
        parts: list[dict[str, str]] = []
        images: list[tinker.types.ImageChunk] = []
        for index, part in enumerate(message.parts):
            if isinstance(part, str):
                parts.append({"type": "text", "text": self.protect(part)})
            else:
                parts.append({"type": "image"})
                images.append(self._image(part, f"{where}: part {index} of the {message.role} message"))
        # Templates of language models take text alone.
        content: Any = parts if images else "".join(part["text"] for part in parts)
        return {**message.further, "role": message.role, "content": content}, images

    def _image(self, image: Any, where: str) -> tinker.types.ImageChunk:
        if isinstance(image, tinker.types.ImageChunk):
            if image.expected_tokens is not None:
                return image
            image = image.data
        if self.image_processor is None:
            raise InvalidRequestError(f"{where}: is an image, and the chat has no image_processor to count its tokens")
        return chunk_of(image, self.image_processor, self._image_format, where)

    def chunks(self, text: str, images: Sequence[tinker.types.ImageChunk]) -> list[Chunk]:
        """A rendered text as chunks, each image token replaced by its image.

        Raises ChatTemplateError if the template shows another number of images than there are.
        """
        pieces = text.split(self._image_token)
        if len(pieces) - 1 != len(images):
            raise ChatTemplateError(
                f"chat template: wrote {len(pieces) - 1} image tokens ({self._image_token}) for {len(images)} images"
            )
        chunks: list[Chunk] = []
        for index, piece in enumerate(pieces):
            if tokens := self.encode(piece):
                chunks.append(tinker.EncodedTextChunk(tokens=tokens))
            if index < len(images):
                chunks.append(images[index])
        return chunks

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text: the template's special tokens as such, fenced ones as plain characters."""
        tokens: list[int] = []
        for index, piece in enumerate(self._any_fence.split(text)):
            if index % 2:
                tokens += self._encode(self._special[int(piece)], split_special_tokens=True)
            elif piece:
                tokens += self._encode(piece)
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`, with special tokens written out if `special`."""
        return str(
            self.tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def ends_turn(self, token: int) -> bool:
        """Whether a reply that ends with `token` ended by itself."""
        return token == self.end_of_turn or token == self.tokenizer.eos_token_id

    def _encode(self, text: str, **how: Any) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, **how))

    def _find_end_of_turn(self) -> int | None:
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        _, found, behind = self.render(asked, generate=False).partition(MARK)
        if not found:
            raise ChatTemplateError("chat template: does not show an assistant's message")
        tokens = self.encode(behind.lstrip())
        return tokens[0] if tokens and self.tokenizer.decode(tokens[:1]) in self._fence_of else None

    def _find_prefill(self) -> str:
        """The generation prompt holds how a reply begins in history; what it has beyond that is written for it."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        asked, prompted = self.render([question], generate=False), self.render([question])
        history = self.render([question, answer, question]).partition(MARK)[0]
        begin, prompt = history.removeprefix(asked), prompted.removeprefix(asked)
        return prompt.removeprefix(begin) if prompt.startswith(begin) else ""
