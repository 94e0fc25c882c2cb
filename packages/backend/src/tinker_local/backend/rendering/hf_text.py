"""`HFText`: the tokenizer and chat template of a Hugging Face model."""

import itertools
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tinker_local.backend.rendering.rendered_input import ImageTokens
from tinker_local.backend.rendering.text import LONE_SURROGATE, ChatMessage, TemplateValue, check_text
from tinker_local.types import Chunk, EncodedTextChunk, InvalidRequestError, ModelInput
from tinker_local.types.control_tokens import control_tokens, control_tokens_in_replies, special_tokens
from tinker_local.types.errors import brief
from tinker_local.types.processor_templates import processor_template

log = logging.getLogger(__name__)

# A control token in a message gets cuts before the template sees it, and the text is encoded in pieces between them.
# They are where the client cuts (`rl/chat.py`), so that a model is asked in the tokens that it was trained on. A cut is
# a character that Python's `repr`, which some templates use, does not escape; in a message another one follows it.
_CUT, _WRITTEN = "\u241f", "\u241e"
_CUTS = re.compile(f"{_CUT}(?!{_WRITTEN})")
_WORD = re.compile(r"</?think>|[A-Za-z_]\w*")

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token that is a byte, where what the vocabulary lacks falls back to bytes, as in Gemma's and Llama 2's."""

_UNREADABLE = "\ufffd"

_PARAMETERS = (
    *("conversation", "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)

_SWITCH = "enable_thinking"
"""The variable that switches thinking off, in templates of several families."""

_THOUGHTS = frozenset({"<think>", "</think>", "reasoning_effort"})
"""Words of templates of models that think."""

_TOOL_WORDS = {"tools": "tools", "tool_calls": "calls of the assistant", "tool": "results of tools"}
"""Words of templates with tools, and what one has without them."""

KEPT_TOKENS = 2**16

_LEVELS = 64
"""Of nested arguments. Deeper ones, which no person writes, are text."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_PARAMETERS})
"""Variables of a template, and parameters of `apply_chat_template`, that requests may not set."""


