"""`HFText`: the tokenizer and chat template of a Hugging Face model."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
from tinker_local.backend.rendering.rendered_input import ImageTokens
from tinker_local.backend.rendering.text import ChatMessage, TemplateValue
from tinker_local.types import Chunk, EncodedTextChunk, InvalidRequestError, ModelInput

# A special token in a message becomes its index between two characters of Unicode's private use area (a fence) before
# the template sees it. These characters in a message become fences, too, so no message can write one.
_OPEN, _CLOSE = "\ue000", "\ue001"
_FENCE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD = re.compile(r"[A-Za-z_]\w*")

_PARAMETERS = (
    *("conversation", "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)

KEPT_TOKENS = 2**16

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_PARAMETERS})
"""Variables of a template, and parameters of `apply_chat_template`, that requests may not set."""


class HFText:
    """Implements `rendering.text.TextCodec`. `images`: the ids that mark an image; None for a text model."""

    def __init__(self, tokenizer: Any, images: ImageTokens | None = None, template: str | None = None) -> None:
        """`template`: instead of the tokenizer's, which may have several; then it is the default one."""
        self._tokenizer = tokenizer
        self._template = template
        self._has_template = bool(template or tokenizer.chat_template)
        self._image_token = None if images is None else str(tokenizer.convert_ids_to_tokens(images.pad))
        self._written, self._meant = "", ""
        if images is not None and images.around is not None:
            self._written, end = map(str, tokenizer.convert_ids_to_tokens([images.start, images.end]))
            self._meant = f"{images.around}{self._written}{self._image_token}{end}{images.around}"
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special), _OPEN, _CLOSE}
        special |= {self._image_token} - {None}
        self._special = sorted(special, key=lambda token: (-len(token), token))
        self._place = {token: index for index, token in enumerate(self._special)}
        tokenizer.encode("a")  # drops a truncation of the file for good; later, it would disturb other threads
        self._token = lru_cache(KEPT_TOKENS)(lambda token: self._decoded([token], special=True))
        self._any_special = re.compile("|".join(map(re.escape, self._special)))

    @classmethod
    def load(cls, model: str, images: ImageTokens | None = None) -> "HFText | None":
        """That of a folder or hub name; None if it has no tokenizer."""
        from transformers import AutoProcessor, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError):
            return None
        template = None
        if images is not None and tokenizer.chat_template is None:
            with suppress(OSError, ValueError):  # it has no processor
                template = getattr(AutoProcessor.from_pretrained(model), "chat_template", None)
        return cls(tokenizer, images, template)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, TemplateValue],
        *,
        go_on: bool,
        functions: Sequence[Mapping[str, Any]] = (),
    ) -> ModelInput:
        """See `TextCodec`."""
        if not self._has_template:
            raise InvalidRequestError("messages: this base model has no chat template; use completions with a prompt")
        if taken := RESERVED & variables.keys():
            raise InvalidRequestError(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set")
        if unknown := [name for name in variables if name not in self._words(functions)]:
            raise InvalidRequestError(f"chat_template_kwargs: this model's template has no {', '.join(unknown)}")
        found = [part for message in messages for part in message.parts if not isinstance(part, str)]
        if found and self._image_token is None:
            raise InvalidRequestError("messages: an image, but this base model reads text only")
        self._check_tools(messages, functions)
        given = [self._given(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                given,
                tools=[self._protected_in(function) for function in functions] or None,
                tokenize=False,
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                chat_template=self._template,
                **variables,
            )
        except Exception as error:  # templates raise what Jinja or their own expressions raise
            roles = ", ".join(message.role for message in messages)
            raise InvalidRequestError(
                f"messages: this model's chat template refuses messages of {roles}: {error}"
            ) from error
        return ModelInput(chunks=tuple(self._chunks(str(text), found)))

    def prompt(self, text: str) -> ModelInput:
        """See `TextCodec`."""
        _check_text(text, "prompt")
        return ModelInput.from_ints(np.asarray(self._tokenizer.encode(text), np.int32))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `TextCodec`."""
        return self._decoded(tokens, special=False)

    def decode_all(self, tokens: Sequence[int]) -> str:
        """See `TextCodec`."""
        return self._decoded(tokens, special=True)

    def token(self, token: int) -> str:
        """See `TextCodec`."""
        return self._token(token)

    def _decoded(self, tokens: Sequence[int], *, special: bool) -> str:
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def _words(self, functions: Sequence[Mapping[str, Any]]) -> set[str]:
        """Among them are the variables of the template, which may be another one with tools."""
        return set(_WORD.findall(self._template or self._tokenizer.get_chat_template(tools=list(functions) or None)))

    def _check_tools(self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]]) -> None:
        """InvalidRequestError for what the template would leave out."""
        needed = {"tools": bool(functions), "tool_calls": any(message.calls for message in messages)}
        needed["tool"] = any(message.role == "tool" for message in messages)
        if missing := [word for word, used in needed.items() if used and word not in self._words(functions)]:
            words = {"tools": "tools", "tool_calls": "calls of the assistant", "tool": "results of tools"}
            raise InvalidRequestError(
                f"{'tools' if missing[0] == 'tools' else 'messages'}: this model's chat template has no "
                f"{words[missing[0]]}"
            )

    def _given(self, message: ChatMessage) -> dict[str, Any]:
        given: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        if message.calls:
            given["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.calls
            ]
            given["tool_calls"] = self._protected_in(given["tool_calls"])
        if message.answers is not None:
            call, name = message.answers
            given["tool_call_id"] = self._protected(call)
            given |= {} if name is None else {"name": self._protected(name)}
        return given

    def _protected_in(self, value: Any) -> Any:
        """JSON whose texts are data."""
        match value:
            case str():
                return self._protected(value)
            case dict():
                return {self._protected(str(name)): self._protected_in(part) for name, part in value.items()}
            case list() | tuple():
                return [self._protected_in(part) for part in value]
            case _:
                return value

    def _content(self, message: ChatMessage) -> str | list[dict[str, str]]:
        """Templates of language models take only a text. Neighbours are joined first: two halves may make a token."""
        parts: list[dict[str, str]] = []
        for is_text, run in itertools.groupby(message.parts, key=lambda part: isinstance(part, str)):
            if is_text:
                parts.append({"type": "text", "text": self._protected("".join(map(str, run)))})
            else:
                parts += [{"type": "image"} for _ in run]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def _protected(self, text: str) -> str:
        _check_text(text, "messages")
        return self._any_special.sub(lambda found: f"{_OPEN}{self._place[found[0]]}{_CLOSE}", text)

    def _chunks(self, text: str, images: Sequence[Chunk]) -> Iterator[Chunk]:
        """A template's text, each image token in it replaced by its image."""
        if self._written:
            text = text.replace(self._written, self._meant)
        pieces = [text] if self._image_token is None else text.split(self._image_token)
        if len(pieces) - 1 != len(images):
            raise InvalidRequestError(
                f"messages: this model's chat template writes {len(pieces) - 1} images where {len(images)} were sent"
            )
        for index, piece in enumerate(pieces):
            if tokens := self._encode(piece):
                yield EncodedTextChunk(tokens=np.asarray(tokens, np.int32))
            if index < len(images):
                yield images[index]

    def _encode(self, text: str) -> list[int]:
        """Special tokens of the template as such, fenced ones as characters: neither half of one is special."""
        tokens: list[int] = []
        for index, piece in enumerate(_FENCE.split(text)):
            written = (piece,) if index % 2 == 0 else _halves(self._special[int(piece)])
            for part in written:
                tokens += self._tokenizer.encode(part, add_special_tokens=False) if part else []
        return tokens


def _halves(token: str) -> tuple[str, str]:
    return token[:1], token[1:]


def _check_text(text: str, where: str) -> None:
    if (lone := _LONE_SURROGATE.search(text)) is not None:
        raise InvalidRequestError(
            f"{where}: character {lone.start()} is U+{ord(lone[0]):04X}, half of a surrogate pair, not text"
        )
