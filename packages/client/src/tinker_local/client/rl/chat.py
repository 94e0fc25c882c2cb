"""A model's chat template, made exact: messages to tokens and images, and the text between turns.

Handles templates and tokenizers; a `Conversation` stores the messages.

Two rules make it exact. The text of a message is data: a control token written in it is encoded character by character,
so that neither a web page nor a model can forge a turn, an image or a tool's result. And an image is only where the
template puts its image token.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import PIL.Image
import tinker
from tinker_local.client.encode_images import ImageFormat, chunk_of, image_token_of
from tinker_local.client.image_marks import QWEN
from tinker_local.client.rl.environment import Message
from tinker_local.client.rl.token_pieces import TokenPieces
from tinker_local.types import InvalidRequestError
from tinker_local.types.control_tokens import control_tokens, control_tokens_in_replies, special_tokens
from tinker_local.types.processor_templates import processor_positions, processor_template

Chunk: TypeAlias = tinker.ModelInputChunk

# In a template's input, special tokens are replaced by an index between two characters of Unicode's private use area (a
# fence). The same characters in a text are fenced too, so no text can be mistaken for a fence.
_OPEN, _CLOSE = "\ue000", "\ue001"
MARK = f"{_OPEN}here{_CLOSE}"
"""Put at the end of a reply to find its place in a rendered text; no message can contain it."""

_ASKED = f"{_OPEN}asked{_CLOSE}"
THINK, END_THINK = _THOUGHT_MARKS = ("<think>", "</think>")
_WORD = re.compile(r"[A-Za-z_]\w*")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Rendered = TypeVar("_Rendered")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UNREADABLE = (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError)


class ChatTemplateError(InvalidRequestError):
    """A chat template cannot express a conversation, or only by changing sampled tokens."""


class Chat:
    """The chat format of one model.

    Args:
        tokenizer: HF's, with a chat template.
        image_processor: The model's HF processor, of images or the whole one, which counts the positions of images as
            in `image_chunk`; only images need it.
        template: A chat template (Jinja) to use instead of the tokenizer's.
        options: Further variables of the template, e.g. {"enable_thinking": False}.
        image_token: The token that the template writes for an image; if not given, that of a whole processor, or
            Qwen's.
        image_format: The format of images that must be encoded: "png" (lossless) or "jpeg".
        as_tokens: Control tokens that count as such where a text has them, for programs that write the results of
            tools into a user's text: `["<tool_response>", "</tool_response>"]`.

    `end_of_turn`: the token that the template puts after a reply, or None. `prefill`: the part of a reply that the
    generation prompt already contains (`<think>\\n` of a thinking model).

    Raises ChatTemplateError if the template cannot render a question and an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any = None,
        *,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        image_token: str | None = None,
        image_format: ImageFormat = "png",
        as_tokens: Collection[str] = (),
    ) -> None:
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError("tokenizer: it has no chat template; pass template=")
        image_token = image_token or image_token_of(image_processor) or QWEN.pad
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self._template = template
        self._options = dict(options or {})
        self._image_token = image_token
        self._image_format: ImageFormat = image_format
        ours = {image_token, _OPEN, _CLOSE}
        self._special = special_tokens(tokenizer) | ours
        in_texts = control_tokens(tokenizer, template)
        if unknown := sorted({*as_tokens} - in_texts | {*as_tokens} & ours):
            raise InvalidRequestError(f"as_tokens: {', '.join(unknown)} cannot be control tokens of this model's texts")
        in_replies = (control_tokens_in_replies(tokenizer, template) | ours).difference(as_tokens, _THOUGHT_MARKS)
        names = sorted(in_texts.difference(as_tokens) | ours, key=lambda token: (-len(token), token))
        self._fence_of = {token: f"{_OPEN}{index}{_CLOSE}" for index, token in enumerate(names)}
        self._seam = f"{_OPEN}{len(names)}{_CLOSE}"  # encodes to no tokens
        self._beginnings = {token[:end] for token in names for end in range(1, len(token)) if token[:end].strip()}
        self._longest = max(map(len, names))
        self._any_control_token, self._any_in_replies = (
            re.compile("|".join(re.escape(name) for name in names if name in chosen)) for chosen in (names, in_replies)
        )
        self._any_fence = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
        self._any_fence_or_image = re.compile(f"{_OPEN}[0-9]+{_CLOSE}|{re.escape(image_token)}")
        self._pieces = TokenPieces(tokenizer, self._written_marks(names), names)
        self._pieces.ahead((part, True) for token in names for part in (token[:1], token[1:]) if part)
        self._spelled = [*(self._spell(token) for token in names), []]
        self._parts_alone = self._takes_parts_alone()
        self.end_of_turn = self._find_end_of_turn()
        self.prefill = self._find_prefill()

    @classmethod
    def of(cls, client: tinker.TrainingClient, **settings: Any) -> "Chat":
        """The format of the model that `client` trains; `settings` as for the constructor.

        Loads tokenizer, image processor and the processor's chat template from the folder or hub name that the server
        gives for the tokenizer.
        """
        tokenizer, processor, template, _ = files_of(client)
        return cls(tokenizer, processor, **{"template": template, **settings})

    @property
    def stop(self) -> list[int]:
        """The token that ends a reply: the template's end of turn, or EOS. Empty if there is neither."""
        ends = (self.end_of_turn, self.tokenizer.eos_token_id)
        return [token for token in ends if token is not None][:1]

    def protect(self, text: str) -> str:
        """`text` with a fence for each control token written in it.

        Raises InvalidRequestError for half of a surrogate pair, which no tokenizer can encode.
        """
        return self._fenced(text, self._any_control_token)

    def protect_reply(self, text: str) -> str:
        """`protect` for what a model writes: it may have tags that are not special tokens, as `<tool_call>` of Qwen3,
        and what the template looks for, as thinking tags."""
        return self._fenced(text, self._any_in_replies)

    def _fenced(self, text: str, tokens: re.Pattern[str]) -> str:
        if (lone := _LONE_SURROGATE.search(text)) is not None:
            raise InvalidRequestError(
                f"text: character {lone.start()} is U+{ord(lone[0]):04X}, half of a surrogate pair, not text"
            )
        return tokens.sub(lambda found: self._fence_of[found[0]], text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The template's text of `messages`, whose content is protected; `generate` adds a generation prompt.

        `options`: further variables of the template for this text, beside those of the constructor: `tools`, say, which
        are protected by `protect_all`.
        """

        def by_template(given: list[Any], variables: Mapping[str, Any]) -> str:
            quick = _quick_templates()
            if given and quick is not None and quick.can_render(self.tokenizer, variables):
                return str(quick.rendered(self.tokenizer, self._source(variables), given, generate, variables))
            return str(
                self.tokenizer.apply_chat_template(
                    given, tokenize=False, add_generation_prompt=generate, chat_template=self._template, **variables
                )
            )

        return self._rendered(messages, options, by_template)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], *, options: Mapping[str, Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """`render` without a generation prompt, and where what the template marks as the assistant's by
        `{% generation %}` begins and ends, in characters of the text. None if it has no such marks: most have none."""
        template = self._source({**self._options, **(options or {})})
        if not _has_marks(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        def marked(given: list[Any], variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
            # What `apply_chat_template` does for return_assistant_tokens_mask, but the tokens are to be made here.
            texts, places = render_jinja_template(
                [given],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **variables},
            )
            return str(texts[0]), [(int(begin), int(end)) for begin, end in places[0]]

        return self._rendered(messages, options, marked)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        by: Callable[[list[Any], Mapping[str, Any]], _Rendered],
    ) -> _Rendered:
        variables = {**self._options, **(options or {})}
        self._check_tools(messages, variables)
        try:
            return by([_in_parts(message) for message in messages] if self._parts_alone else list(messages), variables)
        except Exception as error:  # templates raise what Jinja or their own expressions raise
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ChatTemplateError(f"chat template: cannot render messages of {roles}: {error}") from error

    def words(self, tools: Sequence[Mapping[str, Any]] = ()) -> set[str]:
        """The words of the template, among which are its variables; of the one for `tools`, where there are several."""
        return {*_words(self._source({"tools": list(tools) or None}))}

    def reads(self, field: str, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template looks at a field of messages, as `message.field` or by its name in quotes."""
        return _reads(self._source({"tools": list(tools) or None}), field)

    def _source(self, variables: Mapping[str, Any]) -> str:
        """The template in use: a tokenizer may have another one for tools."""
        return str(self.tokenizer.get_chat_template(self._template, tools=variables.get("tools")))

    def _check_tools(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
        """ChatTemplateError for tools that a given template, as a processor's, would leave out without a word."""
        needed = {"tools": bool(variables.get("tools"))}
        needed["tool_calls"] = any(message.get("tool_calls") for message in messages)
        used = [word for word, is_used in needed.items() if is_used]
        if self._template is not None and used and not {*used} <= _words(self._template):
            raise ChatTemplateError(
                f"chat template: has no {', '.join(used)}; pass template=tokenizer.chat_template if that one has"
            )

    def content(self, message: Message, where: str) -> tuple[dict[str, Any], list[tinker.types.ImageChunk]]:
        """`message` as input of the template, and its images in order. It decodes and encodes images, so do not call it
        on an event loop.

        Raises InvalidRequestError for images that cannot be read and text that cannot be encoded.
        """
        header = self.protect_all({**message.further, "role": message.role})
        texts = [part for part in message.parts if isinstance(part, str)]
        if len(texts) == len(message.parts):  # templates of language models only accept text
            protect = self.protect_reply if message.role == "assistant" else self.protect
            return {**header, "content": protect("".join(texts))}, []
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
        """`protect`, and prevent special tokens where a template joins this part with the next one."""
        fenced = self.protect(text)
        unfinished = any(fenced[start:] in self._beginnings for start in range(-self._longest, 0))
        return fenced + self._seam if unfinished else fenced

    def protect_all(self, value: Any) -> Any:
        """`protect` what a template may read beside the content: tool calls, names, roles."""
        match value:
            case str():
                return self.protect(value)
            case Mapping():
                return {self.protect_all(key): self.protect_all(entry) for key, entry in value.items()}
            case list() | tuple():
                return [self.protect_all(entry) for entry in value]
        return value

    def _image(self, image: Any, where: str) -> tinker.types.ImageChunk:
        if isinstance(image, tinker.types.ImageChunk):
            if image.expected_tokens is not None:
                return image
            image = image.data
        if self.image_processor is None:
            raise InvalidRequestError(f"{where}: is an image, but the chat has no image_processor to count its tokens")
        try:
            return chunk_of(image, self.image_processor, self._image_format, where)
        except _UNREADABLE as error:  # raised by PIL when it decodes late, and by the file system
            raise InvalidRequestError(f"{where}: no image that can be read: {error}") from error

    def chunks(self, text: str, images: Sequence[tinker.types.ImageChunk], *, continued: bool = False) -> list[Chunk]:
        """A rendered text as chunks, with each image token replaced by its image. `continued`: as for `encode`.

        Raises ChatTemplateError unless the template wrote one image token per image.
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
        """Token ids of a rendered text: special tokens of the template as such, fenced ones as plain characters.

        `continued`: the text follows another, so a tokenizer that prepends a space must not.
        """
        tokens: list[int] = []
        for index, piece in enumerate(self._any_fence.split(text)):
            if index % 2:
                tokens += self._spelled[int(piece)]
            elif piece:
                tokens += self._pieces.encode(piece, continued or bool(tokens))
        return tokens

    def encode_ahead(self, texts: Sequence[tuple[str, bool]]) -> None:
        """Encode many texts at once, on all cores, so that `encode` and `chunks` find them done. With each text, its
        `continued`."""
        self._pieces.ahead(
            (piece, continued or index > 0)
            for text, continued in texts
            for index, piece in enumerate(self._any_fence_or_image.split(text))
            if piece
        )

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`; `special` includes special tokens."""
        return str(
            self.tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def ends_turn(self, token: int) -> bool:
        """Whether a reply that ends with `token` is complete. Any special token counts: models have several stops."""
        name = self.decode([token], special=True)
        return name in self._special and name not in _THOUGHT_MARKS

    def _written_marks(self, names: Sequence[str]) -> list[str]:
        """The control tokens that the template's text may have: a tokenizer may have thousands of others."""
        own = getattr(self.tokenizer, "chat_template", None) or ""
        written = "\n".join([*map(str, own.values())] if isinstance(own, Mapping) else [str(own)])
        given = {*self.tokenizer.all_special_tokens, self._image_token}
        return [name for name in names if name in given or name in written or name in (self._template or "")]

    def _spell(self, token: str) -> list[int]:
        """Token ids of the characters of a special token.

        The token is cut in two. `split_special_tokens` would change the tokenizer for other threads.
        """
        return [number for part in (token[:1], token[1:]) for number in self._pieces.encode(part, True)]

    def _takes_parts_alone(self) -> bool:
        """Whether content must be a list of parts: some templates ignore strings."""
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
        """What the generation prompt has beyond the beginning of a reply in history."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        asked, prompted = self.render([question], generate=False), self.render([question])
        history = self.render([question, answer, question]).partition(MARK)[0]
        begin, prompt = history.removeprefix(asked), prompted.removeprefix(asked)
        return prompt.removeprefix(begin) if prompt.startswith(begin) else ""


def files_of(client: tinker.TrainingClient) -> tuple[Any, Any, str | None, int | None]:
    """Tokenizer, image processor, the processor's chat template and its number of positions for every image, of the
    model that `client` trains.

    They come from the folder or hub name that the server gives for the tokenizer. The last three are None for a
    language model, and the last one where the number depends on the image. The image processor is the whole one where
    that of images alone cannot count positions.
    """
    from transformers import AutoImageProcessor, AutoProcessor

    model = client.get_info().model_data.tokenizer_id or ""
    tokenizer = client.get_tokenizer()
    try:
        processor = AutoImageProcessor.from_pretrained(model)
    except (OSError, ValueError):  # a language model has none; an image then raises an error
        return tokenizer, None, None, None
    # From where the tokenizer came, which may be a copy of the server's files (`served_names.py`).
    folder = getattr(tokenizer, "name_or_path", "") or model
    positions = processor_positions(folder)
    if (whole := getattr(processor, "whole", None)) is not None:  # as `use_served_names` gives it
        processor = whole
    elif positions is None and getattr(processor, "merge_size", None) is None:
        processor = AutoProcessor.from_pretrained(model)
    return tokenizer, processor, processor_template(folder), positions


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


@cache
def _quick_templates() -> ModuleType | None:
    """None without transformers, or with a version whose templates are made otherwise."""
    try:
        from tinker_local.client.rl import quick_templates
        from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: F401
    except ImportError:
        return None
    return quick_templates


@lru_cache(16)
def _words(template: str) -> frozenset[str]:
    return frozenset(_WORD.findall(template))


@lru_cache(64)
def _reads(template: str, field: str) -> bool:
    return re.search(rf"""\.{field}\b|['"]{field}['"]""", template) is not None


@lru_cache(16)
def _has_marks(template: str) -> bool:
    return _GENERATION.search(template) is not None