class _Marks:
    """The control tokens that a text must not become. `tokens` have at least two characters."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(tokens)
        self._lengths: dict[str, set[int]] = {}
        for token in self._tokens:
            self._lengths.setdefault(token[0], set()).add(len(token))
        self._first = re.compile("|".join(map(re.escape, sorted(self._lengths))) or "(?!)")

    def __contains__(self, token: str) -> bool:
        return token in self._tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def without(self, tokens: Collection[str]) -> "_Marks":
        return _Marks(self._tokens.difference(tokens)) if tokens else self

    def cut(self, text: str) -> str:
        """`text` with cuts around each of them and behind its first character, also where two overlap."""
        cuts: set[int] = set()
        for first in self._first.finditer(text):
            start = first.start()
            ends = [start + length for length in self._lengths[first[0]] if text[start : start + length] in self]
            if ends:
                # Behind it only where that is not taken for a cut that a message has.
                cuts |= {start, start + 1, *([] if text.startswith(_WRITTEN, max(ends)) else [max(ends)])}
        places = (0, *sorted(cuts), len(text))
        return _CUT.join(text[start:end].replace(_CUT, _CUT + _WRITTEN) for start, end in itertools.pairwise(places))


def _bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary means, as in GPT-2's: printable ones of Latin-1 are
    themselves, and the others the letters from U+0100 on, in order."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES_OF_LETTERS = _bytes_of_letters()


class HFText:
    """Implements `rendering.text.TextCodec`. `images`: the ids that mark an image; None for a text model."""

    def __init__(self, tokenizer: Any, images: ImageTokens | None = None, template: str | None = None) -> None:
        """`template`: the processor's. The tokenizer's, of which there may be several, is used without it, and for
        tools that it does not have."""
        self._tokenizer = tokenizer
        self._template = template
        self._has_template = bool(template or tokenizer.chat_template)
        self._image_token = None if images is None else str(tokenizer.convert_ids_to_tokens(images.pad))
        self._written, self._meant = "", ""
        self._image_in_text = ""
        if images is not None:
            marks = [images.pad] if images.alone else [images.start, images.pad, images.end]
            start, *_ = named = list(map(str, tokenizer.convert_ids_to_tokens(marks)))
            self._image_in_text = "".join(named)
            if images.around is not None:
                self._written, self._meant = start, f"{images.around}{self._image_in_text}{images.around}"
                self._image_in_text = start
        self._images_alone = frozenset(token for token in (self._image_token, self._written) if token)
        self._in_text = _Marks(control_tokens(tokenizer, template) | self._images_alone)
        self._in_replies = _Marks(control_tokens_in_replies(tokenizer, template) | self._images_alone)
        self._decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_ids = _byte_ids(tokenizer, self._decoder)
        self._special = special_tokens(tokenizer)
        # The first encoding drops a truncation of the file for good; later, it would disturb other threads.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._text_before = self._decoded(self._before, special=True)
        self._token = lru_cache(KEPT_TOKENS)(self._text_of)
        self._token_bytes = lru_cache(KEPT_TOKENS)(self._bytes)
        self._is_special = lru_cache(KEPT_TOKENS)(self._is_left_out)

    @classmethod
    def load(cls, model: str, images: ImageTokens | None = None) -> "HFText | None":
        """That of a folder or hub name; None if it has no tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError):
            return None
        return cls(tokenizer, images, None if images is None else processor_template(model))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, TemplateValue],
        *,
        go_on: bool,
        functions: Sequence[Mapping[str, Any]] = (),
        as_tokens: Collection[str] = (),
        no_thoughts: bool = False,
    ) -> ModelInput:
        """See `TextCodec`."""
        if not self._has_template:
            raise InvalidRequestError("messages: this base model has no chat template; use completions with a prompt")
        if taken := RESERVED & variables.keys():
            raise InvalidRequestError(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set")
        template = self._chosen(messages, functions)
        words = self._words(template, functions)
        if unknown := [name for name in variables if name not in words]:
            raise InvalidRequestError(f"chat_template_kwargs: this model's template has no {', '.join(unknown)}")
        if no_thoughts:
            variables = {**variables, **_without_thoughts(variables, words)}
        found = [part for message in messages for part in message.parts if not isinstance(part, str)]
        if found and self._image_token is None:
            fields = [field for message in messages for field in message.image_fields]
            raise InvalidRequestError(f"{[*fields, 'messages'][0]}: an image, but this base model reads text only")
        if missing := _tool_words(messages, functions) - words:
            raise InvalidRequestError(
                f"{'tools' if 'tools' in missing else 'messages'}: this model's chat template has no "
                f"{next(text for word, text in _TOOL_WORDS.items() if word in missing)}"
            )
        marks = self._marks(as_tokens)
        # The tokenizer's template beside the processor's is its language model's.
        in_text = self._image_in_text if template is None and self._template is not None else None

        def rendered(as_object: bool) -> str:
            given = [
                self._given(message, marks[message.role == "assistant"], in_text, as_object) for message in messages
            ]
            return str(
                self._tokenizer.apply_chat_template(
                    given,
                    tools=[self._data_in(function) for function in functions] or None,
                    tokenize=False,
                    add_generation_prompt=not go_on,
                    continue_final_message=go_on,
                    chat_template=template,
                    **{name: self._data_in(value) for name, value in variables.items()},
                )
            )

        try:
            try:
                text = rendered(as_object=False)
            except InvalidRequestError:
                raise
            except Exception:  # templates raise what Jinja or their own expressions raise
                if all(isinstance(_arguments(call.arguments), dict) for message in messages for call in message.calls):
                    raise
                text = rendered(as_object=True)  # one that goes through the names of arguments
        except InvalidRequestError:
            raise
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            log.info("a chat template failed", exc_info=error)
            own = type(error).__name__ == "TemplateError"  # by the template's `raise_exception`, with its reason
            raise InvalidRequestError(
                f"messages: this model's chat template refuses messages of {roles}: "
                f"{error if own else f'{type(error).__name__} in the template'}"
            ) from error
        return ModelInput(chunks=tuple(self._chunks(text, found)))

    def prompt(self, text: str) -> ModelInput:
        """See `TextCodec`."""
        check_text(text, "prompt")
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

    def token_bytes(self, token: int) -> bytes:
        """See `TextCodec`."""
        return self._token_bytes(token)

    def is_special(self, token: int) -> bool:
        """See `TextCodec`."""
        return self._is_special(token)

    def _text_of(self, token: int) -> str:
        """Behind another token, since some decoders drop the blank at the beginning of a text."""
        return self._decoded([*self._before, token], special=True)[len(self._text_before) :]

    def _is_left_out(self, token: int) -> bool:
        return self._decoded([token], special=False) != self._decoded([token], special=True)

    def _bytes(self, token: int) -> bytes:
        text = self._token(token)
        if _UNREADABLE not in text:
            return text.encode()
        written = str(self._tokenizer.convert_ids_to_tokens(token))
        if token in self._byte_ids:
            return bytes([int(written[3:5], 16)])
        if all(letter in _BYTES_OF_LETTERS for letter in written):
            return bytes(_BYTES_OF_LETTERS[letter] for letter in written)
        return text.encode()

    def _decoded(self, tokens: Sequence[int], *, special: bool) -> str:
        if self._byte_ids and not self._byte_ids.isdisjoint(tokens):
            return self._decoded_bytes(tokens, special=special)
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def _decoded_bytes(self, tokens: Sequence[int], *, special: bool) -> str:
        """Of tokens among which are bytes. Hugging Face's decoder makes U+FFFD of all neighbouring bytes if together
        they are not UTF-8, so that a byte takes back the characters before it, which may have been streamed."""
        found = map(self._tokenizer.convert_ids_to_tokens, map(int, tokens))
        words = [str(word) for word in found if word is not None and (special or word not in self._special)]
        readable: list[str] = []
        for is_bytes, run in itertools.groupby(words, key=lambda word: _BYTE.fullmatch(word) is not None):
            neighbours = [*run]
            readable += _readable_bytes(neighbours) if is_bytes else neighbours
        assert self._decoder is not None
        return str(self._decoder.decode(readable))

    def _chosen(self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]]) -> str | None:
        """The processor's template, unless only the tokenizer's has the tools that these messages need; None for that
        one."""
        if self._template is None or not self._tokenizer.chat_template:
            return self._template
        needed = _tool_words(messages, functions)
        if not needed - self._words(self._template, ()) or needed - self._words(None, functions):
            return self._template
        return None

    def _words(self, template: str | None, functions: Sequence[Mapping[str, Any]]) -> set[str]:
        """Among them are the variables of the template. The tokenizer's may be another one with tools."""
        try:
            found = template or self._tokenizer.get_chat_template(tools=list(functions) or None)
        except ValueError:  # there are several, and none is the default one
            return set()
        return set(_WORD.findall(found))

    def _marks(self, as_tokens: Collection[str]) -> tuple["_Marks", "_Marks"]:
        """Of texts in general, and of an assistant's."""
        for token in as_tokens:
            if token in self._images_alone:
                raise InvalidRequestError(f"control_tokens: {brief(token)} marks an image; send the image")
            if token not in self._in_text:
                raise InvalidRequestError(
                    f"control_tokens: {brief(token)} is not a control token of this model; it has "
                    f"{brief(', '.join(sorted(self._in_text)))}"
                )
        return self._in_text.without(as_tokens), self._in_replies.without(as_tokens)

    def _given(
        self, message: ChatMessage, marks: "_Marks", image_in_text: str | None, as_object: bool
    ) -> dict[str, Any]:
        """`as_object`: arguments that are not an object become one, with what was written under `arguments`."""
        given: dict[str, Any] = {"role": message.role, "content": _content(message, marks, image_in_text)}
        if message.calls:
            given["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call.arguments, as_object)},
                }
                for call in message.calls
            ]
            given["tool_calls"] = self._data_in(given["tool_calls"])
        if message.answers is not None:
            call, name = message.answers
            given["tool_call_id"] = self._data(call)
            given |= {} if name is None else {"name": self._data(name)}
        return given

    def _data_in(self, value: Any) -> Any:
        """JSON whose texts are data."""
        match value:
            case str():
                return self._data(value)
            case dict():
                return {self._data(str(name)): self._data_in(part) for name, part in value.items()}
            case list() | tuple():
                return [self._data_in(part) for part in value]
            case _:
                return value

    def _data(self, text: str) -> str:
        check_text(text, "messages")
        return self._in_text.cut(text)

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
        """Control tokens of the template as such, and those that are cut as characters."""
        pieces = (piece.replace(_CUT + _WRITTEN, _CUT) for piece in _CUTS.split(text))
        return [token for piece in pieces if piece for token in self._tokenizer.encode(piece, add_special_tokens=False)]


