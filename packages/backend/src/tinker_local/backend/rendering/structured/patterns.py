"""Regular expressions of JSON schemas, as expressions over characters.

What ECMA 262 and Python's `re` read differently matches here what both match: `\\d` is 0 to 9, `\\w` and `\\s` are
those of both, `$` is the very end.
"""

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tinker_local.backend.rendering.structured.ebnf import (
    EMPTY,
    HIGHEST,
    Concatenated,
    Either,
    Expression,
    OneOf,
    Repeat,
    Text,
    chars,
    common,
    complement,
    either,
    repeat,
    seq,
)

MOST_REPEATS = 100_000

ANY = chars((0, 0xD7FF), (0xE000, HIGHEST))
"""Every character but surrogates, which a text cannot have."""

_DIGIT, _WORD = chars((48, 57)), chars((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = chars((9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
               (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
_DOT = common(ANY, complement(((10, 10), (13, 13), (0x2028, 0x2029))))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


_THE_SAME = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$"}
"""Without what is not followed: pydantic's pattern of decimal numbers."""


class PatternError(ValueError):
    """What cannot be followed in a pattern."""


@functools.cache
def _outside(kind: str) -> OneOf:
    """Characters that neither ECMA nor Python counts among `kind`: d, w or s."""
    counts: dict[str, Callable[[str], bool]] = {
        "d": str.isdecimal,
        "w": lambda char: char.isalnum() or char == "_",
        "s": lambda char: char.isspace() or char == "\ufeff",
    }
    members = (ord(char) for char in map(chr, range(sys.maxunicode + 1)) if counts[kind](char))
    return common(ANY, complement((code, code) for code in members))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression. `whole`: the texts in which it is found. `kernel`: what it matches itself, if that has to
    be the whole text, else None."""

    whole: Expression
    kernel: Expression | None

    @classmethod
    def of(cls, text: str) -> "Pattern":
        """PatternError."""
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"not a regular expression: {error}") from None
        parts = _Reader(_THE_SAME.get(text, text)).read()
        found = [_anchored(part) for part in parts]
        if any(isinstance(each, _Mark) for _, body, _ in found for each in _flat(body)):
            raise PatternError("^ and $ are followed at the ends alone")
        more = repeat(ANY)
        whole = either(
            *(seq(EMPTY if begins else more, *_plain(body), EMPTY if ends else more) for begins, body, ends in found)
        )
        bound = all(begins and ends for begins, _, ends in found)
        return cls(whole, either(*(seq(*_plain(body)) for _, body, _ in found)) if bound else None)

    def of_length(self, least: int, most: int | None) -> Expression | None:
        """The texts of `least` to `most` characters in which it is found; None where that is not written."""
        if self.kernel is None:
            return _of_length(self.whole, least, most)
        return _of_length(self.kernel, least, most)


def lengths(expression: Expression) -> tuple[int, int | None]:
    """The shortest and the longest text that matches; None: without an end."""
    match expression:
        case Text(text):
            return len(text), len(text)
        case OneOf():
            return 1, 1
        case Repeat(part, least, most):
            short, long = lengths(part)
            return short * least, 0 if long == 0 else None if long is None or most is None else long * most
        case Concatenated(parts):
            found = [lengths(part) for part in parts]
            return sum(low for low, _ in found), _total([high for _, high in found])
        case Either(options):
            found = [lengths(option) for option in options]
            longest = [high for _, high in found if high is not None]
            return min((low for low, _ in found), default=0), (
                None if len(longest) < len(found) else max(longest, default=0)
            )
    raise AssertionError("patterns have no rules")


def _total(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _of_length(expression: Expression, least: int, most: int | None) -> Expression | None:
    short, long = lengths(expression)
    if short >= least and (most is None or (long is not None and long <= most)):
        return expression
    if isinstance(expression, Either):
        found = [_of_length(option, least, most) for option in expression.options]
        return None if None in found else either(*(one for one in found if one is not None))
    parts = expression.parts if isinstance(expression, Concatenated) else (expression,)
    varied = [at for at, part in enumerate(parts) if lengths(part)[0] != lengths(part)[1]]
    if not varied:  # of one length, which is another
        return Either(())
    if len(varied) > 1:
        return None
    (at,) = varied
    part = parts[at]
    if not isinstance(part, Repeat) or lengths(part.part) != (1, 1):
        return None
    others = sum(lengths(other)[0] for other in parts) - part.least
    low = max(part.least, least - others)
    high = part.most if most is None else most - others if part.most is None else min(part.most, most - others)
    if high is not None and high < low:
        return Either(())
    return seq(*parts[:at], repeat(part.part, low, high), *parts[at + 1 :])


@dataclass(frozen=True, slots=True)
class _Mark:
    """^ or $."""

    char: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Options in parentheses, each a list of parts."""

    options: tuple[tuple["_Part", ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeated:
    part: "_Part"
    least: int
    most: int | None


_Part = _Mark | _Group | _Repeated | OneOf


def _flat(parts: tuple[_Part, ...]) -> list[_Part]:
    found: list[_Part] = []
    for part in parts:
        if isinstance(part, _Group):
            for option in part.options:
                found += _flat(option)
        elif isinstance(part, _Repeated):
            found += _flat((part.part,))
        else:
            found.append(part)
    return found


def _anchored(parts: tuple[_Part, ...]) -> tuple[bool, tuple[_Part, ...], bool]:
    """Whether it has to begin and to end a text, and what is between."""
    begins = ends = False
    while parts and parts[0] == _Mark("^"):
        begins, parts = True, parts[1:]
    while parts and parts[-1] == _Mark("$"):
        ends, parts = True, parts[:-1]
    return begins, parts, ends


def _plain(parts: tuple[_Part, ...]) -> list[Expression]:
    found: list[Expression] = []
    for part in parts:
        match part:
            case _Group(options):
                found.append(either(*(seq(*_plain(option)) for option in options)))
            case _Repeated(inner, least, most):
                found.append(repeat(seq(*_plain((inner,))), least, most))
            case OneOf():
                found.append(part)
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> list[tuple[_Part, ...]]:
        """The options of the whole, where a single group in them is opened."""
        todo, found = list(self._options()), []
        if self._at < len(self._text):
            raise PatternError(f"character {self._at}: a parenthesis too many")
        while todo:
            option = todo.pop(0)
            if len(option) == 1 and isinstance(option[0], _Group):
                todo = [*option[0].options, *todo]
            else:
                found.append(option)
        return found

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if self._peek(text):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _options(self) -> tuple[tuple[_Part, ...], ...]:
        options: list[tuple[_Part, ...]] = []
        while True:
            parts: list[_Part] = []
            while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
                parts.append(self._repeated(self._one()))
            options.append(tuple(parts))
            if not self._take("|"):
                return tuple(options)

    def _one(self) -> _Part:
        char = self._next()
        if char in "^$":
            return _Mark(char)
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return _DOT
        if char == "\\":
            return self._escape(in_class=False)
        if char in "*+?{":
            raise PatternError(f"character {self._at - 1}: {char!r} with nothing to repeat; escape it")
        return chars((ord(char), ord(char)))

    def _group(self) -> _Part:
        if self._take("?") and not self._take(":"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self._text, self._at)
            if named is None:
                raise PatternError(f"character {self._at}: (?{self._text[self._at : self._at + 1]} is not followed")
            self._at = named.end()
        options = self._options()
        if not self._take(")"):
            raise PatternError("a parenthesis is not closed")
        return _Group(options)

    def _repeated(self, part: _Part) -> _Part:
        found = re.compile(r"[*+?]|\{(\d+)(,?)(\d*)\}").match(self._text, self._at)
        if found is None:
            return part
        self._at = found.end()
        if isinstance(part, _Mark):
            raise PatternError("^ and $ cannot be repeated")
        least, comma, most = found.groups()
        if least is None:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found.group()]
        else:
            low = int(least)
            high = int(most) if most else None if comma else low
        if max(low, high or 0) > MOST_REPEATS:
            raise PatternError(f"more than {MOST_REPEATS} repetitions")
        self._take("?")  # as few as possible: the same texts
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            raise PatternError(f"character {self._at}: a repetition of a repetition")
        return _Repeated(part, low, high)

    def _escape(self, *, in_class: bool) -> OneOf:
        char = self._next()
        if char in "dwsDWS":
            return _kind(char)
        if char == "0" and self._at < len(self._text) and self._text[self._at].isdigit():
            raise PatternError("an octal number")
        if char in _CONTROLS:
            code = _CONTROLS[char]
        elif char == "b" and in_class:
            code = 8
        elif char in "xu":
            digits = self._text[self._at : self._at + (2 if char == "x" else 4)]
            if not re.fullmatch(r"[0-9a-fA-F]{2}|[0-9a-fA-F]{4}", digits) or len(digits) != (2 if char == "x" else 4):
                raise PatternError(f"\\{char} without its digits")
            self._at += len(digits)
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:
                raise PatternError("half of a surrogate pair")
        elif char.isascii() and char.isalnum():
            raise PatternError(f"\\{char} is not followed")
        else:
            code = ord(char)
        return chars((code, code))

    def _class(self) -> OneOf:
        negative = self._take("^")
        if self._peek("]"):
            raise PatternError("a class without characters")
        within: list[tuple[int, int]] = []
        allowed = ANY
        while not self._take("]"):
            if self._peek("[") or any(self._peek(twice) for twice in ("--", "&&", "||", "~~")):
                raise PatternError(f"character {self._at}: escape it in a class")
            kind = self._text[self._at + 1 : self._at + 2] if self._peek("\\") else ""
            if kind and kind in "dwsDWS":
                self._at += 2
                if self._peek("-") and not self._peek("-]"):
                    raise PatternError(f"character {self._at}: not a range")
                if negative:  # what neither ECMA nor Python counts to it
                    allowed = common(allowed, _kind(kind.swapcase()))
                else:
                    within += _kind(kind).ranges
                continue
            low = high = self._in_class()
            if self._peek("-") and not self._peek("-]"):
                self._at += 1
                high = self._in_class()
            if low > high:
                raise PatternError(f"character {self._at}: not a range")
            within.append((low, high))
        return common(allowed, complement(within)) if negative else common(ANY, chars(*within))

    def _in_class(self) -> int:
        """One character."""
        char = self._next()
        if char != "\\":
            return ord(char)
        if self._text[self._at : self._at + 1] in tuple("dwsDWS"):
            raise PatternError(f"character {self._at}: not a range")
        return self._escape(in_class=True).ranges[0][0]


def _kind(char: str) -> OneOf:
    """Characters that both ECMA and Python count to a kind."""
    return {"d": _DIGIT, "w": _WORD, "s": _SPACE}[char] if char.islower() else _outside(char.lower())
