"""Which tokens of a tokenizer are structure: the text of a message must not become one of them.

Works on Hugging Face's tokenizers without importing transformers.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_MARK = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
"""A word between signs, as in `<|fim_prefix|>`. Runs of blanks, words and emoji that are added tokens are text."""

_QUOTED = r"""(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
_LOOKED_FOR = re.compile(rf"{_QUOTED}\s+(?:not\s+)?in\b|\.\s*[a-z]+\(\s*{_QUOTED}")
_ESCAPED_BLANK = re.compile(r"\\[nrt]")


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """The tokens that the tokenizer calls special."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return frozenset({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}) - {""}


def control_tokens(tokenizer: Any, template: str | None = None) -> frozenset[str]:
    """The special tokens, and the added ones that look like marks and are either mentioned in the chat template or
    missing in the vocabulary that was learnt: `<tool_response>`, `<think>` and `<|fim_prefix|>` of Qwen3.

    Gemma's `<table>`, say, is text, since the learnt vocabulary has it. `template`: another one than the tokenizer's.
    """
    learnt = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    mentioned = "\n".join(_templates(tokenizer, template))
    added = (token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
    return special_tokens(tokenizer) | {
        text
        for text in added
        if _MARK.fullmatch(text) and (learnt is None or text in mentioned or learnt.token_to_id(text) is None)
    }


def control_tokens_in_replies(tokenizer: Any, template: str | None = None) -> frozenset[str]:
    """Those that the text of an assistant must not become either: the special ones, except what the template looks
    for, as in `content.split('</think>')` or `'</think>' in content`. Without seeing it a template could not leave out
    thoughts."""
    found = (match for text in _templates(tokenizer, template) for match in _LOOKED_FOR.finditer(text))
    quoted = (next(group for group in match.groups() if group is not None) for match in found)
    return special_tokens(tokenizer) - {_ESCAPED_BLANK.sub(" ", text).strip() for text in quoted}


def _templates(tokenizer: Any, template: str | None) -> Iterator[str]:
    own = getattr(tokenizer, "chat_template", None) or ""
    yield from map(str, own.values()) if isinstance(own, Mapping) else (str(own),)
    yield template or ""