def _without_thoughts(variables: Mapping[str, TemplateValue], words: set[str]) -> Mapping[str, TemplateValue]:
    """The variable that switches them off in a template of these `words`; none where it knows of none."""
    if _SWITCH not in words:
        if words.isdisjoint(_THOUGHTS):
            return {}
        raise InvalidRequestError(
            f"reasoning_effort: this model's chat template has no {_SWITCH} to switch thinking off; leave it out, or "
            "give the template's own variables in chat_template_kwargs"
        )
    if variables.get(_SWITCH):
        raise InvalidRequestError(f"reasoning_effort: none, but chat_template_kwargs has {_SWITCH} true")
    return {_SWITCH: False}


def _byte_ids(tokenizer: Any, decoder: Any) -> frozenset[int]:
    """Of the tokens that are bytes, if the tokenizer falls back to them."""
    if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
        return frozenset()
    found = map(tokenizer.convert_tokens_to_ids, (f"<0x{byte:02X}>" for byte in range(256)))
    return frozenset(token for token in found if token is not None and token != tokenizer.unk_token_id)


def _readable_bytes(words: Iterable[str]) -> Iterator[str]:
    """Tokens that are bytes, with U+FFFD in place of each that is not part of a character in UTF-8."""
    text = bytes(int(word[3:5], 16) for word in words).decode(errors="surrogateescape")
    for letter in text:
        if LONE_SURROGATE.match(letter):
            yield _UNREADABLE
        else:
            yield from (f"<0x{byte:02X}>" for byte in letter.encode())


