"""`FakeText`: the text of a `FakeModel`, one character for each token."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from tinker_local.backend.fakes.fake_model import EOS_ID, FakeModel, decode, encode
from tinker_local.backend.fakes.fake_tools import written_call
from tinker_local.backend.rendering.text import ChatMessage, TemplateValue
from tinker_local.types import Chunk, EncodedTextChunk, InvalidRequestError, ModelInput
from tinker_local.types.errors import brief


class FakeText:
    """Implements `rendering.text.TextCodec`. A conversation is `ROLE:TEXT` for each message, and `assistant:`."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model

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
        """See `TextCodec`; it has no thoughts, and the only variable is `end`, a text after each message."""
        if as_tokens:
            raise InvalidRequestError(f"control_tokens: {brief(min(as_tokens))} is not a control token of the fake")
        if unknown := variables.keys() - {"end"}:
            raise InvalidRequestError(f"chat_template_kwargs: the fake's template has no {', '.join(sorted(unknown))}")
        chunks: list[Chunk] = [self._text(f"tools:{json.dumps(list(functions))}\n", "tools")] if functions else []
        for index, message in enumerate(messages):
            chunks.append(self._text(f"{message.role}:", "messages"))
            calls = [written_call(call.name, call.arguments) for call in message.calls]
            parts = [part for part in (*message.parts, *calls) if part]
            chunks += [self._text(part, "messages") if isinstance(part, str) else part for part in parts]
            if not (go_on and index == len(messages) - 1):
                chunks.append(self._text(f"{variables.get('end', '')}\n", "messages"))
        return ModelInput(chunks=(*chunks, *(() if go_on else (self._text("assistant:", "messages"),))))

    def prompt(self, text: str) -> ModelInput:
        """See `TextCodec`."""
        return ModelInput(chunks=(self._text(text, "prompt"),) if text else ())

    def decode(self, tokens: Sequence[int]) -> str:
        """See `TextCodec`; the only special token is EOS."""
        return decode([token for token in tokens if token != EOS_ID])

    def decode_all(self, tokens: Sequence[int]) -> str:
        """See `TextCodec`."""
        return decode(tokens)

    def token(self, token: int) -> str:
        """See `TextCodec`."""
        return decode([token])

    def token_bytes(self, token: int) -> bytes:
        """See `TextCodec`."""
        return decode([token]).encode()

    def is_special(self, token: int) -> bool:
        """See `TextCodec`."""
        return token == EOS_ID

    def _text(self, text: str, where: str) -> EncodedTextChunk:
        tokens = encode(text)
        for place, token in enumerate(tokens):
            if token == EOS_ID or token >= self._model.vocab_size:
                raise InvalidRequestError(f"{where}: the fake has no token for character {place}, U+{token:04X}")
        return EncodedTextChunk(tokens=np.asarray(tokens, np.int32))
