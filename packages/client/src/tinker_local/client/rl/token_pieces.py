"""Texts of a chat template to token ids, in pieces between marks, each of which is encoded once.

The texts of a conversation repeat: the prompt of its second answer has the first question and the first answer again. A
tokenizer cuts a text at its added tokens before it looks at anything else, so what is between two of them has the same
ids wherever it stands. `TokenPieces` cuts at the added tokens of which this holds, remembers the pieces, and can encode
many new ones at once, on all cores.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

REMEMBERED = 2**20
"""Characters of pieces after which earlier ones are forgotten: with twice as many, about 30 MB with their ids."""

_BEFORE, _BEHIND = ("x", "x ", "\n", "é"), ("x y", " x", "\n\nx", "é")
"""Texts around a mark with which it is tried: tokenizers differ in blanks, accents and the beginning of a text."""


class TokenPieces:
    """`marks`: added tokens of `tokenizer` at which texts may be cut. `names`: of these, one is found that shows how it
    reads a text behind another. Any thread may call it, several at once."""

    def __init__(self, tokenizer: Any, marks: Collection[str], names: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._direct = _is_hugging_faces(tokenizer)
        self._anchor = self._find_anchor(names)
        self._known: dict[tuple[str, bool], list[int]] = {}
        self._older: dict[tuple[str, bool], list[int]] = {}
        self._size = 0
        self._marks = self._find_marks(marks)
        longest_first = sorted(self._marks, key=lambda mark: (-len(mark), mark))
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if self._marks else None

    def encode(self, text: str, behind: bool) -> list[int]:
        """The ids of `text`. `behind`: it follows another text, so a tokenizer that prepends a space must not."""
        tokens: list[int] = []
        for mark, piece, inside in self._pieces(text, behind):
            if mark:
                tokens.append(self._marks[mark])
            if piece:
                key = piece, inside
                found = self._known.get(key) or self._older.get(key)
                tokens += self._learnt([key])[0] if found is None else found
        return tokens

    def ahead(self, texts: Iterable[tuple[str, bool]]) -> None:
        """Encode at once what `encode` is going to be asked for: texts, and whether they follow others."""
        pieces = {(piece, inside) for text, behind in texts for _, piece, inside in self._pieces(text, behind) if piece}
        older, new = self._older, []
        for key in pieces - self._known.keys():
            if (found := older.get(key)) is None:
                new.append(key)
            else:
                self._known[key] = found
        if new:
            self._learnt(new)

    def _pieces(self, text: str, behind: bool) -> Iterator[tuple[str, str, bool]]:
        """Each mark (at first none) with what follows it, and whether that follows anything."""
        parts = [text] if self._cut is None else self._cut.split(text)
        yield "", parts[0], behind
        for at in range(1, len(parts), 2):
            yield parts[at], parts[at + 1], True

    def _learnt(self, keys: Sequence[tuple[str, bool]]) -> list[list[int]]:
        anchored = [bool(self._anchor) and behind for _, behind in keys]
        texts = [
            self._anchor + text if is_anchored else text for (text, _), is_anchored in zip(keys, anchored, strict=True)
        ]
        found = [ids[1:] if is_anchored else ids for ids, is_anchored in zip(self._all(texts), anchored, strict=True)]
        if self._size > REMEMBERED:
            self._older, self._known, self._size = self._known, {}, 0
        self._known.update(zip(keys, found, strict=True))
        self._size += sum(map(len, texts))
        return found

    def _all(self, texts: Sequence[str]) -> list[list[int]]:
        """What `tokenizer.encode` returns for each text."""
        if self._direct:
            backend = self._tokenizer.backend_tokenizer
            # Another thread may have left these behind in it, which `encode` resets.
            if backend.truncation is None and backend.padding is None and not backend.encode_special_tokens:
                return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _find_anchor(self, names: Iterable[str]) -> str:
        """A token to encode text after if the tokenizer prepends a space (SentencePiece), else ""."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        for name in names:
            (tokens,) = self._all([name])
            if len(tokens) != 1 or tokens[0] not in added:
                continue
            if not added[tokens[0]].rstrip and not getattr(added[tokens[0]], "single_word", False):
                (behind,), (alone,) = self._all([f"{name}x"]), self._all(["x"])
                return name if behind[1:] != alone else ""
        return ""

    def _find_marks(self, marks: Collection[str]) -> dict[str, int]:
        """Those which the tokenizer finds before all else, whatever stands around them, with their ids."""
        if not self._direct:
            return {}
        added = {token.content: (number, token) for number, token in self._tokenizer.added_tokens_decoder.items()}
        found = {}
        for name in marks:
            number, token = added.get(name, (-1, None))
            if token is None or token.normalized or token.lstrip or token.rstrip or token.single_word:
                continue
            if not any(_hides(other, name) for other in added if other != name) and self._cuts(name, number):
                found[name] = number
        return found

    def _cuts(self, mark: str, number: int) -> bool:
        """Whether texts around it have the ids that they have without it."""
        pairs = [(before, behind) for before in _BEFORE for behind in _BEHIND]
        wholes = self._all([before + mark + behind for before, behind in pairs])
        begins = dict(zip(_BEFORE, self._all(_BEFORE), strict=True))
        ends = dict(zip(_BEHIND, self._all([self._anchor + text for text in _BEHIND]), strict=True))
        skipped = 1 if self._anchor else 0
        return all(
            whole == [*begins[before], number, *ends[behind][skipped:]]
            for (before, behind), whole in zip(pairs, wholes, strict=True)
        )


def _hides(other: str, mark: str) -> bool:
    """Whether a text may have `other` where one sees `mark`: around it, or over its beginning."""
    return mark in other or any(other.endswith(mark[:size]) for size in range(1, len(mark)))


def _is_hugging_faces(tokenizer: Any) -> bool:
    """Whether `encode` is the tokenizers library's, and nothing of a class of the model's."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return False
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not hasattr(
        tokenizer.backend_tokenizer, "encode_batch_fast"
    ):
        return False
    return all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None)
        for name in ("encode", "_encode_plus")
    )