def _arguments(written: str, as_object: bool = False) -> Any:
    """A call's arguments as templates take them: an object, or the text where a model wrote anything else. `as_object`:
    see `HFText._given`."""
    if not written.strip():
        return {}
    try:
        found = json.loads(written)
        usable = isinstance(found, dict) and _depth(found) <= _LEVELS
    except (ValueError, RecursionError):
        usable = False
    if usable and not LONE_SURROGATE.search(json.dumps(found, ensure_ascii=False)):
        return found
    return {"arguments": written} if as_object else written


def _depth(value: Any) -> int:
    """How deep arrays and objects of JSON are nested; RecursionError."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _tool_words(messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]]) -> set[str]:
    """Of `_TOOL_WORDS`, those that a template must have so that it leaves out nothing."""
    needed = {"tools": bool(functions), "tool_calls": any(message.calls for message in messages)}
    needed["tool"] = any(message.role == "tool" for message in messages)
    return {word for word, used in needed.items() if used}


def _content(message: ChatMessage, marks: _Marks, image_in_text: str | None) -> str | list[dict[str, str]]:
    """Templates of language models take only a text. Neighbours are joined first: two halves may make a token.
    `image_in_text`: what stands for an image in the text; None: the template takes images."""
    parts: list[dict[str, str]] = []
    for is_text, run in itertools.groupby(message.parts, key=lambda part: isinstance(part, str)):
        if is_text:
            text = "".join(map(str, run))
            check_text(text, "messages")
            parts.append({"type": "text", "text": marks.cut(text)})
        elif image_in_text is None:
            parts += [{"type": "image"} for _ in run]
        else:
            parts += [{"type": "text", "text": image_in_text} for _ in run]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
